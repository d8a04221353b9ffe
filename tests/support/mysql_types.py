"""Values of the types that MariaDB and MySQL have, as SQL literals and as consumers see them."""

from __future__ import annotations

import datetime as dt
import struct
import uuid
from decimal import Decimal as D
from typing import Any

UTC = dt.UTC
Types = list[tuple[str, list[tuple[str, Any]]]]
UUIDS = (
    "00112233-4455-6677-8899-aabbccddeeff",
    "123e4567-e89b-12d3-a456-426655440000",
    "01890a5d-ac96-774b-bcce-b302099a8057",
)


def _points(*points: tuple[float, float]) -> bytes:
    return b"".join(struct.pack("<dd", *point) for point in points)


def _shape(kind: int, count: int, content: bytes) -> bytes:
    """Well-known binary of a geometry, behind the SRID 0."""
    return struct.pack("<IBII", 0, 1, kind, count) + content


POINT = bytes.fromhex("0101000000000000000000f03f0000000000000040")
LINE = struct.pack("<BII", 1, 2, 2) + _points((0, 0), (1, 2))
TRIANGLE = struct.pack("<BIII", 1, 3, 1, 4) + _points((0, 0), (1, 0), (1, 1), (0, 0))

# (column type, the literals that are inserted, the values that consumers see)
TYPES: Types = [
    ("tinyint", [("-128", -128), ("127", 127)]),
    ("tinyint unsigned", [("255", 255), ("0", 0)]),
    ("boolean", [("true", 1), ("false", 0)]),
    ("smallint", [("-32768", -32768), ("32767", 32767)]),
    ("smallint unsigned", [("65535", 65535)]),
    ("mediumint", [("-8388608", -8388608), ("8388607", 8388607)]),
    ("mediumint unsigned", [("16777215", 16777215)]),
    ("int", [("-2147483648", -(2**31)), ("2147483647", 2**31 - 1)]),
    ("int(5) unsigned zerofill", [("4294967295", 2**32 - 1), ("7", 7)]),
    ("bigint", [("-9223372036854775808", -(2**63)), ("9223372036854775807", 2**63 - 1)]),
    ("bigint unsigned", [("18446744073709551615", 2**64 - 1), ("0", 0), ("128", 128)]),
    ("float", [("0.1", 0.10000000149011612), ("-3.5e30", -3.5000001282239955e30)]),
    ("float unsigned", [("16777216.5", 16777216.0)]),
    ("float(7,3)", [("1.25", 1.25)]),
    ("double", [("0.1", 0.1), ("-1.7976931348623157e308", -1.7976931348623157e308)]),
    ("double unsigned", [("2.2250738585072014e-308", 2.2250738585072014e-308)]),
    ("decimal(12,2)", [("-1234567890.12", D("-1234567890.12")), ("0", D("0.00"))]),
    ("decimal(5,5)", [("-0.00001", D("-0.00001")), ("0.99999", D("0.99999"))]),
    ("decimal(10,0)", [("-9999999999", D("-9999999999")), ("128", D(128))]),
    ("decimal(65,30)", [("-" + "9" * 35 + "." + "9" * 30, D("-" + "9" * 35 + "." + "9" * 30))]),
    ("decimal(65,0)", [("9" * 65, D("9" * 65)), ("1" + "0" * 64, D("1" + "0" * 64))]),
    ("decimal(38,18) unsigned", [("1.5", D("1.500000000000000000"))]),
    ("decimal(18,9)", [("-1.000000001", D("-1.000000001"))]),
    ("char(5)", [("'ab  '", "ab"), ("'żółć€'", "żółć€"), ("''", "")]),
    ("char(255)", [("'" + "€" * 255 + "'", "€" * 255)]),
    ("varchar(20)", [("'ab  '", "ab  "), ("'😀\\0x'", "😀\0x")]),
    ("varchar(300)", [("repeat('x', 300)", "x" * 300), ("''", "")]),
    ("varchar(20) character set latin1", [("'café €'", "café €")]),
    ("varchar(20) character set latin2", [("'łódź'", "łódź")]),
    ("varchar(20) character set cp1251", [("'Привет'", "Привет")]),
    ("varchar(20) character set utf16", [("'a😀'", "a😀")]),
    ("varchar(20) character set utf8mb3", [("'żółć'", "żółć")]),
    ("varchar(20) character set sjis", [("'日本'", "日本")]),
    ("varchar(20) character set gbk", [("'中文'", "中文")]),
    ("varchar(20) character set koi8r", [("'Привет'", "Привет")]),
    ("char(10) character set latin1", [("'ÿþ'", "ÿþ")]),
    ("tinytext", [("'t'", "t")]),
    ("text", [("repeat('ab', 30000)", "ab" * 30000), ("''", "")]),
    ("text character set latin1", [("'café'", "café")]),
    ("mediumtext", [("repeat('é', 40000)", "é" * 40000)]),
    ("longtext", [("'l'", "l")]),
    ("binary(4)", [("x'6100'", b"a\0\0\0"), ("x'00000000'", b"\0\0\0\0"), ("x'20'", b" \0\0\0")]),
    ("binary(16)", [("x'0102'", b"\1\2" + b"\0" * 14)]),
    ("varbinary(300)", [("x'00ff00'", b"\0\xff\0"), ("''", b"")]),
    ("tinyblob", [("x'ff'", b"\xff")]),
    ("blob", [("repeat(x'c3', 1000)", b"\xc3" * 1000)]),
    ("mediumblob", [("repeat(x'00', 70000)", b"\0" * 70000)]),
    ("longblob", [("x'80'", b"\x80")]),
    ("date", [("'2024-02-29'", dt.date(2024, 2, 29)), ("'9999-12-31'", dt.date(9999, 12, 31))]),
    ("date", [("'1000-01-01'", dt.date(1000, 1, 1)), ("'1969-12-31'", dt.date(1969, 12, 31))]),
    ("time", [("'-838:59:59'", -dt.timedelta(hours=838, minutes=59, seconds=59))]),
    ("time", [("'00:00:00'", dt.timedelta()), ("'23:59:59'", dt.timedelta(seconds=86399))]),
    ("time(1)", [("'-00:00:00.1'", -dt.timedelta(milliseconds=100))]),
    ("time(3)", [("'-01:00:00.001'", -dt.timedelta(hours=1, milliseconds=1))]),
    ("time(4)", [("'-00:59:59.0001'", -dt.timedelta(minutes=59, seconds=59, microseconds=100))]),
    (
        "time(6)",
        [
            ("'838:59:59.999999'", dt.timedelta(hours=839) - dt.timedelta(microseconds=1)),
            ("'-00:00:00.000001'", -dt.timedelta(microseconds=1)),
        ],
    ),
    ("datetime", [("'2024-02-29 23:59:59'", dt.datetime(2024, 2, 29, 23, 59, 59))]),
    ("datetime(3)", [("'1000-01-01 00:00:00.001'", dt.datetime(1000, 1, 1, 0, 0, 0, 1000))]),
    (
        "datetime(6)",
        [
            ("'9999-12-31 23:59:59.999999'", dt.datetime.max),
            ("'1969-12-31 23:59:59.000001'", dt.datetime(1969, 12, 31, 23, 59, 59, 1)),
        ],
    ),
    ("timestamp null", [("'2038-01-19 03:14:07'", dt.datetime(2038, 1, 19, 3, 14, 7, tzinfo=UTC))]),
    (
        "timestamp(6) null",
        [("'1970-01-01 00:00:01.000001'", dt.datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC))],
    ),
    ("year", [("2155", 2155), ("1901", 1901), ("0", 0)]),
    ("bit(1)", [("b'1'", 1), ("b'0'", 0)]),
    ("bit(12)", [("b'101010101010'", 0b101010101010)]),
    ("bit(64)", [("18446744073709551615", 2**64 - 1)]),
    ("enum('a','it''s','ż')", [("'it''s'", "it's"), ("'ż'", "ż"), ("3", "ż")]),
    ("enum('x','é') character set latin1", [("'é'", "é")]),
    ("set('r','w','ż')", [("'r,ż'", "r,ż"), ("''", ""), ("'w'", "w")]),
    ("json", [("""'{"a": [1, 2.50], "ż": "\\\\u20ac"}'""", '{"a": [1, 2.50], "ż": "\\u20ac"}')]),
    *[("uuid", [(f"'{text}'", uuid.UUID(text))]) for text in UUIDS],
    ("inet6", [("'2001:db8::f0:42:8329'", "2001:db8::f0:42:8329"), ("'::1'", "::1")]),
    ("inet6", [("'::'", "::")]),
    ("inet6", [("'::ffff:192.0.2.128'", "::ffff:192.0.2.128"), ("'::192.0.2.1'", "::192.0.2.1")]),
    ("inet4", [("'192.0.2.0'", "192.0.2.0"), ("'0.0.0.0'", "0.0.0.0")]),
    ("point", [("ST_GeomFromText('POINT(1 2)', 4326)", b"\xe6\x10\0\0" + POINT)]),
    ("geometry", [("ST_GeomFromText('POINT(1 2)')", b"\0\0\0\0" + POINT)]),
    (
        "linestring",
        [("ST_GeomFromText('LINESTRING(0 0,1 2)')", _shape(2, 2, _points((0, 0), (1, 2))))],
    ),
    (
        "polygon",
        [
            (
                "ST_GeomFromText('POLYGON((0 0,1 0,1 1,0 0))')",
                _shape(3, 1, struct.pack("<I", 4) + _points((0, 0), (1, 0), (1, 1), (0, 0))),
            )
        ],
    ),
    ("multipoint", [("ST_GeomFromText('MULTIPOINT(1 2)')", _shape(4, 1, POINT))]),
    (
        "multilinestring",
        [("ST_GeomFromText('MULTILINESTRING((0 0,1 2))')", _shape(5, 1, LINE))],
    ),
    (
        "multipolygon",
        [("ST_GeomFromText('MULTIPOLYGON(((0 0,1 0,1 1,0 0)))')", _shape(6, 1, TRIANGLE))],
    ),
    (
        "geometrycollection",
        [("ST_GeomFromText('GEOMETRYCOLLECTION(POINT(1 2))')", _shape(7, 1, POINT))],
    ),
    (
        "timestamp(3) null",
        [("'2001-09-09 01:46:40.123'", dt.datetime(2001, 9, 9, 1, 46, 40, 123000, tzinfo=UTC))],
    ),
    ("real", [("-2.5", -2.5)]),
    ("numeric(7,3)", [("-1234.567", D("-1234.567"))]),
    ("nchar(4)", [("'żó'", "żó")]),
    ("nvarchar(4)", [("'żółć'", "żółć")]),
    ("varchar(20) character set big5", [("'中文'", "中文")]),
    ("varchar(20) character set ujis", [("'日本'", "日本")]),
    ("varchar(20) character set euckr", [("'한국'", "한국")]),
    ("varchar(20) collate utf8mb4_bin", [("'aA '", "aA ")]),
]  # fmt: skip

