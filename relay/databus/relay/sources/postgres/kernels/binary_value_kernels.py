"""Converts values in PostgreSQL's binary form to plain Avro, compiled.

Only chunks have binary values; the stream has text.  A function refuses a value that it cannot
convert exactly as the text form of the same value.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import U8Array, i64
from databus.relay.sources.avro_kernels import put_bytes, put_double, put_long
from databus.relay.sources.postgres.kernels.text_value_kernels import all_bits, is_utf8, put_decimal

# The forms of a column's values; this module does not read TEXT.
(
    TEXT, BOOL, INTEGER, DOUBLE, DATE, TIME, TIMESTAMP, BYTES, UUID, UNSIGNED, REAL, NUMERIC, JSONB,
    UTF8,
) = range(14)  # fmt: skip

_EPOCH_DAYS = 10_957
_EPOCH_US = 946_684_800_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAY_US = 86_400_000_000
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_POWERS = np.array([10.0**exponent for exponent in range(23)])
_TENS = np.array([10**exponent for exponent in range(19)], dtype=np.int64)


@kernels.jit_uncounted
def put_binary(
    buf: U8Array, start: int, length: int, form: int, scale: int, out: U8Array, at: int
) -> int:
    """Write one value, not null, as its plain Avro type; returns the offset after it, or -1."""
    if form == INTEGER and (length == 4 or length == 8 or length == 2):
        return put_long(out, at, _signed(buf, start, length))
    if form == BYTES:
        return put_bytes(buf, start, length, out, at)
    if form == UTF8:
        if all_bits(buf, start, length) >= 128 and not is_utf8(buf, start, length):
            return -1
        return put_bytes(buf, start, length, out, at)
    if form == TIMESTAMP and length == 8:
        value = _signed(buf, start, 8)
        day = value // _DAY_US + _EPOCH_DAYS
        if day < _FIRST_DAY or day > _LAST_DAY:
            return -1
        return put_long(out, at, value + _EPOCH_US)
    if form == DATE and length == 4:
        day = _signed(buf, start, 4) + _EPOCH_DAYS
        return -1 if day < _FIRST_DAY or day > _LAST_DAY else put_long(out, at, day)
    if form == TIME and length == 8:
        value = _signed(buf, start, 8)
        return -1 if value < 0 or value >= _DAY_US else put_long(out, at, value)
    if form == NUMERIC:
        return _numeric(buf, start, length, scale, out, at)
    if form == DOUBLE and length == 8:
        if buf[start] & 0x7F == 0x7F and buf[start + 1] & 0xF0 == 0xF0:
            return -1  # not a finite number
        for offset in range(8):
            out[at + offset] = buf[start + 7 - offset]
        return at + 8
    if form == BOOL and length == 1:
        out[at] = buf[start]
        return at + 1
    if form == UUID and length == 16:
        return _uuid(buf, start, out, at)
    if form == JSONB:
        if length < 1 or buf[start] != 1:  # the version
            return -1
        if not is_utf8(buf, start + 1, length - 1):
            return -1
        return put_bytes(buf, start + 1, length - 1, out, at)
    if form == UNSIGNED and length == 4:
        return put_long(out, at, _signed(buf, start, 4) & 0xFFFFFFFF)
    if form == REAL and length == 4:
        return _real(_signed(buf, start, 4) & 0xFFFFFFFF, out, at)
    return -1


@kernels.jit_uncounted
def _uuid(buf: U8Array, start: int, out: U8Array, at: int) -> int:
    at = put_long(out, at, 36)
    for offset in range(16):
        if offset in (4, 6, 8, 10):
            out[at] = 45
            at += 1
        byte = buf[start + offset]
        out[at] = _HEX[byte >> 4]
        out[at + 1] = _HEX[byte & 15]
        at += 2
    return at


@kernels.jit_uncounted
def _numeric(buf: U8Array, start: int, length: int, scale: int, out: U8Array, at: int) -> int:
    """Avro's decimal from digits in base 10,000, for at most 18 decimal digits."""
    if length < 8:
        return -1
    count, weight = _signed(buf, start, 2), _signed(buf, start + 2, 2)
    sign, digits_after = _signed(buf, start + 4, 2) & 0xFFFF, _signed(buf, start + 6, 2)
    if length != 8 + 2 * count or (sign != 0 and sign != 0x4000) or digits_after != scale:
        return -1
    if 4 * (weight + 1) + scale > 18:
        return -1
    value = 0
    for number in range(count):
        digit = _signed(buf, start + 8 + 2 * number, 2)
        exponent = 4 * (weight - number) + scale
        if exponent >= 0:
            value += digit * _TENS[exponent]
        elif exponent > -4:
            value += digit // _TENS[-exponent]
        elif digit != 0:
            return -1
    return put_decimal(-value if sign else value, out, at)


@kernels.jit_uncounted
def _real(bits: int, out: U8Array, at: int) -> int:
    """The double of the shortest decimal for this real, which is its text form.

    It is refused if that may not be the nearest decimal with so many digits: at powers of two,
    whose neighbours have different distances.
    """
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0 and mantissa == 0:
        for offset in range(7):
            out[at + offset] = 0
        out[at + 7] = np.uint8(bits >> 24)
        return at + 8
    if exponent == 0xFF or exponent == 0:
        return -1
    size = np.float64(mantissa | 0x800000) * np.float64(2.0) ** (exponent - 150)
    for digits in range(6, 10):
        shift = digits - 1 - i64(np.floor(np.log10(size)))
        if shift < -22 or shift > 22:
            return -1
        if shift >= 0:
            found = np.rint(size * _POWERS[shift]) / _POWERS[shift]
        else:
            found = np.rint(size / _POWERS[-shift]) * _POWERS[-shift]
        # PostgreSQL uses no decimal that is exactly between two reals.
        if abs(found - size) < np.float64(2.0) ** (exponent - 151):
            if mantissa == 0 and found != size:
                return -1
            return put_double(out, at, -found if bits >> 31 else found)
    return -1


@kernels.jit_uncounted
def _signed(buf: U8Array, start: int, length: int) -> int:
    """A big-endian number of 1 to 8 bytes, as two's complement."""
    value = i64(buf[start])
    if value & 0x80:
        value -= 256
    for offset in range(1, length):
        value = value << 8 | i64(buf[start + offset])
    return value
