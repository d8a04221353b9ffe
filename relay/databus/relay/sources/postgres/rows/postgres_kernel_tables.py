"""The described tables as arrays for the kernel: a row for each table, column and key column."""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import I64Array
from databus.common.schema.source_schema import Column, Kind, SourceSchema
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

    Owner: the assembler.
    """

    def __init__(self, encoding: str = text_encodings.UTF8) -> None:
        """``encoding`` is the encoding of texts."""
        self._is_utf8 = encoding == text_encodings.UTF8
        self._schemas: dict[int, SourceSchema | None] = {}
        self._arrays: Arrays | None = None

    def put(self, oid: int, schema: SourceSchema | None) -> None:
        """Set the table's schema from here on; with None its changes are skipped."""
        self._schemas[oid] = schema
        self._arrays = None

    def forget(self, oid: int) -> None:
        """Remove the table; the kernel stops at its changes."""
        self._schemas.pop(oid, None)
        self._arrays = None

    @property
    def arrays(self) -> Arrays:
        """The five arrays; they are rebuilt after a change."""
        if self._arrays is None:
            self._arrays = self._build()
        return self._arrays

    def _build(self) -> Arrays:
        size = 16
        while size < 2 * len(self._schemas):
            size *= 2
        index = np.full(size, -1, dtype=np.int64)
        relations = np.zeros((max(1, len(self._schemas)), 8), dtype=np.int64)
        columns: list[tuple[int, int, int, int]] = []
        keys: list[int] = []
        widest = 1
        for number, (oid, schema) in enumerate(self._schemas.items()):
            slot = (oid * 2654435761 >> 7) & (size - 1)
            while index[slot] >= 0:
                slot = (slot + 1) & (size - 1)
            index[slot] = number
            relations[number, pgoutput_kernels.OID] = oid
            if schema is None:
                continue
            names = [column.name for column in schema.columns]
            relations[number] = (
                oid, 1 + schema.nullable_key, len(columns), len(names), len(keys),
                len(schema.key), schema.source_id,
                schema.signed_fingerprint,
            )  # fmt: skip
            columns += [_column(column, is_utf8=self._is_utf8) for column in schema.columns]
            keys += [names.index(name) for name in schema.key]
            widest = max(widest, len(names))
        return (
            index,
            relations,
            np.array(columns, dtype=np.int64).reshape(-1, 4),
            np.array(keys, dtype=np.int64),
            np.zeros((4, widest), dtype=np.int64),
        )


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
