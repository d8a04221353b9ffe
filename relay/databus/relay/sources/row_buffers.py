"""Rows of a chunk as Avro bytes in one buffer, with what the splice needs to find them by key.

No object per row: a chunk of a hundred thousand rows is three arrays and a hash table, filled
by compiled code in the thread that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from databus.common.compiled.kernels import COMPILED, I64Array, U8Array, i64, jit
from databus.common.compiled.xxh3 import xxh3_64

U64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_FIRST_BYTES = 1 << 20
_FIRST_ROWS = 4096

# A row's line in ``spans``: where its key and its row begin and end.
KEY_START, KEY_STOP, ROW_START, ROW_STOP = range(4)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a chunk: Avro bytes of its key and of the row."""

    key: bytes
    row: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Many rows in key order: ``spans[i]`` says where in ``data`` row ``i`` lies.

    Invariants:
        I1. ``hashes[i]`` is the xxh3 of row ``i``'s key, as in its frame.
        I2. Every row is found by its key in ``slots``, an open-addressed table of row numbers.

    Owner: whoever made it; nobody changes it.
    """

    data: U8Array
    spans: I64Array
    hashes: U64Array
    slots: I64Array

    @staticmethod
    def at(data: U8Array, spans: I64Array) -> Rows:
        """The rows that lie at ``spans``, of shape (count, 4), in ``data``."""
        hashes = np.empty(len(spans), dtype=np.uint64)
        slots = np.full(1 << (2 * len(spans) + 1).bit_length(), -1, dtype=np.int64)
        index_keys(data, spans, hashes, slots)
        return Rows(data, spans, hashes, slots)

    @staticmethod
    def of(rows: Iterable[Row]) -> Rows:
        """The same, out of objects: for sources that have no kernel."""
        buffer, lines = bytearray(), []
        for row in rows:
            start = len(buffer)
            buffer += row.key
            middle = len(buffer)
            buffer += row.row
            lines.append((start, middle, middle, len(buffer)))
        spans = np.array(lines, dtype=np.int64).reshape(-1, 4)
        buffer.append(0)  # an array cannot be made of nothing
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
    """Room for the rows of a chunk while they arrive; kernels write to ``out`` and ``spans``.

    Invariants:
        I1. ``out[:fill]`` and ``spans[:count]`` are taken; growing keeps them.

    Owner: one chunk.
    """

    def __init__(self) -> None:
        self.out: U8Array = np.empty(_FIRST_BYTES, dtype=np.uint8)
        self.spans: I64Array = np.empty((_FIRST_ROWS, 4), dtype=np.int64)
        self.fill = 0
        self.count = 0

    def grow(self, need_bytes: int) -> None:
        """Make room for ``need_bytes`` more, and for another row."""
        if self.fill + need_bytes > len(self.out):
            larger = np.empty(max(2 * len(self.out), self.fill + need_bytes), dtype=np.uint8)
            larger[: self.fill] = self.out[: self.fill]
            self.out = larger
        if self.count == len(self.spans):
            self.spans = np.concatenate((self.spans, np.empty_like(self.spans)))

    def put(self, row: Row) -> None:
        """Take a row that Python has converted."""
        self.grow(len(row.key) + len(row.row))
        start, middle = self.fill, self.fill + len(row.key)
        self.fill = middle + len(row.row)
        self.out[start : self.fill] = np.frombuffer(row.key + row.row, dtype=np.uint8)
        self.spans[self.count] = (start, middle, middle, self.fill)
        self.count += 1

    def rows(self) -> Rows:
        """Everything that was taken."""
        return Rows.at(self.out, self.spans[: self.count])


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
    kept: BoolArray,
    touched: U8Array,
    places: I64Array,
    touched_hashes: U64Array,
    first: int,
    stop: int,
) -> int:
    """Strike the rows whose key is among the touched ones ``[first, stop)``; how many they were.

    ``places[i]`` says where in ``touched`` key ``i`` begins and ends.
    """
    mask = len(slots) - 1
    dropped = 0
    for number in range(first, stop):
        hashed = touched_hashes[number]
        start, length = places[number, 0], places[number, 1] - places[number, 0]
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
                if kept[row]:
                    kept[row] = False
                    dropped += 1
                break
            slot = (slot + 1) & mask
    return dropped


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache."""
    if not COMPILED:
        return
    rows = Rows.of([Row(b"k", b"row")])
    kept = np.ones(1, dtype=np.bool_)
    places = np.array([[0, 1]], dtype=np.int64)
    key = np.frombuffer(bytearray(b"k"), dtype=np.uint8)
    drop_keys(
        rows.data, rows.spans, rows.hashes, rows.slots, kept, key, places, rows.hashes, 0, 1
    )  # fmt: skip
