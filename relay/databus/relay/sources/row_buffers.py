"""Rows of a chunk as Avro bytes in one buffer, with an index by which the splice finds a key.

No object per row: a chunk of a hundred thousand rows is three arrays and a hash table.  Compiled
code fills them in the thread that reads the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from databus.common.compiled.kernels import COMPILED, I64Array, U8Array, i64, jit, jit_uncounted
from databus.common.compiled.xxh3 import xxh3_64

U64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_FIRST_BYTES = 1 << 20
_FIRST_ROWS = 4096

# A line of ``spans``: where the row's key and its Avro record begin and end.
KEY_START, KEY_STOP, ROW_START, ROW_STOP = range(4)

# Why a chunk kernel stopped: at the block's end, at what is no row, for lack of space, before a
# row that it cannot convert.
AT_END, AT_OTHER, OUT_FULL, ROW_REFUSED = range(4)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a chunk: Avro bytes of its key and of the row."""

    key: bytes
    row: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Many rows in key order; ``spans[i]`` has the offsets of row ``i`` in ``data``.

    Invariants:
        I1. ``hashes[i]`` is the xxh3 of row ``i``'s key, as in its frame.
        I2. Every row is found by its key in ``slots``, an open-addressed table of row numbers.

    Owner: none; it never changes.
    """

    data: U8Array
    spans: I64Array
    hashes: U64Array
    slots: I64Array

    @staticmethod
    def at(data: U8Array, spans: I64Array) -> Rows:
        """The rows at ``spans``, of shape (count, 4), in ``data``."""
        hashes = np.empty(len(spans), dtype=np.uint64)
        slots = np.full(1 << (2 * len(spans) + 1).bit_length(), -1, dtype=np.int64)
        index_keys(data, spans, hashes, slots)
        return Rows(data, spans, hashes, slots)

    @staticmethod
    def of(rows: Iterable[Row]) -> Rows:
        """The same from objects: for sources that have no kernel."""
        buffer, lines = bytearray(), []
        for row in rows:
            start = len(buffer)
            buffer += row.key
            middle = len(buffer)
            buffer += row.row
            lines.append((start, middle, middle, len(buffer)))
        spans = np.array(lines, dtype=np.int64).reshape(-1, 4)
        buffer.append(0)  # numpy makes no array of an empty buffer
        return Rows.at(np.frombuffer(buffer, dtype=np.uint8), spans)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Row:
        key_start, key_stop, row_start, row_stop = self.spans[index].tolist()
        return Row(self.data[key_start:key_stop].tobytes(), self.data[row_start:row_stop].tobytes())

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @property
    def size_bytes(self) -> int:
        """Bytes of keys and rows."""
        if len(self) == 0:
            return 0
        lengths = self.spans[:, 1] - self.spans[:, 0] + self.spans[:, 3] - self.spans[:, 2]
        return int(lengths.sum())


EMPTY = Rows(
    np.zeros(1, dtype=np.uint8),
    np.zeros((0, 4), dtype=np.int64),
    np.zeros(0, dtype=np.uint64),
    np.full(2, -1, dtype=np.int64),
)


class RowSpace:
    """Space for the rows of a chunk while they arrive; kernels write to ``out`` and ``spans``.

    Invariants:
        I1. ``out[:fill]`` and ``spans[:count]`` are in use; growing preserves them.

    Owner: one chunk.
    """

    def __init__(self) -> None:
        self.out: U8Array = np.empty(_FIRST_BYTES, dtype=np.uint8)
        self.spans: I64Array = np.empty((_FIRST_ROWS, 4), dtype=np.int64)
        self.fill = 0
        self.count = 0

    def grow(self, need_bytes: int) -> None:
        """Make space for ``need_bytes`` more, and for another row."""
        if self.fill + need_bytes > len(self.out):
            larger = np.empty(max(2 * len(self.out), self.fill + need_bytes), dtype=np.uint8)
            larger[: self.fill] = self.out[: self.fill]
            self.out = larger
        if self.count == len(self.spans):
            self.spans = np.concatenate((self.spans, np.empty_like(self.spans)))

    def put(self, row: Row) -> None:
        """Add a row that Python has converted."""
        self.grow(len(row.key) + len(row.row))
        start, middle = self.fill, self.fill + len(row.key)
        self.fill = middle + len(row.row)
        self.out[start : self.fill] = np.frombuffer(row.key + row.row, dtype=np.uint8)
        self.count = add_span(self.spans, self.count, start, middle, self.fill)

    def rows(self) -> Rows:
        """All rows that were added."""
        return Rows.at(self.out, self.spans[: self.count])


@jit_uncounted
def bytes_of_row(received_bytes: int, column_count: int) -> int:
    """An upper bound of the Avro bytes of a row's key and record."""
    return 64 + 2 * received_bytes + 48 * column_count


@jit_uncounted
def has_space(out: U8Array, fill: int, spans: I64Array, count: int, need_bytes: int) -> bool:
    """Whether there is space for ``need_bytes`` and for another row."""
    return fill + need_bytes <= len(out) and count < len(spans)


@jit_uncounted
def add_span(spans: I64Array, count: int, start: int, middle: int, stop: int) -> int:
    """Add a row with its key in ``[start, middle)`` and its record up to ``stop``; the count."""
    spans[count, KEY_START], spans[count, KEY_STOP] = start, middle
    spans[count, ROW_START], spans[count, ROW_STOP] = middle, stop
    return count + 1


@jit
def index_keys(data: U8Array, spans: I64Array, hashes: U64Array, slots: I64Array) -> None:
    """Fill ``hashes`` and ``slots`` from the keys."""
    mask = len(slots) - 1
    for row in range(len(spans)):
        hashed = np.uint64(xxh3_64(data, spans[row, 0], spans[row, 1]))
        hashes[row] = hashed
        slot = i64(hashed) & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = row


@jit
def drop_keys(
    data: U8Array,
    spans: I64Array,
    hashes: U64Array,
    slots: I64Array,
    live: BoolArray,
    touched: U8Array,
    key_spans: I64Array,
    touched_hashes: U64Array,
    first: int,
    stop: int,
) -> int:
    """Clear ``live`` for the rows whose key is among touched keys ``[first, stop)``; their count.

    ``key_spans[i]`` has the offsets in ``touched`` at which key ``i`` begins and ends.
    """
    mask = len(slots) - 1
    dropped = 0
    for number in range(first, stop):
        hashed = touched_hashes[number]
        start, length = key_spans[number, 0], key_spans[number, 1] - key_spans[number, 0]
        slot = i64(hashed) & mask
        while slots[slot] >= 0:
            row = slots[slot]
            same = hashes[row] == hashed and spans[row, 1] - spans[row, 0] == length
            if same:
                key = spans[row, 0]
                for offset in range(length):
                    if data[key + offset] != touched[start + offset]:
                        same = False
                        break
            if same:
                if live[row]:
                    live[row] = False
                    dropped += 1
                break
            slot = (slot + 1) & mask
    return dropped


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache."""
    if not COMPILED:
        return
    rows = Rows.of([Row(b"k", b"row")])
    live = np.ones(1, dtype=np.bool_)
    key_spans = np.array([[0, 1]], dtype=np.int64)
    key = np.frombuffer(bytearray(b"k"), dtype=np.uint8)
    drop_keys(
        rows.data, rows.spans, rows.hashes, rows.slots, live, key, key_spans, rows.hashes, 0, 1
    )  # fmt: skip
