"""The types of PostgreSQL's columns in an envelope, as Debezium's connector has them."""

from __future__ import annotations

import decimal
import json
import re
import struct as binary
import uuid
from typing import Any

from databus.common.envelopes.column_types import (
    JSON,
    TIME_MS,
    TIMESTAMP_MS,
    ZONED_TIMESTAMP,
    ColumnType,
    Convert,
    ValueModes,
    by_kind,
    converter,
    decimal_type,
    iso_time,
    milliseconds,
    numeric_type,
)
from databus.common.envelopes.connect_types import (
    BOOLEAN,
    BYTES,
    FLOAT32,
    FLOAT64,
    INT16,
    INT32,
    INT64,
    STRING,
    array,
    named,
    struct,
)
from databus.common.envelopes.mysql_column_types import bits_type, shortest_float
from databus.common.schema.column_values import from_json_value
from databus.common.schema.postgres_arrays import parse_array
from databus.common.schema.source_schema import Column, Kind

POINT = struct(
    "io.debezium.data.geometry.Point",
    ("x", FLOAT64),
    ("y", FLOAT64),
    ("wkb", BYTES.as_optional()),
    ("srid", INT32.as_optional()),
    version=1,
    doc="Geometry (POINT)",
)
_PARTS = re.compile(r'([a-z_" 0-9]+?)(?:\(([0-9,-]+)\))?((?: with| without) time zone)?')
_PAIR = re.compile(r'"((?:[^"\\]|\\.)*)"=>(?:"((?:[^"\\]|\\.)*)"|NULL)', re.DOTALL)
_SPAN = re.compile(
    r"(?:([+-]?\d+) years? ?)?(?:([+-]?\d+) mons? ?)?(?:([+-]?\d+) days? ?)?"
    r"(?:([+-]?)(\d+):(\d\d):(\d\d)(?:\.(\d+))?)?"
)
_DAY_US = 86_400_000_000
_MONTH_US = _DAY_US * 1461 // 48
"""A twelfth of 365.25 days."""


def postgres_column_type(column: Column, modes: ValueModes) -> ColumnType:
    """The type of a column by PostgreSQL's name for it."""
    if column.kind is Kind.STRING and column.type_name.endswith("[]"):
        return _array(column, modes)
    word, inside = _parts(column.type_name)
    wanted = _KINDS_OF_WORDS.get(word)
    if column.kind is Kind.STRING:
        return _text_type(word, inside, modes)
    if wanted is not column.kind:  # A domain, or a special form of the option special_values.
        return by_kind(column, modes)
    if word in _INTEGERS:
        return _INTEGERS[word], None
    if word == "real":
        return FLOAT32, shortest_float
    if column.kind in (Kind.TIME, Kind.TIMESTAMP) and inside is not None and int(inside) <= 3:
        kind = TIME_MS if column.kind is Kind.TIME else TIMESTAMP_MS
        return kind, milliseconds(converter(column.kind.value))
    if column.kind is Kind.TIMESTAMPTZ:
        return ZONED_TIMESTAMP, _zoned(6 if inside is None else int(inside))
    return by_kind(column, modes)


def _parts(type_name: str) -> tuple[str, str | None]:
    """The type without its modifier, and the modifier."""
    found = _PARTS.fullmatch(type_name)
    return (type_name, None) if found is None else (found[1] + (found[3] or ""), found[2])


_INTEGERS = {"smallint": INT16, "integer": INT32, "bigint": INT64, "oid": INT64}
_KINDS_OF_WORDS = {
    **dict.fromkeys(_INTEGERS, Kind.INT),
    "real": Kind.FLOAT,
    "time without time zone": Kind.TIME,
    "timestamp without time zone": Kind.TIMESTAMP,
    "timestamp with time zone": Kind.TIMESTAMPTZ,
}


def _text_type(word: str, inside: str | None, modes: ValueModes) -> ColumnType:
    """The type of a column whose values are texts."""
    if word == "money":
        kind, convert = decimal_type(0, 2, modes)
        if kind.parameters:
            kind = named(BYTES, kind.name, scale="2")
        return kind, lambda text: _money(text, convert)
    if word == "bit" and int(inside or 1) == 1:
        return BOOLEAN, lambda text: text == "1"
    if word in ("bit", "bit varying"):
        return bits_type(int(inside) if inside else 2**31 - 1), _bits
    return _TEXTS.get(word, (STRING, None))


