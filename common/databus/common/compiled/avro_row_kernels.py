"""Avro records into columns: the loops that cut many rows into numbers and byte ranges at once.

What belongs here: walking records by a table of column codes.  What does not: the meaning of the
numbers, and the Arrow arrays made of them (``databus.client.tables.arrow_rows``).
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import I64Array, U8Array, i64

BOOLEAN, LONG, DOUBLE, BYTES, DECIMAL = range(5)
"""Codes of plain Avro types; DECIMAL is BYTES that hold a number of 16 bytes at most."""


@kernels.jit_uncounted
def varint(buf: U8Array, at: int, stop: int) -> tuple[int, int]:
    """The zigzag number at ``at`` and where it ends; -1 if there is none."""
    value = i64(0)
    shift = 0
    while at < stop and shift < 70:
        byte = i64(buf[at])
        at += 1
        if shift < 64:
            value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return ((value >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(value & 1), at
        shift += 7
    return i64(0), -1


@kernels.jit_uncounted
def _two_words(buf: U8Array, start: int, stop: int) -> tuple[int, int]:
    """The big-endian number of 1 to 16 bytes at ``start``: its low word and its high one."""
    middle = max(start, stop - 8)
    high = i64(-1) if buf[start] & 0x80 else i64(0)
    low = high if stop - middle < 8 else i64(0)
    for index in range(middle, stop):
        low = low << 8 | i64(buf[index])
    for index in range(start, middle):
        high = high << 8 | i64(buf[index])
    return low, high


@kernels.jit_uncounted
def decode_row(
    buf: U8Array,
    at: int,
    stop: int,
    codes: I64Array,
    nullable: U8Array,
    slots: I64Array,
    row: int,
    first: I64Array,
    second: I64Array,
    valid: U8Array,
) -> bool:
    """Cut the record ``buf[at:stop]`` into columns.

    Column c has the type ``codes[c]`` and goes to the place ``[slots[c], row]`` of the outputs, or
    nowhere if its slot is negative.  ``first`` gets the number, the bits of a double, the low word
    of a decimal or the start of bytes in ``buf``; ``second`` the high word or the length;
    ``valid`` 1 where there is a value.  Returns whether the record is whole.
    """
    for column in range(len(codes)):
        if nullable[column]:
            # 0 and 1 as Avro writes them, or longer.
            if at < stop and buf[at] <= 2 and buf[at] != 1:
                branch = i64(buf[at]) >> 1
                at += 1
            else:
                branch, at = varint(buf, at, stop)
            if at < 0 or branch < 0 or branch > 1:
                return False
            if branch == 0:
                continue
        slot = slots[column]
        code = codes[column]
        low = i64(0)
        high = i64(0)
        if code == LONG:
            low, at = varint(buf, at, stop)
            if at < 0:
                return False
        elif code == BOOLEAN:
            if at >= stop or buf[at] > 1:
                return False
            low = i64(buf[at])
            at += 1
        elif code == DOUBLE:
            if at + 8 > stop:
                return False
            low = kernels.load_i64(buf, at)
            at += 8
        else:
            high, at = varint(buf, at, stop)
            if at < 0 or high < 0 or high > stop - at:
                return False
            low = i64(at)
            at += high
            if code == DECIMAL and slot >= 0:
                if high == 0 or high > 16:
                    return False
                low, high = _two_words(buf, low, at)
        if slot >= 0:
            first[slot, row] = low
            second[slot, row] = high
            valid[slot, row] = 1
    return at == stop


@kernels.jit_uncounted
def decode_rows(
    buf: U8Array,
    starts: I64Array,
    stops: I64Array,
    codes: I64Array,
    nullable: U8Array,
    slots: I64Array,
    first: I64Array,
    second: I64Array,
    valid: U8Array,
) -> int:
    """Cut the records ``buf[starts[i] : stops[i]]`` into columns, as ``decode_row`` does.

    Returns -1, or the index of the first damaged record.
    """
    for row in range(len(starts)):
        at, stop = starts[row], stops[row]
        if not decode_row(buf, at, stop, codes, nullable, slots, row, first, second, valid):
            return row
    return -1


@kernels.jit_uncounted
def gather_bytes(
    buf: U8Array, starts: I64Array, edges: I64Array, row: int, count: int, out: U8Array
) -> None:
    """Copy the bytes of rows ``row`` .. ``row + count - 1`` of each column to ``out``.

    ``starts[c, i]`` is where a value begins in ``buf``.  Its place in ``out`` is from
    ``edges[c * rows + i]`` up to the next edge.
    """
    columns, rows = starts.shape
    for column in range(columns):
        for index in range(row, row + count):
            to = edges[column * rows + index]
            size = edges[column * rows + index + 1] - to
            if size:
                kernels.copy(out, to, buf, starts[column, index], size)


def warm_up() -> None:
    """Compile every kernel, or load it from the cache."""
    for writable in (True, False):
        buf = np.array([2, 0, 0, 0, 0, 0, 0, 0, 0], dtype=np.uint8)
        buf.flags.writeable = writable
        ones = np.zeros(1, dtype=np.int64)
        numbers = np.zeros((1, 1), dtype=np.int64)
        bits = np.zeros((1, 1), dtype=np.uint8)
        nullable = np.zeros(1, dtype=np.uint8)
        decode_rows(buf, ones, ones + 1, ones + LONG, nullable, ones, numbers, numbers, bits)
        edges = np.array([0, 1], dtype=np.int64)
        gather_bytes(buf, numbers, edges, 0, 1, np.zeros(1, dtype=np.uint8))
