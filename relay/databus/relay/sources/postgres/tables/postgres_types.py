"""PostgreSQL's types and the text form of their values.

``kind_of`` maps a type to the kind that consumers see.  ``parser_of`` returns the function that
reads the text of the type's output function (ISO dates, UTC, hex bytea), which is the same in the
stream and in chunks.  docs/types-postgres.md has the table for users.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
import uuid
from collections.abc import Callable
from typing import Any

from databus.common.schema.source_schema import Column, Kind
from databus.relay.sources.postgres.protocol.text_encodings import UTF8

DATE_OID = 1082
NUMERIC_OID = 1700
_WIDEST_DECIMAL = 128

_KINDS: dict[int, Kind] = {
    16: Kind.BOOL,
    17: Kind.BYTES,
    20: Kind.INT,
    21: Kind.INT,
    23: Kind.INT,
    26: Kind.INT,
    114: Kind.JSON,
    700: Kind.FLOAT,
    701: Kind.FLOAT,
    DATE_OID: Kind.DATE,
    1083: Kind.TIME,
    1114: Kind.TIMESTAMP,
    1184: Kind.TIMESTAMPTZ,
    2950: Kind.UUID,
    3802: Kind.JSON,
}
"""Every other type becomes a STRING in its text form; numeric depends on its modifier."""

NAMES: dict[int, str] = {
    16: "boolean",
    17: "bytea",
    18: '"char"',
    19: "name",
    20: "bigint",
    21: "smallint",
    23: "integer",
    25: "text",
    26: "oid",
    114: "json",
    142: "xml",
    700: "real",
    701: "double precision",
    790: "money",
    869: "inet",
    1042: "character",
    1043: "character varying",
    DATE_OID: "date",
    1083: "time without time zone",
    1114: "timestamp without time zone",
    1184: "timestamp with time zone",
    1186: "interval",
    1266: "time with time zone",
    1560: "bit",
    1562: "bit varying",
    NUMERIC_OID: "numeric",
    2950: "uuid",
    3802: "jsonb",
}

SPECIAL_KINDS = frozenset({Kind.DATE, Kind.TIME, Kind.TIMESTAMP, Kind.TIMESTAMPTZ, Kind.DECIMAL})
"""Kinds that cannot represent every value of their PostgreSQL type."""


class SpecialValue(ValueError):
    """A value that the column's kind cannot represent: infinity, BC, 24:00, NaN."""


def kind_of(type_oid: int, modifier: int) -> tuple[Kind, int, int]:
    """Kind, precision and scale of a type; domains are resolved before."""
    if type_oid != NUMERIC_OID:
        return _KINDS.get(type_oid, Kind.STRING), 0, 0
    if modifier < 4:
        return Kind.NUMERIC, 0, 0
    precision = (modifier - 4) >> 16 & 0xFFFF
    scale = (((modifier - 4) & 0x7FF) ^ 0x400) - 0x400
    # Avro's decimal allows a scale from 0 to the precision, and few readers support a wide one.
    if not 0 <= scale <= precision <= _WIDEST_DECIMAL:
        return Kind.NUMERIC, 0, 0
    return Kind.DECIMAL, precision, scale


def column_of(name: str, type_oid: int, modifier: int, nullable: bool, type_name: str) -> Column:
    """The column in the consumers' schema."""
    kind, precision, scale = kind_of(type_oid, modifier)
    return Column(name, kind, nullable, precision, scale, type_name)


def parser_of(kind: Kind, encoding: str = UTF8) -> Callable[[bytes], Any]:
    """The function that reads the text form of a value of this kind.

    It raises SpecialValue for a value that the kind cannot represent, ValueError for text that is
    no value of the type.
    """
    if kind in (Kind.STRING, Kind.JSON):
        return lambda data: data.decode(encoding)
    return _PARSERS[kind]


def _bool(data: bytes) -> bool:
    if data not in (b"t", b"f"):
        raise ValueError(f"{data!r} is not a boolean")
    return data == b"t"


def _bytea(data: bytes) -> bytes:
    if not data.startswith(b"\\x"):
        raise ValueError("bytea is not in hex form")
    return bytes.fromhex(data[2:].decode())


def _numeric(data: bytes) -> decimal.Decimal:
    return decimal.Decimal(data.decode())


def _decimal(data: bytes) -> decimal.Decimal:
    value = decimal.Decimal(data.decode())
    if not value.is_finite():
        raise SpecialValue(f"a decimal cannot be {data.decode()}")
    return value


def _date(data: bytes) -> dt.date:
    text = data.decode()
    if len(text) != 10:
        raise SpecialValue(f"a date cannot be {text!r}")
    return dt.date.fromisoformat(text)


def _time(data: bytes) -> dt.time:
    text = data.decode()
    if text.startswith("24"):
        raise SpecialValue(f"a time of day cannot be {text!r}")
    return dt.time.fromisoformat(_six_digits(text))


_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?")


def _timestamp(data: bytes) -> dt.datetime:
    text = data.decode()
    if not _TIMESTAMP.fullmatch(text):
        raise SpecialValue(f"a timestamp cannot be {text!r}")
    return dt.datetime.fromisoformat(_six_digits(text))


def _timestamptz(data: bytes) -> dt.datetime:
    if not data.endswith(b"+00"):
        raise SpecialValue(f"a timestamp cannot be {data.decode()!r}")
    return _timestamp(data[:-3]).replace(tzinfo=dt.UTC)


def _six_digits(text: str) -> str:
    whole, point, fraction = text.partition(".")
    return f"{whole}.{fraction:0<6}" if point else whole


_PARSERS: dict[Kind, Callable[[bytes], Any]] = {
    Kind.BOOL: _bool,
    Kind.INT: int,
    Kind.FLOAT: float,
    Kind.DECIMAL: _decimal,
    Kind.NUMERIC: _numeric,
    Kind.BYTES: _bytea,
    Kind.DATE: _date,
    Kind.TIME: _time,
    Kind.TIMESTAMP: _timestamp,
    Kind.TIMESTAMPTZ: _timestamptz,
    Kind.UUID: lambda data: uuid.UUID(data.decode()),
}

_EPOCH = dt.datetime(1970, 1, 1)

PLACEHOLDERS: dict[Kind, Any] = {
    Kind.BOOL: False,
    Kind.INT: 0,
    Kind.FLOAT: 0.0,
    Kind.DECIMAL: decimal.Decimal(0),
    Kind.NUMERIC: decimal.Decimal(0),
    Kind.STRING: "",
    Kind.BYTES: b"",
    Kind.DATE: _EPOCH.date(),
    Kind.TIME: dt.time(0),
    Kind.TIMESTAMP: _EPOCH,
    Kind.TIMESTAMPTZ: _EPOCH.replace(tzinfo=dt.UTC),
    Kind.UUID: uuid.UUID(int=0),
    Kind.JSON: "null",
}
"""The value in the bytes of an absent column that is not nullable."""
