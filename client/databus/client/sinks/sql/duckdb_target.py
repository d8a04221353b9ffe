"""DuckDB as the target of a mirror."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from databus.client.checkpoints.checkpoint_table import Answer
from databus.client.sinks.sql.sql_target import MirrorTable
from databus.client.sinks.sql.staged_target import StagedTarget
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Column, Kind

_TYPES = {
    Kind.BOOL: "BOOLEAN",
    Kind.INT: "BIGINT",
    Kind.UINT64: "UBIGINT",
    Kind.FLOAT: "DOUBLE",
    Kind.BYTES: "BLOB",
    Kind.DATE: "DATE",
    Kind.TIME: "TIME",
    Kind.TIME_SPAN: "INTERVAL",
    Kind.TIMESTAMP: "TIMESTAMP",
    Kind.TIMESTAMPTZ: "TIMESTAMPTZ",
    Kind.UUID: "UUID",
    Kind.JSON: "JSON",
}
_MOST_DIGITS = 38


class DuckdbTarget(StagedTarget):
    """A file of DuckDB: rows come as Arrow."""

    row_refusals = (
        duckdb.ConversionException,
        duckdb.ConstraintException,
        duckdb.OutOfRangeException,
    )
    refusals = (duckdb.CatalogException, duckdb.BinderException)

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._is_begun = False

    def connect(self) -> None:
        """Open the file."""
        self._connection = duckdb.connect(self._path)
        self._connection.execute("SET TimeZone = 'UTC'")
        self._is_begun = False

    def close(self) -> None:
        """Close it."""
        if self._connection is not None:
            with contextlib.suppress(duckdb.Error):
                self._connection.close()
            self._connection = None

    def commit(self) -> None:
        """Commit."""
        self._open().commit()
        self._is_begun = False

    def ask(self, sql: str, values: Sequence[Any] = ()) -> Answer:
        """Run a statement."""
        rows = self._open().execute(sql, list(values)).fetchall()
        is_change = sql.startswith(("UPDATE", "INSERT", "DELETE"))
        return Answer(rows[0][0], []) if is_change and rows else Answer(len(rows), rows)

    def type_of(self, column: Column, *, is_key: bool, key_count: int) -> str:
        """The type of the same values; text for more digits than DuckDB has."""
        if column.kind is Kind.DECIMAL and 0 < column.precision <= _MOST_DIGITS:
            return f"DECIMAL({column.precision}, {column.scale})"
        return _TYPES.get(column.kind, "VARCHAR")

    def has_table(self, name: str) -> bool:
        """Whether a table of this name is there."""
        schema, table = split_source(name)
        where = "table_name = ?" + (" AND table_schema = ?" if table else "")
        values = (table, schema) if table else (schema,)
        sql = f"SELECT 1 FROM information_schema.tables WHERE {where}"
        return bool(self.ask(sql, values).rows)

    def prepare_name(self, target: str) -> None:
        """Make the schema."""
        schema, table = split_source(target)
        if table:
            self.ask(f"CREATE SCHEMA IF NOT EXISTS {self.quoted(schema)}")

    @contextlib.contextmanager
    def stage(self, table: MirrorTable, rows: Any) -> Iterator[str]:
        """The rows as they are in memory."""
        kinds = {column.name: column.kind for column in table.schema.columns}
        columns = [
            column.cast(pa.duration("us")) if kinds.get(name) is Kind.TIME_SPAN else column
            for name, column in zip(rows.schema.names, rows.columns, strict=True)
        ]
        connection = self._open()
        connection.register("databus_rows", pa.Table.from_arrays(columns, rows.schema.names))
        try:
            yield "databus_rows"
        finally:
            connection.unregister("databus_rows")

    def _open(self) -> duckdb.DuckDBPyConnection:
        assert self._connection is not None
        if not self._is_begun:
            self._connection.begin()
            self._is_begun = True
        return self._connection
