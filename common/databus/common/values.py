"""Column values on their way to Avro and to JSON.

``TO_AVRO`` and ``FROM_AVRO`` convert the kinds that fastavro's logical types do not cover.
``to_json_value`` gives the JSON of NDJSON, SSE and the command line: integers and floats as
numbers (integers outside +-2**53 as strings), decimals as strings, bytes as base64, dates and
times in ISO 8601, JSON columns as JSON.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from databus.common.errors import FormatError

if TYPE_CHECKING:
    from databus.common.schema import Column

_EXACT = 2**53
_MICROSECOND = dt.timedelta(microseconds=1)


def _uint64(value: int) -> decimal.Decimal:
    if not 0 <= value < 2**64:
        raise FormatError(f"{value} is not an unsigned 64-bit number")
    return decimal.Decimal(value)


TO_AVRO: dict[str, Callable[[Any], Any]] = {
    "uint64": _uint64,
    "numeric": str,
    "time_span": lambda value: value // _MICROSECOND,
}
FROM_AVRO: dict[str, Callable[[Any], Any]] = {
    "uint64": int,
    "numeric": decimal.Decimal,
    "time_span": lambda value: dt.timedelta(microseconds=value),
}


def to_json_value(value: Any, kind: str) -> Any:
    """A decoded column value as JSON; ``kind`` matters for JSON text only."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _parsed_json(value) if kind == "json" else value
    convert = _TO_JSON.get(type(value))
    if convert is None:
        raise FormatError(f"a value of type {type(value).__name__} has no JSON form")
    return convert(value)


def _parsed_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


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


def to_json_record(
    record: Mapping[str, Any], columns: tuple[Column, ...], absent: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A decoded record as a JSON object, without the columns named in ``absent``."""
    return {
        column.name: to_json_value(record[column.name], column.kind)
        for column in columns
        if column.name not in absent
    }
