"""The binlog's hot path, compiled: packets to frames without an object per row.

``walk`` takes a block of the replication stream and does what ``decoder.py`` does for the
events that make up nearly all of a binlog: GTIDs, known table maps, rows of the common types,
XIDs.  At anything else, and at anything that is not as it should be, it stops in front of the
event and leaves it to the decoder; so every error and every rare case has one place.

Row images are documented with MySQL's "Rows_event" class; the columns' codes come from
``plan.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from databus.common.kernels import (
    COMPILED,
    I64Array,
    U8Array,
    crc32c,
    i64,
    jit,
    load_i64,
    load_u16,
    load_u32,
)
from databus.common.xxh3 import xxh3_64

# The head of the plan: the state that both sides share, and where its sections lie.
(
    SCN,
    SEQ,
    EVENT_COUNT,
    COMMIT_US,
    IN_GROUP,
    WANTED,
    GROUP_FLAGS,
    GROUP_DOMAIN,
    GROUP_SERVER,
    RESOLVED,
    LAST_SEQ_NO,
    DOMAIN,
    CHECKSUMS,
    END_OFFSET,
    FOREIGN_GROUPS,
    OTHER_GROUPS,
    PLACE,
    FILL,
    GROUP_START,
    SENT_PART,
    NEED_BYTES,
    RESUME_AT,
    ROWS_DONE,
    AT_SLOTS,
    SLOT_MASK,
    AT_SPANS,
) = range(26)
LIMB, LIMBS = 32, 16
HEAD = LIMB + LIMBS

# What ``walk`` returns.
NEED_INPUT, NEED_DECODER, NEED_ROOM = 0, 1, 2
_DONE = 3

# Fields of a table.
(
    T_ID,
    T_BODY,
    T_BODY_BYTES,
    T_MODE,
    T_COLUMN,
    T_COLUMNS,
    T_KEY,
    T_KEYS,
    T_SOURCE,
    T_SCHEMA,
    T_EXTRA,
) = range(11)
TABLE_FIELDS = 11
MODE_SKIP, MODE_KERNEL, MODE_PYTHON = 0, 1, 2

# Fields of a column.
C_OP, C_A, C_B, C_NULLABLE, C_EXTRA, C_NULL_ZERO = range(6)
COLUMN_FIELDS = 6
(
    OP_SIGNED,
    OP_UNSIGNED,
    OP_UINT64,
    OP_FLOAT,
    OP_DOUBLE,
    OP_DECIMAL,
    OP_BYTES,
    OP_PADDED,
    OP_SINGLE_BYTE,
    OP_ENUM,
    OP_SET,
    OP_BIT,
    OP_BIT64,
    OP_YEAR,
    OP_DATE,
    OP_DATETIME,
    OP_TIMESTAMP,
    OP_TIME,
    OP_UUID,
) = range(19)

_HEADER_BYTES = 19
_CRC_BYTES = 4
_LONGEST_PACKET = 0xFFFFFF
_XID, _TABLE_MAP, _WRITE, _UPDATE, _DELETE, _HEARTBEAT, _GTID = 16, 19, 23, 24, 25, 27, 162
_PREPARED_XA = 64
_ARTIFICIAL = 0x20

_FRAME_BYTES = 72
_FRAME_MARK = 0xDB05 | 1 << 16
_INSERT_OP, _UPDATE_OP, _DELETE_OP, _END_OP = 1, 2, 3, 64
_HAS_BEFORE, _HAS_AFTER = 1, 2
_END_FRAME_BYTES = 192
_SINGLE_BYTE_GROWTH = 3

_U7 = np.uint64(7)
_U127 = np.uint64(127)
_U128 = np.uint64(128)


def _crc32_tables() -> I64Array:
    """Slicing-by-8 tables of CRC-32 (reflected 0xEDB88320), the binlog's checksum."""
    tables = np.zeros((8, 256), dtype=np.int64)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
        tables[0, byte] = crc
    for slice_ in range(1, 8):
        previous = tables[slice_ - 1]
        tables[slice_] = tables[0][previous & 0xFF] ^ (previous >> 8)
    return tables