NOT_OF_MYSQL = ("uuid", "inet4", "inet6", "json", "point", "time(6)")
LONGEST_TIME = dt.timedelta(hours=838, minutes=59, seconds=59)
US = dt.timedelta(microseconds=1)
VECTORS = [("TO_VECTOR('[1,-2.5,3e10]')", struct.pack("<3f", 1, -2.5, 3e10))]
MYSQL_TYPES: Types = [
    *[one for one in TYPES if one[0] not in NOT_OF_MYSQL],
    ("time(6)", [("'838:59:59'", LONGEST_TIME), ("'-838:59:58.999999'", US - LONGEST_TIME)]),
    # MySQL's JSON is binary; this is the text that it makes of it.
    ("json", [("""'{"a": [1, 2.50], "ż": "\\\\u20ac"}'""", '{"a": [1, 2.5], "ż": "€"}')]),
    ("vector(3)", VECTORS),
    ("vector", VECTORS),
]

_WIDE_CHARSETS = ("utf16", "sjis", "gbk", "big5", "ujis", "euckr")
_PLAIN = {"mariadb": (*_WIDE_CHARSETS, "inet"), "mysql": (*_WIDE_CHARSETS, "json")}


def is_in_the_kernel(server: str, column_type: str) -> bool:
    """Whether a column of this type leaves its table to the kernel, not to the Python decoder."""
    return not any(word in column_type for word in _PLAIN[server])


def value_rows(types: Types) -> list[list[tuple[str, Any]]]:
    """Rows that hold every value of every type once: one of nulls, then value by value."""
    depth = max(len(values) for _, values in types)
    rows: list[list[tuple[str, Any]]] = [[("NULL", None)] * len(types)]
    for number in range(depth):
        rows.append([values[min(number, len(values) - 1)] for _, values in types])
    return rows
