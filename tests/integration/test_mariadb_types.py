"""Every MariaDB type: the value in the stream, in a dump and in plain SQL is one value."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from databus.common.errors import PreflightFailed, UnsupportedChange
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.source import ChunkRequest
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, read_to_end

D = decimal.Decimal
UTC = dt.UTC
Types = list[tuple[str, list[tuple[str, Any]]]]

UUIDS = (
    "00112233-4455-6677-8899-aabbccddeeff",
    "123e4567-e89b-12d3-a456-426655440000",
    "01890a5d-ac96-774b-bcce-b302099a8057",
)
POINT = bytes.fromhex("0101000000000000000000f03f0000000000000040")

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
]  # fmt: skip


@pytest.fixture
async def source(mariadb_database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    name = mariadb_database.name
    opened = MySqlSource(mariadb_config(mariadb_database.url, f"{name}.*"))
    yield opened
    await opened.close()


def _value_rows(types: Types) -> list[list[tuple[str, Any]]]:
    """Rows that hold every value of every type once: one of nulls, then value by value."""
    depth = max(len(values) for _, values in types)
    rows: list[list[tuple[str, Any]]] = [[("NULL", None)] * len(types)]
    for number in range(depth):
        rows.append([values[min(number, len(values) - 1)] for _, values in types])
    return rows


# One column of these leaves its whole table to the Python decoder.
NOT_IN_THE_KERNEL = ("inet", "utf16", "sjis", "gbk")


@pytest.mark.parametrize(
    "types",
    [TYPES, [t for t in TYPES if not any(word in t[0] for word in NOT_IN_THE_KERNEL)]],
    ids=["python decoder", "kernel"],
)
async def test_all_types_are_equal_in_the_stream_in_a_dump_and_as_inserted(
    mariadb_database: FreshDatabase, source: MySqlSource, types: Types
) -> None:
    columns = ", ".join(f"c{i} {type_}" for i, (type_, _) in enumerate(types))
    mariadb_database.execute(f"CREATE TABLE t (id INT PRIMARY KEY, {columns})")
    await source.open()
    start = await source.first_scn()
    rows = _value_rows(types)
    for number, row in enumerate(rows):
        literals = ", ".join(literal for literal, _ in row)
        mariadb_database.execute(f"INSERT INTO t VALUES ({number}, {literals})".replace("%", "%%"))
    mariadb_database.execute("UPDATE t SET c0 = 1")
    mariadb_database.execute("DELETE FROM t WHERE id = 0")
    streamed = await read_to_end(source, start)
    events = streamed.events()
    wanted = [{"id": n} | {f"c{i}": v for i, (_, v) in enumerate(r)} for n, r in enumerate(rows)]
    assert [event.after for event in events[: len(rows)]] == wanted
    updates = events[len(rows) : -1]
    assert [event.before for event in updates] == wanted
    assert [event.after for event in updates] == [row | {"c0": 1} for row in wanted]
    assert events[-1].before == wanted[0] | {"c0": 1}
    assert [schema.fingerprint for schema in await source.schemas()] == [
        schema.fingerprint for schema in streamed.schemas
    ]
    chunk = await source.read_chunk(ChunkRequest(f"{mariadb_database.name}.t", 100))
    assert chunk.done
    views = [view for view in streamed.frames() if view.after and not view.is_control]
    last = {bytes(view.key): bytes(view.after or b"") for view in views}
    del last[chunk.schema.encode_key([0])]
    assert {row.key: row.row for row in chunk.rows} == last


@pytest.mark.parametrize("value", ["0000-00-00", "2020-00-00", "2020-02-00"])
@pytest.mark.parametrize("column", ["date", "datetime(3)"])
async def test_a_date_that_is_none_stops_the_stream_and_a_dump_with_its_table_and_value(
    mariadb_database: FreshDatabase, source: MySqlSource, column: str, value: str
) -> None:
    mariadb_database.execute(f"CREATE TABLE t (id INT PRIMARY KEY, d {column} NOT NULL)")
    await source.open()
    start = await source.first_scn()
    mariadb_database.transaction("SET sql_mode=''", f"INSERT INTO t VALUES (1, '{value}')")
    with pytest.raises(UnsupportedChange, match=rf"{mariadb_database.name}\.t: .*d .*{value}"):
        await read_to_end(source, start)
    with pytest.raises(UnsupportedChange, match=rf"{mariadb_database.name}\.t: .*d .*{value}"):
        await source.read_chunk(ChunkRequest(f"{mariadb_database.name}.t", 10))


async def test_a_date_that_is_none_becomes_null_when_so_configured(
    mariadb_database: FreshDatabase,
) -> None:
    name = mariadb_database.name
    mariadb_database.execute(
        "CREATE TABLE t (id INT PRIMARY KEY, d DATE NOT NULL, e DATETIME NOT NULL, "
        "f TIMESTAMP NOT NULL)"
    )
    source = MySqlSource(
        mariadb_config(mariadb_database.url, f"{name}.*", options={"zero_dates": "null"})
    )
    await source.open()
    start = await source.first_scn()
    mariadb_database.transaction(
        "SET sql_mode=''", "INSERT INTO t VALUES (1, '0000-00-00', '2020-00-01', '0000-00-00')"
    )
    streamed = await read_to_end(source, start)
    chunk = await source.read_chunk(ChunkRequest(f"{name}.t", 10))
    assert [event.after for event in streamed.events()] == [
        {"id": 1, "d": None, "e": None, "f": None}
    ]
    assert chunk.schema.decode_row(chunk.rows[0].row) == {"id": 1, "d": None, "e": None, "f": None}
    assert chunk.schema.fingerprint in streamed.schemas
    await source.close()


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ("v varchar(10) compressed", "v"),
        ("v varchar(10) character set armscii8", None),
        ("v varchar(10) character set swe7", None),
    ],
)
async def test_a_type_is_carried_or_refused_by_name_at_the_preflight(
    mariadb_database: FreshDatabase, source: MySqlSource, columns: str, named: str | None
) -> None:
    mariadb_database.execute(f"CREATE TABLE t (id INT PRIMARY KEY, {columns})")
    if named is None:
        await source.open()
        return
    with pytest.raises(PreflightFailed, match=rf"{mariadb_database.name}\.t: column {named}"):
        await source.open()
