"""Compiled code that writes Avro's long, bytes, double and decimal, for the kernels of all sources.

Formats of one database's protocol belong to that source's kernels.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import I64Array, U8Array, i64

_U64 = np.uint64
_LEAD = 0xED
_POWERS = np.array([10.0**n for n in range(23)])
EXACT_DIGITS = 15
"""Decimal numbers of up to this many digits are exact in a double."""


@kernels.jit_uncounted
def put_long(out: U8Array, at: int, value: int) -> int:
    """Write an int or long; where it ends."""
    rest = _U64((value << 1) ^ (value >> 63))
    while rest >= _U64(0x80):
        out[at] = np.uint8((rest & _U64(0x7F)) | _U64(0x80))
        rest >>= _U64(7)
        at += 1
    out[at] = np.uint8(rest)
    return at + 1


@kernels.jit_uncounted
def put_raw(out: U8Array, at: int, buf: U8Array, start: int, length: int) -> int:
    """Copy ``buf[start:start + length]``; where the copy ends."""
    if length >= 16:
        kernels.copy(out, at, buf, start, length)
    else:
        for offset in range(length):
            out[at + offset] = buf[start + offset]
    return at + length


@kernels.jit
def put_bytes(buf: U8Array, start: int, length: int, out: U8Array, at: int) -> int:
    """Write ``buf[start:start + length]`` as bytes or string; where it ends."""
    return put_raw(out, put_long(out, at, length), buf, start, length)


@kernels.jit_uncounted
def put_double(out: U8Array, at: int, value: float) -> int:
    """Write a double; where it ends."""
    bits = np.float64(value).view(np.int64)
    for offset in range(8):
        out[at + offset] = np.uint8(bits >> 8 * offset & 0xFF)
    return at + 8


@kernels.jit_uncounted
def put_limbs(
    out: U8Array, at: int, limbs: I64Array, first: int, count: int, negative: bool
) -> int:
    """Write an integer as a decimal: big-endian two's complement, as short as it can be.

    Its magnitude is in ``count`` limbs of 32 bits from ``limbs[first]`` on, the lowest first.
    They are changed.
    """
    while count > 1 and limbs[first + count - 1] == 0:
        count -= 1
    if count == 1 and limbs[first] == 0:
        negative = False
    if negative:
        index = first
        while limbs[index] == 0:
            limbs[index] = 0xFFFFFFFF
            index += 1
        limbs[index] -= 1
        while count > 1 and limbs[first + count - 1] == 0:
            count -= 1
    bits, top = 32 * (count - 1), limbs[first + count - 1]
    while top:
        bits += 1
        top >>= 1
    size = bits // 8 + 1
    extension = 0xFF if negative else 0
    at = put_long(out, at, size)
    for index in range(size):
        number = size - 1 - index
        limb = limbs[first + (number >> 2)] if number >> 2 < count else i64(0)
        out[at + index] = np.uint8((limb >> 8 * (number & 3)) & 0xFF ^ extension)
    return at + size


@kernels.jit_uncounted
def days_since_1970(year: int, month: int, day: int) -> int:
    """The number of days from 1970-01-01 to a date of the proleptic Gregorian calendar."""
    shifted = year - 1 if month <= 2 else year
    era = shifted // 400
    year_of_era = shifted - era * 400
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year
    return era * 146_097 + day_of_era - 719_468


@kernels.jit_uncounted
def has_surrogate(buf: U8Array, start: int, length: int) -> bool:
    """Whether otherwise valid UTF-8 has an encoded UTF-16 surrogate, so that it is no text."""
    begin = _U64(start)
    leads = np.uint8(0)
    for offset in range(_U64(length)):
        # An unsigned index, so that the compiler vectorises the loop.
        leads |= np.uint8(buf[begin + _U64(offset)] == _LEAD)
    if leads == 0:
        return False
    for offset in range(start, start + length - 1):
        if buf[offset] == _LEAD and buf[offset + 1] >= 0xA0:
            return True
    return False


@kernels.jit_uncounted
def put_exact_double(buf: U8Array, start: int, stop: int, out: U8Array, at: int) -> int:
    """Write the decimal text ``buf[start:stop]`` as a double; where it ends.

    -1, unless digits and power of ten are both exact, so that one rounding is right.
    """
    negative = start < stop and buf[start] == 45
    cursor = start + 1 if negative else start
    mantissa, digits, exponent, seen_point = 0, 0, 0, False
    while cursor < stop and buf[cursor] != 101:  # e
        if buf[cursor] == 46 and not seen_point:
            seen_point = True
        else:
            digit = i64(buf[cursor]) - 48
            if digit < 0 or digit > 9 or digits == EXACT_DIGITS:
                return -1
            mantissa = mantissa * 10 + digit
            if mantissa > 0:
                digits += 1
            if seen_point:
                exponent -= 1
        cursor += 1
    if cursor < stop:
        sign, written = 1, 0
        cursor += 1
        if cursor < stop and (buf[cursor] == 45 or buf[cursor] == 43):
            sign = -1 if buf[cursor] == 45 else 1
            cursor += 1
        if cursor == stop or stop - cursor > 3:
            return -1
        while cursor < stop:
            digit = i64(buf[cursor]) - 48
            if digit < 0 or digit > 9:
                return -1
            written = written * 10 + digit
            cursor += 1
        exponent += sign * written
    if exponent < -22 or exponent > 22:
        return -1
    value = float(mantissa)
    value = value * _POWERS[exponent] if exponent >= 0 else value / _POWERS[-exponent]
    return put_double(out, at, -value if negative else value)
