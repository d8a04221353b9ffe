"""The types of MariaDB's and MySQL's columns in an envelope, as Debezium's connectors have them."""

from __future__ import annotations

import re
import struct as binary
from typing import Any

import numpy as np

from databus.common.envelopes.column_types import (
    JSON,
    TIMESTAMP_MS,
    TIMESTAMP_US,
    ZONED_TIMESTAMP,
    ColumnType,
    Convert,
    ValueModes,
    by_kind,
    converter,
    iso_time,
    milliseconds,
)
from databus.common.envelopes.connect_types import (
    BOOLEAN,
    BYTES,
    FLOAT32,
    INT16,
    INT32,
    INT64,
    STRING,
    ConnectType,
    named,
    struct,
)
from databus.common.schema.source_schema import Column, Kind

GEOMETRY = struct(
    "io.debezium.data.geometry.Geometry",
    ("wkb", BYTES),
    ("srid", INT32.as_optional()),
    version=1,
    doc="Geometry",
)
VECTOR = ConnectType("array", name="io.debezium.data.FloatVector", version=1, items=FLOAT32)
_BLANK = re.compile(r'("(?:[^"\\]|\\.)*")|([,:]) ')
_PARTS = re.compile(r"([a-z0-9]+)(?:\((.*)\))?( unsigned)?", re.DOTALL)
_LABEL = re.compile(r"'((?:[^']|'')*)'")


def mysql_column_type(column: Column, modes: ValueModes, *, is_mariadb: bool) -> ColumnType:
    """The type of a column by MariaDB's or MySQL's name for it."""
    parts = _PARTS.fullmatch(column.type_name)
    if parts is None:
        return by_kind(column, modes)
    word, inside, is_unsigned = parts[1], parts[2] or "", parts[3] is not None
    if column.kind is Kind.INT and word in _INTEGERS:
        return _INTEGERS[word][is_unsigned], None
    if word == "bit":
        return _bits(int(inside or 1))
    if column.kind is Kind.FLOAT and word == "float":
        return FLOAT32, shortest_float
    if word in ("enum", "set") and column.kind is Kind.STRING:
        labels = ",".join(label.replace("''", "'") for label in _LABEL.findall(inside))
        name = "io.debezium.data.Enum" if word == "enum" else "io.debezium.data.EnumSet"
        return named(STRING, name, allowed=labels), None
    if word == "geometry" and column.kind is Kind.BYTES:
        return GEOMETRY, _geometry
    if word == "vector" and column.kind is Kind.BYTES:
        return VECTOR, _floats
    if column.kind is Kind.JSON:
        # MariaDB's JSON is a text with a check.
        return (STRING, None) if is_mariadb else (JSON, _compact)
    if column.kind is Kind.TIMESTAMP and word == "datetime":
        microseconds = converter("timestamp")
        if int(inside or 0) <= 3:
            return TIMESTAMP_MS, milliseconds(microseconds)
        return TIMESTAMP_US, microseconds
    if column.kind is Kind.TIMESTAMPTZ and word == "timestamp":
        return ZONED_TIMESTAMP, _zoned(int(inside or 0))
    return by_kind(column, modes)


_INTEGERS = {
    "tinyint": (INT16, INT16),
    "smallint": (INT16, INT32),
    "mediumint": (INT32, INT32),
    "int": (INT32, INT64),
    "bigint": (INT64, INT64),
    "year": (named(INT32, "io.debezium.time.Year"),) * 2,
}


def shortest_float(value: float) -> float:
    """A float of 32 bits with the fewest digits that give it back."""
    return float(str(np.float32(value)))


def bits_type(length: int) -> ConnectType:
    """Debezium's Bits."""
    return named(BYTES, "io.debezium.data.Bits", length=str(length))


def _bits(length: int) -> ColumnType:
    if length == 1:
        return BOOLEAN, bool
    size = (length + 7) // 8
    return bits_type(length), lambda value: value.to_bytes(size, "little")


def _geometry(value: bytes) -> dict[str, Any]:
    (srid,) = binary.unpack_from("<I", value)
    return {"wkb": value[4:], "srid": srid or None}


def _floats(value: bytes) -> list[float]:
    return [shortest_float(one) for one in binary.unpack(f"<{len(value) // 4}f", value)]


def _compact(document: str) -> str:
    """A document as MySQL writes it, without the blank behind a comma or a colon."""
    return _BLANK.sub(lambda found: found[1] or found[2], document)


def _zoned(digits: int) -> Convert:
    return lambda value: iso_time(value, digits)
