"""The described tables as arrays for the kernel: a row for each table, column and key column."""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import I64Array
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.kernel_rows import KernelRows
from databus.relay.sources.postgres.kernels import (
    binary_value_kernels,
    pgoutput_kernels,
    text_value_kernels,
)
from databus.relay.sources.postgres.protocol import text_encodings

_KINDS: dict[Kind, int] = {
    Kind.BOOL: text_value_kernels.BOOL,
    Kind.INT: text_value_kernels.INT,
    Kind.FLOAT: text_value_kernels.FLOAT,
    Kind.DECIMAL: text_value_kernels.DECIMAL,
    Kind.NUMERIC: text_value_kernels.NUMERIC,
    Kind.STRING: text_value_kernels.STRING,
    Kind.BYTES: text_value_kernels.BYTES,
    Kind.DATE: text_value_kernels.DATE,
    Kind.TIME: text_value_kernels.TIME,
    Kind.TIMESTAMP: text_value_kernels.TIMESTAMP,
    Kind.TIMESTAMPTZ: text_value_kernels.TIMESTAMPTZ,
    Kind.UUID: text_value_kernels.STRING,  # an Avro string in PostgreSQL's own form
    Kind.JSON: text_value_kernels.JSON,
}

Arrays = tuple[I64Array, I64Array, I64Array, I64Array, I64Array]


class PostgresKernelTables:
    """The arrays ``index, relations, columns, keys, fields`` of ``kernels.transcode``.

    Invariants:
        I1. ``arrays`` describes exactly the tables of the last ``put`` of each oid.
        I2. A new table costs what its columns cost, however many tables there are.

    Owner: the assembler.
    """

    def __init__(self, encoding: str = text_encodings.UTF8) -> None:
        """``encoding`` is the encoding of texts."""
        self._is_utf8 = encoding == text_encodings.UTF8
        self._schemas: dict[int, SourceSchema | None] = {}
        self._is_stale = False
        self._clear()

    def put(self, oid: int, schema: SourceSchema | None) -> None:
        """Set the table's schema from here on; with None its changes are skipped."""
        self._is_stale |= oid in self._schemas and self._schemas[oid] != schema
        is_new = oid not in self._schemas
        self._schemas[oid] = schema
        if is_new and not self._is_stale:
            self._add(oid, schema)

    def forget(self, oid: int) -> None:
        """Remove the table; the kernel stops at its changes."""
        self._is_stale |= oid in self._schemas
        self._schemas.pop(oid, None)

    @property
    def arrays(self) -> Arrays:
        """The five arrays; they are rebuilt if a table has changed or is gone."""
        if self._is_stale:
            self._clear()
            for oid, schema in self._schemas.items():
                self._add(oid, schema)
        keys = self._keys.rows.reshape(-1)
        return self._index, self._relations.rows, self._columns.rows, keys, self._fields

    def _clear(self) -> None:
        self._is_stale = False
        self._index: I64Array = np.full(16, -1, dtype=np.int64)
        self._relations, self._columns, self._keys = KernelRows(8), KernelRows(4), KernelRows(1)
        self._fields: I64Array = np.zeros((4, 1), dtype=np.int64)

    def _add(self, oid: int, schema: SourceSchema | None) -> None:
        line = [oid, 0, 0, 0, 0, 0, 0, 0]
        if schema is not None:
            names = [column.name for column in schema.columns]
            columns = [_column(column, is_utf8=self._is_utf8) for column in schema.columns]
            keys = [[names.index(name)] for name in schema.key]
            line = [
                oid, 1 + schema.nullable_key, self._columns.add(columns), len(names),
                self._keys.add(keys), len(keys), schema.source_id, schema.signed_fingerprint,
            ]  # fmt: skip
            if len(names) > self._fields.shape[1]:
                self._fields = np.zeros((4, len(names)), dtype=np.int64)
        number = self._relations.add([line])
        if 2 * (number + 1) > len(self._index):
            self._index = np.full(4 * len(self._index), -1, dtype=np.int64)
            for earlier, known in enumerate(self._relations.rows[:, pgoutput_kernels.OID].tolist()):
                self._enter(known, earlier)
        else:
            self._enter(oid, number)

    def _enter(self, oid: int, number: int) -> None:
        """Let the index find a table."""
        mask = len(self._index) - 1
        slot = (oid * 2654435761 >> 7) & mask
        while self._index[slot] >= 0:
            slot = (slot + 1) & mask
        self._index[slot] = number


def _column(column: Column, *, is_utf8: bool) -> tuple[int, int, int, int]:
    kind = _KINDS[column.kind]
    if not is_utf8 and column.kind in (Kind.STRING, Kind.JSON):
        kind = text_value_kernels.ASCII
    return kind, int(column.nullable), column.scale, binary_value_kernels.TEXT


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache."""
    nothing = np.zeros(8, dtype=np.uint8)
    state = np.zeros(pgoutput_kernels.STATE_COUNT, dtype=np.int64)
    pgoutput_kernels.last_whole(nothing, 0, 0)
    pgoutput_kernels.transcode(nothing, 0, 0, nothing, 0, state, *PostgresKernelTables().arrays)