_CRC32 = _crc32_tables()
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_POWERS = np.array([10**n for n in range(10)], dtype=np.int64)
_DIGIT_BYTES = np.array([0, 1, 1, 2, 2, 3, 3, 4, 4, 4], dtype=np.int64)
_FRACTION_US = np.array([1_000_000, 10_000, 100, 1], dtype=np.int64)
_MONTH_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], dtype=np.int64)


@jit
def crc32(buf: U8Array, start: int, stop: int) -> int:
    """CRC-32 of ``buf[start:stop]``."""
    tables = _CRC32
    crc = i64(0xFFFFFFFF)
    at = start
    while at + 8 <= stop:
        low = crc ^ load_u32(buf, at)
        crc = (
            tables[7, low & 0xFF]
            ^ tables[6, (low >> 8) & 0xFF]
            ^ tables[5, (low >> 16) & 0xFF]
            ^ tables[4, (low >> 24) & 0xFF]
            ^ tables[3, buf[at + 4]]
            ^ tables[2, buf[at + 5]]
            ^ tables[1, buf[at + 6]]
            ^ tables[0, buf[at + 7]]
        )
        at += 8
    while at < stop:
        crc = tables[0, (crc ^ i64(buf[at])) & 0xFF] ^ (crc >> 8)
        at += 1
    return crc ^ 0xFFFFFFFF


if TYPE_CHECKING:

    def _move(to: U8Array, at: int, source: U8Array, start: int, count: int) -> None: ...

elif COMPILED:
    from numba.core import cgutils, types
    from numba.extending import intrinsic
    from numba.np.arrayobj import make_array

    @intrinsic
    def _move(typing_context, to, at, source, start, count):
        """memcpy between two byte arrays, which numba has no word for."""

        def generate(context, builder, signature, args):
            target = make_array(signature.args[0])(context, builder, args[0]).data
            origin = make_array(signature.args[2])(context, builder, args[2]).data
            cgutils.raw_memcpy(
                builder,
                builder.gep(target, [args[1]]),
                builder.gep(origin, [args[3]]),
                args[4],
                1,
            )
            return context.get_dummy_value()

        return types.void(to, types.int64, source, types.int64, types.int64), generate

else:

    def _move(to, at, source, start, count):
        to[at : at + count] = source[start : start + count]


@jit
def _copy(to: U8Array, at: int, source: U8Array, start: int, count: int) -> int:
    """Copy and return where the copy ends."""
    if count >= 16:
        _move(to, at, source, start, count)
    else:
        for index in range(count):
            to[at + index] = source[start + index]
    return at + count


@jit
def _put_long(out: U8Array, at: int, value: int) -> int:
    """Avro's long: zigzag, seven bits a byte."""
    rest = np.uint64((value << 1) ^ (value >> 63))
    while rest >= _U128:
        out[at] = np.uint8(rest & _U127 | _U128)
        rest >>= _U7
        at += 1
    out[at] = np.uint8(rest)
    return at + 1


@jit
def _bit_count(value: np.uint64) -> int:
    bits = 0
    while value >> np.uint64(8):
        bits += 8
        value >>= np.uint64(8)
    while value:
        bits += 1
        value >>= np.uint64(1)
    return bits


@jit
def _put_big(out: U8Array, at: int, magnitude: np.uint64, negative: bool) -> int:
    """Avro bytes of an integer: two's complement, big-endian, as short as it can be."""
    if magnitude == np.uint64(0):
        negative = False
    inverted = magnitude - np.uint64(1) if negative else magnitude
    count = _bit_count(inverted) // 8 + 1
    turn = 0xFF if negative else 0
    at = _put_long(out, at, count)
    for index in range(count):
        shift = 8 * (count - 1 - index)
        byte = i64(inverted >> np.uint64(shift)) & 0xFF if shift < 64 else 0
        out[at + index] = byte ^ turn
    return at + count


@jit
def _load_big_endian(buf: U8Array, at: int, width: int) -> int:
    value = i64(0)
    for index in range(width):
        value = value << 8 | i64(buf[at + index])
    return value


