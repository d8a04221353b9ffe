"""Writes the column values of a row image as plain Avro, compiled.

Each function reads the bytes of one value and writes its Avro form; the columns' codes are those
of ``mysql_kernel_tables.py``.  MySQL documents images and values with its "Rows_event" class.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import (
    I64Array,
    U8Array,
    i64,
    jit_uncounted,
    load_i64,
    load_u32,
)
from databus.relay.sources.avro_kernels import (
    days_since_1970,
    has_surrogate,
    put_limbs,
    put_long,
    put_raw,
)
from databus.relay.sources.mysql.kernels import kernel_cells as c

NO_DATE = -(1 << 62)
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_POWERS = np.array([10**n for n in range(10)], dtype=np.int64)
_DIGIT_BYTES = np.array([0, 1, 1, 2, 2, 3, 3, 4, 4, 4], dtype=np.int64)
_FRACTION_US = np.array([1_000_000, 10_000, 100, 1], dtype=np.int64)
_MONTH_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], dtype=np.int64)


@jit_uncounted
def _put_big(out: U8Array, at: int, magnitude: np.uint64, negative: bool) -> int:
    """Avro bytes of an integer: two's complement, big-endian, as short as it can be."""
    if magnitude == np.uint64(0):
        negative = False
    inverted = magnitude - np.uint64(1) if negative else magnitude
    count = 1
    while count < 9 and inverted >> np.uint64(8 * count - 1):
        count += 1
    promotion = 0xFF if negative else 0
    at = put_long(out, at, count)
    for index in range(count):
        shift = 8 * (count - 1 - index)
        byte = i64(inverted >> np.uint64(shift)) & 0xFF if shift < 64 else 0
        out[at + index] = byte ^ promotion
    return at + count


@jit_uncounted
def _load_big_endian(buf: U8Array, at: int, width: int) -> int:
    value = i64(0)
    for index in range(width):
        value = value << 8 | i64(buf[at + index])
    return value


@jit_uncounted
def _load_little_endian(buf: U8Array, at: int, width: int) -> int:
    """A number of 1 to 8 bytes, without a loop: the buffer has slack after the last event."""
    word = load_i64(buf, at)
    return word if width == 8 else word & (i64(1) << 8 * width) - 1


@jit_uncounted
def _put_decimal(
    out: U8Array, at: int, buf: U8Array, start: int, precision: int, scale: int, plan: I64Array
) -> tuple[int, int]:
    """Write a DECIMAL at ``start``; returns (the output's end, the input's end)."""
    whole = precision - scale
    negative = buf[start] & 0x80 == 0
    promotion = i64(0xFF) if negative else i64(0)
    groups = (whole + 8) // 9 + (scale + 8) // 9
    small = i64(0)
    limb_count = 1
    plan[c.LIMB + 0] = 0
    cursor = start
    for number in range(groups):
        digits = 9
        if number == 0 and whole % 9:
            digits = whole % 9
        elif number == groups - 1 and scale % 9:
            digits = scale % 9
        group = i64(0)
        for _ in range(_DIGIT_BYTES[digits]):
            byte = i64(buf[cursor]) ^ promotion
            if cursor == start:
                byte ^= 0x80
            group = group << 8 | byte
            cursor += 1
        if precision <= 18:
            small = small * _POWERS[digits] + group
        else:
            carry = group
            for index in range(limb_count):
                value = plan[c.LIMB + index] * _POWERS[digits] + carry
                plan[c.LIMB + index] = value & 0xFFFFFFFF
                carry = value >> 32
            if carry:
                plan[c.LIMB + limb_count] = carry
                limb_count += 1
    if precision <= 18:
        return _put_big(out, at, np.uint64(small), negative), cursor
    return put_limbs(out, at, plan, c.LIMB, limb_count, negative), cursor


