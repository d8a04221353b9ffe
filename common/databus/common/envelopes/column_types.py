"""The type of a column's values in an envelope, and the function that makes the value.

What all databases share, by the column's ``Kind``.  The modules of MySQL and PostgreSQL refine it
by the database's own name for the type.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from databus.common.envelopes.connect_types import (
    BOOLEAN,
    BYTES,
    FLOAT64,
    INT32,
    INT64,
    STRING,
    ConnectType,
    named,
    struct,
)
from databus.common.schema.column_values import to_avro
from databus.common.schema.source_schema import Column, Kind

Convert = Callable[[Any], Any]
ColumnType = tuple[ConnectType, Convert | None]
"""The type, and what makes its value from a decoded column value that is not None."""

DATE = named(INT32, "io.debezium.time.Date")
TIME_MS = named(INT32, "io.debezium.time.Time")
TIME_US = named(INT64, "io.debezium.time.MicroTime")
TIMESTAMP_MS = named(INT64, "io.debezium.time.Timestamp")
TIMESTAMP_US = named(INT64, "io.debezium.time.MicroTimestamp")
ZONED_TIMESTAMP = named(STRING, "io.debezium.time.ZonedTimestamp")
UUID = named(STRING, "io.debezium.data.Uuid")
JSON = named(STRING, "io.debezium.data.Json")
SCALED = struct(
    "io.debezium.data.VariableScaleDecimal",
    ("scale", INT32),
    ("value", BYTES),
    version=1,
    doc="Variable scaled decimal",
)
_WIDE = decimal.Context(prec=200)


@dataclass(frozen=True, slots=True)
class ValueModes:
    """How values are written that have several forms; the defaults are Debezium's."""

    decimals: Literal["precise", "double", "string"] = "precise"
    unsigned_bigints: Literal["long", "precise"] = "long"


def by_kind(column: Column, modes: ValueModes) -> ColumnType:
    """The type of a column by its kind alone."""
    if column.kind is Kind.DECIMAL:
        return decimal_type(column.precision, column.scale, modes)
    if column.kind is Kind.NUMERIC:
        return numeric_type(modes)
    if column.kind is Kind.UINT64:
        if modes.unsigned_bigints == "precise":
            return fixed_point(0, None), lambda value: unscaled(decimal.Decimal(value), 0)
        return INT64, lambda value: value - (1 << 64) if value >> 63 else value
    return _BY_KIND[column.kind]


def decimal_type(precision: int, scale: int, modes: ValueModes) -> ColumnType:
    """A number with a fixed scale."""
    if modes.decimals == "precise":
        return fixed_point(scale, precision), to_avro("decimal", scale)
    return (FLOAT64, float) if modes.decimals == "double" else (STRING, _plain)


def numeric_type(modes: ValueModes) -> ColumnType:
    """A number with a scale of its own in each value."""
    if modes.decimals == "precise":
        return SCALED, _scaled
    return (FLOAT64, float) if modes.decimals == "double" else (STRING, _named_number)


def fixed_point(scale: int, precision: int | None) -> ConnectType:
    """Connect's Decimal."""
    parameters = {"scale": str(scale)}
    if precision is not None:
        parameters["connect.decimal.precision"] = str(precision)
    return named(BYTES, "org.apache.kafka.connect.data.Decimal", **parameters)


def unscaled(value: decimal.Decimal, scale: int) -> bytes:
    """The number without its point, as two's complement in as few bytes as it needs."""
    number = int(value.scaleb(scale, _WIDE))
    bits = (number if number >= 0 else ~number).bit_length()
    return number.to_bytes(bits // 8 + 1, "big", signed=True)


def iso_time(value: dt.datetime, digits: int) -> str:
    """A time in UTC with so many digits behind the second."""
    text = value.isoformat(timespec="microseconds")
    return f"{text[: 20 + digits if digits else 19]}Z"


def milliseconds(convert: Convert) -> Convert:
    """The milliseconds of what ``convert`` gives in microseconds."""
    return lambda value: convert(value) // 1000


def _plain(value: decimal.Decimal) -> str:
    return format(value, "f")


def _scaled(value: decimal.Decimal) -> Any:
    """A number that is none (NaN, infinity) has no such form, and is null."""
    if not value.is_finite():
        return None
    found = value.normalize(_WIDE)
    scale = max(0, -int(found.as_tuple().exponent))
    return {"scale": scale, "value": unscaled(found, scale)}


def _named_number(value: decimal.Decimal) -> str:
    if value.is_finite():
        return _plain(value)
    if value.is_nan():
        return "NAN"
    return "NEGATIVE_INFINITY" if value < 0 else "POSITIVE_INFINITY"


def converter(kind: str) -> Convert:
    """The number that a kind has in Avro: days or microseconds."""
    found = to_avro(kind, 0)
    assert found is not None
    return found


_BY_KIND: dict[Kind, ColumnType] = {
    Kind.BOOL: (BOOLEAN, None),
    Kind.INT: (INT64, None),
    Kind.FLOAT: (FLOAT64, None),
    Kind.STRING: (STRING, None),
    Kind.BYTES: (BYTES, None),
    Kind.DATE: (DATE, converter("date")),
    Kind.TIME: (TIME_US, converter("time")),
    Kind.TIME_SPAN: (TIME_US, converter("time_span")),
    Kind.TIMESTAMP: (TIMESTAMP_US, converter("timestamp")),
    Kind.TIMESTAMPTZ: (ZONED_TIMESTAMP, lambda value: iso_time(value, 6)),
    Kind.UUID: (UUID, str),
    Kind.JSON: (JSON, None),
}
