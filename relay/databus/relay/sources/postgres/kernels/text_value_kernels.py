"""Converts values in PostgreSQL's text form to plain Avro, compiled.

A function refuses a value that it cannot convert exactly as the reference path
(``postgres_types.py``) does.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import U8Array, i64
from databus.relay.sources.avro_kernels import (
    days_since_1970,
    put_bytes,
    put_exact_double,
    put_long,
)

# The kinds of columns.
(
    BOOL, INT, FLOAT, DECIMAL, NUMERIC, STRING, BYTES, DATE, TIME, TIMESTAMP, TIMESTAMPTZ, JSON,
    ASCII,
) = range(13)  # fmt: skip
"""ASCII is for texts in other encodings than UTF-8."""

_BAD = -(1 << 40)
_DAY_US = 86_400_000_000


@kernels.jit_uncounted
def put_value(
    buf: U8Array, start: int, length: int, kind: int, scale: int, out: U8Array, at: int
) -> int:
    """Write one value, not null, as its plain Avro type; returns the offset after it, or -1."""
    if kind in (STRING, JSON, ASCII):
        high = all_bits(buf, start, length)
        if high >= 128 and (kind == ASCII or not is_utf8(buf, start, length)):
            return -1
        return put_bytes(buf, start, length, out, at)
    if length == 0:
        return -1
    if kind == INT:
        return _integer(buf, start, length, out, at)
    if kind == DECIMAL:
        return _decimal(buf, start, length, scale, out, at)
    if kind == TIMESTAMP:
        return _timestamp(buf, start, length, out, at)
    if kind == TIMESTAMPTZ:
        tail = start + length - 3
        if length < 22 or buf[tail] != 43 or buf[tail + 1] != 48 or buf[tail + 2] != 48:
            return -1
        return _timestamp(buf, start, length - 3, out, at)
    if kind == BOOL:
        if length != 1 or (buf[start] != 116 and buf[start] != 102):
            return -1
        out[at] = 1 if buf[start] == 116 else 0
        return at + 1
    if kind == NUMERIC:
        # The reference path writes an exponent for values below a millionth.
        zeros = start + 1 if buf[start] == 45 else start
        if start + length - zeros >= 8 and buf[zeros] == 48:
            tiny = True
            for offset in range(2, 8):
                tiny = tiny and buf[zeros + offset] == 48
            if tiny:
                return -1
        return put_bytes(buf, start, length, out, at)
    if kind == FLOAT:
        return put_exact_double(buf, start, start + length, out, at)
    if kind == DATE:
        if length != 10:
            return -1
        days = _date(buf, start)
        return -1 if days == _BAD else put_long(out, at, days)
    if kind == TIME:
        time_us = _clock(buf, start, length)
        return -1 if time_us < 0 or time_us >= _DAY_US else put_long(out, at, time_us)
    if kind == BYTES:
        return _hex(buf, start, length, out, at)
    return -1


@kernels.jit_uncounted
def all_bits(buf: U8Array, start: int, length: int) -> int:
    """The bitwise OR of all bytes."""
    found = np.uint8(0)
    for cursor in range(start, start + length):
        found |= buf[cursor]
    return i64(found)


@kernels.jit_uncounted
def is_utf8(buf: U8Array, start: int, length: int) -> bool:
    """Whether the bytes are UTF-8 as in RFC 3629."""
    cursor, stop = start, start + length
    while cursor < stop:
        first = i64(buf[cursor])
        cursor += 1
        if first < 0x80:
            continue
        if first < 0xC2 or first > 0xF4:
            return False
        more = 1 if first < 0xE0 else 2 if first < 0xF0 else 3
        if cursor + more > stop:
            return False
        least = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
        most = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
        second = i64(buf[cursor])
        if second < least or second > most:
            return False
        for offset in range(1, more):
            if i64(buf[cursor + offset]) & 0xC0 != 0x80:
                return False
        cursor += more
    return True


@kernels.jit_uncounted
def _hex(buf: U8Array, start: int, length: int, out: U8Array, at: int) -> int:
    if length < 2 or length & 1 or buf[start] != 92 or buf[start + 1] != 120:
        return -1
    count = (length - 2) >> 1
    at = put_long(out, at, count)
    cursor = start + 2
    for offset in range(count):
        high, low = _nibble(buf[cursor]), _nibble(buf[cursor + 1])
        if high < 0 or low < 0:
            return -1
        out[at + offset] = np.uint8(high << 4 | low)
        cursor += 2
    return at + count


@kernels.jit_uncounted
def _nibble(digit: int) -> int:
    if 48 <= digit <= 57:
        return i64(digit) - 48
    if 97 <= digit <= 102:
        return i64(digit) - 87
    return -1


@kernels.jit_uncounted
def _integer(buf: U8Array, start: int, length: int, out: U8Array, at: int) -> int:
    negative = buf[start] == 45
    cursor = start + 1 if negative else start
    stop = start + length
    if stop - cursor > 19 or cursor == stop:
        return -1
    value = 0
    while cursor < stop:
        digit = i64(buf[cursor]) - 48
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 - digit  # negative: the smallest number has no positive twin
        cursor += 1
    return put_long(out, at, value if negative else -value)


@kernels.jit_uncounted
def _decimal(buf: U8Array, start: int, length: int, scale: int, out: U8Array, at: int) -> int:
    """Avro's decimal: the unscaled number, big-endian and as short as it can be."""
    negative = buf[start] == 45
    cursor = start + 1 if negative else start
    stop = start + length
    value, digits, after_point = 0, 0, -1
    while cursor < stop:
        if buf[cursor] == 46 and after_point < 0:
            after_point = 0
        else:
            digit = i64(buf[cursor]) - 48
            if digit < 0 or digit > 9 or digits == 18:
                return -1
            value = value * 10 + digit
            digits += 1
            if after_point >= 0:
                after_point += 1
        cursor += 1
    if digits == 0 or max(after_point, 0) != scale:
        return -1
    return put_decimal(-value if negative else value, out, at)


