"""Every PostgreSQL type from the stream and from a chunk: equal bytes, and the right values."""

from __future__ import annotations

import datetime as dt
import math
import re
import uuid
from decimal import Decimal
from typing import Any

import pytest

from databus.common.frame.frame_format import read_frame
from databus.common.schema.source_schema import Kind
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.postgres.chunks import chunk_session
from databus.relay.sources.postgres.kernels.binary_value_kernels import DOUBLE, NUMERIC, REAL, TEXT
from databus.relay.sources.postgres.kernels.postgres_chunk_kernels import FORM
from databus.relay.sources.postgres.stream import window_assembler
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import config_of, follow_to, now_scn, opened, opened_on

UTC = dt.UTC
UUID_TEXT = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"

# Type, kind, and pairs of an SQL literal and what consumers see.
TYPES: list[tuple[str, Kind, list[tuple[str, Any]]]] = [
    ("bool", Kind.BOOL, [("true", True), ("false", False)]),
    ("int2", Kind.INT, [("-32768", -32768), ("32767", 32767)]),
    ("int4", Kind.INT, [("-2147483648", -(2**31)), ("0", 0), ("63", 63), ("64", 64)]),
    ("int8", Kind.INT, [("-9223372036854775808", -(2**63)), ("9223372036854775807", 2**63 - 1)]),
    ("oid", Kind.INT, [("4294967295", 2**32 - 1)]),
    ("float4", Kind.FLOAT, [("1.1", 1.1), ("'NaN'", math.nan), ("'-Infinity'", -math.inf)]),
    (
        "float8",
        Kind.FLOAT,
        [
            ("0.1", 0.1),
            ("-1.7976931348623157e308", -1.7976931348623157e308),
            ("5e-324", 5e-324),
            ("'Infinity'", math.inf),
            ("'-0'", -0.0),
            ("123456789012345678", 123456789012345680.0),
            ("1e22", 1e22),
            ("9007199254740993", 9007199254740992.0),
            ("2.5e-7", 2.5e-7),
        ],
    ),
    (
        "numeric(12,2)",
        Kind.DECIMAL,
        [
            ("-9999999999.99", Decimal("-9999999999.99")),
            ("0", Decimal("0.00")),
            ("1.275", Decimal("1.28")),
            ("-1.28", Decimal("-1.28")),
            ("327.68", Decimal("327.68")),
        ],
    ),
    (
        "numeric(38,10)",
        Kind.DECIMAL,
        [
            (
                "1234567890123456789012345678.0123456789",
                Decimal("1234567890123456789012345678.0123456789"),
            )
        ],
    ),
    ("numeric(18,0)", Kind.DECIMAL, [("-999999999999999999", Decimal(-(10**18) + 1))]),
    ("numeric(3,5)", Kind.NUMERIC, [("0.00123", Decimal("0.00123"))]),
    (
        "numeric",
        Kind.NUMERIC,
        [
            ("1.500", Decimal("1.500")),
            ("0.0000001", Decimal("0.0000001")),
            ("'NaN'", Decimal("NaN")),
            ("'-Infinity'", Decimal("-Infinity")),
            ("1e40", Decimal(10) ** 40),
        ],
    ),
    ("text", Kind.STRING, [("''", ""), ("'naïve 𝄞 \\ \"q\" ''s'''", "naïve 𝄞 \\ \"q\" 's'")]),
    ("varchar(10)", Kind.STRING, [("'ten chars.'", "ten chars.")]),
    ("char(5)", Kind.STRING, [("'ab'", "ab   ")]),
    ('"char"', Kind.STRING, [("'x'", "x")]),
    ("name", Kind.STRING, [("'a_name'", "a_name")]),
    (
        "bytea",
        Kind.BYTES,
        [("'\\x'", b""), ("'\\x00ff10deadBEEF'", bytes.fromhex("00ff10deadbeef"))],
    ),
    (
        "date",
        Kind.DATE,
        [
            ("'0001-01-01'", dt.date(1, 1, 1)),
            ("'9999-12-31'", dt.date(9999, 12, 31)),
            ("'1970-01-01'", dt.date(1970, 1, 1)),
            ("'2000-02-29'", dt.date(2000, 2, 29)),
            ("'1969-12-31'", dt.date(1969, 12, 31)),
        ],
    ),
    (
        "time",
        Kind.TIME,
        [("'00:00'", dt.time(0)), ("'23:59:59.999999'", dt.time(23, 59, 59, 999999))],
    ),
    ("time(3)", Kind.TIME, [("'12:34:56.7'", dt.time(12, 34, 56, 700000))]),
    (
        "timestamp",
        Kind.TIMESTAMP,
        [
            ("'2024-02-29 12:34:56.000001'", dt.datetime(2024, 2, 29, 12, 34, 56, 1)),
            ("'0001-01-01 00:00:00'", dt.datetime(1, 1, 1)),
            ("'9999-12-31 23:59:59.999999'", dt.datetime(9999, 12, 31, 23, 59, 59, 999999)),
        ],
    ),
    (
        "timestamptz",
        Kind.TIMESTAMPTZ,
        [
            ("'2024-06-01 12:00:00.5+02'", dt.datetime(2024, 6, 1, 10, 0, 0, 500000, UTC)),
            ("'1901-12-13 20:45:52-00:30'", dt.datetime(1901, 12, 13, 21, 15, 52, 0, UTC)),
        ],
    ),
    (
        "timetz",
        Kind.STRING,
        [("'12:00:00+02'", "12:00:00+02"), ("'24:00:00-01:30'", "24:00:00-01:30")],
    ),
    (
        "interval",
        Kind.STRING,
        [("'1 year 2 mons 3 days 04:05:06.7'", "1 year 2 mons 3 days 04:05:06.7")],
    ),
    (
        "uuid",
        Kind.UUID,
        [
            (
                "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
                uuid.UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
            )
        ],
    ),
    ("json", Kind.JSON, [('\'{"b": 1,  "a":[null]}\'', '{"b": 1,  "a":[null]}')]),
    ("jsonb", Kind.JSON, [('\'{"b": 1,  "a":[null]}\'', '{"a": [null], "b": 1}')]),
    ("xml", Kind.STRING, [("'<a>é</a>'", "<a>é</a>")]),
    ("money", Kind.STRING, [("1234.5", "$1,234.50")]),
    ("inet", Kind.STRING, [("'10.1.2.3'", "10.1.2.3"), ("'2001:db8::1/64'", "2001:db8::1/64")]),
    ("cidr", Kind.STRING, [("'10.1.0.0/16'", "10.1.0.0/16")]),
    ("macaddr", Kind.STRING, [("'08-00-2B-01-02-03'", "08:00:2b:01:02:03")]),
    ("macaddr8", Kind.STRING, [("'08:00:2b:01:02:03:04:05'", "08:00:2b:01:02:03:04:05")]),
    ("bit(1)", Kind.STRING, [("B'1'", "1")]),
    ("bit(3)", Kind.STRING, [("B'101'", "101")]),
    ("varbit", Kind.STRING, [("B'10'", "10")]),
    ("int4[]", Kind.STRING, [("'{{1,2},{3,NULL}}'", "{{1,2},{3,NULL}}")]),
    ("text[]", Kind.STRING, [("ARRAY['a,b', 'q\"', NULL]", '{"a,b","q\\"",NULL}')]),
    ("uuid[]", Kind.STRING, [(f"ARRAY['{UUID_TEXT}']::uuid[]", f"{{{UUID_TEXT}}}")]),
    ("bytea[]", Kind.STRING, [("ARRAY['\\x00ff'::bytea]", '{"\\\\x00ff"}')]),
    ("numeric[]", Kind.STRING, [("'{1.50,NaN,-Infinity}'", "{1.50,NaN,-Infinity}")]),
    ("timestamptz[]", Kind.STRING, [("'{infinity}'", "{infinity}")]),
    ("money[]", Kind.STRING, [("ARRAY[1.5::money]", "{$1.50}")]),
    ("interval[]", Kind.STRING, [("ARRAY['-1 day'::interval]", '{"-1 days"}')]),
    ("hstore[]", Kind.STRING, [("ARRAY['a=>1'::hstore]", '{"\\"a\\"=>\\"1\\""}')]),
    ("mood[]", Kind.STRING, [("'{sad,NULL}'", "{sad,NULL}")]),
    ("int2[]", Kind.STRING, [("'[0:1][2:3]={{1,2},{3,4}}'", "[0:1][2:3]={{1,2},{3,4}}")]),
    ("int8range", Kind.STRING, [("'(,9223372036854775807)'", "(,9223372036854775807)")]),
    ("numrange", Kind.STRING, [("'[1.10,]'", "[1.10,)")]),
    ("daterange", Kind.STRING, [("'[2024-02-28,2024-02-29]'", "[2024-02-28,2024-03-01)")]),
    (
        "tstzrange",
        Kind.STRING,
        [("'[2024-01-01 00:00+02,)'", '["2023-12-31 22:00:00+00",)'), ("'empty'", "empty")],
    ),
    ("int4multirange", Kind.STRING, [("'{}'", "{}")]),
    ("int4range", Kind.STRING, [("'[1,5)'", "[1,5)")]),
    ("nummultirange", Kind.STRING, [("'{[1,2),[3,4)}'", "{[1,2),[3,4)}")]),
    ("tsvector", Kind.STRING, [("'a fat cat'", "'a' 'cat' 'fat'")]),
    ("tsquery", Kind.STRING, [("'fat & !rat'", "'fat' & !'rat'")]),
    ("jsonpath", Kind.STRING, [("'$.a'", '$."a"')]),
    ("point", Kind.STRING, [("'(1.5,2)'", "(1.5,2)")]),
    ("line", Kind.STRING, [("'{1,-1,0}'", "{1,-1,0}")]),
    ("lseg", Kind.STRING, [("'[(0,0),(1,1)]'", "[(0,0),(1,1)]")]),
    ("box", Kind.STRING, [("'(2,2),(0,0)'", "(2,2),(0,0)")]),
    ("path", Kind.STRING, [("'[(0,0),(1,1)]'", "[(0,0),(1,1)]")]),
    ("polygon", Kind.STRING, [("'((0,0),(1,1),(1,0))'", "((0,0),(1,1),(1,0))")]),
    ("circle", Kind.STRING, [("'<(1,2),3>'", "<(1,2),3>")]),
    ("isbn13", Kind.STRING, [("'9780393040029'", "978-0-393-04002-9")]),
    ("pg_lsn", Kind.STRING, [("'16/B374D848'", "16/B374D848")]),
    ("mood", Kind.STRING, [("'happy'", "happy")]),
    ("pair", Kind.STRING, [("ROW(1, 'x y')::pair", '(1,"x y")')]),
    ("price", Kind.DECIMAL, [("12.5", Decimal("12.50"))]),
    ("positive", Kind.INT, [("7", 7)]),
    ("nested", Kind.INT, [("8", 8)]),
    ("citext", Kind.STRING, [("'MiXed'", "MiXed")]),
    ("hstore", Kind.STRING, [("'a=>1, b=>NULL'", '"a"=>"1", "b"=>NULL')]),
    ("ltree", Kind.STRING, [("'Top.Science'", "Top.Science")]),
    ("cube", Kind.STRING, [("'(1,2),(3,4)'", "(1, 2),(3, 4)")]),
    ("unheard", Kind.STRING, [("'[1,2.5,3]'", "[1,2.5,3]")]),
    ("over_unheard", Kind.STRING, [("'[1]'", "[1]")]),
    ("mail", Kind.STRING, [("'A@b.de'", "A@b.de")]),
]

