"""Foreign keys whose actions change rows that the binlog does not have.

InnoDB deletes and updates the children of a row by itself.  The binlog has the parent's change
alone, but for MySQL 9.6 and later, which changes the children above the engine and marks the
events.  So where a parent's row goes, or its key changes, what the children hold is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from databus.relay.sources.contract import Finding
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain
from databus.relay.sources.mysql.statements.token_reader import TableName
from databus.relay.sources.mysql.tables.mapped_table import MappedTable

_CHECKS_OFF, _CHILDREN_LOGGED = 1 << 1, 1 << 4
"""Flags of a rows event: foreign keys were not looked at, or their actions are in the binlog."""
_ACTIONS = frozenset({"CASCADE", "SET NULL", "SET DEFAULT"})


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A foreign key with an action.  ``columns`` are the parent's that it refers to."""

    name: str
    parent: TableName
    child: TableName
    columns: tuple[str, ...]
    on_delete: str
    on_update: str

    @property
    def deletes(self) -> bool:
        """Whether a parent's DELETE changes rows of the child."""
        return self.on_delete in _ACTIONS

    @property
    def updates(self) -> bool:
        """Whether a change of the parent's key changes rows of the child."""
        return self.on_update in _ACTIONS

    def __str__(self) -> str:
        return f"{self.name} (ON DELETE {self.on_delete} ON UPDATE {self.on_update})"


class Cascades:
    """The foreign keys with actions, and whom they reach."""

    def __init__(self, keys: Iterable[ForeignKey] = ()) -> None:
        self.keys = frozenset(keys)
        self._of_parent: dict[TableName, list[ForeignKey]] = defaultdict(list)
        for key in sorted(self.keys, key=str):
            self._of_parent[key.parent].append(key)

    def of(self, parent: TableName) -> Sequence[ForeignKey]:
        """The keys that refer to a table."""
        return self._of_parent.get(parent, ())

    def reached(self, key: ForeignKey) -> Iterator[TableName]:
        """The child, and whom its own change may reach in turn."""
        todo, found = [key.child], {key.child}
        while todo:
            child = todo.pop()
            yield child
            for other in self.of(child):
                if other.child not in found:
                    found.add(other.child)
                    todo.append(other.child)


def is_logged(row_flags: int) -> bool:
    """Whether a rows event has no action of a foreign key behind it that is not in the binlog."""
    return bool(row_flags & (_CHECKS_OFF | _CHILDREN_LOGGED))


def changes_columns(
    header: binlog_events.Header, body: memoryview, mapped: MappedTable, columns: Sequence[str]
) -> bool:
    """Whether one of the updated rows has, or may have, another value in one of these columns."""
    names = [column.column.name.lower() for column in mapped.columns]
    wanted = [names.index(column.lower()) for column in columns if column.lower() in names]
    if len(wanted) < len(columns):
        return True
    _, start = binlog_events.rows_event(header.type, body)
    partial = header.type == binlog_events.EventType.PARTIAL_UPDATE_ROWS
    try:
        rows = mapped.rows(body, start, update=True, partial=partial)
        return any(before[index] != after[index] for before, after in rows for index in wanted)
    except TableUncertain:
        return True


def load_cascades(connection: MySqlConnection) -> Cascades:
    """The foreign keys with actions of every schema that the account may see."""
    listed = "', '".join(sorted(_ACTIONS))
    rules = connection.query(
        "SELECT CONSTRAINT_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, UNIQUE_CONSTRAINT_SCHEMA, "
        "REFERENCED_TABLE_NAME, DELETE_RULE, UPDATE_RULE "
        "FROM information_schema.REFERENTIAL_CONSTRAINTS "
        f"WHERE DELETE_RULE IN ('{listed}') OR UPDATE_RULE IN ('{listed}')"
    )
    if not rules:
        return Cascades()
    columns: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for schema, table, name, column in connection.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, REFERENCED_COLUMN_NAME "
        "FROM information_schema.KEY_COLUMN_USAGE WHERE REFERENCED_TABLE_NAME IS NOT NULL "
        "ORDER BY 1, 2, 3, ORDINAL_POSITION"
    ):
        columns[str(schema), str(table), str(name)].append(str(column))
    return Cascades(
        ForeignKey(
            str(name),
            (str(parent_schema), str(parent)),
            (str(schema), str(table)),
            tuple(columns[str(schema), str(table), str(name)]),
            str(on_delete),
            str(on_update),
        )
        for schema, table, name, parent_schema, parent, on_delete, on_update in rules
    )


def cascade_findings(connection: MySqlConnection, settings: MySqlSettings) -> list[Finding]:
    """Each foreign key by which captured rows change without being in the binlog."""
    native = connection.query("SHOW GLOBAL VARIABLES LIKE 'innodb_native_foreign_keys'")
    if native and str(native[0][1]).upper() == "OFF":
        return []
    return [
        Finding(
            f"foreign key {key.name} of {'.'.join(key.child)}",
            f"{key} changes rows of {'.'.join(key.child)} with those of {'.'.join(key.parent)}, "
            "and the binlog does not have these changes: the child is suspended and resynchronised "
            "each time",
            f"ALTER TABLE {'.'.join(key.child)} DROP FOREIGN KEY {key.name}, add it again with ON "
            "DELETE RESTRICT ON UPDATE RESTRICT, and let the application change the children "
            "first",
            fatal=False,
            table=".".join(key.child),
        )
        for key in sorted(load_cascades(connection).keys, key=str)
        if settings.captures(*key.child)
    ]
