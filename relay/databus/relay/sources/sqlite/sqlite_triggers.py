"""The triggers that write SQLite's change log: their text, and the triggers that a table has.

SQLite refuses ``ALTER TABLE DROP COLUMN`` while a trigger names the column.  So our triggers take
each column from ``NEW`` or ``OLD`` if it exists there, and otherwise from an outer row of marks
with the same names: the statement succeeds, and the log shows the first row without the column.

Every connection parses the texts of all triggers when it opens, and after each change of a
definition.  So they are short, and few transactions create the triggers of many tables.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.sqlite.sqlite_log import (
    GROUP,
    NOW_MS,
    has_text_affinity,
    quoted,
    row_expression,
)
from databus.relay.sources.sqlite.sqlite_replacements import Conflict

MISSING = "9C61D2F35B4E4A0C8F17E6A27D30B58E"
"""The mark in a row of the log for a column that its table no longer has, as hexadecimal."""

_OURS = "sqlite_master WHERE type = 'trigger' AND name GLOB 'databus_[cudir]_*'"
_OPS = {"c": "INSERT", "u": "UPDATE", "d": "DELETE"}


@dataclass(frozen=True, slots=True)
class Trigger:
    """One of our triggers in the database, with its row number in ``sqlite_master``."""

    rowid: int
    table: str
    name: str
    text: str


def wanted(
    schema: SourceSchema, version: int, conflicts: Collection[Conflict] = ()
) -> dict[str, str]:
    """The triggers that a table needs, by name, with the text that SQLite stores."""
    table = split_source(schema.source)[1]
    texts = {
        f"databus_{op}_{table}": _text(schema, table, version, op, event)
        for op, event in _OPS.items()
    }
    searches = {f"databus_i_{table}": conflicts}
    searches[f"databus_r_{table}"] = [one for one in conflicts if not one.constraint]
    # No table has the name of an index.
    searches |= {f"databus_r_{one.constraint}": [one] for one in conflicts if one.constraint}
    texts |= {
        name: _candidates(name, schema, table, version, some)
        for name, some in searches.items()
        if some
    }
    return texts


def events(names: Iterable[str]) -> set[str]:
    """Those of these triggers that log events, not candidates (``sqlite_replacements``)."""
    return {name for name in names if name.startswith(("databus_c", "databus_u", "databus_d"))}


def _candidates(
    name: str, schema: SourceSchema, table: str, version: int, conflicts: Collection[Conflict]
) -> str:
    """The trigger of this name, which logs rows before REPLACE may remove them."""
    event, old = ("INSERT", "NEW") if name.startswith("databus_i") else ("UPDATE", "OLD")
    names = [column.name for column in schema.columns]
    texts = {c.name for c in schema.columns if has_text_affinity(c.type_name)}
    row = quoted(table)
    values = row_expression(names, f"{row}.", texts)
    rowids = [conflict.rowid for conflict in conflicts if conflict.rowid]
    other = ""  # Without a condition the examination finds that the row is still there.
    if schema.nullable_key and rowids and event == "UPDATE":
        other = f" AND {row}.{rowids[0]}<>OLD.{rowids[0]}"
    elif not schema.nullable_key:
        differs = (f"{row}.{quoted(k)} IS NOT {old}.{quoted(k)} COLLATE BINARY" for k in schema.key)
        other = f" AND({' OR '.join(differs)})"
    read: frozenset[str] = frozenset().union(*(conflict.columns for conflict in conflicts))
    marks = _marks(schema, sorted(read.difference(names)))
    rows = []
    for conflict in conflicts:
        found = f"SELECT {values} FROM {row} WHERE {conflict.guard}{conflict.condition}{other}"
        for outer in (row, "NEW") if marks else ():
            found = f"SELECT({found})o FROM({marks}){outer}"
        rows.append(f"SELECT({found})o")
    columns = when = ""
    if event == "UPDATE" and not any(conflict.is_computed for conflict in conflicts):
        written = [
            *map(quoted, sorted(read) or schema.key),
            *(("rowid,_rowid_,oid",) if rowids else ()),
        ]
        columns = f" OF {','.join(written)}"
    elif event == "INSERT" and len(rowids) == len(conflicts):  # Few statements name the rowid.
        when = f"WHEN NEW.{rowids[0]}<>-1 "
    return (
        f"CREATE TRIGGER {quoted(name)} BEFORE {event}{columns} ON {row} "
        f"{when}BEGIN INSERT INTO databus_log(at_ms,version,op,old)SELECT {NOW_MS},{version},"
        f"'r',o FROM({' UNION '.join(rows)})WHERE o NOTNULL; END"
    )


def _text(schema: SourceSchema, table: str, version: int, op: str, event: str) -> str:
    old = "NULL" if op == "c" else _image(schema, "OLD")
    new = "NULL" if op == "d" else _image(schema, "NEW")
    return (
        f"CREATE TRIGGER {quoted(f'databus_{op}_{table}')} AFTER {event} ON {quoted(table)} "
        f"BEGIN INSERT INTO databus_log(at_ms,version,op,old,new)"
        f"VALUES({NOW_MS},{version},'{op}',{old},{new}); END"
    )


def _image(schema: SourceSchema, row: str) -> str:
    """SQL for a row in a trigger, with a mark for each column that was dropped.

    A primary key's columns cannot be dropped.
    """
    names = [column.name for column in schema.columns]
    texts = {c.name for c in schema.columns if has_text_affinity(c.type_name)}
    values = row_expression(names, f"{row}.", texts)
    marks = _marks(schema)
    return f"(SELECT(SELECT {values})FROM({marks}){row})" if marks else values


def _marks(schema: SourceSchema, others: Collection[str] = ()) -> str:
    """A row with a mark for each column that can be dropped, ``others`` too; "" if none can."""
    names = [column.name for column in schema.columns]
    droppable = [name for name in names if schema.nullable_key or name not in schema.key]
    marks = ",".join(f"m {quoted(name)}" for name in (*droppable, *others))
    return f"SELECT {marks} FROM(SELECT x'{MISSING}'m)" if marks else ""


def ours(connection: sqlite3.Connection) -> list[Trigger]:
    """All our triggers in the database."""
    rows = connection.execute(f"SELECT rowid, tbl_name, name, sql FROM {_OURS}")
    return [Trigger(*row) for row in rows]


def folded(name: str) -> str:
    """A name as SQLite compares names: ASCII letters in lower case."""
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in name)


def has_name_of_another(connection: sqlite3.Connection, names: Iterable[str]) -> bool:
    """Whether a trigger that is not ours has one of these names.

    SQLite refuses such a name for CREATE TRIGGER; as rows of ``sqlite_master``, two triggers of one
    name make the database unreadable.
    """
    others = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'trigger' AND rowid NOT IN "
        f"(SELECT rowid FROM {_OURS})"
    )
    taken = {folded(name) for (name,) in others}
    return any(folded(name) in taken for name in names)


def of_table(connection: sqlite3.Connection, table: str) -> dict[str, str]:
    """The texts of our triggers on a table, by name."""
    rows = connection.execute(f"SELECT name, sql FROM {_OURS} AND tbl_name = ?", (table,))
    return dict(rows.fetchall())


def watch(connection: sqlite3.Connection, triggers: Mapping[str, str], table: str) -> None:
    """Make these the only triggers of ours on a table."""
    if of_table(connection, table) != triggers:
        drop(connection, table, triggers)
        for text in triggers.values():
            connection.execute(text)


def drop(connection: sqlite3.Connection, table: str, names: Iterable[str] = ()) -> None:
    """Stop logging the changes of a table.  Triggers with these names are dropped from all tables:
    a renamed table has them still."""
    listed = list(names)
    rows = connection.execute(
        f"SELECT name FROM {_OURS} AND (tbl_name = ? OR name IN ({', '.join('?' * len(listed))}))",
        (table, *listed),
    ).fetchall()
    for (name,) in rows:
        connection.execute(f"DROP TRIGGER {quoted(name)}")


def compile_all(wanted: Mapping[str, Mapping[str, str]]) -> None:
    """Let SQLite compile these triggers of tables, in a database in memory.

    Raises:
        sqlite3.Error: SQLite refuses one.
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        for table, texts in wanted.items():
            memory.execute("BEGIN")
            memory.execute(f"CREATE TABLE {quoted(table)} (c)")
            for text in texts.values():
                memory.execute(text)
            memory.execute("ROLLBACK")


