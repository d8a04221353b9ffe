"""The change log inside an SQLite database: its tables, and reading and writing them.

This is the paper's TxLog technique (section 4.1): triggers write each change into a log table
in the transaction that makes it, and the log's ids are the clock.  SQLite has one writer at a
time, so ids grow in commit order, and a read transaction sees only whole transactions of the
log.

The log stores rows exactly, as JSON arrays in column order: numbers of type real as the text
of SQL's ``quote``, blobs as hexadecimal.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from databus.common.errors import SourceUnavailable, UnsupportedChange
from databus.common.schema.source_names import join_source, split_source
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.contract import Finding

_TABLES = """
CREATE TABLE IF NOT EXISTS databus_meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS databus_schema (
    version INTEGER PRIMARY KEY, source TEXT NOT NULL, document TEXT NOT NULL,
    changed_after INTEGER);
CREATE TABLE IF NOT EXISTS databus_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, version INTEGER NOT NULL,
    op TEXT NOT NULL, old TEXT, new TEXT);
"""
NOW_MS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
_TYPES = {int: "integer", float: "real", str: "text", bytes: "blob", type(None): "null"}


_T = TypeVar("_T")

GROUP = 60
"""A row is stored as arrays of this many values each."""

_LOOKED_AT = 1000

_IS_VIRTUAL = "(type = 'table' AND sql LIKE 'CREATE VIRTUAL TABLE%')"
"""SQLite writes these words itself, however the statement was spelt."""

BUSY_MS = 10_000
WRITE_BUSY_MS = 20
RETRY_S = 0.02


def connect(path: str, *, busy_ms: int = BUSY_MS) -> sqlite3.Connection:
    """A connection in autocommit mode to an existing database.

    Raises:
        SourceUnavailable: the file does not exist or is no database.
    """
    try:
        connection = sqlite3.connect(
            f"file:{path}?mode=rw", uri=True, isolation_level=None, check_same_thread=False
        )
        connection.execute(f"PRAGMA busy_timeout = {busy_ms}")
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.Error as error:
        raise SourceUnavailable(f"SQLite database {path}: {error}") from error
    return connection


def install(connection: sqlite3.Connection) -> str:
    """Create the log's tables where they are missing; return the clock's identity."""

    def create() -> None:
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute(
            "INSERT OR IGNORE INTO databus_meta VALUES ('clock', ?)", (str(uuid.uuid4()),)
        )
        # Id 1 is never given: a stream that begins before the first change begins at scn 1.
        connection.execute(
            "INSERT INTO sqlite_sequence SELECT 'databus_log', 1 WHERE NOT EXISTS "
            "(SELECT 1 FROM sqlite_sequence WHERE name = 'databus_log')"
        )

    write_briefly(connection, create)
    row = connection.execute("SELECT value FROM databus_meta WHERE name = 'clock'").fetchone()
    return f"sqlite:{row[0]}"


def last_id(connection: sqlite3.Connection) -> int:
    """The largest id that the log has ever assigned.

    A statement that ends early (INSERT OR FAIL) has logged rows that ``sqlite_sequence`` lacks.
    """
    row = connection.execute(
        "SELECT max(seq, coalesce((SELECT max(id) FROM databus_log), 0)) FROM sqlite_sequence "
        "WHERE name = 'databus_log'"
    )
    return int((row.fetchone() or (0,))[0])


def delete_upto(connection: sqlite3.Connection, log_id: int) -> None:
    """Delete the log's rows up to an id.  Their ids are not assigned again."""
    connection.execute("DELETE FROM databus_log WHERE id <= ?", (log_id,))
    connection.execute(
        "UPDATE sqlite_sequence SET seq = ?1 WHERE name = 'databus_log' AND seq < ?1", (log_id,)
    )
    set_meta(connection, "pruned", log_id)