@jit_uncounted
def valid_days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 of a proleptic Gregorian date; NO_DATE if it is invalid."""
    if year < 1 or year > 9999 or month < 1 or month > 12 or day < 1:
        return NO_DATE
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if day > _MONTH_DAYS[month] + (1 if leap and month == 2 else 0):
        return NO_DATE
    return days_since_1970(year, month, day)


@jit_uncounted
def _datetime_us(buf: U8Array, at: int, digits: int) -> int:
    """Microseconds of a DATETIME; NO_DATE if it is invalid."""
    bits = _load_big_endian(buf, at, 5) - 0x8000000000
    width = (digits + 1) // 2
    year_month = bits >> 22 & 0x1FFFF
    days = valid_days(year_month // 13, year_month % 13, bits >> 17 & 31)
    hour, minute, second = bits >> 12 & 31, bits >> 6 & 63, bits & 63
    us = _load_big_endian(buf, at + 5, width) * _FRACTION_US[width]
    if days == NO_DATE or bits < 0 or hour > 23 or minute > 59 or second > 59 or us > 999_999:
        return NO_DATE
    return i64(((days * 24 + hour) * 60 + minute) * 60_000_000 + second * 1_000_000 + us)


@jit_uncounted
def _time_us(buf: U8Array, at: int, digits: int) -> int:
    """Microseconds of a TIME, which is signed."""
    fraction_bytes = (digits + 1) // 2
    width = 3 + fraction_bytes
    number = _load_big_endian(buf, at, width) - (i64(1) << 8 * width - 1)
    size = -number if number < 0 else number
    hms = size >> 8 * fraction_bytes
    us = (size & (i64(1) << 8 * fraction_bytes) - 1) * _FRACTION_US[fraction_bytes]
    seconds = ((hms >> 12 & 0x3FF) * 60 + (hms >> 6 & 63)) * 60 + (hms & 63)
    span = seconds * 1_000_000 + us
    return i64(-span if number < 0 else span)


@jit_uncounted
def _put_list(
    out: U8Array, at: int, bits: int, is_set: bool, labels_at: int, plan: I64Array, blob: U8Array
) -> int:
    """The text of an ENUM's number or of a SET's bits; -1 if there is no such member."""
    count = plan[labels_at]
    if not is_set:
        if bits == 0:
            return put_long(out, at, 0)
        if bits > count or bits < 0:
            return -1
        length = plan[labels_at + 2 * bits]
        at = put_long(out, at, length)
        return put_raw(out, at, blob, plan[labels_at + 2 * bits - 1], length)
    if count < 64 and bits >> count:
        return -1
    total = i64(0)
    for index in range(count):
        if bits >> index & 1:
            total += plan[labels_at + 2 * index + 2] + (1 if total else 0)
    at = put_long(out, at, total)
    first = True
    for index in range(count):
        if bits >> index & 1:
            if not first:
                out[at] = 44
                at += 1
            first = False
            at = put_raw(
                out, at, blob, plan[labels_at + 2 * index + 1], plan[labels_at + 2 * index + 2]
            )
    return at


@jit_uncounted
def _put_single_byte(
    out: U8Array, at: int, buf: U8Array, start: int, count: int, blob: U8Array, table: int
) -> int:
    """Text of a single-byte character set as UTF-8."""
    total = i64(0)
    for index in range(count):
        total += blob[table + 4 * buf[start + index]]
    at = put_long(out, at, total)
    for index in range(count):
        entry = table + 4 * i64(buf[start + index])
        for byte in range(blob[entry]):
            out[at] = blob[entry + 1 + byte]
            at += 1
    return at


@jit_uncounted
def _put_uuid(out: U8Array, at: int, buf: U8Array, start: int, count: int) -> int:
    at = put_long(out, at, 36)
    for index in range(16):
        byte = buf[start + index] if index < count else np.uint8(0)
        if index in (4, 6, 8, 10):
            out[at] = 45
            at += 1
        out[at] = _HEX[byte >> 4]
        out[at + 1] = _HEX[byte & 15]
        at += 2
    return at


@jit_uncounted
def put_inet4(out: U8Array, to: int, buf: U8Array, start: int, count: int) -> int:
    """An IPv4 address as text, without a length; trailing zero bytes may be missing."""
    for index in range(4):
        byte = i64(buf[start + index]) if index < count else i64(0)
        if index:
            out[to] = 46  # .
            to += 1
        to = _put_number(out, to, byte, 3 if byte > 99 else 2 if byte > 9 else 1)
    return to


@jit_uncounted
def put_inet6(out: U8Array, to: int, buf: U8Array, start: int, count: int) -> int:
    """An IPv6 address in MariaDB's form: v4-mapped and v4-compatible ones end with dots."""
    zeros = i64(0)  # The number of leading groups that are zero.
    longest, longest_at, run = i64(1), i64(-1), i64(0)
    for index in range(8):
        if _group(buf, start, count, index):
            run = i64(0)
            continue
        zeros += 1 if zeros == index else 0
        run += 1
        if run > longest:
            longest, longest_at = run, index - run + 1
    is_mapped = zeros == 5 and _group(buf, start, count, 5) == 0xFFFF
    has_dots = (is_mapped or zeros == 6) and _group(buf, start, count, 6) != 0
    groups = 6 if has_dots else 8
    if has_dots:
        longest, longest_at = zeros, i64(0)
    index = i64(0)
    while index < groups:
        if index == longest_at:
            out[to] = out[to + 1] = 58  # :
            to += 2
            index += longest
            continue
        if index and index != longest_at + longest:
            out[to] = 58
            to += 1
        to = _put_group(out, to, _group(buf, start, count, index))
        index += 1
    if has_dots:
        if is_mapped:
            out[to] = 58
            to += 1
        to = put_inet4(out, to, buf, start + 12, count - 12)
    return to