SET_UP = [
    "CREATE EXTENSION IF NOT EXISTS citext",
    "CREATE EXTENSION IF NOT EXISTS hstore",
    "CREATE EXTENSION IF NOT EXISTS ltree",
    "CREATE EXTENSION IF NOT EXISTS isn",
    "CREATE EXTENSION IF NOT EXISTS cube",
    "CREATE TYPE mood AS ENUM ('sad', 'happy')",
    "CREATE TYPE pair AS (n int, t text)",
    "CREATE DOMAIN price AS numeric(10, 2)",
    "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    "CREATE DOMAIN nested AS positive",
    # A base type of an unknown name, as those of PostGIS and pgvector are.
    "CREATE TYPE unheard",
    "CREATE FUNCTION unheard_in(cstring) RETURNS unheard LANGUAGE internal IMMUTABLE STRICT "
    "AS 'textin'",
    "CREATE FUNCTION unheard_out(unheard) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT "
    "AS 'textout'",
    "CREATE TYPE unheard (INPUT = unheard_in, OUTPUT = unheard_out)",
    "CREATE DOMAIN over_unheard AS unheard",
    "CREATE DOMAIN mail AS citext CHECK (VALUE LIKE '%@%')",
]


def is_since(database: FreshDatabase, version: int) -> bool:
    return int(database.server.version.split(".")[0]) >= version


