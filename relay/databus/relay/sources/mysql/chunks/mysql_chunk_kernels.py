"""Converts the rows of a prepared SELECT to Avro keys and rows, without Python per row.

The binary protocol has numbers and dates in binary form, so that only decimals are parsed.
``walk_rows`` stops before a row that it cannot convert exactly as the reference path
(``mysql_chunks.py``) does.  The protocol is MySQL's "Binary Protocol Resultset Row".
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import COMPILED, I64Array, U8Array, i64, load_u16, load_u32
from databus.relay.sources.avro_kernels import has_surrogate, put_bytes, put_limbs, put_long
from databus.relay.sources.mysql.kernels.mysql_value_kernels import NO_DATE, valid_days
from databus.relay.sources.row_buffers import (
    AT_END,
    AT_OTHER,
    OUT_FULL,
    ROW_REFUSED,
    add_span,
    bytes_of_row,
    has_space,
)

# columns: a row for each column.
OP, NULLABLE, WIDTH, UNSIGNED, SCALE, NULL_ZERO = range(6)
INTEGER, UINT64, DOUBLE, DECIMAL, BYTES, UTF8, DATE, DATETIME, TIME, SKIPPED = range(10)
COLUMN_FIELDS = 6

LIMBS = 12


@kernels.jit
def walk_rows(
    buf: U8Array,
    at: int,
    stop: int,
    out: U8Array,
    out_at: int,
    spans: I64Array,
    count: int,
    columns: I64Array,
    keys: I64Array,
    fields: I64Array,
    limbs: I64Array,
) -> tuple[int, int, int, int]:
    """Pack the rows of the packets in ``buf[at:stop]`` into ``out`` from ``out_at`` on.

    ``spans`` has a line for each row, the next one is ``count``; ``fields`` is scratch of two
    lines.  Returns (where in buf it stopped, where out ends, rows so far, why it stopped).
    """
    while True:
        if stop - at < 5:
            return at, out_at, count, AT_END
        size = load_u32(buf, at) & 0xFFFFFF
        if size == 0xFFFFFF or buf[at + 4] != 0:
            return at, out_at, count, ROW_REFUSED if buf[at + 4] == 0 else AT_OTHER
        end = at + 4 + size
        if end > stop:
            return at, out_at, count, AT_END
        need_bytes = bytes_of_row(size, len(columns))
        if not has_space(out, out_at, spans, count, need_bytes):
            return at, out_at, count, OUT_FULL
        if not _fields(buf, at + 5, end, columns, fields):
            return at, out_at, count, ROW_REFUSED
        middle = _key(buf, out, out_at, columns, keys, fields, limbs)
        if middle < 0:
            return at, out_at, count, ROW_REFUSED
        row_end = _row(buf, out, middle, columns, fields, limbs)
        if row_end < 0:
            return at, out_at, count, ROW_REFUSED
        count = add_span(spans, count, out_at, middle, row_end)
        out_at, at = row_end, end


@kernels.jit
def skip_rows(buf: U8Array, at: int, stop: int) -> int:
    """The end of the whole packets that are rows."""
    while stop - at >= 5:
        size = load_u32(buf, at) & 0xFFFFFF
        if size == 0 or at + 4 + size > stop or (buf[at + 4] != 0 and size < 0xFFFFFF):
            break
        at += 4 + size
    return at


@kernels.jit
def last_packet(buf: U8Array, at: int, stop: int) -> int:
    """The offset of the last packet in ``buf[at:stop]``, which has at least one whole packet."""
    found = at
    while at < stop:
        found = at
        at += 4 + (load_u32(buf, at) & 0xFFFFFF)
    return found


@kernels.jit
def _fields(buf: U8Array, at: int, end: int, columns: I64Array, fields: I64Array) -> bool:
    """Find each value: its offset and its length, -1 for null."""
    nulls = at
    at += (len(columns) + 9) >> 3
    for index in range(len(columns)):
        if buf[nulls + ((index + 2) >> 3)] >> ((index + 2) & 7) & 1:
            fields[1, index] = -1
            continue
        if at >= end:
            return False
        length = columns[index, WIDTH]
        if length == 0:
            length = i64(buf[at])
            at += 1
            if DECIMAL <= columns[index, OP] <= UTF8:
                if length == 252:
                    length = load_u16(buf, at)
                    at += 2
                elif length == 253:
                    length = load_u32(buf, at) & 0xFFFFFF
                    at += 3
                elif length > 250:
                    return False
        fields[0, index] = at
        fields[1, index] = length
        at += length
        if at > end:
            return False
    return True


@kernels.jit
def _key(
    buf: U8Array,
    out: U8Array,
    at: int,
    columns: I64Array,
    keys: I64Array,
    fields: I64Array,
    limbs: I64Array,
) -> int:
    for number in range(len(keys)):
        index = keys[number]
        if fields[1, index] < 0:
            return -1
        at = _value(buf, fields[0, index], fields[1, index], columns, index, out, at, limbs)
        if at < 0:
            return -1
    return at


@kernels.jit
def _row(
    buf: U8Array, out: U8Array, at: int, columns: I64Array, fields: I64Array, limbs: I64Array
) -> int:
    for index in range(len(columns)):
        if columns[index, OP] == SKIPPED:
            continue
        length = fields[1, index]
        nullable = columns[index, NULLABLE] != 0
        if length < 0:
            if not nullable:
                return -1
            out[at] = 0
            at += 1
            continue
        begin = at
        if nullable:
            out[at] = 2
            at += 1
        at = _value(buf, fields[0, index], length, columns, index, out, at, limbs)
        if at < 0:
            if not columns[index, NULL_ZERO]:
                return -1
            out[begin] = 0
            at = begin + 1
    return at


@kernels.jit
def _value(
    buf: U8Array,
    start: int,
    length: int,
    columns: I64Array,
    index: int,
    out: U8Array,
    at: int,
    limbs: I64Array,
) -> int:
    """Write one value, not null; returns the offset after it, or -1."""
    op = columns[index, OP]
    if op == UTF8 and has_surrogate(buf, start, length):
        return -1
    if op == BYTES or op == UTF8:
        return put_bytes(buf, start, length, out, at)
    if op == INTEGER:
        return put_long(out, at, _integer(buf, start, length, columns[index, UNSIGNED] != 0))
    if op == DECIMAL:
        return _decimal(buf, start, length, columns[index, SCALE], out, at, limbs)
    if op == DATETIME or op == DATE:
        value = _date_us(buf, start, length)
        if value == NO_DATE:
            return -1
        return put_long(out, at, value // 86_400_000_000 if op == DATE else value)
    if op == DOUBLE:
        for offset in range(8):
            out[at + offset] = buf[start + offset]
        return at + 8
    if op == TIME:
        return put_long(out, at, _time_us(buf, start, length))
    if op == UINT64:
        limbs[0] = load_u32(buf, start)
        limbs[1] = load_u32(buf, start + 4)
        return put_limbs(out, at, limbs, 0, 2, False)
    return -1


@kernels.jit
def _integer(buf: U8Array, start: int, width: int, unsigned: bool) -> int:
    value = i64(0)
    for offset in range(width):
        value |= i64(buf[start + offset]) << 8 * offset
    shift = 64 - 8 * width
    return value if unsigned else (value << shift) >> shift


@kernels.jit
def _decimal(
    buf: U8Array, start: int, length: int, scale: int, out: U8Array, at: int, limbs: I64Array
) -> int:
    """Avro's decimal: the unscaled number, big-endian and as short as it can be."""
    stop = start + length
    negative = length > 0 and buf[start] == 45
    cursor = start + 1 if negative else start
    used, after_point, digits = 1, -1, 0
    limbs[0] = 0
    group, weight = i64(0), i64(1)
    while cursor < stop:
        if buf[cursor] == 46 and after_point < 0:
            after_point = 0
        else:
            digit = i64(buf[cursor]) - 48
            if digit < 0 or digit > 9 or digits == 100:
                return -1
            group = group * 10 + digit
            weight *= 10
            digits += 1
            if after_point >= 0:
                after_point += 1
            if weight == 1_000_000_000:
                used = _shift_in(limbs, used, weight, group)
                group, weight = i64(0), i64(1)
        cursor += 1
    if digits == 0 or max(after_point, 0) != scale:
        return -1
    used = _shift_in(limbs, used, weight, group)
    return put_limbs(out, at, limbs, 0, used, negative)