def meta(connection: sqlite3.Connection, name: str) -> int:
    """A number that ``databus_meta`` stores under this name, else 0."""
    row = connection.execute("SELECT value FROM databus_meta WHERE name = ?", (name,))
    return int((row.fetchone() or (0,))[0])


def set_meta(connection: sqlite3.Connection, name: str, value: int | str) -> None:
    """Store a value in ``databus_meta``, in the open transaction."""
    connection.execute("INSERT OR REPLACE INTO databus_meta VALUES (?, ?)", (name, value))


def metas(connection: sqlite3.Connection, prefix: str) -> dict[str, int | str]:
    """The values in ``databus_meta`` whose names begin with ``prefix``."""
    rows = connection.execute(
        "SELECT name, value FROM databus_meta WHERE name GLOB ?", (f"{prefix}*",)
    )
    return dict(rows.fetchall())


@contextlib.contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that writes.

    Any failure rolls it back, a failed commit too: an open write transaction blocks all other
    writers.  Without WAL a commit waits for readers, and blocks new readers while it waits.
    """
    connection.execute(f"PRAGMA busy_timeout = {WRITE_BUSY_MS}")
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    finally:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")


@contextlib.contextmanager
def reading(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction in which all queries see the same rows."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


def write_briefly(connection: sqlite3.Connection, work: Callable[[], _T]) -> _T:
    """Do ``work`` in a transaction of its own.

    While the application holds the lock, this waits without holding one and retries; ``work`` may
    run more than once.

    Raises:
        sqlite3.OperationalError: the lock was not free within ``BUSY_MS``.
    """
    deadline_s = time.monotonic() + BUSY_MS / 1000
    while True:
        try:
            with writing(connection):
                return work()
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline_s:
                raise
        time.sleep(RETRY_S)


@contextlib.contextmanager
def texts_as_bytes(connection: sqlite3.Connection) -> Iterator[None]:
    """A context in which texts are returned as bytes: UTF-8, or invalid UTF-8, whatever the
    database's encoding."""
    connection.text_factory = bytes
    try:
        yield
    finally:
        connection.text_factory = str


def quoted(name: str) -> str:
    """An identifier as SQL."""
    return '"' + name.replace('"', '""') + '"'


def user_tables(connection: sqlite3.Connection) -> dict[str, int]:
    """All ordinary tables except ours and SQLite's own, each with its first page in the file.

    Virtual tables are not ordinary tables; neither are the shadow tables that store their data.
    """
    rows = connection.execute(
        "SELECT name, rootpage FROM sqlite_master WHERE type = 'table' "
        "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name NOT LIKE 'databus\\_%' ESCAPE '\\' "
        f"AND NOT {_IS_VIRTUAL} ORDER BY name"
    )
    tables = dict(rows.fetchall())
    if virtual_tables(connection):
        for _, name, kind, *_ in connection.execute("PRAGMA main.table_list"):
            if kind == "shadow":
                tables.pop(name, None)
    return tables


def virtual_tables(connection: sqlite3.Connection) -> list[str]:
    """The names of all virtual tables."""
    rows = connection.execute(f"SELECT name FROM sqlite_master WHERE {_IS_VIRTUAL} ORDER BY name")
    return [name for (name,) in rows]


def table_schema(
    connection: sqlite3.Connection, table: str, keys: ConfiguredKeys = NO_KEYS
) -> SourceSchema | None:
    """The present schema of a table; None if it has neither its own nor a configured key."""
    columns, key = [], {}
    for _, name, declared, not_null, _, pk in connection.execute(
        f"PRAGMA table_info({quoted(table)})"
    ):
        columns.append(Column(name, kind_of(declared), not (not_null or pk), type_name=declared))
        if pk:
            key[pk] = name
    if not key:
        source = join_source("main", table)
        configured = keys.of(source, (column.name for column in columns))
        if not configured:
            return None
        return SourceSchema(source, tuple(columns), configured, nullable_key=True)
    return SourceSchema(
        join_source("main", table), tuple(columns), tuple(key[i] for i in sorted(key))
    )


