"""Columns: from a MariaDB or MySQL type to a ``Column``, and from binlog bytes to Python values.

A type has one canonical name (``varchar(64)``, ``int unsigned``, ``enum('a','b')``), which is
derived from the catalogue and from the binlog alike, so that a table has the same schema in a dump
and in the stream.  Display widths, ZEROFILL, the digits of FLOAT(7,3) and the character set are
not part of it: this module returns all text as UTF-8.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from databus.common.errors import FormatError, UnsupportedChange
from databus.common.schema.source_schema import Column, Kind
from databus.relay.sources.mysql.protocol.binlog_events import ENUM, SET, STRING, TableMap
from databus.relay.sources.mysql.rows.binary_json import json_text
from databus.relay.sources.mysql.rows.charsets import Charset, Charsets
from databus.relay.sources.mysql.rows.packed_decimals import Decoder, packed_decimal
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain

TINY, SHORT, LONG, FLOAT, DOUBLE = 1, 2, 3, 4, 5
LONGLONG, INT24, DATE, YEAR, VARCHAR, BIT = 8, 9, 10, 13, 15, 16
TIMESTAMP2, DATETIME2, TIME2 = 17, 18, 19
VECTOR, JSON = 242, 245
NEWDECIMAL, BLOB, VAR_STRING, GEOMETRY = 246, 252, 253, 255

INTEGER_BYTES = {TINY: 1, SHORT: 2, INT24: 3, LONG: 4, LONGLONG: 8}
_INTEGER_NAMES = {
    TINY: "tinyint",
    SHORT: "smallint",
    INT24: "mediumint",
    LONG: "int",
    LONGLONG: "bigint",
}
_TEXT_NAMES = {1: "tinytext", 2: "text", 3: "mediumtext", 4: "longtext"}
_BLOB_NAMES = {1: "tinyblob", 2: "blob", 3: "mediumblob", 4: "longblob"}
_PLAIN_NAMES = {DATE: "date", YEAR: "year", VECTOR: "vector", JSON: "json", GEOMETRY: "geometry"}
_TEMPORAL_NAMES = {TIMESTAMP2: "timestamp", DATETIME2: "datetime", TIME2: "time"}
_OLD_TEMPORAL = {7: "TIMESTAMP", 11: "TIME", 12: "DATETIME"}
_UNSUPPORTED = {**_OLD_TEMPORAL, 140: "BLOB COMPRESSED", 141: "VARCHAR COMPRESSED"}

ZERO_DATES_ADVICE = (
    'zero_dates = "null" to capture such dates as null (not in a key), or "text" for all as text'
)

SPECIAL_NAMES = frozenset({"uuid", "inet6", "inet4", "json"})
"""Types that the binlog does not distinguish from their storage types."""

NO_TEXT_LABEL = (
    "is an ENUM or SET with CHARACTER SET binary and a label that is no text; "
    "ALTER TABLE ... MODIFY it with other labels, or leave the table out of sources"
)

_KINDS = {
    "tinyint": Kind.INT,
    "smallint": Kind.INT,
    "mediumint": Kind.INT,
    "int": Kind.INT,
    "bigint": Kind.INT,
    "year": Kind.INT,
    "float": Kind.FLOAT,
    "double": Kind.FLOAT,
    "decimal": Kind.DECIMAL,
    "char": Kind.STRING,
    "varchar": Kind.STRING,
    "tinytext": Kind.STRING,
    "text": Kind.STRING,
    "mediumtext": Kind.STRING,
    "longtext": Kind.STRING,
    "enum": Kind.STRING,
    "set": Kind.STRING,
    "inet6": Kind.STRING,
    "inet4": Kind.STRING,
    "binary": Kind.BYTES,
    "varbinary": Kind.BYTES,
    "tinyblob": Kind.BYTES,
    "blob": Kind.BYTES,
    "mediumblob": Kind.BYTES,
    "longblob": Kind.BYTES,
    "geometry": Kind.BYTES,
    "vector": Kind.BYTES,
    "date": Kind.DATE,
    "time": Kind.TIME_SPAN,
    "datetime": Kind.TIMESTAMP,
    "timestamp": Kind.TIMESTAMPTZ,
    "bit": Kind.INT,
    "uuid": Kind.UUID,
    "json": Kind.JSON,
}
DATED = frozenset({Kind.DATE, Kind.TIMESTAMP, Kind.TIMESTAMPTZ})
_GEOMETRIES = frozenset(
    {
        "geometry",
        "point",
        "linestring",
        "polygon",
        "multipoint",
        "multilinestring",
        "multipolygon",
        "geometrycollection",
        "geomcollection",
    }
)


def catalogue_type(column_type: str) -> str:
    """The canonical name of a type as information_schema.COLUMNS.COLUMN_TYPE writes it.

    ``column_of`` may not know the name.
    """
    lower = column_type if column_type.startswith(("enum(", "set(")) else column_type.lower()
    if lower.startswith(("enum(", "set(")):
        return re.sub(r"^(enum|set)\((.*)\)[^)]*$", r"\1(\2)", lower, flags=re.DOTALL)
    name = re.match(r"[a-z0-9]+", lower)
    if name is None:
        return lower
    sign = " unsigned" if " unsigned" in lower else ""
    if name[0] in ("tinyint", "smallint", "mediumint", "int", "bigint", "float", "double"):
        return name[0] + sign
    if name[0] == "year":
        return "year"
    if name[0] in _GEOMETRIES:
        return "geometry"
    if "compressed" in lower:
        return lower
    found = re.match(r"[a-z0-9]+(\([0-9,]+\))?", lower)
    assert found is not None
    return found[0] + (sign if name[0] == "decimal" else "")


def column_of(name: str, type_name: str, nullable: bool, zero_dates: str) -> Column:
    """The column with this canonical type.

    Raises:
        UnsupportedChange: the type cannot be captured.
    """
    word = re.match(r"[a-z0-9]*", type_name)
    kind = _KINDS.get(word[0]) if word else None
    if kind is None or "compressed" in type_name or type_name.startswith("vector("):
        raise UnsupportedChange(
            f"column {name} has the type {type_name}, which is not supported; exclude its table "
            "through sources, or change the type"
        )
    precision = scale = 0
    if kind is Kind.DECIMAL:
        precision, scale = (int(part) for part in re.findall(r"\d+", type_name)[:2])
    elif type_name == "bigint unsigned" or type_name == "bit(64)":
        kind = Kind.UINT64
    if kind in DATED and zero_dates == "text":
        kind = Kind.STRING
    elif kind in DATED and zero_dates == "null":
        nullable = True
    return Column(name, kind, nullable, precision, scale, type_name)


def stream_type(table: TableMap, index: int, charsets: Charsets) -> str:
    """The canonical name of a column's type, derived from the binlog.

    Raises:
        UnsupportedChange: the type cannot be captured; the message names table and column.
    """
    code, meta = table.types[index], table.metas[index]
    where = f"{table.schema}.{table.table}.{table.names[index]}"
    sign = " unsigned" if table.unsigned[index] else ""
    if code in INTEGER_BYTES:
        return _INTEGER_NAMES[code] + sign
    if code in (FLOAT, DOUBLE):
        return ("float" if code == FLOAT else "double") + sign
    if code == NEWDECIMAL:
        return f"decimal({meta >> 8},{meta & 255}){sign}"
    if code in (VARCHAR, VAR_STRING, STRING, BLOB):
        return _textual_type(code, meta, charsets.of_collation(table.collations[index]))
    if code in (ENUM, SET):
        decode = _label_decoder(charsets.of_collation(table.collations[index]), where)
        values = ",".join("'" + decode(m).replace("'", "''") + "'" for m in table.members[index])
        return f"{'enum' if code == ENUM else 'set'}({values})"
    if code in _TEMPORAL_NAMES:
        return _TEMPORAL_NAMES[code] + (f"({meta})" if meta else "")
    if code == BIT:
        return f"bit({(meta >> 8) * 8 + (meta & 255)})"
    plain = _PLAIN_NAMES.get(code)
    if plain is None:
        advice = (
            "it is stored in the format before MariaDB 10.1; rebuild the table with "
            "mysql56_temporal_format=ON and ALTER TABLE ... FORCE"
            if code in _OLD_TEMPORAL
            else "exclude its table through sources, or change the type"
        )
        raise UnsupportedChange(
            f"{where} has the binlog type {code} ({_UNSUPPORTED.get(code, 'unknown')}), "
            f"which is not supported: {advice}"
        )
    return plain


def char_bytes(meta: int) -> int:
    """The maximal bytes of a CHAR or BINARY column, from its metadata."""
    high, low = meta >> 8, meta & 255
    return low if high & 0x30 == 0x30 else low | ((high & 0x30) ^ 0x30) << 4


def _textual_type(code: int, meta: int, charset: Charset) -> str:
    binary = charset.name == "binary"
    if code == BLOB:
        return (_BLOB_NAMES if binary else _TEXT_NAMES)[meta]
    if code == STRING:
        length = char_bytes(meta) // charset.max_bytes
        return f"{'binary' if binary else 'char'}({length})"
    return f"{'varbinary' if binary else 'varchar'}({meta // charset.max_bytes})"


@dataclass(frozen=True, slots=True)
class StreamColumn:
    """One column of a table map, with the layout of its values in a row image."""

    code: int
    meta: int
    unsigned: bool
    charset: Charset | None
    members: tuple[str, ...]
    column: Column
    zero_dates: str

    def decoder(self) -> Decoder:
        """The function from (bytes, offset) to (Python value of the column's kind, next offset).

        It raises TableUncertain for invalid text, and for an invalid date with
        ``zero_dates = "error"``.

        Raises:
            UnsupportedChange: there is no such function for this type.
        """
        if self.code in INTEGER_BYTES:
            return _integer(INTEGER_BYTES[self.code], not self.unsigned)
        if self.code in (VARCHAR, VAR_STRING, STRING, BLOB):
            return self._textual()
        if self.is_date_text:
            return _dates_as_text(self.code, self.meta)
        simple: dict[int, Callable[[], Decoder]] = {
            FLOAT: lambda: _packed(struct.Struct("<f")),
            DOUBLE: lambda: _packed(struct.Struct("<d")),
            NEWDECIMAL: lambda: packed_decimal(self.meta >> 8, self.meta & 255),
            ENUM: lambda: _enum(self.meta & 255, self.members),
            SET: lambda: _set(self.meta & 255, self.members),
            BIT: lambda: _bits((self.meta >> 8) + (self.meta & 255 > 0)),
            YEAR: lambda: _year,
            DATE: lambda: _dated(_date, self._zero),
            DATETIME2: lambda: _dated(_datetime(self.meta), self._zero),
            TIMESTAMP2: lambda: _dated(_timestamp(self.meta), self._zero),
            TIME2: lambda: _time(self.meta),
            GEOMETRY: lambda: _sized(self.meta, bytes),
            VECTOR: lambda: _sized(self.meta, bytes),
            JSON: lambda: _sized(self.meta, json_text),
        }
        if self.code not in simple:
            raise UnsupportedChange(f"no decoder for binlog type {self.code}")
        return simple[self.code]()

    @property
    def is_date_text(self) -> bool:
        """Whether its dates are captured as text."""
        return self.column.kind is Kind.STRING and self.code in (DATE, DATETIME2, TIMESTAMP2)

    @property
    def length_bytes(self) -> int:
        """The width in bytes of the length before a textual value."""
        if self.code in (BLOB, GEOMETRY, VECTOR):
            return self.meta
        longest = char_bytes(self.meta) if self.code == STRING else self.meta
        return 2 if longest > 255 else 1

    def _textual(self) -> Decoder:
        kind, type_name = self.column.kind, self.column.type_name
        if type_name in ("uuid", "inet6", "inet4"):
            return _sized(self.length_bytes, _SPECIALS[type_name])
        if kind is Kind.BYTES:
            if self.code == STRING:
                width = char_bytes(self.meta)
                return _sized(self.length_bytes, lambda data: data.ljust(width, b"\0"))
            return _sized(self.length_bytes, bytes)
        assert self.charset is not None
        decode = self.charset.decoder()

        def text(data: bytes) -> str:
            try:
                return decode(data)
            except TableUncertain as error:
                raise TableUncertain(f"column {self.column.name}: {error.message}") from None

        return _sized(self.length_bytes, text)

    def _zero(self, text: str) -> None:
        if self.zero_dates == "null":
            return
        raise TableUncertain(
            f"column {self.column.name} holds the date {text}, which no calendar has; correct the "
            f"row, or set the database's option {ZERO_DATES_ADVICE}"
        )


def _label_decoder(charset: Charset, where: str) -> Callable[[bytes], str]:
    """The text of a label of an ENUM or SET; a binary label must be UTF-8."""
    if charset.name != "binary":
        return charset.decoder()

    def decode(label: bytes) -> str:
        try:
            return label.decode()
        except UnicodeDecodeError:
            raise UnsupportedChange(f"{where} {NO_TEXT_LABEL} (0x{label.hex()})") from None

    return decode


def stream_columns(
    table: TableMap, columns: tuple[Column, ...], charsets: Charsets, zero_dates: str
) -> tuple[StreamColumn, ...]:
    """The columns of a table map; ``columns`` are the same columns in the consumers' schema."""
    found = []
    for index, column in enumerate(columns):
        collation = table.collations[index]
        charset = charsets.of_collation(collation) if collation else None
        where = f"{table.schema}.{table.table}.{table.names[index]}"
        decode = _label_decoder(charset, where) if charset and table.members[index] else None
        found.append(
            StreamColumn(
                table.types[index],
                table.metas[index],
                table.unsigned[index],
                charset,
                tuple(decode(member) for member in table.members[index]) if decode else (),
                column,
                zero_dates,
            )
        )
    return tuple(found)


def _integer(width: int, signed: bool) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        return int.from_bytes(data[at : at + width], "little", signed=signed), at + width

    return decode


def _packed(form: struct.Struct) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        return form.unpack_from(data, at)[0], at + form.size

    return decode


def _sized(length_bytes: int, convert: Callable[[bytes], Any]) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        start = at + length_bytes
        stop = start + int.from_bytes(data[at:start], "little")
        if stop > len(data):
            raise FormatError(f"a value of {stop - start} bytes does not end in its event")
        return convert(bytes(data[start:stop])), stop

    return decode


def _bits(width: int) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        return int.from_bytes(data[at : at + width], "big"), at + width

    return decode


def _year(data: memoryview, at: int) -> tuple[Any, int]:
    return data[at] + 1900 if data[at] else 0, at + 1


def _enum(width: int, members: tuple[str, ...]) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        number = int.from_bytes(data[at : at + width], "little")
        if number > len(members):
            raise FormatError(f"ENUM value {number} of {len(members)}")
        return members[number - 1] if number else "", at + width

    return decode


def _set(width: int, members: tuple[str, ...]) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        bits = int.from_bytes(data[at : at + width], "little")
        if bits >> len(members):
            raise FormatError(f"SET value {bits:#x} of {len(members)} members")
        return ",".join(m for i, m in enumerate(members) if bits >> i & 1), at + width

    return decode


class _ZeroDate(Exception):
    """The text of an invalid date, and the offset after it."""

    def __init__(self, text: str, stop: int) -> None:
        self.text = text
        self.stop = stop


def _dated(decode: Decoder, refuse: Callable[[str], None]) -> Decoder:
    def dated(data: memoryview, at: int) -> tuple[Any, int]:
        try:
            return decode(data, at)
        except _ZeroDate as zero:
            refuse(zero.text)
            return None, zero.stop

    return dated


def _date(data: memoryview, at: int) -> tuple[Any, int]:
    bits = int.from_bytes(data[at : at + 3], "little")
    year, month, day = bits >> 9, bits >> 5 & 15, bits & 31
    try:
        return dt.date(year, month, day), at + 3
    except ValueError:
        raise _ZeroDate(f"{year:04d}-{month:02d}-{day:02d}", at + 3) from None


def _dates_as_text(code: int, digits: int) -> Decoder:
    """The server's text for a DATE, DATETIME or TIMESTAMP (in UTC), even for an invalid one."""

    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        if code == DATE:
            bits = int.from_bytes(data[at : at + 3], "little")
            return f"{bits >> 9:04d}-{bits >> 5 & 15:02d}-{bits & 31:02d}", at + 3
        if code == TIMESTAMP2:
            seconds = int.from_bytes(data[at : at + 4], "big")
            us, stop = _fraction(data, at + 4, digits)
            moment = _EPOCH + dt.timedelta(seconds=seconds)
            text = f"{moment:%Y-%m-%d %H:%M:%S}" if seconds or us else "0000-00-00 00:00:00"
        else:
            bits = int.from_bytes(data[at : at + 5], "big") - 0x8000000000
            us, stop = _fraction(data, at + 5, digits)
            year, month = divmod(bits >> 22, 13)
            hour, minute, second = bits >> 12 & 31, bits >> 6 & 63, bits & 63
            if not 0 <= year <= 9999 or hour > 23 or minute > 59 or second > 59:
                raise FormatError(f"{bits:#x} is no DATETIME")
            text = f"{year:04d}-{month:02d}-{bits >> 17 & 31:02d} "
            text += f"{hour:02d}:{minute:02d}:{second:02d}"
        return (text + f".{us:06d}"[: 1 + digits] if digits else text), stop

    return decode


def _fraction(data: memoryview, at: int, digits: int) -> tuple[int, int]:
    """Microseconds of ``digits`` digits, and the offset after them."""
    width = (digits + 1) // 2
    return int.from_bytes(data[at : at + width], "big") * 100 ** (3 - width), at + width


def _datetime(digits: int) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        bits = int.from_bytes(data[at : at + 5], "big") - 0x8000000000
        us, stop = _fraction(data, at + 5, digits)
        year_month, day = bits >> 22 & 0x1FFFF, bits >> 17 & 31
        hour, minute, second = bits >> 12 & 31, bits >> 6 & 63, bits & 63
        year, month = divmod(year_month, 13)
        try:
            return dt.datetime(year, month, day, hour, minute, second, us), stop
        except ValueError:
            text = f"{year:04d}-{month:02d}-{day:02d} {hour:02d}:{minute:02d}:{second:02d}"
            raise _ZeroDate(text, stop) from None

    return decode


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _timestamp(digits: int) -> Decoder:
    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        seconds = int.from_bytes(data[at : at + 4], "big")
        us, stop = _fraction(data, at + 4, digits)
        if not seconds and not us:
            raise _ZeroDate("0000-00-00 00:00:00", stop)
        return _EPOCH + dt.timedelta(seconds=seconds, microseconds=us), stop

    return decode


def _time(digits: int) -> Decoder:
    """A signed number of 24 bits and the bytes of the fraction, as one number with an offset."""
    fraction_bytes = (digits + 1) // 2
    width = 3 + fraction_bytes
    scale_us = 100 ** (3 - fraction_bytes)

    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        number = int.from_bytes(data[at : at + width], "big") - (1 << 8 * width - 1)
        size = abs(number)
        hms, us = size >> 8 * fraction_bytes, size & (1 << 8 * fraction_bytes) - 1
        span = dt.timedelta(
            hours=hms >> 12 & 0x3FF,
            minutes=hms >> 6 & 63,
            seconds=hms & 63,
            microseconds=us * scale_us,
        )
        return -span if number < 0 else span, at + width

    return decode


_SPECIALS: dict[str, Callable[[bytes], Any]] = {
    "uuid": lambda data: uuid.UUID(bytes=data.ljust(16, b"\0")),
    "inet6": lambda data: inet6_text(data.ljust(16, b"\0")),
    "inet4": lambda data: str(ipaddress.IPv4Address(data.ljust(4, b"\0"))),
}


def inet6_text(raw: bytes) -> str:
    """An IPv6 address in MariaDB's form: v4-mapped and v4-compatible ones with dots."""
    if raw[:10] == bytes(10) and raw[10:12] in (b"\0\0", b"\xff\xff"):
        is_mapped = raw[10:12] != b"\0\0"
        if raw[12:14] != b"\0\0":
            return ("::ffff:" if is_mapped else "::") + str(ipaddress.IPv4Address(raw[12:]))
        if is_mapped:  # Python 3.13 and later write it with dots.
            return f"::ffff:0:{int.from_bytes(raw[14:]):x}"
    return str(ipaddress.IPv6Address(raw))
