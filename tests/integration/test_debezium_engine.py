"""The Debezium envelope beside Debezium's own engine: the same workload, record by record.

The differences that docs/envelopes.md states are taken out of both sides by ``_comparable``; all
else is equal, schemas included.  Skipped, with the reason, without the engine's jars.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from databus.common.envelopes.debezium_envelope import DebeziumEnvelope
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.frame_changes import FrameChanges, product_of
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_change import EndedWindow
from databus.common.frame.frame_format import Op
from databus.common.schema.source_schema import SchemaSet
from tests.integration.test_postgres_types import SET_UP
from tests.support.debezium_engine import EngineRecord, started_engine
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import read_to_end, source_of
from tests.support.mysql_types import MYSQL_TYPES, TYPES, Types, value_rows
from tests.support.postgres_follower import follow_to, now_scn, opened_on

_KEYED = [
    "INSERT INTO p VALUES (1, 'a', 1, {big}), (2, 'b', 2, NULL)",
    "UPDATE p SET n = 3",
    "UPDATE p SET id = 5, big = 'x' WHERE id = 1",
    "DELETE FROM p WHERE id = 2",
    "TRUNCATE TABLE p",
]
_TABLE = "CREATE TABLE {} (id INT PRIMARY KEY, name VARCHAR(20) NOT NULL, n INT NOT NULL, big TEXT)"
POSTGRES_TYPES: list[tuple[str, list[str]]] = [
    ("bool", ["true", "false"]),
    ("int2", ["-32768"]),
    ("int4", ["-2147483648", "64"]),
    ("int8", ["9223372036854775807"]),
    ("oid", ["4294967295"]),
    ("float4", ["1.1", "'NaN'", "'-Infinity'"]),
    ("float8", ["0.1", "5e-324", "'Infinity'", "1e22"]),
    ("numeric(12,2)", ["-9999999999.99", "0", "327.68"]),
    ("numeric(38,10)", ["1234567890123456789012345678.0123456789"]),
    ("numeric", ["1.500", "0.0000001", "1e40", "0"]),
    ("text", ["''", "'naïve 𝄞 \\ \"q\"'"]),
    ("varchar(10)", ["'ten chars.'"]),
    ("char(5)", ["'ab'"]),
    ('"char"', ["'x'"]),
    ("bytea", ["'\\x'", "'\\x00ff10deadbeef'"]),
    ("date", ["'0001-01-01'", "'9999-12-31'", "'1969-12-31'"]),
    ("time", ["'23:59:59.999999'", "'00:00'"]),
    ("time(3)", ["'12:34:56.7'"]),
    ("timestamp", ["'2024-02-29 12:34:56.000001'", "'0001-01-01 00:00:00'"]),
    ("timestamp(3)", ["'2024-02-29 10:11:12.123'"]),
    ("timestamp(0)", ["'1960-02-29 10:11:12'"]),
    ("timestamptz", ["'2024-06-01 12:00:00.5+02'", "'1901-12-13 20:45:52-00:30'"]),
    ("timestamptz(3)", ["'2024-02-29 10:11:12.120+02'"]),
    ("timestamptz(0)", ["'2024-02-29 10:11:12+02'"]),
    ("timetz", ["'12:00:00+02'", "'24:00:00-01:30'", "'10:11:12.500+02'"]),
    ("interval", ["'1 year 2 mons 3 days 04:05:06.789'", "'-1 day'", "'-00:00:00.5'"]),
    ("uuid", ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"]),
    ("json", ['\'{"b": 1,  "a":[null]}\'']),
    ("jsonb", ['\'{"b": 1,  "a":[null]}\'']),
    ("xml", ["'<a>é</a>'"]),
    ("money", ["1234.5", "-0.5"]),
    ("inet", ["'10.1.2.3'", "'2001:db8::1/64'"]),
    ("cidr", ["'10.1.0.0/16'"]),
    ("macaddr", ["'08-00-2B-01-02-03'"]),
    ("macaddr8", ["'08:00:2b:01:02:03:04:05'"]),
    ("bit(1)", ["B'1'", "B'0'"]),
    ("bit(12)", ["B'101010101011'", "B'000000000001'"]),
    ("varbit", ["B'10'"]),
    ("varbit(20)", ["B'1011'"]),
    ("int4[]", ["'{1,NULL,3}'", "'{}'"]),
    ("text[]", ["ARRAY['a,b', 'q\"', NULL]"]),
    ("uuid[]", ["'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'"]),
    ("bytea[]", ["ARRAY['\\x00ff'::bytea]"]),
    ("bool[]", ["'{t,f}'"]),
    ("date[]", ["'{2024-02-29}'"]),
    ("float8[]", ["'{1.5,NaN}'"]),
    ("numeric(5,2)[]", ["'{1.10,2.20}'"]),
    ("timestamptz[]", ["'{2024-02-29 10:11:12+00}'"]),
    ("jsonb[]", ["ARRAY['{\"a\": 1}'::jsonb]"]),
    ("int8range", ["'(,9223372036854775807)'"]),
    ("tstzrange", ["'[2024-01-01 00:00+02,)'", "'empty'"]),
    ("tsvector", ["'a fat cat'"]),
    ("point", ["'(1.5,2)'"]),
    ("price", ["12.5"]),
    ("citext", ["'MiXed'"]),
    ("hstore", ["'a=>1, b=>NULL'"]),
    ("ltree", ["'Top.Science'"]),
    ("mail", ["'A@b.de'"]),
]
Record = tuple[str, Any, Any]
_POSITION = ("file", "pos", "row", "sequence", "lsn", "version")


def _comparable(document: Any, is_mysql: bool) -> Any:
    """A key or a value without the stated differences."""
    found = copy.deepcopy(document)
    if found is None:
        return None
    payload = found["payload"]
    if "op" in payload:
        for name in ("ts_ms", "ts_us", "ts_ns"):
            payload.pop(name)
        for name in _POSITION + (("server_id", "thread") if is_mysql else ()):
            payload["source"].pop(name, None)
        if is_mysql and payload["op"] == "t":  # The engine has it outside of a transaction.
            payload.pop("transaction")
            for name in ("ts_us", "ts_ns"):
                payload["source"].pop(name)
    elif "status" in payload:
        if payload["status"] == "BEGIN":
            payload.pop("ts_ms")  # The engine has the time of the event before it.
        else:
            payload["data_collections"].sort(key=lambda count: count["data_collection"])
    for block in (payload, payload.get("transaction") or {}):
        if isinstance(txid := block.get("id"), str) and txid.partition(":")[0].isdecimal():
            block["id"] = txid.partition(":")[0]  # PostgreSQL's, which has an LSN behind it.
    _drop(found["schema"])
    return found


def _drop(schema: dict[str, Any]) -> None:
    """The defaults of columns are not in our schemas."""
    for field in schema.get("fields", ()):
        if field.get("field") != "snapshot":
            field.pop("default", None)
        _drop(field)


def _ours(block: bytes, schemas: SchemaSet, clock: str, database: str) -> list[Record]:
    options = EnvelopeOptions(
        product=product_of(clock), prefix="shop", database=database, transactions=True
    )
    envelope, encoding = DebeziumEnvelope(options), JsonEncoding(with_schemas=True)
    records, window = [], []
    counts: dict[str, int] = {}
    for frame, change in FrameChanges(schemas.by_fingerprint).read(block):
        if change is not None:
            counts[change.schema.source] = counts.get(change.schema.source, 0) + 1
            window += envelope.records(change)
        elif frame.op == Op.END_OF_WINDOW:
            ended = EndedWindow(frame.scn, frame.commit_us, bytes(frame.key).decode(), counts)
            if counts:
                records += [*envelope.begin(ended), *window, *envelope.end(ended)]
            window, counts = [], {}
    assert not window

    def document(kind: Any, value: Any) -> Any:
        return None if kind is None else json.loads(encoding.text(kind, value))

    return [
        (one.topic, document(one.key_type, one.key), document(one.value_type, one.value))
        for one in records
    ]


def _compare(
    ours: list[Record],
    engine: list[EngineRecord],
    adjust: Callable[[str, Any], None],
    *,
    is_mysql: bool = False,
    unmarked: Collection[str] = (),
) -> None:
    """All records but those of the table ``marker`` and of the schema-change topic, in order."""
    theirs = [(one.topic, one.key, one.value) for one in engine if one.topic != "shop"]
    left, right = (_relevant(records, is_mysql, unmarked) for records in (ours, theirs))
    for found, wanted in zip(left, right, strict=False):
        for side in (found, wanted):
            if side[2] is not None:
                adjust(side[0], side[2])
        assert found == wanted
    assert len(left) == len(right)
    assert sum(not topic.endswith(".transaction") for topic, _, _ in left) > 10


def _relevant(
    records: list[Record], is_mysql: bool = False, unmarked: Collection[str] = ()
) -> list[list[Any]]:
    retained: list[list[Any]] = []
    for topic, key, value in records:
        is_end = value is not None and value["payload"].get("status") == "END"
        counts = (value["payload"]["data_collections"] if is_end else None) or []
        if any(count["data_collection"].endswith(".marker") for count in counts):
            while retained.pop()[2]["payload"].get("status") != "BEGIN":
                pass
        elif not topic.endswith(".marker") and not (
            topic == "shop.transaction" and key["payload"]["id"] in unmarked
        ):
            retained.append([topic, _comparable(key, is_mysql), _comparable(value, is_mysql)])
    return retained


def _columns_of(value: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(the schema of a row, the row) of before and after."""
    fields = {field["field"]: field for field in value["schema"]["fields"]}
    return [
        (fields[name], value["payload"][name])
        for name in ("before", "after")
        if name in fields and value["payload"].get(name) is not None
    ]


