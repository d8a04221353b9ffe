"""Column values on their way to Avro and to JSON.

``to_avro`` and ``from_avro`` convert between the Python value of a kind and its plain Avro
value, with the representation of Avro's logical types.
``to_json_value`` gives the JSON of NDJSON, SSE and the command line: integers and floats as
numbers (integers outside +-2**53 as strings), decimals as strings, bytes as base64, dates and
times in ISO 8601, and a JSON column as a string: the document's text as it was stored.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import functools
import math
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from databus.common.errors import FormatError

if TYPE_CHECKING:
    from databus.common.schema.source_schema import Column

_EXACT = 2**53
_MICROSECOND = dt.timedelta(microseconds=1)
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_EPOCH = dt.datetime(1970, 1, 1)
_EPOCH_UTC = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_WIDE = decimal.Context(prec=200)


def _check_long(value: Any) -> int:
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise FormatError(f"{value!r} is not a signed 64-bit number")
    return value


def _check_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FormatError(f"{value!r} is neither true nor false")
    return value


def bytes_of_int(value: int) -> bytes:
    """Two's complement, big-endian, as short as it can be, as Avro's decimals are."""
    return value.to_bytes(
        ((value if value >= 0 else ~value).bit_length() // 8) + 1, "big", signed=True
    )


def _int_of_bytes(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _uint64_bytes(value: int) -> bytes:
    if not 0 <= value < 2**64:
        raise FormatError(f"{value} is not an unsigned 64-bit number")
    return bytes_of_int(value)


@functools.cache
def _decimal_bytes(scale: int) -> Callable[[decimal.Decimal], bytes]:
    def convert(value: decimal.Decimal) -> bytes:
        unscaled = value.scaleb(scale, _WIDE)
        if unscaled != unscaled.to_integral_value():
            raise FormatError(f"{value} has more than {scale} digits after the point")
        return bytes_of_int(int(unscaled))

    return convert


def _bytes_decimal(scale: int) -> Callable[[bytes], decimal.Decimal]:
    def convert(data: bytes) -> decimal.Decimal:
        return decimal.Decimal(_int_of_bytes(data)).scaleb(-scale, _WIDE)

    return convert


def _time_us(value: dt.time) -> int:
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return seconds * 1_000_000 + value.microsecond


def _us_time(value: int) -> dt.time:
    seconds, us = divmod(value, 1_000_000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return dt.time(hour, minute, second, us)


def to_avro(kind: str, scale: int) -> Callable[[Any], Any] | None:
    """The converter to a plain Avro value for this kind; None if the value is one already."""
    return _decimal_bytes(scale) if kind == "decimal" else _TO_AVRO.get(kind)


def from_avro(kind: str, scale: int) -> Callable[[Any], Any] | None:
    """The converter from a plain Avro value; None if none is needed."""
    return _bytes_decimal(scale) if kind == "decimal" else _FROM_AVRO.get(kind)


_TO_AVRO: dict[str, Callable[[Any], Any]] = {
    "bool": _check_bool,
    "int": _check_long,
    "uint64": _uint64_bytes,
    "numeric": str,
    "date": lambda value: value.toordinal() - _EPOCH_DAY,
    "time": _time_us,
    "time_span": lambda value: value // _MICROSECOND,
    "timestamp": lambda value: (value - _EPOCH) // _MICROSECOND,
    "timestamptz": lambda value: (value - _EPOCH_UTC) // _MICROSECOND,
    "uuid": str,
}
_FROM_AVRO: dict[str, Callable[[Any], Any]] = {
    "uint64": _int_of_bytes,
    "numeric": decimal.Decimal,
    "date": lambda value: dt.date.fromordinal(value + _EPOCH_DAY),
    "time": _us_time,
    "time_span": lambda value: dt.timedelta(microseconds=value),
    "timestamp": lambda value: _EPOCH + dt.timedelta(microseconds=value),
    "timestamptz": lambda value: _EPOCH_UTC + dt.timedelta(microseconds=value),
    "uuid": uuid.UUID,
}


def to_json_value(value: Any) -> Any:
    """A decoded column value as JSON.

    A document of the kind json is the string of its text: a parser in between would change numbers
    and keys, and the document ``null`` would look like a NULL of SQL.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    convert = _TO_JSON.get(type(value))
    if convert is None:
        raise FormatError(f"a value of type {type(value).__name__} has no JSON form")
    return convert(value)


def _int_json(value: int) -> int | str:
    return value if -_EXACT <= value <= _EXACT else str(value)


def _float_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _timestamp_json(value: dt.datetime) -> str:
    text = value.isoformat()
    return text[:-6] + "Z" if text.endswith("+00:00") else text


def _time_span_json(value: dt.timedelta) -> str:
    total_us = value // _MICROSECOND
    seconds, us = divmod(abs(total_us), 1_000_000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    fraction = f".{us:06d}" if us else ""
    return f"{'-' if total_us < 0 else ''}{hour:02d}:{minute:02d}:{second:02d}{fraction}"


_TO_JSON: dict[type, Callable[[Any], Any]] = {
    int: _int_json,
    float: _float_json,
    decimal.Decimal: lambda value: format(value, "f"),
    bytes: lambda value: base64.b64encode(value).decode(),
    dt.datetime: _timestamp_json,
    dt.date: dt.date.isoformat,
    dt.time: dt.time.isoformat,
    dt.timedelta: _time_span_json,
    uuid.UUID: str,
}


def from_json_value(value: Any, kind: str) -> Any:
    """The column value of a result of ``to_json_value``.

    Raises:
        FormatError: it is not a value of this kind.
    """
    if value is None or kind in ("bool", "string"):
        return value
    convert = _FROM_JSON.get(kind)
    if convert is None:
        raise FormatError(f"values of kind {kind} are not read from JSON")
    try:
        return convert(value)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise FormatError(f"{value!r} is not a value of kind {kind}: {error}") from None


def _span_of_json(text: str) -> dt.timedelta:
    hours, minutes, seconds = text.removeprefix("-").split(":")
    whole, _, fraction = seconds.partition(".")
    span = dt.timedelta(
        hours=int(hours),
        minutes=int(minutes),
        seconds=int(whole),
        microseconds=int(fraction.ljust(6, "0")) if fraction else 0,
    )
    return -span if text.startswith("-") else span


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a document is given as the string of its text")
    return value


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "uint64": int,
    "float": float,
    "decimal": lambda value: decimal.Decimal(str(value)),
    "numeric": lambda value: decimal.Decimal(str(value)),
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "time_span": _span_of_json,
    "timestamp": dt.datetime.fromisoformat,
    "timestamptz": dt.datetime.fromisoformat,
    "uuid": uuid.UUID,
    "json": _text,
}


def to_json_record(
    record: Mapping[str, Any], columns: tuple[Column, ...], absent: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A decoded record as a JSON object, without the columns named in ``absent``."""
    return {
        column.name: to_json_value(record[column.name])
        for column in columns
        if column.name not in absent
    }
