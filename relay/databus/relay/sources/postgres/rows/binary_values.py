"""PostgreSQL's binary form of values: which types are known in it, and their text.

The reference path beside ``binary_value_kernels``: a value that came in binary becomes the text
that the type's output function would write, and goes the way of all texts.  A type that is not here
is only read as text.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import struct
import uuid
from collections.abc import Callable

from databus.common.errors import FormatError
from databus.common.schema.source_schema import Kind
from databus.relay.sources.postgres.kernels import binary_value_kernels as k

FORMS: dict[tuple[int, Kind], int] = {
    (16, Kind.BOOL): k.BOOL,
    (17, Kind.BYTES): k.BYTES,
    (19, Kind.STRING): k.UTF8,
    (20, Kind.INT): k.INTEGER,
    (21, Kind.INT): k.INTEGER,
    (23, Kind.INT): k.INTEGER,
    (25, Kind.STRING): k.UTF8,
    (26, Kind.INT): k.UNSIGNED,
    (114, Kind.JSON): k.UTF8,
    (700, Kind.FLOAT): k.REAL,
    (701, Kind.FLOAT): k.DOUBLE,
    (1042, Kind.STRING): k.UTF8,
    (1043, Kind.STRING): k.UTF8,
    (1082, Kind.DATE): k.DATE,
    (1083, Kind.TIME): k.TIME,
    (1114, Kind.TIMESTAMP): k.TIMESTAMP,
    (1184, Kind.TIMESTAMPTZ): k.TIMESTAMP,
    (1700, Kind.DECIMAL): k.NUMERIC,
    (2950, Kind.UUID): k.UUID,
    (3802, Kind.JSON): k.JSONB,
}
"""By the oid of the type, domains resolved, and the kind it is carried as: its form."""

_EPOCH = dt.datetime(2000, 1, 1)
_DAY_US = 86_400_000_000
_WIDE = decimal.Context(prec=200)


def text_of(type_oid: int, data: bytes) -> bytes:
    """The text of a value, whose type is one of ``FORMS``.

    A date or timestamp of a year before 1 or after 9999 is told otherwise than PostgreSQL does:
    no kind holds it.

    Raises:
        FormatError: the bytes are no value of the type.
    """
    convert = _TEXTS.get(type_oid)
    if convert is None:
        return data
    try:
        return convert(data)
    except (struct.error, ValueError, LookupError) as error:
        raise FormatError(f"{data[:64]!r} is no value of the type {type_oid}: {error}") from None


def _number(layout: str) -> Callable[[bytes], bytes]:
    unpack = struct.Struct(layout).unpack
    return lambda data: str(unpack(data)[0]).encode()


def _bool(data: bytes) -> bytes:
    return b"t" if struct.unpack("!?", data)[0] else b"f"


def _real(data: bytes) -> bytes:
    """The shortest decimal that is nearer to this real than to any other."""
    (value,) = struct.unpack("!f", data)
    if not math.isfinite(value) or value == 0:
        return str(value).encode()
    exact = decimal.Decimal(abs(value))
    exponent, mantissa = data[0] << 1 & 0xFF | data[1] >> 7, data[1] & 0x7F | data[2] | data[3]
    upwards = math.ldexp(1, max(exponent, 1) - 151)
    downwards = upwards / 2 if mantissa == 0 and exponent > 1 else upwards
    low, high = decimal.Decimal(abs(value) - downwards), decimal.Decimal(abs(value) + upwards)
    for digits in range(1, 10):
        step = decimal.Decimal((0, (1,), exact.adjusted() - digits + 1))
        below = exact.quantize(step, decimal.ROUND_FLOOR, _WIDE)
        near = [number for number in (below, _WIDE.add(below, step)) if low < number < high]
        if near:
            nearest = min(near, key=lambda number: _distance(number, exact))
            return f"{'-' if value < 0 else ''}{nearest}".encode()
    raise ValueError("nine digits do not tell a real")


def _distance(number: decimal.Decimal, exact: decimal.Decimal) -> tuple[decimal.Decimal, int]:
    return abs(_WIDE.subtract(number, exact)), number.as_tuple().digits[-1] & 1


def _date(data: bytes) -> bytes:
    (days,) = struct.unpack("!i", data)
    return _infinite(days, 31) or _day(days)


def _time(data: bytes) -> bytes:
    (us,) = struct.unpack("!q", data)
    return _clock(us)


def _timestamp(data: bytes) -> bytes:
    (us,) = struct.unpack("!q", data)
    days, rest = divmod(us, _DAY_US)
    return _infinite(us, 63) or _day(days) + b" " + _clock(rest)


def _timestamptz(data: bytes) -> bytes:
    text = _timestamp(data)
    return text if text.endswith(b"infinity") else text + b"+00"


def _infinite(value: int, bits: int) -> bytes:
    return {(1 << bits) - 1: b"infinity", -(1 << bits): b"-infinity"}.get(value, b"")


def _day(days: int) -> bytes:
    try:
        return (_EPOCH + dt.timedelta(days=days)).date().isoformat().encode()
    except OverflowError:
        return f"{days} days after 2000-01-01".encode()


def _clock(us: int) -> bytes:
    seconds, fraction = divmod(us, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return (f"{text}.{fraction:06}".rstrip("0") if fraction else text).encode()


_NUMERIC_SIGNS = {0xC000: b"NaN", 0xD000: b"Infinity", 0xF000: b"-Infinity"}


def _numeric(data: bytes) -> bytes:
    count, weight, sign, scale = struct.unpack_from("!hhHH", data)
    if len(data) != 8 + 2 * count:
        raise ValueError(f"{count} digits do not fit")
    if sign & 0xC000 == 0xC000:
        return _NUMERIC_SIGNS[sign]
    digits = struct.unpack_from(f"!{count}H", data, 8)
    before = "".join(f"{digit:04}" for digit in digits[: max(0, weight + 1)])
    before += "0000" * (weight + 1 - count)
    after = "0000" * (-1 - weight) + "".join(f"{d:04}" for d in digits[max(0, weight + 1) :])
    text = ("-" if sign else "") + (before.lstrip("0") or "0")
    return f"{text}.{after[:scale]:0<{scale}}".encode() if scale else text.encode()


def _jsonb(data: bytes) -> bytes:
    if data[0] != 1:
        raise ValueError(f"version {data[0]} of jsonb is unknown")
    return data[1:]


_TEXTS: dict[int, Callable[[bytes], bytes]] = {
    16: _bool,
    17: lambda data: b"\\x" + data.hex().encode(),
    20: _number("!q"),
    21: _number("!h"),
    23: _number("!i"),
    26: _number("!I"),
    700: _real,
    701: _number("!d"),
    1082: _date,
    1083: _time,
    1114: _timestamp,
    1184: _timestamptz,
    1700: _numeric,
    2950: lambda data: str(uuid.UUID(bytes=data)).encode(),
    3802: _jsonb,
}
"""Text types are the same in both forms."""