def _without(value: Any, names: set[str]) -> None:
    """Take columns out of the schema and of both rows."""
    for field in value["schema"]["fields"]:
        if field.get("field") in ("before", "after"):
            field["fields"] = [one for one in field["fields"] if one["field"] not in names]
    for _, row in _columns_of(value):
        for name in names:
            row.pop(name, None)


def _binlog_types(product: str) -> Types:
    types = TYPES if product == "mariadb" else MYSQL_TYPES
    return [
        *[one for one in types if not one[0].startswith("inet")],  # The engine refuses the table.
        ("bit(12)", [("b'1'", 1)]),
        ("timestamp(6) null", [("'2024-01-01 00:00:00.5'", None)]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("product", ["mariadb", "mysql"])
async def test_records_of_a_binlog_are_those_of_debeziums_engine(
    product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    db: FreshDatabase = request.getfixturevalue(f"{product}_database")
    types = _binlog_types(product)
    columns = ", ".join(f"c{i} {type_}" for i, (type_, _) in enumerate(types))
    db.execute(f"CREATE TABLE t (id INT PRIMARY KEY, {columns})".replace("%", "%%"))
    db.execute(_TABLE.format("p"))
    db.execute("CREATE TABLE marker (id INT PRIMARY KEY)")
    source = source_of(db)
    await source.open()
    start = await source.first_scn()
    with started_engine(tmp_path, product, db.url, db.name, db.execute) as records:
        for number, row in enumerate(value_rows(types)):
            literals = ", ".join(literal for literal, _ in row)
            db.execute(f"INSERT INTO t VALUES ({number}, {literals})".replace("%", "%%"))
        db.execute("UPDATE t SET c0 = 1")
        db.execute("DELETE FROM t WHERE id = 0")
        for statement in _KEYED:
            db.execute(statement.format(big="'text'"))
        db.transaction("INSERT INTO p VALUES (1, 'a', 1, '')", "UPDATE t SET c0 = 2 WHERE id = 1")
        engine = records()
    streamed = await read_to_end(source, start)
    ours = _ours(bytes(streamed.data), streamed.schemas, source.clock, db.name)
    await source.close()
    # Stated: our schemas have no POINT and no digits of a FLOAT; the engine has other UUIDs of the
    # versions 1 to 5, another YEAR 0, vectors of six digits, and no markers of a truncate.
    special = {
        f"c{i}"
        for i, (name, _) in enumerate(types)
        if name.startswith(("point", "uuid", "float(7,3)", "year", "vector"))
    }
    truncating = {
        value["payload"]["transaction"]["id"] for _, _, value in ours if _op(value) == "t"
    }
    _compare(
        ours,
        engine,
        lambda topic, value: _without(value, special) if topic.endswith(".t") else None,
        is_mysql=product == "mysql",
        unmarked=truncating,
    )


def _op(value: Any) -> Any:
    return None if value is None else value["payload"].get("op")


@pytest.mark.slow
async def test_records_of_postgresql_are_those_of_debeziums_engine(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    db = postgres_database
    types = POSTGRES_TYPES
    columns = ", ".join(f"c{i} {type_}" for i, (type_, _) in enumerate(types))
    set_up = [
        *SET_UP,
        f"CREATE TABLE t (id INT PRIMARY KEY, {columns})",
        _TABLE.format("p"),
        _TABLE.format("f"),
        "ALTER TABLE f REPLICA IDENTITY FULL",
        "CREATE TABLE marker (id INT PRIMARY KEY)",
    ]
    text = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 200) i)"
    async with opened_on(db, *set_up) as (source, start):
        with started_engine(tmp_path, "postgresql", db.url, db.name, db.execute) as records:
            for number in range(max(len(literals) for _, literals in types)):
                values = (literals[number % len(literals)] for _, literals in types)
                db.execute(f"INSERT INTO t VALUES ({number}, {', '.join(values)})")
            for table in "pf":
                for statement in _KEYED:
                    db.execute(
                        statement.format(big=text)
                        .replace(" p ", f" {table} ")
                        .replace("TABLE p", f"TABLE {table}")
                    )
            db.transaction("INSERT INTO p VALUES (1, 'a', 1, '')", "UPDATE t SET c0 = false")
            engine = records()
        seen = await follow_to(source, start, now_scn(db))
        clock = source.clock
    ours = _ours(b"".join(seen.frames), seen.schemas, clock, db.name)
    _compare(ours, engine, lambda topic, value: None)