def kind_of(declared: str) -> Kind:
    """The kind of a declared type: SQLite's affinity rules, and the usual names of dates."""
    name = declared.upper()
    if "JSON" in name:
        return Kind.JSON
    if "DATE" in name or "TIME" in name or "UUID" in name:
        return Kind.STRING
    if "INT" in name or "BOOL" in name:
        return Kind.INT
    if "CHAR" in name or "CLOB" in name or "TEXT" in name:
        return Kind.STRING
    if "BLOB" in name or not name:
        return Kind.BYTES
    if "REAL" in name or "FLOA" in name or "DOUB" in name:
        return Kind.FLOAT
    return Kind.NUMERIC


def registered(connection: sqlite3.Connection, after: int = 0) -> dict[int, SourceSchema]:
    """The schema versions that triggers have written rows with, by version number."""
    return {
        version: SourceSchema.from_json(json.loads(document))
        for version, document in connection.execute(
            "SELECT version, document FROM databus_schema WHERE version > ?", (after,)
        )
    }


def schema_changes(
    connection: sqlite3.Connection, after: int = 0
) -> list[tuple[int, SourceSchema]]:
    """The versions that replaced another one, each with the log id after which it applies."""
    return [
        (changed_after, SourceSchema.from_json(json.loads(document)))
        for changed_after, document in connection.execute(
            "SELECT changed_after, document FROM databus_schema WHERE changed_after IS NOT NULL "
            "AND version > ? ORDER BY version",
            (after,),
        )
    ]


def schema_version(connection: sqlite3.Connection) -> int:
    """A number that changes with any definition in the database, even in this transaction."""
    return int(connection.execute("PRAGMA schema_version").fetchone()[0])


def latest_versions(connection: sqlite3.Connection) -> dict[str, tuple[int, str]]:
    """The number and document of each source's latest version."""
    rows = connection.execute(
        "SELECT source, version, document FROM databus_schema ORDER BY version"
    )
    return {source: (version, document) for source, version, document in rows}


def last_version(connection: sqlite3.Connection) -> int:
    """The number of the version that was recorded last, 0 without any."""
    return int(connection.execute("SELECT max(version) FROM databus_schema").fetchone()[0] or 0)


def put_version(
    connection: sqlite3.Connection, schema: SourceSchema, changed_after: int | None
) -> int:
    """Record a version of a table's schema; its number."""
    cursor = connection.execute(
        "INSERT INTO databus_schema (source, document, changed_after) VALUES (?, ?, ?)",
        (schema.source, json.dumps(schema.to_json()), changed_after),
    )
    return int(cursor.lastrowid or 0)


def log_emptied(connection: sqlite3.Connection, version: int) -> None:
    """Log, in the open transaction, that the table of a version has no rows."""
    connection.execute(
        f"INSERT INTO databus_log (at_ms, version, op) VALUES ({NOW_MS}, ?, 't')", (version,)
    )


def first_emptied(
    connection: sqlite3.Connection, after: int, upto: int, versions: Iterable[int]
) -> int | None:
    """The first log id in this range that records that a table of ``versions`` has no rows."""
    listed = ", ".join(map(str, versions))
    if not listed:
        return None
    (found,) = connection.execute(
        f"SELECT min(id) FROM databus_log WHERE id > ? AND id <= ? AND op = 't' "
        f"AND version IN ({listed})",
        (after, upto),
    ).fetchone()
    return found if found is None else int(found)


def has_rows(connection: sqlite3.Connection, table: str) -> bool:
    """Whether a table holds any row."""
    return connection.execute(f"SELECT 1 FROM {quoted(table)} LIMIT 1").fetchone() is not None


