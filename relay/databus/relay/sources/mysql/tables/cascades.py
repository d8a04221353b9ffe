"""Foreign keys whose actions change rows without events in the binlog.

InnoDB deletes and updates the children of a row itself, and the binlog has only the parent's
change.  (MySQL 9.6 and later change the children above the engine and mark the events.)  So if a
parent's row is deleted, or its key changes, the content of the children is not known.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

from databus.relay.sources.contract import Finding
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection, ServerError
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.statements.lexer import tokens_of
from databus.relay.sources.mysql.statements.token_reader import TableName, TokenReader

_CHECKS_OFF, _CHILDREN_LOGGED = 1 << 1, 1 << 4
"""Flags of a rows event: foreign keys were not checked, or their actions are in the binlog."""
_ACTIONS = frozenset({"CASCADE", "SET NULL", "SET DEFAULT"})
"""What a key does to rows of the child; other words leave them."""
_NO_SUCH_TABLE = 1146
ConstraintName = tuple[str, str, str]
"""Schema and table of the child, and the constraint's own name."""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A foreign key with an action.

    ``columns`` are the referenced columns of the parent; none if they are not known.  ``name`` is
    "" if the server chose it and it is not known.
    """

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
        name = self.name or "without a name"
        return f"{name} (ON DELETE {self.on_delete} ON UPDATE {self.on_update})"


class Cascades:
    """The foreign keys with actions, and the tables that they change."""

    def __init__(self, keys: Iterable[ForeignKey] = ()) -> None:
        self.keys = frozenset(keys)
        self._of_parent: dict[TableName, list[ForeignKey]] = defaultdict(list)
        for key in sorted(self.keys, key=str):
            self._of_parent[key.parent].append(key)
        self._encoded: str | None = None

    def encode(self) -> str:
        """As JSON, to be stored; "" if there are none."""
        if self._encoded is None:
            keys = sorted(astuple(key) for key in self.keys)
            self._encoded = json.dumps(keys) if keys else ""
        return self._encoded

    def of(self, parent: TableName) -> Sequence[ForeignKey]:
        """The keys that refer to a table."""
        return self._of_parent.get(parent, ())

    def reached(self, key: ForeignKey) -> Iterator[TableName]:
        """The child, and the tables that its own change may reach."""
        todo, found = [key.child], {key.child}
        while todo:
            child = todo.pop()
            yield child
            for other in self.of(child):
                if other.child not in found:
                    found.add(other.child)
                    todo.append(other.child)


def decode_cascades(text: str) -> Cascades:
    """The keys that ``encode`` made a text of."""
    return Cascades(
        ForeignKey(name, tuple(parent), tuple(child), tuple(columns), on_delete, on_update)
        for name, parent, child, columns, on_delete, on_update in json.loads(text or "[]")
    )


def is_logged(row_flags: int) -> bool:
    """Whether all foreign key actions of a rows event are in the binlog."""
    return bool(row_flags & (_CHECKS_OFF | _CHILDREN_LOGGED))


def load_cascades(connection: MySqlConnection) -> Cascades:
    """The foreign keys with actions of every schema that the account may see.

    MariaDB lists actions only for accounts with a privilege other than SELECT on the child.  The
    child's definition has them for every account that may read it.
    """
    actions = {
        (str(schema), str(table), str(name)): (str(on_delete), str(on_update))
        for schema, table, name, on_delete, on_update in connection.query(
            "SELECT CONSTRAINT_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, DELETE_RULE, UPDATE_RULE "
            "FROM information_schema.REFERENTIAL_CONSTRAINTS"
        )
    }
    parents: dict[ConstraintName, TableName] = {}
    columns: dict[ConstraintName, list[str]] = defaultdict(list)
    for schema, table, name, parent_schema, parent, column in connection.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, REFERENCED_TABLE_SCHEMA, "
        "REFERENCED_TABLE_NAME, REFERENCED_COLUMN_NAME "
        "FROM information_schema.KEY_COLUMN_USAGE WHERE REFERENCED_TABLE_NAME IS NOT NULL "
        "ORDER BY 1, 2, 3, ORDINAL_POSITION"
    ):
        constraint = (str(schema), str(table), str(name))
        parents[constraint] = (str(parent_schema), str(parent))
        columns[constraint].append(str(column))
    for schema, table in sorted({one[:2] for one in parents.keys() - actions.keys()}):
        actions.update(_defined_actions(connection, schema, table))
    found = (
        ForeignKey(name[2], parent, name[:2], tuple(columns[name]), *actions[name])
        for name, parent in parents.items()
        if name in actions
    )
    return Cascades(key for key in found if key.deletes or key.updates)


def _defined_actions(
    connection: MySqlConnection, schema: str, table: str
) -> dict[ConstraintName, tuple[str, str]]:
    """The actions of a table's foreign keys; none if it was dropped meanwhile."""
    quoted = ".".join("`" + part.replace("`", "``") + "`" for part in (schema, table))
    try:
        definition = str(connection.row(f"SHOW CREATE TABLE {quoted}")[1])
    except ServerError as error:
        if error.number == _NO_SUCH_TABLE:
            return {}
        raise
    found = actions_in(definition, is_mysql=connection.is_mysql)
    return {(schema, table, name): actions for name, actions in found.items()}


def actions_in(definition: str, *, is_mysql: bool) -> dict[str, tuple[str, str]]:
    """The actions on DELETE and on UPDATE of the foreign keys in a CREATE TABLE, by name.

    >>> actions_in("CREATE TABLE c (CONSTRAINT k FOREIGN KEY (p) REFERENCES p (id) "
    ...     "ON DELETE CASCADE)", is_mysql=False)
    {'k': ('CASCADE', 'RESTRICT')}
    """
    reader = TokenReader(tokens_of(definition, 0, is_mysql=is_mysql), "")
    found: dict[str, tuple[str, str]] = {}
    name = ""
    while not reader.ended:
        if reader.accept("CONSTRAINT"):
            name = reader.identifier()
            if reader.accept("FOREIGN", "KEY"):
                found[name] = ("RESTRICT", "RESTRICT")
        elif name in found and reader.keyword() == "ON":
            found[name] = read_actions(reader)
        else:
            reader.at += 1
    return found


def read_actions(reader: TokenReader) -> tuple[str, str]:
    """The actions on DELETE and on UPDATE at the reader; RESTRICT for those that leave rows."""
    found = {"DELETE": "RESTRICT", "UPDATE": "RESTRICT"}
    while reader.accept("ON"):
        event = reader.expect("DELETE", "UPDATE")
        action = " ".join(filter(None, (reader.keyword(), reader.keyword(1))))
        found[event] = next((one for one in _ACTIONS if action.startswith(one)), "RESTRICT")
        reader.at += 2 if action.startswith(("SET ", "NO ")) else 1
    return found["DELETE"], found["UPDATE"]


def cascade_findings(connection: MySqlConnection, settings: MySqlSettings) -> list[Finding]:
    """A finding for each foreign key that changes captured rows without events in the binlog."""
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