@kernels.jit
def _shift_in(limbs: I64Array, used: int, weight: int, group: int) -> int:
    """limbs = limbs * weight + group; returns the number of limbs."""
    carry = group
    for index in range(used):
        value = limbs[index] * weight + carry
        limbs[index] = value & 0xFFFFFFFF
        carry = value >> 32
    if carry:
        limbs[used] = carry
        used += 1
    return used


@kernels.jit
def _date_us(buf: U8Array, start: int, length: int) -> int:
    """Microseconds since 1970 of a DATE or DATETIME; NO_DATE for an invalid date."""
    if length < 4:
        return NO_DATE
    days = valid_days(load_u16(buf, start), i64(buf[start + 2]), i64(buf[start + 3]))
    if days == NO_DATE:
        return NO_DATE
    seconds = days * 86_400
    if length >= 7:
        seconds += (i64(buf[start + 4]) * 60 + i64(buf[start + 5])) * 60 + i64(buf[start + 6])
    us = load_u32(buf, start + 7) if length >= 11 else i64(0)
    return seconds * 1_000_000 + us


@kernels.jit
def _time_us(buf: U8Array, start: int, length: int) -> int:
    """Microseconds of a TIME, which is signed and may be longer than a day."""
    if length < 8:
        return i64(0)
    hours = load_u32(buf, start + 1) * 24 + i64(buf[start + 5])
    seconds = (hours * 60 + i64(buf[start + 6])) * 60 + i64(buf[start + 7])
    us = seconds * 1_000_000 + (load_u32(buf, start + 8) if length >= 12 else i64(0))
    return -us if buf[start] else us


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache."""
    if not COMPILED:
        return
    nothing = np.frombuffer(bytearray(8), dtype=np.uint8)
    walk_rows(
        nothing, 0, 0, nothing, 0, np.zeros((1, 4), dtype=np.int64), 0,
        np.zeros((1, COLUMN_FIELDS), dtype=np.int64), np.zeros(1, dtype=np.int64),
        np.zeros((2, 1), dtype=np.int64), np.zeros(LIMBS, dtype=np.int64),
    )  # fmt: skip
    skip_rows(nothing, 0, 0)
    last_packet(nothing, 0, 0)