def has_events(connection: sqlite3.Connection, schema: SourceSchema, after: int) -> bool:
    """Whether rows of a source were inserted or updated after a log id."""
    query = (
        "SELECT 1 FROM databus_log WHERE id > ? AND op IN ('c', 'u') AND version IN "
        "(SELECT version FROM databus_schema WHERE source = ?) LIMIT 1"
    )
    return connection.execute(query, (after, schema.source)).fetchone() is not None


def other_objects(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Type and name of everything that a statement has defined, but for what is ours."""
    rows = connection.execute(
        "SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL "
        "AND name NOT LIKE 'databus\\_%' ESCAPE '\\'"
    )
    return set(rows.fetchall())


def index_count(
    connection: sqlite3.Connection, tables: Collection[str], *, besides: Collection[str]
) -> int:
    """The number of CREATE INDEX statements that these tables have, besides indexes so named."""
    names = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL "
        f"AND tbl_name IN ({', '.join('?' * len(tables))})",
        tuple(tables),
    )
    return sum(name not in besides for (name,) in names)


def has_only_defaults(
    connection: sqlite3.Connection, table: str, column: str, default: str | None, spared: int
) -> bool:
    """Whether the first rows of a table have a column's default value, but for ``spared``."""
    value = quoted(column)
    (count,) = connection.execute(
        f"SELECT count(*) FROM (SELECT {value} COLLATE BINARY {value} FROM {quoted(table)} "
        "LIMIT ?) "
        f"WHERE {value} IS NOT ({default or 'NULL'})",
        (2 * spared + _LOOKED_AT,),
    ).fetchone()
    return int(count) <= spared


def defaults(connection: sqlite3.Connection, table: str) -> dict[str, str | None]:
    """The SQL of each column's default value; None: NULL."""
    rows = connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()
    return {row[1]: None if str(row[4]).upper() in ("NONE", "NULL") else row[4] for row in rows}


def has_text_affinity(declared: str) -> bool:
    """Whether a column of this declared type never holds a number: SQLite's affinity rules."""
    name = declared.upper()
    is_text = "CHAR" in name or "CLOB" in name or "TEXT" in name
    return is_text and "INT" not in name and name.isascii()


def row_expression(
    names: Iterable[str], prefix: str = "", texts: Collection[str] = frozenset()
) -> str:
    """SQL that gives a row as the log's JSON array.  Nested, since SQLite limits arguments.

    Columns with the names ``texts`` hold no numbers, and take fewer words.
    """
    cells = []
    for name in names:
        cell = prefix + quoted(name)
        real = "" if name in texts else f"WHEN'real'THEN json_array('r',quote({cell}))"
        cells.append(
            f"CASE typeof({cell}){real}WHEN'blob'THEN json_array('b',hex({cell}))ELSE {cell} END"
        )
    groups = [cells[at : at + GROUP] for at in range(0, len(cells), GROUP)]
    return "json_array(" + ",".join(f"json_array({','.join(g)})" for g in groups) + ")"


def parse_row(text: str) -> list[Any]:
    """The SQLite values of a row in the log."""
    return [
        (float(cell[1]) if cell[0] == "r" else bytes.fromhex(cell[1]))
        if isinstance(cell, list)
        else cell
        for group in json.loads(text)
        for cell in group
    ]


def convert(value: Any, column: Column, source: str) -> Any:
    """An SQLite value as the Python value of the column's kind.

    Raises:
        UnsupportedChange: SQLite let a value of another type into the column, or a null into a
            primary key.  The message does not have the value: it may be masked.
    """
    kind = column.kind
    if value is None:
        if column.nullable:
            return None
    elif kind is Kind.INT and isinstance(value, int):
        return value
    elif kind in (Kind.STRING, Kind.JSON) and not isinstance(value, bytes):
        return value if isinstance(value, str) else repr(value)
    elif kind is Kind.BYTES and isinstance(value, bytes):
        return value
    elif kind is Kind.FLOAT and isinstance(value, int | float):
        return float(value)
    elif kind is Kind.NUMERIC and not isinstance(value, bytes):
        try:
            return Decimal(repr(value) if isinstance(value, float) else value)
        except InvalidOperation:
            pass
    held = _TYPES[type(value)]
    table = quoted(split_source(source)[1])
    raise UnsupportedChange(
        f"{source}.{column.name} is declared {column.type_name!r}, carried as {kind.value}, and "
        f"holds a value of type {held}, which SELECT * FROM {table} WHERE "
        f"typeof({quoted(column.name)}) = '{held}' finds; correct it, or declare the table STRICT",
        source=source,
        column=column.name,
    )


def not_text(source: str, column: str) -> UnsupportedChange:
    """The error for a stored text that is no UTF-8; without the text, which may be masked."""
    return UnsupportedChange(
        f"{source}: a text in column {column!r} is not UTF-8; correct the row",
        source=source,
        column=column,
    )


def converted(schema: SourceSchema, row: Iterable[Any]) -> list[Any]:
    """A row's SQLite values as the Python values of its columns' kinds.

    Raises:
        UnsupportedChange: a value does not have its column's kind.
    """
    return [
        convert(value, column, schema.source)
        for value, column in zip(row, schema.columns, strict=True)
    ]


def logged(schema: SourceSchema, line: bytes) -> list[Any]:
    """The values of a row as the triggers have logged it.

    Raises:
        UnsupportedChange: a text is not UTF-8, or a value does not have its column's kind.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError:
        cells = parse_row(line.decode(errors="surrogateescape"))
        names = (c.name for c, cell in zip(schema.columns, cells, strict=True) if _is_damaged(cell))
        raise not_text(schema.source, ", ".join(names)) from None
    return converted(schema, parse_row(text))


def _is_damaged(cell: Any) -> bool:
    return isinstance(cell, str) and not cell.isascii() and not _is_utf8(cell)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def key_of(schema: SourceSchema, row: list[Any]) -> bytes:
    """The key of a row of ``converted`` values."""
    values = dict(zip((column.name for column in schema.columns), row, strict=True))
    return schema.encode_key(values)


def has_key(connection: sqlite3.Connection, schema: SourceSchema) -> str:
    """SQL that compares the key with parameters, its exact text if SQLite can compare no other."""
    collation = "" if has_order(connection, schema) else " COLLATE BINARY"
    return " AND ".join(f"{quoted(name)} IS ?{collation}" for name in schema.key)


def has_order(connection: sqlite3.Connection, schema: SourceSchema) -> bool:
    """Whether SQLite can compare the values of a key here."""
    table = quoted(split_source(schema.source)[1])
    try:
        key = ", ".join(map(quoted, schema.key))
        connection.execute(f"SELECT 1 FROM {table} ORDER BY {key} LIMIT 0")
    except sqlite3.OperationalError:
        return False
    return True


def findings(
    connection: sqlite3.Connection, tables: list[str], keys: ConfiguredKeys = NO_KEYS
) -> list[Finding]:
    """The obstacles to capturing ``tables``, which may include virtual ones."""
    found = []
    virtual = set(virtual_tables(connection)).intersection(tables)
    for table in tables:
        if table in virtual:
            found.append(_virtual(table))
            continue
        if table_schema(connection, table, keys) is None:
            columns = connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()
            names = [column[1] for column in columns]
            found.append(
                keys.finding(join_source("main", table), names, "create it with a PRIMARY KEY")
            )
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    if mode != "wal":
        found.append(
            Finding(
                "journal_mode",
                f"it is {mode}: readers and writers wait for each other",
                "PRAGMA journal_mode = WAL",
                fatal=False,
            )
        )
    return found


def _virtual(table: str) -> Finding:
    return Finding(
        f"table main.{table}",
        "it is a virtual table: SQLite fires no triggers for its rows, so they are not captured",
        "capture the tables that it is filled from, and fill the copy's virtual table from them",
        fatal=False,
        table=join_source("main", table),
    )
