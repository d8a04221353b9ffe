"""Frames as tables: the columns of a run's files, and the frames in them.

FORMAT.md of the bootstrap's runs specifies the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from databus.common.frame.frame_format import FIRST_CONTROL_OP, HEADER_BYTES, FrameColumns

FOOTER_BYTES = 64 << 10
"""How much of a file's end is read at once: most footers are shorter."""

COLUMNS = ("scn", "seq", "source_id", "op", "flags", "commit_us", "key_hash", "key", "frame")
SCHEMA = pa.schema(
    [
        ("scn", pa.int64()),
        ("seq", pa.int64()),
        ("source_id", pa.int64()),
        ("op", pa.int32()),
        ("flags", pa.int32()),
        ("commit_us", pa.int64()),
        ("key_hash", pa.int64()),
        ("key", pa.binary()),
        ("frame", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """Whole frames back to back, in Parquet's decoded buffer, and where each begins.

    ``edges`` has one entry more than there are frames: the last is the end.
    """

    data: npt.NDArray[np.uint8]
    edges: npt.NDArray[np.int64]

    def slice(self, start: int, stop: int) -> FrameBlock:
        """The frames ``start`` .. ``stop`` - 1, without a copy."""
        edges = self.edges[start : stop + 1]
        return FrameBlock(self.data[edges[0] : edges[-1]], edges - edges[0])

    def columns(self) -> FrameColumns:
        """The headers as columns."""
        return FrameColumns(self.data.view(np.uint64), self.edges[:-1], len(self.data))


def blocks_of(table: Any) -> list[FrameBlock]:
    """The ``frame`` column of an Arrow table, without a copy."""
    return [as_block(chunk) for chunk in table.column("frame").chunks]


def as_block(chunk: Any) -> FrameBlock:
    """The frames of one chunk of the ``frame`` column, without a copy."""
    _, offsets, values = chunk.buffers()
    edges = np.frombuffer(offsets, dtype=np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
    if values is None:
        return FrameBlock(np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))
    data = np.frombuffer(values, dtype=np.uint8)[edges[0] : edges[-1]]
    return FrameBlock(data, edges.astype(np.int64) - int(edges[0]))


def as_table(data: bytes, columns: FrameColumns) -> pa.Table:
    """The columns of a run from whole frames that were scanned; ``data`` is not copied."""
    is_row = columns.op < FIRST_CONTROL_OP
    key_len = np.where(is_row, columns.key_len, 0).astype(np.int64)
    arrays = [
        columns.scn.view(np.int64),
        columns.seq.astype(np.int64),
        columns.source_id.astype(np.int64),
        columns.op.astype(np.int32),
        columns.flags.astype(np.int32),
        columns.commit_us,
        columns.key_hash.view(np.int64),
    ]
    key = _gathered(data, columns.offset + HEADER_BYTES, key_len)
    edges = np.append(columns.offset, len(data)).astype(np.int32)
    frames = pa.Array.from_buffers(
        pa.binary(), len(columns), [None, pa.py_buffer(edges), pa.py_buffer(data)]
    )
    return pa.Table.from_arrays([*map(pa.array, arrays), key, frames], schema=SCHEMA)


def _gathered(
    data: bytes, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> pa.Array:
    """Binary column of ``data[start : start + length]`` for each pair."""
    edges = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.repeat(starts - edges[:-1], lengths) + np.arange(edges[-1])
    values = np.frombuffer(data, dtype=np.uint8)[indices]
    return pa.Array.from_buffers(
        pa.binary(),
        len(starts),
        [None, pa.py_buffer(edges.astype(np.int32)), pa.py_buffer(values)],
    )


def footer_crc(source: Any, size: int) -> int:
    """CRC-32C of a Parquet file's footer, with its length and the magic after it."""
    tail = source.read_at(min(size, FOOTER_BYTES), max(0, size - FOOTER_BYTES))
    footer_bytes = min(size, int.from_bytes(tail[-8:-4], "little") + 8)
    if footer_bytes > len(tail):
        tail = source.read_at(footer_bytes, size - footer_bytes)
    return int(google_crc32c.value(tail[len(tail) - footer_bytes :]))
