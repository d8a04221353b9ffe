"""A chunk's rows as the frames of a dump window, packed by compiled code."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from databus.common.checkpoint import Position
from databus.common.compiled.kernels import COMPILED, I64Array, U8Array, copy, jit
from databus.common.frame.header_layout import DELETE, HAS_AFTER, HEADER_BYTES, READ, seal
from databus.common.frame.window_builder import end_of_window
from databus.common.schema.column_values import from_json_value
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.contract import Chunk
from databus.relay.sources.row_buffers import Rows, U64Array

_DELETED = -1
"""Length of the row of a key that is deleted."""
_PAD_BYTES = 8


def pack_window(
    schema: SourceSchema,
    rows: Rows,
    left: I64Array,
    after: Position,
    commit_us: int,
    limit_bytes: int,
) -> tuple[bytes, int]:
    """A dump window that begins after ``after``, of the first of the rows ``left``, at least one.

    It is no longer than ``limit_bytes`` unless its first row is.  Returns the window, and how
    many rows are in it.
    """
    left = left[: limit_bytes // HEADER_BYTES + 1]
    starts_and_stops = rows.spans[left]
    lengths = starts_and_stops[:, 1] - starts_and_stops[:, 0]
    lengths += starts_and_stops[:, 3] - starts_and_stops[:, 2]
    ends = np.cumsum(lengths + (HEADER_BYTES + _PAD_BYTES))
    count = max(1, int(np.searchsorted(ends, limit_bytes, side="right")))
    out = np.empty(int(ends[count - 1]) + _PAD_BYTES & ~7, dtype=np.uint8)
    fill = pack_rows(
        rows.data, rows.spans, rows.hashes, left[:count], out,
        after.scn, after.seq + 1, schema.source_id, np.uint64(schema.fingerprint), commit_us,
    )  # fmt: skip
    end = end_of_window(after.scn, after.seq + 1 + count, commit_us, count, dump=True)
    return out[:fill].tobytes() + end, count


def with_deletions(chunk: Chunk, schema: SourceSchema, gone: list[list[Any]]) -> Chunk:
    """The chunk with a deletion after its rows for each of the keys ``gone``, which are JSON.

    Raises:
        FormatError: a value does not match its column's kind.
    """
    kinds = [column.kind for column in schema.key_columns]
    keys = [
        schema.encode_key(
            [from_json_value(value, kind) for value, kind in zip(key, kinds, strict=True)]
        )
        for key in gone
    ]
    stops = len(chunk.rows.data) + np.cumsum([len(key) for key in keys], dtype=np.int64)
    spans = np.zeros((len(keys), 4), dtype=np.int64)
    spans[:, 0], spans[:, 1], spans[:, 3] = (
        np.append(len(chunk.rows.data), stops[:-1]),
        stops,
        _DELETED,
    )
    data = np.concatenate((chunk.rows.data, np.frombuffer(b"".join(keys), dtype=np.uint8)))
    rows = Rows.at(data, np.concatenate((chunk.rows.spans, spans)))
    return dataclasses.replace(chunk, rows=rows)


@jit
def pack_rows(
    data: U8Array,
    spans: I64Array,
    hashes: U64Array,
    left: I64Array,
    out: U8Array,
    scn: int,
    seq: int,
    source_id: int,
    schema_fp: np.uint64,
    commit_us: int,
) -> int:
    """READ and DELETE frames of the rows ``left``, seq growing by one; where they end."""
    at = 0
    for number in range(len(left)):
        row = left[number]
        key_bytes = spans[row, 1] - spans[row, 0]
        row_bytes = spans[row, 3] - spans[row, 2]
        stop = at + HEADER_BYTES
        copy(out, stop, data, spans[row, 0], key_bytes)
        stop += key_bytes
        op, flags = READ, HAS_AFTER
        if row_bytes == _DELETED:
            op, flags, row_bytes = DELETE, 0, 0
        copy(out, stop, data, spans[row, 2], row_bytes)
        stop += row_bytes
        at = seal(
            out, at, stop, op, flags, scn, seq + number, source_id, hashes[row], schema_fp,
            commit_us, key_bytes, 0, row_bytes, 0,
        )  # fmt: skip
    return at


def warm_up() -> None:
    """Compile the kernel, or load it from numba's cache."""
    if not COMPILED:
        return
    nothing = np.zeros(8, dtype=np.uint8)
    pack_rows(
        nothing, np.zeros((0, 4), dtype=np.int64), np.zeros(0, dtype=np.uint64),
        np.zeros(0, dtype=np.int64), nothing, 0, 0, 0, np.uint64(0), 0,
    )  # fmt: skip