@jit_uncounted
def _group(buf: U8Array, start: int, count: int, index: int) -> int:
    high = i64(buf[start + 2 * index]) if 2 * index < count else i64(0)
    low = i64(buf[start + 2 * index + 1]) if 2 * index + 1 < count else i64(0)
    return high << 8 | low


@jit_uncounted
def _put_group(out: U8Array, to: int, group: int) -> int:
    """Up to four hexadecimal digits, without leading zeros."""
    digits = 4 if group > 0xFFF else 3 if group > 0xFF else 2 if group > 0xF else 1
    for index in range(digits):
        out[to + index] = _HEX[group >> 4 * (digits - 1 - index) & 15]
    return to + digits


@jit_uncounted
def _put_address(out: U8Array, to: int, buf: U8Array, start: int, count: int, op: int) -> int:
    """The text with its length before it, which is a single byte."""
    if op == c.OP_INET4:
        stop = put_inet4(out, to + 1, buf, start, count)
    else:
        stop = put_inet6(out, to + 1, buf, start, count)
    out[to] = 2 * (stop - to - 1)
    return stop


@jit_uncounted
def _put_single(out: U8Array, to: int, bits: int) -> None:
    """The bits of a single as a double, little-endian."""
    sign = bits >> 31
    exponent = bits >> 23 & 0xFF
    fraction = bits & 0x7FFFFF
    if exponent == 0xFF:
        exponent = 0x7FF
    elif exponent:
        exponent += 1023 - 127
    elif fraction:
        exponent = 1023 - 126
        while fraction & 0x800000 == 0:
            fraction <<= 1
            exponent -= 1
        fraction &= 0x7FFFFF
    double = sign << 63 | exponent << 52 | fraction << 29
    for index in range(8):
        out[to + index] = double >> 8 * index & 0xFF


@jit_uncounted
def _put_number(out: U8Array, to: int, value: int, digits: int) -> int:
    """Decimal digits, padded with zeros."""
    for index in range(digits):
        out[to + digits - 1 - index] = 48 + value % 10
        value //= 10
    return to + digits


@jit_uncounted
def _put_date(out: U8Array, to: int, year: int, month: int, day: int) -> int:
    to = _put_number(out, to, year, 4)
    out[to] = 45  # -
    to = _put_number(out, to + 1, month, 2)
    out[to] = 45
    return _put_number(out, to + 1, day, 2)


