"""PostgreSQL as the target of a mirror."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors
from pyarrow import csv

from databus.client.checkpoints.checkpoint_table import Answer, with_marks
from databus.client.sinks.sql.sql_target import MirrorTable
from databus.client.sinks.sql.staged_target import StagedTarget
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Column, Kind

_TYPES = {
    Kind.BOOL: "boolean",
    Kind.INT: "bigint",
    Kind.UINT64: "numeric(20)",
    Kind.FLOAT: "double precision",
    Kind.NUMERIC: "numeric",
    Kind.STRING: "text",
    Kind.BYTES: "bytea",
    Kind.DATE: "date",
    Kind.TIME: "time",
    Kind.TIME_SPAN: "interval",
    Kind.TIMESTAMP: "timestamp",
    Kind.TIMESTAMPTZ: "timestamptz",
    Kind.UUID: "uuid",
    Kind.JSON: "json",
}
_MOST_WAIT = 1024


class PostgresTarget(StagedTarget):
    """A database of PostgreSQL: rows come by COPY into a temporary table, one for each shape."""

    row_refusals = (errors.DataError, errors.IntegrityError)
    refusals = (errors.ProgrammingError, errors.NotSupportedError)

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[Any] | None = None
        self._stages: dict[tuple[Any, ...], str] = {}
        # By table: batches until the next COPY into it, and how many after another failure.
        self._waits: dict[str, tuple[int, int]] = {}

    def connect(self) -> None:
        """Connect; times are in UTC."""
        self._stages.clear()
        self._connection = psycopg.connect(
            self._url,
            connect_timeout=10,
            application_name="databus sink",
            options="-c timezone=UTC -c datestyle=ISO -c client_min_messages=warning",
        )

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def commit(self) -> None:
        """Commit."""
        self._open.commit()

    def ask(self, sql: str, values: Sequence[Any] = ()) -> Answer:
        """Run a statement."""
        with self._open.cursor() as cursor:
            if values:
                sql = with_marks(sql, "format")
            cursor.execute(sql.encode(), values or None)
            rows = cursor.fetchall() if cursor.description else []
            return Answer(cursor.rowcount, rows)

    def type_of(self, column: Column, *, is_key: bool, key_count: int) -> str:
        """The type of the same values."""
        if column.kind is Kind.DECIMAL:
            return f"numeric({column.precision}, {column.scale})" if column.precision else "numeric"
        return _TYPES[column.kind]

    def has_table(self, name: str) -> bool:
        """Whether a table of this name is there."""
        answer = self.ask("SELECT to_regclass(?) IS NOT NULL", (self.sql_name(name),))
        return bool(answer.rows[0][0])

    def prepare_name(self, target: str) -> None:
        """Make the schema."""
        schema, table = split_source(target)
        if table:
            self.ask(f"CREATE SCHEMA IF NOT EXISTS {self.quoted(schema)}")

    def convert(self, table: MirrorTable, column: Column) -> None:
        """Give a column another type, with its values."""
        name, type_name = self.quoted(column.name), self.type_of(column, is_key=False, key_count=0)
        self.ask(
            f"ALTER TABLE {table.sql_name} ALTER COLUMN {name} TYPE {type_name} "
            f"USING {name}::text::{type_name}"
        )

    def upsert(self, table: MirrorTable, rows: Any, *, are_new: bool = False) -> None:
        """COPY into the table if the rows seem to be new, otherwise by the stage.

        After a key that was there already, the next 1, 2, 4, ... batches go by the stage.
        """
        left, most = self._waits.get(table.sql_name, (0, 1))
        if not are_new or table.schema.nullable_key:
            super().upsert(table, rows)
        elif left:
            self._waits[table.sql_name] = left - 1, most
            super().upsert(table, rows)
        elif not self._copied(table, rows):
            self._waits[table.sql_name] = most, min(2 * most, _MOST_WAIT)
            super().upsert(table, rows)

    def _copied(self, table: MirrorTable, rows: Any) -> bool:
        """Whether the rows could be copied into the table; it has none of them otherwise."""
        self.ask("SAVEPOINT databus_copy")
        try:
            self._copy(table.sql_name, table, rows)
        except errors.UniqueViolation:
            self.ask("ROLLBACK TO SAVEPOINT databus_copy")
            return False
        self.ask("RELEASE SAVEPOINT databus_copy")
        return True

    def _copy(self, name: str, table: MirrorTable, rows: Any) -> None:
        kinds = {column.name: column for column in table.schema.columns}
        statement = f"COPY {name} ({self.names(rows.schema.names)}) FROM STDIN (FORMAT csv)"
        with self._open.cursor() as cursor, cursor.copy(statement.encode()) as copy:
            copy.write(_csv(rows, kinds))

    @contextlib.contextmanager
    def stage(self, table: MirrorTable, rows: Any) -> Iterator[str]:
        """A temporary table, filled by COPY."""
        kinds = {column.name: column for column in table.schema.columns}
        names = rows.schema.names
        shape = (table.sql_name, *((name, kinds.get(name)) for name in names))
        stage = self._stages.get(shape)
        listed = self.names(names)
        if stage is None:
            stage = self._stages[shape] = f"pg_temp.databus_rows_{len(self._stages)}"
            self.ask(
                f"CREATE TEMPORARY TABLE {stage.removeprefix('pg_temp.')} AS "
                f"SELECT {listed} FROM {table.sql_name} WITH NO DATA"
            )
        self._copy(stage, table, rows)
        yield stage
        self.ask(f"TRUNCATE {stage}")

    @property
    def _open(self) -> psycopg.Connection[Any]:
        assert self._connection is not None
        return self._connection


def _csv(rows: Any, kinds: dict[str, Column]) -> bytes:
    """The rows as CSV of PostgreSQL: a null is nothing, an empty text is quoted."""
    columns = []
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        kind = kinds[name].kind if name in kinds else Kind.INT
        if kind is Kind.BYTES:
            texts = [None if one is None else f"\\x{one.hex()}" for one in column.to_pylist()]
            column = pa.array(texts, pa.string())
        elif kind is Kind.TIME_SPAN:
            column = pc.binary_join_element_wise(column.cast(pa.string()), "microseconds", " ")
        columns.append(column)
    out = io.BytesIO()
    table = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
    csv.write_csv(table, out, csv.WriteOptions(include_header=False))
    return out.getvalue()
