"""SQLite as the target of a mirror."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from databus.client.checkpoints.checkpoint_table import Answer
from databus.client.sinks.sql.net_rows import POSITION
from databus.client.sinks.sql.sql_target import MirrorTable, SqlTarget
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Column, Kind

_TYPES = {
    Kind.BOOL: "BOOLEAN",
    Kind.INT: "INTEGER",
    Kind.UINT64: "",  # SQLite would make a float of a number above 2**63 in any other column.
    Kind.FLOAT: "REAL",
    Kind.TIME_SPAN: "INTEGER",  # microseconds
    Kind.BYTES: "BLOB",
}
_AS_TEXT = (pa.types.is_decimal, pa.types.is_timestamp, pa.types.is_date)


class SqliteTarget(SqlTarget):
    """A file of SQLite, in WAL mode; each commit is synced."""

    same = "IS"
    row_refusals = (sqlite3.DataError, sqlite3.IntegrityError)
    refusals = (sqlite3.ProgrammingError,)

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def connect(self) -> None:
        """Open the file."""
        self._connection = sqlite3.connect(self._path, isolation_level=None, timeout=30)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        """Close it."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def commit(self) -> None:
        """Make the transaction durable."""
        connection = self._open()
        connection.execute("COMMIT")

    def ask(self, sql: str, values: Sequence[Any] = ()) -> Answer:
        """Run a statement."""
        cursor = self._open().execute(sql, values)
        rows = cursor.fetchall()
        return Answer(cursor.rowcount, rows)

    def type_of(self, column: Column, *, is_key: bool, key_count: int) -> str:
        """The type by which SQLite stores the values exactly."""
        return _TYPES.get(column.kind, "TEXT")

    def has_table(self, name: str) -> bool:
        """Whether a table of this name is there."""
        head, rest = split_source(name)
        found = self.ask("SELECT 1 FROM sqlite_master WHERE name = ?", (rest or head,))
        return bool(found.rows)

    def convert(self, table: MirrorTable, column: Column) -> None:
        """Give a column another type: SQLite has no statement for it."""
        new = f"{column.name}_databus_new"
        name, other = self.quoted(column.name), self.quoted(new)
        type_name = self.type_of(column, is_key=False, key_count=0)
        self.ask(f"ALTER TABLE {table.sql_name} ADD COLUMN {other} {type_name}")
        self.ask(f"UPDATE {table.sql_name} SET {other} = {name}")
        self.ask(f"ALTER TABLE {table.sql_name} DROP COLUMN {name}")
        self.ask(f"ALTER TABLE {table.sql_name} RENAME COLUMN {other} TO {name}")

    def upsert(self, table: MirrorTable, rows: Any, *, are_new: bool = False) -> None:
        """One INSERT for all rows."""
        names = rows.schema.names
        if table.schema.nullable_key:
            self.delete(table, rows.select([*table.key, *POSITION]))
        marks = ", ".join("?" * len(names))
        insert = f"INSERT INTO {table.sql_name} ({self.names(names)})"
        if table.schema.nullable_key:
            same = self._same_key(table)
            insert += (
                f" SELECT {marks} WHERE NOT EXISTS (SELECT 1 FROM {table.sql_name} WHERE {same})"
            )
            columns = [*_columns(rows), *_columns(rows.select(list(table.key)))]
            self._many(insert, columns)
            return
        changed = [name for name in names if name not in table.key]
        sets = ", ".join(f"{self.quoted(name)} = excluded.{self.quoted(name)}" for name in changed)
        old = ", ".join(f"{table.sql_name}.{self.quoted(name)}" for name in POSITION)
        new = ", ".join(f"excluded.{self.quoted(name)}" for name in POSITION)
        self._many(
            f"{insert} VALUES ({marks}) ON CONFLICT ({self.names(table.key)}) "
            f"DO UPDATE SET {sets} WHERE ({old}) <= ({new})",
            _columns(rows),
        )

    def update(self, table: MirrorTable, names: Sequence[str], rows: Any) -> None:
        """One UPDATE for all rows."""
        sets = ", ".join(f"{self.quoted(name)} = ?" for name in (*names, *POSITION))
        chosen = rows.select([*names, *POSITION, *table.key, *POSITION])
        self._many(
            f"UPDATE {table.sql_name} SET {sets} WHERE {self._same_key(table)} "
            f"AND ({self.names(POSITION)}) <= (?, ?)",
            _columns(chosen),
        )

    def delete(self, table: MirrorTable, rows: Any) -> None:
        """One DELETE for all keys."""
        self._many(
            f"DELETE FROM {table.sql_name} WHERE {self._same_key(table)} "
            f"AND ({self.names(POSITION)}) <= (?, ?)",
            _columns(rows),
        )

    def _same_key(self, table: MirrorTable) -> str:
        equals = "IS" if table.schema.nullable_key else "="
        return " AND ".join(f"{self.quoted(name)} {equals} ?" for name in table.key)

    def _many(self, sql: str, columns: list[list[Any]]) -> None:
        self._open().executemany(sql, zip(*columns, strict=True))

    def _open(self) -> sqlite3.Connection:
        assert self._connection is not None
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        return self._connection


def _columns(rows: Any) -> list[list[Any]]:
    """The values of each column, as SQLite stores them."""
    return [_values(column) for column in rows.columns]


def _values(column: Any) -> list[Any]:
    if pa.types.is_decimal(column.type) and column.type.scale == 0 and column.type.precision == 20:
        # UINT64 and others of this form: a number while SQLite has one, its digits above.
        return [_number(value) for value in column.to_pylist()]
    if any(is_kind(column.type) for is_kind in _AS_TEXT):
        if pa.types.is_timestamp(column.type) and column.type.tz is not None:
            column = column.cast(pa.timestamp("us"))
        column = column.cast(pa.string())
    values: list[Any] = column.to_pylist()
    return values


def _number(value: Any) -> Any:
    if value is None:
        return None
    number = int(value)
    return number if number < 2**63 else str(number)