@jit
def _load_little_endian(buf: U8Array, at: int, width: int) -> int:
    value = i64(0)
    for index in range(width):
        value |= i64(buf[at + index]) << 8 * index
    return value


@jit
def _put_decimal(
    out: U8Array, at: int, buf: U8Array, start: int, precision: int, scale: int, plan: I64Array
) -> tuple[int, int]:
    """A DECIMAL at ``start``; returns (where the output ends, where the input ends)."""
    whole = precision - scale
    negative = buf[start] & 0x80 == 0
    turn = i64(0xFF) if negative else i64(0)
    groups = (whole + 8) // 9 + (scale + 8) // 9
    small = i64(0)
    limb_count = 1
    plan[LIMB + 0] = 0
    place = start
    for number in range(groups):
        digits = 9
        if number == 0 and whole % 9:
            digits = whole % 9
        elif number == groups - 1 and scale % 9:
            digits = scale % 9
        group = i64(0)
        for _ in range(_DIGIT_BYTES[digits]):
            byte = i64(buf[place]) ^ turn
            if place == start:
                byte ^= 0x80
            group = group << 8 | byte
            place += 1
        if precision <= 18:
            small = small * _POWERS[digits] + group
        else:
            carry = group
            for index in range(limb_count):
                value = plan[LIMB + index] * _POWERS[digits] + carry
                plan[LIMB + index] = value & 0xFFFFFFFF
                carry = value >> 32
            if carry:
                plan[LIMB + limb_count] = carry
                limb_count += 1
    if precision <= 18:
        return _put_big(out, at, np.uint64(small), negative), place
    return _put_limbs(out, at, plan, limb_count, negative), place


@jit
def _put_limbs(out: U8Array, at: int, plan: I64Array, limb_count: int, negative: bool) -> int:
    """As ``_put_big``, for a magnitude in 32-bit limbs, the lowest first."""
    while limb_count > 1 and plan[LIMB + limb_count - 1] == 0:
        limb_count -= 1
    if limb_count == 1 and plan[LIMB + 0] == 0:
        negative = False
    if negative:
        index = 0
        while plan[LIMB + index] == 0:
            plan[LIMB + index] = 0xFFFFFFFF
            index += 1
        plan[LIMB + index] -= 1
        while limb_count > 1 and plan[LIMB + limb_count - 1] == 0:
            limb_count -= 1
    bits = 32 * (limb_count - 1) + _bit_count(np.uint64(plan[LIMB + limb_count - 1]))
    count = bits // 8 + 1
    turn = 0xFF if negative else 0
    at = _put_long(out, at, count)
    for index in range(count):
        byte_number = count - 1 - index
        limb = plan[LIMB + (byte_number >> 2)] if byte_number >> 2 < limb_count else i64(0)
        out[at + index] = (limb >> 8 * (byte_number & 3)) & 0xFF ^ turn
    return at + count