@contextlib.contextmanager
def definitions_writable(connection: sqlite3.Connection) -> Iterator[bool]:
    """A context in which ``put`` works; False if this build of SQLite refuses that."""
    connection.execute("PRAGMA writable_schema = ON")
    try:
        yield bool(connection.execute("PRAGMA writable_schema").fetchone()[0])
    finally:
        connection.execute("PRAGMA writable_schema = OFF")


def put(
    connection: sqlite3.Connection,
    triggers: Mapping[str, str],
    table: str,
    replaced: Iterable[Trigger],
) -> None:
    """Like ``watch``, in a tenth of the time: write the rows of ``sqlite_master`` that CREATE
    TRIGGER would write, after ``compile_all`` has tested them.

    No connection reads them before ``publish``.
    """
    connection.executemany(
        "DELETE FROM sqlite_master WHERE rowid = ? AND type = 'trigger' AND tbl_name = ? "
        "AND name = ?",
        [(held.rowid, held.table, held.name) for held in replaced],
    )
    connection.executemany(
        "INSERT INTO sqlite_master (type, name, tbl_name, rootpage, sql) "
        "VALUES ('trigger', ?, ?, 0, ?)",
        [(name, table, text) for name, text in triggers.items()],
    )


def publish(connection: sqlite3.Connection, version: int) -> None:
    """Make all connections read the definitions again after this transaction, by a new
    ``schema_version``; the last statement of the transaction."""
    connection.execute(f"PRAGMA schema_version = {version}")


def first_missing(connection: sqlite3.Connection, after: int) -> dict[int, int]:
    """The versions with rows after a log id that lack columns, each with the first row's id."""
    rows = connection.execute(
        "SELECT version, min(id) FROM databus_log "
        "WHERE id > ? AND (instr(old, ?) OR instr(new, ?)) GROUP BY version",
        (after, MISSING, MISSING),
    )
    return dict(rows.fetchall())


def without_missing(
    connection: sqlite3.Connection, old: int, new: int, first: int, columns: Sequence[int]
) -> None:
    """Change the rows of version ``old`` from the log id ``first`` on to version ``new``, which
    lacks these ``columns`` of it, by index."""
    paths = ", ".join(f"'$[{at // GROUP}][{at % GROUP}]'" for at in reversed(columns))
    connection.execute(
        f"UPDATE databus_log SET version = ?, old = json_remove(old, {paths}), "
        f"new = json_remove(new, {paths}) WHERE id >= ? AND version = ?",
        (new, first, old),
    )


def forget(connection: sqlite3.Connection, source: str, after: int) -> None:
    """Delete a source's rows after a log id: they may be another table's, or lack columns."""
    connection.execute(
        "DELETE FROM databus_log WHERE id > ? AND version IN "
        "(SELECT version FROM databus_schema WHERE source = ?)",
        (after, source),
    )