@kernels.jit_uncounted
def put_decimal(value: int, out: U8Array, at: int) -> int:
    """Write an unscaled number as Avro's decimal; returns the offset after it."""
    size = 1
    while value >> (8 * size - 1) != 0 and value >> (8 * size - 1) != -1:
        size += 1
    at = put_long(out, at, size)
    for offset in range(size):
        out[at + offset] = np.uint8(value >> 8 * (size - 1 - offset) & 0xFF)
    return at + size


@kernels.jit_uncounted
def _two(buf: U8Array, at: int) -> int:
    """Two decimal digits; negative for other bytes."""
    high, low = i64(buf[at]) - 48, i64(buf[at + 1]) - 48
    if high < 0 or high > 9 or low < 0 or low > 9:
        return -10_000
    return high * 10 + low


@kernels.jit_uncounted
def _date(buf: U8Array, at: int) -> int:
    """Days since 1970 of YYYY-MM-DD, 0001 to 9999; _BAD for other text."""
    year = _two(buf, at) * 100 + _two(buf, at + 2)
    month, day = _two(buf, at + 5), _two(buf, at + 8)
    if buf[at + 4] != 45 or buf[at + 7] != 45 or year < 1 or month < 1 or day < 1:
        return _BAD
    return days_since_1970(year, month, day)


@kernels.jit_uncounted
def _clock(buf: U8Array, at: int, length: int) -> int:
    """Microseconds of HH:MM:SS[.f...]; negative for other text."""
    if length < 8 or length == 9 or length > 15 or buf[at + 2] != 58 or buf[at + 5] != 58:
        return -1
    hour, minute, second = _two(buf, at), _two(buf, at + 3), _two(buf, at + 6)
    if hour < 0 or minute < 0 or second < 0:
        return -1
    fraction = 0
    if length > 9:
        if buf[at + 8] != 46:
            return -1
        for offset in range(9, 15):
            fraction *= 10
            if offset < length:
                digit = i64(buf[at + offset]) - 48
                if digit < 0 or digit > 9:
                    return -1
                fraction += digit
    return ((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction


@kernels.jit_uncounted
def _timestamp(buf: U8Array, start: int, length: int, out: U8Array, at: int) -> int:
    if length < 19 or buf[start + 10] != 32:
        return -1
    days = _date(buf, start)
    time_us = _clock(buf, start + 11, length - 11)
    if days == _BAD or time_us < 0:
        return -1
    return put_long(out, at, days * _DAY_US + time_us)