@jit
def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 of a proleptic Gregorian date; -(2**62) if there is none such."""
    if year < 1 or year > 9999 or month < 1 or month > 12 or day < 1:
        return -(1 << 62)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if day > _MONTH_DAYS[month] + (1 if leap and month == 2 else 0):
        return -(1 << 62)
    shifted = year - 1 if month <= 2 else year
    era = shifted // 400
    year_of_era = shifted - era * 400
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year
    return era * 146097 + day_of_era - 719468


@jit
def _datetime_us(buf: U8Array, at: int, digits: int) -> int:
    """Microseconds of a DATETIME; -(2**62) if it is no date."""
    bits = _load_big_endian(buf, at, 5) - 0x8000000000
    width = (digits + 1) // 2
    year_month = bits >> 22 & 0x1FFFF
    days = _days(year_month // 13, year_month % 13, bits >> 17 & 31)
    hour, minute, second = bits >> 12 & 31, bits >> 6 & 63, bits & 63
    us = _load_big_endian(buf, at + 5, width) * _FRACTION_US[width]
    if days == -(1 << 62) or bits < 0 or hour > 23 or minute > 59 or second > 59 or us > 999_999:
        return -(1 << 62)
    return i64(((days * 24 + hour) * 60 + minute) * 60_000_000 + second * 1_000_000 + us)


@jit
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


@jit
def _put_list(
    out: U8Array, at: int, bits: int, is_set: bool, place: int, plan: I64Array, blob: U8Array
) -> int:
    """The text of an ENUM's number or of a SET's bits; -1 if there is no such member."""
    count = plan[place]
    if not is_set:
        if bits == 0:
            return _put_long(out, at, 0)
        if bits > count or bits < 0:
            return -1
        length = plan[place + 2 * bits]
        at = _put_long(out, at, length)
        return _copy(out, at, blob, plan[place + 2 * bits - 1], length)
    if count < 64 and bits >> count:
        return -1
    total = i64(0)
    for index in range(count):
        if bits >> index & 1:
            total += plan[place + 2 * index + 2] + (1 if total else 0)
    at = _put_long(out, at, total)
    first = True
    for index in range(count):
        if bits >> index & 1:
            if not first:
                out[at] = 44
                at += 1
            first = False
            at = _copy(out, at, blob, plan[place + 2 * index + 1], plan[place + 2 * index + 2])
    return at


@jit
def _put_single_byte(
    out: U8Array, at: int, buf: U8Array, start: int, count: int, blob: U8Array, table: int
) -> int:
    """Text of a single-byte character set as UTF-8."""
    total = i64(0)
    for index in range(count):
        total += blob[table + 4 * buf[start + index]]
    at = _put_long(out, at, total)
    for index in range(count):
        entry = table + 4 * i64(buf[start + index])
        for byte in range(blob[entry]):
            out[at] = blob[entry + 1 + byte]
            at += 1
    return at


@jit
def _put_uuid(out: U8Array, at: int, buf: U8Array, start: int, count: int) -> int:
    at = _put_long(out, at, 36)
    for index in range(16):
        byte = buf[start + index] if index < count else np.uint8(0)
        if index in (4, 6, 8, 10):
            out[at] = 45
            at += 1
        out[at] = _HEX[byte >> 4]
        out[at + 1] = _HEX[byte & 15]
        at += 2
    return at


@jit
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


@jit
def _value(
    buf: U8Array,
    at: int,
    end: int,
    out: U8Array,
    to: int,
    column: int,
    blob: U8Array,
    plan: I64Array,
) -> tuple[int, int]:
    """One value: (where the input ends, where the output ends).

    An input end of -1 leaves the event to the decoder; an output end of -1 stands for null.
    """
    op = plan[column + C_OP]
    width = plan[column + C_A]
    if op == OP_SIGNED:
        shift = 64 - 8 * width
        return at + width, _put_long(
            out, to, (_load_little_endian(buf, at, width) << shift) >> shift
        )
    if op == OP_UNSIGNED:
        return at + width, _put_long(out, to, _load_little_endian(buf, at, width))
    if OP_BYTES <= op <= OP_SINGLE_BYTE or op == OP_UUID:
        count = _load_little_endian(buf, at, width)
        start = at + width
        stop = start + count
        if stop > end:
            return -1, to
        if op == OP_BYTES:
            return stop, _copy(out, _put_long(out, to, count), buf, start, count)
        if op == OP_SINGLE_BYTE:
            return stop, _put_single_byte(out, to, buf, start, count, blob, plan[column + C_B])
        if op == OP_UUID:
            return (stop, _put_uuid(out, to, buf, start, count)) if count <= 16 else (-1, to)
        padded = plan[column + C_B]
        if count > padded:
            return -1, to
        to = _copy(out, _put_long(out, to, padded), buf, start, count)
        for index in range(padded - count):
            out[to + index] = 0
        return stop, to + padded - count
    if op == OP_DECIMAL:
        to, at = _put_decimal(out, to, buf, at, width, plan[column + C_B], plan)
        return at, to
    if op == OP_DATETIME:
        us = _datetime_us(buf, at, width)
        at += 5 + (width + 1) // 2
        if us == -(1 << 62):
            return (at, -1) if plan[column + C_NULL_ZERO] else (-1, to)
        return at, _put_long(out, to, us)
    if op == OP_TIMESTAMP:
        fraction_bytes = (width + 1) // 2
        fraction = _load_big_endian(buf, at + 4, fraction_bytes) * _FRACTION_US[fraction_bytes]
        us = _load_big_endian(buf, at, 4) * 1_000_000 + fraction
        at += 4 + fraction_bytes
        if us == 0:
            return (at, -1) if plan[column + C_NULL_ZERO] else (-1, to)
        return at, _put_long(out, to, us)
    if op == OP_DATE:
        bits = _load_little_endian(buf, at, 3)
        days = _days(bits >> 9, bits >> 5 & 15, bits & 31)
        if days == -(1 << 62):
            return (at + 3, -1) if plan[column + C_NULL_ZERO] else (-1, to)
        return at + 3, _put_long(out, to, days)
    if op == OP_TIME:
        return at + 3 + (width + 1) // 2, _put_long(out, to, _time_us(buf, at, width))
    if op == OP_YEAR:
        return at + 1, _put_long(out, to, i64(buf[at]) + 1900 if buf[at] else 0)
    if op == OP_UINT64:
        return at + 8, _put_big(out, to, np.uint64(load_i64(buf, at)), False)
    if op == OP_BIT:
        return at + width, _put_long(out, to, _load_big_endian(buf, at, width))
    if op == OP_BIT64:
        return at + 8, _put_big(out, to, np.uint64(_load_big_endian(buf, at, 8)), False)
    if op in (OP_ENUM, OP_SET):
        bits = _load_little_endian(buf, at, width)
        to = _put_list(out, to, bits, op == OP_SET, plan[column + C_B], plan, blob)
        return (at + width, to) if to >= 0 else (-1, to)
    if op == OP_DOUBLE:
        return at + 8, _copy(out, to, buf, at, 8)
    if op == OP_FLOAT:
        _put_single(out, to, load_u32(buf, at))
        return at + 4, to + 8
    return -1, to


@jit
def _image(
    buf: U8Array,
    at: int,
    end: int,
    out: U8Array,
    to: int,
    table: int,
    blob: U8Array,
    span: int,
    plan: I64Array,
) -> tuple[int, int]:
    """One row image as an Avro record at ``to``; ``span`` gets each value's place in it.

    Returns (where the input ends or -1, where the output ends).
    """
    count = plan[table + T_COLUMNS]
    nulls = at
    at += (count + 7) // 8
    first = plan[table + T_COLUMN]
    for index in range(count):
        column = first + COLUMN_FIELDS * index
        is_null = buf[nulls + (index >> 3)] >> (index & 7) & 1
        if is_null:
            if not plan[column + C_NULLABLE]:
                return -1, to
            out[to] = 0
            to += 1
            plan[span + 2 * index] = plan[span + 2 * index + 1] = to
            continue
        if plan[column + C_NULLABLE]:
            out[to] = 2
            to += 1
        plan[span + 2 * index] = to
        if at >= end:
            return -1, to
        at, written = _value(buf, at, end, out, to, column, blob, plan)
        if at < 0 or at > end:
            return -1, to
        if written < 0:
            out[to - 1] = 0
        else:
            to = written
        plan[span + 2 * index + 1] = to
    return at, to


@jit
def _put_key(
    out: U8Array,
    to: int,
    images: U8Array,
    table: int,
    span: int,
    plan: I64Array,
) -> int:
    for index in range(plan[table + T_KEYS]):
        column = plan[plan[table + T_KEY] + index]
        start = plan[span + 2 * column]
        to = _copy(out, to, images, start, plan[span + 2 * column + 1] - start)
    return to


@jit
def _same_key(
    images: U8Array,
    table: int,
    old: int,
    new: int,
    plan: I64Array,
) -> bool:
    for index in range(plan[table + T_KEYS]):
        column = plan[plan[table + T_KEY] + index]
        old_start, new_start = plan[old + 2 * column], plan[new + 2 * column]
        size = plan[old + 2 * column + 1] - old_start
        if plan[new + 2 * column + 1] - new_start != size:
            return False
        for byte in range(size):
            if images[old_start + byte] != images[new_start + byte]:
                return False
    return True


@jit
def _seal(
    out: U8Array,
    words: I64Array,
    start: int,
    stop: int,
    op: int,
    flags: int,
    plan: I64Array,
    source: int,
    schema: int,
    key_bytes: int,
    before_bytes: int,
    after_bytes: int,
) -> int:
    """Pad the frame at ``start``, whose parts end at ``stop``, and write its header."""
    while stop & 7:
        out[stop] = 0
        stop += 1
    word = start >> 3
    words[word] = (stop - start) << 32
    words[word + 1] = i64(_FRAME_MARK) | op << 24 | flags << 32
    words[word + 2] = plan[SCN]
    words[word + 3] = plan[SEQ] | source << 32
    key_start = start + _FRAME_BYTES
    words[word + 4] = i64(xxh3_64(out, key_start, key_start + key_bytes)) if source else 0
    words[word + 5] = schema
    words[word + 6] = plan[COMMIT_US]
    words[word + 7] = key_bytes | before_bytes << 32
    words[word + 8] = after_bytes
    words[word] |= crc32c(out, start + 4, stop)
    plan[SEQ] += 1
    plan[FILL] = stop
    return stop


@jit
def _put_event(
    out: U8Array,
    words: I64Array,
    op: int,
    plan: I64Array,
    table: int,
    images: U8Array,
    span: int,
    before_start: int,
    before_stop: int,
    after_start: int,
    after_stop: int,
) -> None:
    """One row frame at FILL; an image that is absent has its stop before its start."""
    start = plan[FILL]
    to = _put_key(out, start + _FRAME_BYTES, images, table, span, plan)
    key_bytes = to - start - _FRAME_BYTES
    flags = 0
    before_bytes = after_bytes = 0
    if before_stop >= before_start:
        flags |= _HAS_BEFORE
        before_bytes = before_stop - before_start
        to = _copy(out, to, images, before_start, before_bytes)
    if after_stop >= after_start:
        flags |= _HAS_AFTER
        after_bytes = after_stop - after_start
        to = _copy(out, to, images, after_start, after_bytes)
    _seal(
        out,
        words,
        start,
        to,
        op,
        flags,
        plan,
        plan[table + T_SOURCE],
        plan[table + T_SCHEMA],
        key_bytes,
        before_bytes,
        after_bytes,
    )
    plan[EVENT_COUNT] += 1


@jit
def _put_number(out: U8Array, to: int, value: int) -> int:
    """A number in decimal digits."""
    digits = 1
    rest = value // 10
    while rest:
        digits += 1
        rest //= 10
    for index in range(digits):
        out[to + digits - 1 - index] = 48 + value % 10
        value //= 10
    return to + digits


@jit
def _end_group(out: U8Array, words: I64Array, plan: I64Array) -> None:
    """Close the open group; there is room for an end-of-window frame."""
    if plan[WANTED]:
        if plan[SEQ]:
            start = plan[FILL]
            to = _put_number(out, start + _FRAME_BYTES, plan[GROUP_DOMAIN])
            out[to] = 45
            to = _put_number(out, to + 1, plan[GROUP_SERVER])
            out[to] = 45
            to = _put_number(out, to + 1, plan[SCN])
            key_bytes = to - start - _FRAME_BYTES
            for index in range(4):
                out[to + index] = plan[EVENT_COUNT] >> 8 * index & 0xFF
            _seal(out, words, start, to + 4, _END_OP, _HAS_AFTER, plan, 0, 0, key_bytes, 0, 4)
        else:
            plan[OTHER_GROUPS] += 1
        plan[RESOLVED] = plan[SCN]
    plan[IN_GROUP] = 0
    plan[WANTED] = 0
    plan[GROUP_START] = plan[FILL]
    plan[SENT_PART] = 0


@jit
def _begin_group(buf: U8Array, at: int, plan: I64Array) -> int:
    body = at + _HEADER_BYTES
    seq_no = load_i64(buf, body)
    domain = load_u32(buf, body + 8)
    flags = i64(buf[body + 12])
    ours = domain == plan[DOMAIN]
    wanted = ours and seq_no > plan[RESOLVED]
    if plan[IN_GROUP] or (ours and seq_no <= plan[LAST_SEQ_NO]):
        return NEED_DECODER
    if wanted and flags & _PREPARED_XA:
        return NEED_DECODER
    plan[SCN] = seq_no
    plan[SEQ] = 0
    plan[EVENT_COUNT] = 0
    plan[COMMIT_US] = load_u32(buf, at) * 1_000_000
    plan[GROUP_SERVER] = load_u32(buf, at + 5)
    plan[GROUP_DOMAIN] = domain
    plan[GROUP_FLAGS] = flags
    plan[IN_GROUP] = 1
    plan[WANTED] = 1 if wanted else 0
    if ours:
        plan[LAST_SEQ_NO] = seq_no
    else:
        plan[FOREIGN_GROUPS] += 1
    return _DONE


@jit
def _find_table(table_id: int, plan: I64Array) -> int:
    slots, mask = plan[AT_SLOTS], plan[SLOT_MASK]
    slot = table_id & mask
    while plan[slots + slot]:
        if plan[plan[slots + slot] + T_ID] == table_id:
            return i64(plan[slots + slot])
        slot = (slot + 1) & mask
    return -1


@jit
def _known_table_map(buf: U8Array, at: int, end: int, blob: U8Array, plan: I64Array) -> int:
    index = _find_table(load_u32(buf, at) | load_u16(buf, at + 4) << 32, plan)
    if index < 0 or plan[index + T_BODY_BYTES] != end - at:
        return NEED_DECODER
    body = plan[index + T_BODY]
    for byte in range(end - at):
        if blob[body + byte] != buf[at + byte]:
            return NEED_DECODER
    return _DONE


@jit
def _all_present(buf: U8Array, at: int, count: int) -> bool:
    for index in range(count):
        if not buf[at + (index >> 3)] >> (index & 7) & 1:
            return False
    return True


@jit
def _rows(
    buf: U8Array,
    at: int,
    end: int,
    kind: int,
    out: U8Array,
    words: I64Array,
    images: U8Array,
    blob: U8Array,
    plan: I64Array,
) -> int:
    """The rows event whose body is ``buf[at:end]``, from RESUME_AT on if that is set."""
    table = _find_table(load_u32(buf, at) | load_u16(buf, at + 4) << 32, plan)
    if table < 0:
        return NEED_DECODER
    if plan[table + T_MODE] == MODE_SKIP:
        return _DONE
    count = plan[table + T_COLUMNS]
    if plan[table + T_MODE] == MODE_PYTHON or count > 250 or buf[at + 8] != count:
        return NEED_DECODER
    bitmap_bytes = (count + 7) // 8
    place = at + 9 + bitmap_bytes
    if not _all_present(buf, at + 9, count):
        return NEED_DECODER
    if kind == _UPDATE:
        if not _all_present(buf, place, count):
            return NEED_DECODER
        place += bitmap_bytes
    if plan[RESUME_AT]:
        place = at + plan[RESUME_AT]
    old = plan[AT_SPANS]
    new = old + 2 * count
    while place < end:
        # No value grows by more than this when it is written as Avro.
        growth = 2 * (plan[table + T_EXTRA] + bitmap_bytes) + _SINGLE_BYTE_GROWTH * (end - place)
        need = 2 * growth + 2 * _END_FRAME_BYTES
        if len(images) < growth or len(out) - plan[FILL] < need:
            plan[RESUME_AT] = place - at
            plan[NEED_BYTES] = need
            return NEED_ROOM
        after_row, first_stop = _image(buf, place, end, images, 0, table, blob, old, plan)
        if after_row < 0:
            return NEED_DECODER
        before_stop, after_start, stop = first_stop, 0, first_stop
        if kind == _UPDATE:
            after_start = first_stop
            after_row, stop = _image(
                buf, after_row, end, images, first_stop, table, blob, new, plan
            )
            if after_row < 0:
                return NEED_DECODER
        if kind == _UPDATE and _same_key(images, table, old, new, plan):
            _put_event(
                out, words, _UPDATE_OP, plan, table, images, new, 0,
                before_stop, after_start, stop,
            )  # fmt: skip
        else:
            if kind != _WRITE:
                _put_event(
                    out, words, _DELETE_OP, plan, table, images, old, 0,
                    before_stop, 0, -1,
                )  # fmt: skip
            if kind != _DELETE:
                _put_event(
                    out, words, _INSERT_OP, plan, table, images,
                    new if kind == _UPDATE else old, 0, -1, after_start, stop,
                )  # fmt: skip
        place = after_row
        plan[ROWS_DONE] += 1
    return _DONE


@jit
def _intact(buf: U8Array, at: int, end: int) -> bool:
    return crc32(buf, at, end - _CRC_BYTES) == load_u32(buf, end - _CRC_BYTES)


@jit
def _event(
    buf: U8Array,
    at: int,
    end: int,
    out: U8Array,
    words: I64Array,
    images: U8Array,
    blob: U8Array,
    plan: I64Array,
) -> int:
    """One event; only what is wanted and intact is used here."""
    if end - at < _HEADER_BYTES + _CRC_BYTES or load_u32(buf, at + 9) != end - at:
        return NEED_DECODER
    kind = buf[at + 4]
    is_rows = _WRITE <= kind <= _DELETE
    if not (is_rows or kind in (_GTID, _TABLE_MAP, _XID)):
        return NEED_DECODER
    if (is_rows or kind == _TABLE_MAP) and not plan[WANTED]:
        return _DONE if plan[IN_GROUP] else NEED_DECODER
    if plan[CHECKSUMS]:
        if not plan[RESUME_AT] and not _intact(buf, at, end):
            return NEED_DECODER
        end -= _CRC_BYTES
    if kind == _GTID:
        if end - at < _HEADER_BYTES + 13:
            return NEED_DECODER
        return _begin_group(buf, at, plan)
    body = at + _HEADER_BYTES
    if kind == _TABLE_MAP:
        return _known_table_map(buf, body, end, blob, plan)
    if kind == _XID:
        if not plan[IN_GROUP]:
            return NEED_DECODER
        if len(out) - plan[FILL] < _END_FRAME_BYTES:
            plan[NEED_BYTES] = _END_FRAME_BYTES
            return NEED_ROOM
        _end_group(out, words, plan)
        return _DONE
    if end - body < 10:
        return NEED_DECODER
    return _rows(buf, body, end, kind, out, words, images, blob, plan)


@jit
def walk(
    buf: U8Array,
    start: int,
    stop: int,
    out: U8Array,
    words: I64Array,
    images: U8Array,
    blob: U8Array,
    plan: I64Array,
) -> int:
    """Turn the packets in ``buf[start:stop]`` into frames in ``out``.

    Returns why it stopped; PLACE says where: in front of the packet that is cut off, or that
    the decoder must take, or that needs NEED_BYTES of room.
    """
    at = start
    while True:
        plan[PLACE] = at
        if stop - at < 5:
            return NEED_INPUT
        size = load_u32(buf, at) & 0xFFFFFF
        if size in (0, _LONGEST_PACKET) or buf[at + 4]:
            return NEED_DECODER
        begin, end = at + 5, at + 4 + size
        if end > stop:
            return NEED_INPUT
        reason = _event(buf, begin, end, out, words, images, blob, plan)
        if reason != _DONE:
            return reason
        plan[RESUME_AT] = 0
        plan[ROWS_DONE] = 0
        offset = load_u32(buf, begin + 13)
        if offset and not load_u16(buf, begin + 17) & _ARTIFICIAL:
            plan[END_OFFSET] = offset
        at = end