def _bits(text: str) -> bytes:
    """The last bit first, in as few bytes as the value needs."""
    value = int(text or "0", 2)
    return value.to_bytes((value.bit_length() + 7) // 8, "little")


def _money(text: str, convert: Convert | None) -> Any:
    sign = "-" if "-" in text or "(" in text else ""
    digits = re.sub(r"[^0-9]", "", text)
    value = decimal.Decimal(f"{sign}{digits or 0}").scaleb(-2)
    return value if convert is None else convert(value)


def _interval_us(text: str) -> int | None:
    """PostgreSQL's interval in microseconds; an infinite one is null."""
    found = _SPAN.fullmatch(text)
    if found is None:
        return None
    years, months, days = (int(found[index] or 0) for index in (1, 2, 3))
    clock = 0
    if found[5] is not None:
        seconds = (int(found[5]) * 60 + int(found[6])) * 60 + int(found[7])
        clock = seconds * 1_000_000 + int((found[8] or "").ljust(6, "0")[:6])
        clock = -clock if found[4] == "-" else clock
    return (years * 12 + months) * _MONTH_US + days * _DAY_US + clock


def _zoned_time(text: str) -> str:
    """A time with its zone as the time in UTC."""
    found = re.fullmatch(
        r"(\d+):(\d\d):(\d\d)(?:\.(\d+))?([+-])(\d+)(?::(\d\d))?(?::(\d\d))?", text
    )
    if found is None:
        return text
    offset = (int(found[6]) * 60 + int(found[7] or 0)) * 60 + int(found[8] or 0)
    clock = (int(found[1]) * 60 + int(found[2])) * 60 + int(found[3])
    clock = (clock - (offset if found[5] == "+" else -offset)) % 86_400
    fraction = f".{found[4]}".rstrip("0") if found[4] else ""
    return f"{clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}{fraction.rstrip('.')}Z"


def _hstore(text: str) -> str:
    """The pairs of an hstore as a document."""
    pairs = {
        re.sub(r"\\(.)", r"\1", key): None if value is None else re.sub(r"\\(.)", r"\1", value)
        for key, value in ((found[1], found[2]) for found in _PAIR.finditer(text))
    }
    return json.dumps(pairs, ensure_ascii=False, separators=(",", ":"))


def _point(text: str) -> dict[str, Any]:
    x, _, y = text.strip("()").partition(",")
    place = float(x), float(y)
    return {"x": place[0], "y": place[1], "wkb": binary.pack("<BIdd", 1, 1, *place), "srid": None}


_TEXTS: dict[str, ColumnType] = {
    "xml": (named(STRING, "io.debezium.data.Xml"), None),
    "ltree": (named(STRING, "io.debezium.data.Ltree"), None),
    "tsvector": (named(STRING, "io.debezium.data.Tsvector"), None),
    "hstore": (JSON, _hstore),
    "interval": (named(INT64, "io.debezium.time.MicroDuration"), _interval_us),
    "time with time zone": (named(STRING, "io.debezium.time.ZonedTime"), _zoned_time),
    "point": (POINT, _point),
}


def _array(column: Column, modes: ValueModes) -> ColumnType:
    """An array of one dimension; with several, or with bounds of its own, it is null."""
    word, inside = _parts(column.type_name.removesuffix("[]"))
    kind = _ELEMENT_KINDS.get(word, Kind.STRING)
    if kind is None:
        return STRING, None
    element = Column("", kind, type_name=column.type_name.removesuffix("[]"))
    if word == "numeric":
        digits = [int(part) for part in (inside or "").split(",") if part]
        items, convert = (
            decimal_type(digits[0], digits[1] if len(digits) > 1 else 0, modes)
            if digits
            else numeric_type(modes)
        )
    else:
        items, convert = postgres_column_type(element, modes)
    parse = _PARSERS.get(word) or (lambda text: from_json_value(text, kind.value))

    def element_of(text: str) -> Any:
        value = parse(text)
        return value if convert is None else convert(value)

    def values(text: str) -> Any:
        found = parse_array(text, element_of)
        is_flat = isinstance(found, list) and not any(isinstance(one, list) for one in found)
        return found if is_flat else None

    return array(items), values


_ELEMENT_KINDS: dict[str, Kind | None] = {
    "boolean": Kind.BOOL,
    **dict.fromkeys(_INTEGERS, Kind.INT),
    "real": Kind.FLOAT,
    "double precision": Kind.FLOAT,
    "numeric": Kind.NUMERIC,
    "bytea": Kind.BYTES,
    "date": Kind.DATE,
    "time without time zone": Kind.TIME,
    "timestamp without time zone": Kind.TIMESTAMP,
    "timestamp with time zone": Kind.TIMESTAMPTZ,
    "uuid": Kind.UUID,
    "json": Kind.JSON,
    "jsonb": Kind.JSON,
    "box": None,  # Its arrays are separated by semicolons.
}


def _iso(text: str, kind: str) -> Any:
    return from_json_value(re.sub(r"([+-]\d\d)$", r"\1:00", text), kind)


_PARSERS: dict[str, Convert] = {
    "boolean": lambda text: text == "t",
    "real": float,
    "double precision": float,
    "bytea": lambda text: bytes.fromhex(text.removeprefix("\\x")),
    "timestamp with time zone": lambda text: _iso(text, "timestamptz"),
    "uuid": uuid.UUID,
}


def _zoned(digits: int) -> Convert:
    return lambda value: iso_time(value, digits)