def known_types(database: FreshDatabase) -> list[tuple[str, Kind, list[tuple[str, Any]]]]:
    """The types that the server has, with the values that it has: infinite numeric since 14."""
    lacks = () if is_since(database, 14) else ("'-Infinity'", "'{1.50,NaN,-Infinity}'")
    return [
        (name, kind, [case for case in cases if "numeric" not in name or case[0] not in lacks])
        for name, kind, cases in TYPES
        if is_known(database, name)
    ]


def is_known(database: FreshDatabase, type_name: str) -> bool:
    """Multiranges are there since version 14, scales beyond the precision or below 0 since 15."""
    scale = re.fullmatch(r"numeric\((\d+),(-?\d+)\)", type_name)
    if scale is not None and not 0 <= int(scale[2]) <= int(scale[1]):
        return is_since(database, 15)
    return is_since(database, 14) or "multirange" not in type_name


# What a session of this database has unless it asks for something else.
ODD_SESSIONS = {
    "TimeZone": "'Asia/Kolkata'",
    "DateStyle": "'SQL, DMY'",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-5",
    "xmloption": "content",
}


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return math.copysign(1, found) == math.copysign(1, expected) and (
            found == expected or (math.isnan(found) and math.isnan(expected))
        )
    if isinstance(expected, Decimal):
        return str(found) == str(expected) or found == expected
    return type(found) is type(expected) and bool(found == expected)