@jit_uncounted
def _put_days(out: U8Array, to: int, days: int) -> int:
    """The date so many days after 1970-01-01, which are not negative."""
    shifted = days + 719468
    era = shifted // 146097
    day_of_era = shifted - era * 146097
    year_of_era = (
        day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // 146096
    ) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * day_of_year + 2) // 153
    month = shifted_month + (3 if shifted_month < 10 else -9)
    year = era * 400 + year_of_era + (1 if month <= 2 else 0)
    return _put_date(out, to, year, month, day_of_year - (153 * shifted_month + 2) // 5 + 1)


@jit_uncounted
def _put_date_text(
    buf: U8Array, at: int, out: U8Array, to: int, op: int, digits: int
) -> tuple[int, int]:
    """As ``put_value``, for a date in the server's text form, even an invalid one."""
    if op == c.OP_DATE_TEXT:
        bits = _load_little_endian(buf, at, 3)
        to = put_long(out, to, 10)
        return at + 3, _put_date(out, to, bits >> 9, bits >> 5 & 15, bits & 31)
    start, size = to, 20 + digits if digits else 19
    width = (digits + 1) // 2
    to = put_long(out, to, size)
    if op == c.OP_DATETIME_TEXT:
        bits = _load_big_endian(buf, at, 5) - 0x8000000000
        hour, minute, second = bits >> 12 & 31, bits >> 6 & 63, bits & 63
        year_month = bits >> 22 & 0x1FFFF
        if bits < 0 or year_month >= 130_000 or hour > 23 or minute > 59 or second > 59:
            return -1, start
        at += 5
        us = _load_big_endian(buf, at, width) * _FRACTION_US[width]
        to = _put_date(out, to, year_month // 13, year_month % 13, bits >> 17 & 31)
    else:
        seconds = _load_big_endian(buf, at, 4)
        at += 4
        us = _load_big_endian(buf, at, width) * _FRACTION_US[width]
        if seconds == 0 and us == 0:
            to = _put_date(out, to, 0, 0, 0)
        else:
            to = _put_days(out, to, seconds // 86_400)
        hour, minute, second = seconds // 3600 % 24, seconds // 60 % 60, seconds % 60
    if us > 999_999:
        return -1, start
    out[to] = 32
    to = _put_number(out, to + 1, hour, 2)
    out[to] = 58  # :
    to = _put_number(out, to + 1, minute, 2)
    out[to] = 58
    to = _put_number(out, to + 1, second, 2)
    if digits:
        out[to] = 46  # .
        to = _put_number(out, to + 1, us // _POWERS[6 - digits], digits)
    return at + width, to


@jit_uncounted
def put_value(
    buf: U8Array,
    at: int,
    end: int,
    out: U8Array,
    to: int,
    column: int,
    blob: U8Array,
    plan: I64Array,
) -> tuple[int, int]:
    """Write one value; returns (the input's end, the output's end).

    An input end of -1 leaves the event to the decoder; an output end of -1 means null.
    """
    op = plan[column + c.C_OP]
    width = plan[column + c.C_A]
    if op == c.OP_SIGNED:
        shift = 64 - 8 * width
        return at + width, put_long(out, to, (load_i64(buf, at) << shift) >> shift)
    if op == c.OP_UNSIGNED:
        return at + width, put_long(out, to, _load_little_endian(buf, at, width))
    if c.OP_BYTES <= op <= c.OP_SINGLE_BYTE or op in (c.OP_UUID, c.OP_INET4, c.OP_INET6):
        count = _load_little_endian(buf, at, width)
        start = at + width
        stop = start + count
        if stop > end:
            return -1, to
        if op == c.OP_UTF8 and has_surrogate(buf, start, count):
            return -1, to
        if op in (c.OP_BYTES, c.OP_UTF8):
            return stop, put_raw(out, put_long(out, to, count), buf, start, count)
        if op == c.OP_SINGLE_BYTE:
            return stop, _put_single_byte(out, to, buf, start, count, blob, plan[column + c.C_B])
        if op == c.OP_UUID:
            return (stop, _put_uuid(out, to, buf, start, count)) if count <= 16 else (-1, to)
        if op in (c.OP_INET4, c.OP_INET6):
            if count > (4 if op == c.OP_INET4 else 16):
                return -1, to
            return stop, _put_address(out, to, buf, start, count, op)
        padded = plan[column + c.C_B]
        if count > padded:
            return -1, to
        to = put_raw(out, put_long(out, to, padded), buf, start, count)
        for index in range(padded - count):
            out[to + index] = 0
        return stop, to + padded - count
    if op == c.OP_DECIMAL:
        to, at = _put_decimal(out, to, buf, at, width, plan[column + c.C_B], plan)
        return at, to
    if op == c.OP_DATETIME:
        us = _datetime_us(buf, at, width)
        at += 5 + (width + 1) // 2
        if us == NO_DATE:
            return (at, -1) if plan[column + c.C_NULL_ZERO] else (-1, to)
        return at, put_long(out, to, us)
    if op == c.OP_TIMESTAMP:
        fraction_bytes = (width + 1) // 2
        fraction = _load_big_endian(buf, at + 4, fraction_bytes) * _FRACTION_US[fraction_bytes]
        us = _load_big_endian(buf, at, 4) * 1_000_000 + fraction
        at += 4 + fraction_bytes
        if us == 0:
            return (at, -1) if plan[column + c.C_NULL_ZERO] else (-1, to)
        return at, put_long(out, to, us)
    if op == c.OP_DATE:
        bits = _load_little_endian(buf, at, 3)
        days = valid_days(bits >> 9, bits >> 5 & 15, bits & 31)
        if days == NO_DATE:
            return (at + 3, -1) if plan[column + c.C_NULL_ZERO] else (-1, to)
        return at + 3, put_long(out, to, days)
    if op == c.OP_TIME:
        return at + 3 + (width + 1) // 2, put_long(out, to, _time_us(buf, at, width))
    if op == c.OP_YEAR:
        return at + 1, put_long(out, to, i64(buf[at]) + 1900 if buf[at] else 0)
    if op == c.OP_UINT64:
        return at + 8, _put_big(out, to, np.uint64(load_i64(buf, at)), False)
    if op == c.OP_BIT:
        return at + width, put_long(out, to, _load_big_endian(buf, at, width))
    if op == c.OP_BIT64:
        return at + 8, _put_big(out, to, np.uint64(_load_big_endian(buf, at, 8)), False)
    if op in (c.OP_ENUM, c.OP_SET):
        bits = _load_little_endian(buf, at, width)
        to = _put_list(out, to, bits, op == c.OP_SET, plan[column + c.C_B], plan, blob)
        return (at + width, to) if to >= 0 else (-1, to)
    if op == c.OP_DOUBLE:
        return at + 8, put_raw(out, to, buf, at, 8)
    if op == c.OP_FLOAT:
        _put_single(out, to, load_u32(buf, at))
        return at + 4, to + 8
    if c.OP_DATE_TEXT <= op <= c.OP_TIMESTAMP_TEXT:
        return _put_date_text(buf, at, out, to, op, width)
    return -1, to
