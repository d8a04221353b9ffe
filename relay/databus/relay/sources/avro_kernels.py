"""Avro's long, bytes and double, written by compiled code: what the packers of rows share.

What only one database's protocol has is the business of its own kernels.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import U8Array, i64

_U64 = np.uint64
_LEAD = 0xED
_POWERS = np.array([10.0**n for n in range(23)])
EXACT_DIGITS = 15
"""So many decimal digits are always exact in a double."""


@kernels.jit
def put_long(out: U8Array, at: int, value: int) -> int:
    """Write an int or long; where it ends."""
    rest = _U64((value << 1) ^ (value >> 63))
    while rest >= _U64(0x80):
        out[at] = np.uint8((rest & _U64(0x7F)) | _U64(0x80))
        rest >>= _U64(7)
        at += 1
    out[at] = np.uint8(rest)
    return at + 1


@kernels.jit
def put_bytes(buf: U8Array, start: int, length: int, out: U8Array, at: int) -> int:
    """Write ``buf[start:start + length]`` as bytes or string; where it ends."""
    at = put_long(out, at, length)
    if length >= 16:
        kernels.copy(out, at, buf, start, length)
    else:
        for offset in range(length):
            out[at + offset] = buf[start + offset]
    return at + length


@kernels.jit_uncounted
def has_surrogate(buf: U8Array, start: int, length: int) -> bool:
    """Whether there is half a pair of UTF-16 in what is UTF-8 otherwise: then it is no text."""
    begin = _U64(start)
    leads = np.uint8(0)
    for offset in range(_U64(length)):
        # An index without a sign, so that it is done for many bytes at a time.
        leads |= np.uint8(buf[begin + _U64(offset)] == _LEAD)
    if leads == 0:
        return False
    for place in range(start, start + length - 1):
        if buf[place] == _LEAD and buf[place + 1] >= 0xA0:
            return True
    return False


@kernels.jit_uncounted
def put_exact_double(buf: U8Array, start: int, stop: int, out: U8Array, at: int) -> int:
    """Write the decimal text ``buf[start:stop]`` as a double; where it ends.

    -1, unless digits and power of ten are both exact, so that one rounding is right.
    """
    negative = start < stop and buf[start] == 45
    place = start + 1 if negative else start
    mantissa, digits, exponent, seen_point = 0, 0, 0, False
    while place < stop and buf[place] != 101:  # e
        if buf[place] == 46 and not seen_point:
            seen_point = True
        else:
            digit = i64(buf[place]) - 48
            if digit < 0 or digit > 9 or digits == EXACT_DIGITS:
                return -1
            mantissa = mantissa * 10 + digit
            if mantissa > 0:
                digits += 1
            if seen_point:
                exponent -= 1
        place += 1
    if place < stop:
        sign, written = 1, 0
        place += 1
        if place < stop and (buf[place] == 45 or buf[place] == 43):
            sign = -1 if buf[place] == 45 else 1
            place += 1
        if place == stop or stop - place > 3:
            return -1
        while place < stop:
            digit = i64(buf[place]) - 48
            if digit < 0 or digit > 9:
                return -1
            written = written * 10 + digit
            place += 1
        exponent += sign * written
    if exponent < -22 or exponent > 22:
        return -1
    value = float(mantissa)
    value = value * _POWERS[exponent] if exponent >= 0 else value / _POWERS[-exponent]
    bits = np.float64(-value if negative else value).view(np.int64)
    for offset in range(8):
        out[at + offset] = np.uint8(bits >> 8 * offset & 0xFF)
    return at + 8