@pytest.fixture(params=[True, False], ids=["kernel", "reference"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Windows are put together by the kernel, then by the reference."""
    if not request.param:
        monkeypatch.setitem(
            window_assembler.WindowAssembler.__init__.__kwdefaults__, "compiled", False
        )
    return bool(request.param)


@pytest.mark.usefixtures("compiled")
async def test_each_type_has_one_value_from_stream_and_chunk(db: FreshDatabase) -> None:
    types = known_types(db)
    for name, value in ODD_SESSIONS.items():
        db.execute(f"ALTER DATABASE {db.name} SET {name} = {value}")
    for statement in SET_UP:
        db.execute(statement)
    for number, (type_name, _, _) in enumerate(types):
        db.execute(f"CREATE TABLE t{number:02} (id int PRIMARY KEY, v {type_name})")
    async with opened_on(db) as (source, start):
        for number, (_, _, cases) in enumerate(types):
            for row, (literal, _) in enumerate(cases):
                db.execute(f"INSERT INTO t{number:02} VALUES ({row}, {literal})")
            db.execute(f"INSERT INTO t{number:02} VALUES (-1, NULL)")
        seen = await follow_to(source, start, now_scn(db))
        streamed = {}
        for data in seen.frames:
            frame = read_frame(data)
            if not frame.is_control:
                name = seen.schemas.by_fingerprint(frame.schema_fp).source
                streamed[name, bytes(frame.key)] = frame
        for number, (type_name, kind, cases) in enumerate(types):
            chunk = await source.read_chunk(ChunkRequest(f"public.t{number:02}", 100))
            assert len(chunk.rows) == len(cases) + 1
            assert chunk.schema.columns[1].kind is kind, type_name
            expected = dict(enumerate(value for _, value in cases)) | {-1: None}
            for row in chunk.rows:
                frame = streamed[chunk.schema.source, row.key]
                assert frame.after is not None
                assert bytes(frame.after) == row.row, type_name
                assert frame.schema_fp == chunk.schema.fingerprint
                found = chunk.schema.decode_row(row.row)
                value = expected[found["id"]]
                assert _same(found["v"], value), (type_name, found["v"], value)


PLAIN_REALS = ["0.5", "0", "-0.0", "1024", "0.3", "16777216", "1e10", "9.5367e-7"]
PLAIN_DECIMALS = ["0.01", "-0.01", "1", "10000", "99990000.5", "1234567890.12"]
ODD_REALS = ["3.4028235e38", "1.17549435e-38", "1e-45", "-Infinity"]


@pytest.mark.usefixtures("compiled")
async def test_reals_and_decimals_of_chunks_in_binary_are_those_of_the_stream_in_text(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses the odd ones, so their chunk is read as text."""
    forms, make = list[list[int]](), chunk_session.RowBuffer.of

    def recorded(*args: Any, **options: Any) -> chunk_session.RowBuffer:
        rows = make(*args, **options)
        forms.append(rows.columns[:, FORM].tolist())
        return rows

    monkeypatch.setattr(chunk_session.RowBuffer, "of", recorded)
    for table in ("plain", "odd"):
        db.execute(f"CREATE TABLE {table} (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
                   "r float4, d float8, n numeric(12,2))")  # fmt: skip
    async with opened_on(db) as (source, start):
        db.execute(
            "INSERT INTO plain (r, d) SELECT x, x FROM (SELECT (random() * "
            "power(10, n % 30 - 10))::float4 AS x FROM generate_series(1, 3000) n) AS reals"
        )
        for table, column, values in (
            ("plain", "r", PLAIN_REALS),
            ("plain", "n", PLAIN_DECIMALS),
            ("odd", "r", ODD_REALS),
        ):
            rows = ", ".join(f"('{value}')" for value in values)
            db.execute(f"INSERT INTO {table} ({column}) VALUES {rows}")
        seen = await follow_to(source, start, now_scn(db))
        frames = [frame for frame in map(read_frame, seen.frames) if not frame.is_control]
        chunks = [
            await source.read_chunk(ChunkRequest(f"public.{t}", 10_000)) for t in ("plain", "odd")
        ]
    for chunk in chunks:
        streamed = {
            bytes(frame.key): bytes(frame.after or b"")
            for frame in frames
            if frame.schema_fp == chunk.schema.fingerprint
        }
        assert {row.key: row.row for row in chunk.rows} == streamed
    assert [len(chunk.rows) for chunk in chunks] == [3014, len(ODD_REALS)]
    in_binary, in_text = [TEXT, REAL, DOUBLE, NUMERIC], [TEXT] * 4
    assert forms == [in_binary, in_binary, in_text]


# Type, an SQL literal of a value that its kind cannot hold, and that value's text.
SPECIAL = [
    ("date", "'infinity'", "infinity"),
    ("date", "'0044-03-15 BC'", "0044-03-15 BC"),
    ("date", "'10000-01-01'", "10000-01-01"),
    ("time", "'24:00:00'", "24:00:00"),
    ("timestamp", "'-infinity'", "-infinity"),
    ("timestamp", "'294276-12-31 23:59:59'", "294276-12-31 23:59:59"),
    ("timestamptz", "'infinity'", "infinity"),
    ("timestamptz", "'0044-03-15 00:00:00+00 BC'", "0044-03-15 00:00:00+00 BC"),
    ("numeric(6,2)", "'NaN'", "NaN"),
]


async def test_values_beyond_their_kind_become_null_where_that_is_configured(
    db: FreshDatabase,
) -> None:
    for number, (type_name, _, _) in enumerate(SPECIAL):
        db.execute(f"CREATE TABLE s{number} (id int PRIMARY KEY, v {type_name} NOT NULL)")
    async with opened_on(db, special_values="null") as (source, start):
        for number, (_, literal, _) in enumerate(SPECIAL):
            db.execute(f"INSERT INTO s{number} VALUES (1, {literal})")
        seen = await follow_to(source, start, now_scn(db))
        assert [e.after for e in seen.events] == [{"id": 1, "v": None}] * len(SPECIAL)
        for number in range(len(SPECIAL)):
            chunk = await source.read_chunk(ChunkRequest(f"public.s{number}", 10))
            assert chunk.schema.decode_row(chunk.rows[0].row)["v"] is None
            assert chunk.schema.fingerprint in seen.schemas


# Type, and pairs of an SQL literal and its text: values of every day, and those of SPECIAL.
AS_TEXT: list[tuple[str, list[tuple[str, str]]]] = [
    ("date", [("'2024-02-29'", "2024-02-29")]),
    ("time(3)", [("'12:34:56.7'", "12:34:56.7"), ("'24:00'", "24:00:00")]),
    ("timetz", [("'24:00:00-01:30'", "24:00:00-01:30")]),
    ("timestamp", [("'2024-02-29 12:34:56.5'", "2024-02-29 12:34:56.5")]),
    ("timestamptz", [("'2024-06-01 12:00:00.5+02'", "2024-06-01 10:00:00.5+00")]),
    ("numeric(20,10)", [("0", "0.0000000000"), ("-1.5", "-1.5000000000"), ("'NaN'", "NaN")]),
    ("payday", [("'infinity'", "infinity")]),
]


async def test_values_beyond_their_kind_are_carried_as_text_where_that_is_configured(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(chunk_session, "COMPILED", False)
    db.execute("CREATE DOMAIN payday AS date")
    columns: dict[str, list[tuple[str, str]]] = {name: list(cases) for name, cases in AS_TEXT}
    for type_name, literal, text in SPECIAL:
        columns.setdefault(type_name, []).append((literal, text))
    for number, type_name in enumerate(columns):
        # The key and the value; another key column behind it, for chunks that end in between.
        db.execute(
            f"CREATE TABLE k{number} (k {type_name}, n int, v {type_name}, PRIMARY KEY (k, n))"
        )
    async with opened_on(db, special_values="text") as (source, start):
        for number, cases in enumerate(columns.values()):
            rows = [f"({one}, {n}, {one})" for one, _ in cases for n in (1, 2)]
            db.execute(f"INSERT INTO k{number} VALUES {', '.join(rows)}")
        db.execute("UPDATE k0 SET n = 3 WHERE k = 'infinity' AND n = 2")
        db.execute("DELETE FROM k0 WHERE k = '0044-03-15 BC' AND n = 2")
        seen = await follow_to(source, start, now_scn(db))
        streamed: dict[str, dict[bytes, bytes]] = {}
        for data in seen.frames:
            frame = read_frame(data)
            if not frame.is_control:
                rows_now = streamed.setdefault(
                    seen.schemas.by_fingerprint(frame.schema_fp).source, {}
                )
                rows_now.pop(bytes(frame.key), None)
                if frame.after is not None:
                    rows_now[bytes(frame.key)] = bytes(frame.after)
        for number, (type_name, cases) in enumerate(columns.items()):
            name = f"public.k{number}"
            upto = await source.largest_key(name)
            dumped, pages, after, done = dict[bytes, bytes](), 0, None, False
            while not done:
                chunk = await source.read_chunk(ChunkRequest(name, 1, after=after, upto=upto))
                dumped |= {row.key: row.row for row in chunk.rows}
                after, done, pages = chunk.last_key, chunk.done, pages + 1
            assert dumped == streamed[name], type_name
            assert pages == len(dumped) + 1
            schema = chunk.schema
            column = schema.columns[0]
            assert (column.kind, schema.columns[2].kind) == (Kind.STRING, Kind.STRING)
            assert column.type_name.startswith(type_name[:4])
            assert schema.key_codec.avro["fields"][0]["databus.type"] == column.type_name
            values = {tuple(schema.decode_row(row).values()) for row in dumped.values()}
            expected = {(text, n, text) for _, text in cases for n in (1, 2)}
            if number == 0:
                expected -= {("infinity", 2, "infinity"), ("0044-03-15 BC", 2, "0044-03-15 BC")}
                expected |= {("infinity", 3, "infinity")}
            assert values == expected, type_name
            chunk = await source.read_chunk(
                ChunkRequest(name, 10, keys=[[cases[-1][1], 1], ["2001-01-01", 7]])
                if type_name == "date"
                else ChunkRequest(name, 10, keys=[[cases[-1][1], 1]])
            )
            assert len(chunk.rows) == 1
            assert len(chunk.missing) == (type_name == "date")


KEYS = [
    ("uuid", "gen_random_uuid()"),
    ("text", "md5(i::text)"),
    ('text COLLATE "C"', "chr(60 + i)"),
    ("text COLLATE german", "chr(60 + i) || CASE i % 3 WHEN 0 THEN 'ß' ELSE 'É' END"),
    ("text COLLATE any_case", "chr(60 + i)"),
    ("numeric(10,3)", "i / 7.0"),
    ("bytea", "decode(md5(i::text), 'hex')"),
    ("timestamptz", "now() + i * interval '1.5 s'"),
    ("date", "date '2024-01-01' + i"),
    ("bool, w int", "i % 2 = 0"),
    ("mood", "NULL"),
]


async def test_chunks_page_by_keys_of_many_types(db: FreshDatabase) -> None:
    db.execute("CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')")
    db.execute("CREATE COLLATION german (provider = icu, locale = 'de')")
    db.execute(
        "CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', "
        "deterministic = false)"
    )
    for number, (type_name, expression) in enumerate(KEYS):
        name = f"k{number}"
        if ", w" in type_name:
            db.execute(f"CREATE TABLE {name} (k {type_name}, PRIMARY KEY (k, w))")
            db.execute(f"INSERT INTO {name} SELECT {expression}, i FROM generate_series(1, 25) i")
        elif "any_case" in type_name:
            # In both cases, which this collation holds to be equal.
            db.execute(f"CREATE TABLE {name} (k {type_name} PRIMARY KEY)")
            db.execute(
                f"INSERT INTO {name} SELECT {expression} FROM generate_series(1, 25) i "
                "ON CONFLICT DO NOTHING"
            )
        elif type_name == "mood":
            db.execute(f"CREATE TABLE {name} (k mood PRIMARY KEY)")
            db.execute(f"INSERT INTO {name} VALUES ('happy'), ('sad'), ('ok')")
        else:
            db.execute(f"CREATE TABLE {name} (k {type_name} PRIMARY KEY)")
            db.execute(f"INSERT INTO {name} SELECT {expression} FROM generate_series(1, 25) i")
    async with opened(config_of(db)) as source:
        for number in range(len(KEYS)):
            name = f"k{number}"
            upto = await source.largest_key(f"public.{name}")
            keys, after, done = [], None, False
            while not done:
                chunk = await source.read_chunk(
                    ChunkRequest(f"public.{name}", 2, after=after, upto=upto)
                )
                keys += [row.key for row in chunk.rows]
                after, done = chunk.last_key, chunk.done
            ((count,),) = db.execute(f"SELECT count(*) FROM {name}")
            assert len(keys) == len(set(keys)) == count
            # The same in chunks whose ends are known before, as they are when read in parallel.
            bounded, after, bound = [], None, None
            while bound is not None or not bounded:
                request = ChunkRequest(f"public.{name}", 3, after=after, upto=upto)
                bound = await source.chunk_end(request)
                chunk = await source.read_chunk(
                    ChunkRequest(f"public.{name}", 9, after=after, upto=bound or upto)
                )
                assert len(chunk.rows) <= 3
                assert chunk.done
                bounded += [row.key for row in chunk.rows]
                after = bound
            assert bounded == keys
