"""Every MariaDB type: the value in the stream, in a dump and in plain SQL is one value."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from databus.common.errors import PreflightFailed, UnsupportedChange
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from tests.support.fixtures import FreshDatabase, SetRowMetadata
from tests.support.mariadb_stream import mariadb_config, read_to_end
from tests.support.mysql_types import TYPES, Types, is_in_the_kernel, value_rows
from tests.support.opened_source import opened_scn
from tests.support.zero_dates import check_zero_dates_as_text


@pytest.fixture
async def source(mariadb_database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    name = mariadb_database.name
    opened = MySqlSource(mariadb_config(mariadb_database.url, f"{name}.*"))
    yield opened
    await opened.close()


@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL", "NO_LOG"])
@pytest.mark.parametrize(
    "types",
    [TYPES, [t for t in TYPES if is_in_the_kernel("mariadb", t[0])]],
    ids=["python decoder", "kernel"],
)
async def test_all_types_are_equal_in_the_stream_in_a_dump_and_as_inserted(
    mariadb_database: FreshDatabase,
    source: MySqlSource,
    types: Types,
    metadata: str,
    row_metadata: SetRowMetadata,
) -> None:
    row_metadata(mariadb_database.server, metadata)
    columns = ", ".join(f"c{i} {type_}" for i, (type_, _) in enumerate(types))
    mariadb_database.execute(f"CREATE TABLE t (id INT PRIMARY KEY, {columns})")
    start = await opened_scn(source)
    rows = value_rows(types)
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
async def test_an_invalid_date_suspends_its_table_alone_and_fails_a_dump_with_table_and_value(
    mariadb_database: FreshDatabase, source: MySqlSource, column: str, value: str
) -> None:
    db, name = mariadb_database, mariadb_database.name
    why = rf"{name}\.t: .*d .*{value}.*zero_dates"
    db.execute(f"CREATE TABLE t (id INT PRIMARY KEY, d {column} NOT NULL)")
    db.execute("CREATE TABLE other (id INT PRIMARY KEY)")
    start = await opened_scn(source)
    db.transaction(
        "SET sql_mode=''",
        "INSERT INTO other VALUES (1)",
        f"INSERT INTO t VALUES (1, '2024-02-29'), (2, '{value}'), (3, '2024-02-29')",
        "INSERT INTO other VALUES (2)",
    )
    db.execute("INSERT INTO t VALUES (4, '2024-02-29')")
    db.execute("INSERT INTO other VALUES (3)")
    with pytest.raises(UnsupportedChange, match=why):
        await source.read_chunk(ChunkRequest(f"{name}.t", 10))
    streamed = await read_to_end(source, start)
    assert [event.key["id"] for event in streamed.events(f"{name}.other")] == [1, 2, 3]
    assert [event.key["id"] for event in streamed.events(f"{name}.t")] == [1]
    source.use_kernels = False
    assert bytes((await read_to_end(source, start)).data) == bytes(streamed.data)
    (suspension,) = (await source.status())["stopped_tables"].items()
    assert suspension[0] == f"{name}.t"
    assert re.search(why, suspension[1]["why"])


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
    start = await opened_scn(source)
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


@pytest.mark.parametrize("metadata", ["FULL", "NO_LOG"])
async def test_a_date_that_is_none_is_carried_as_text_when_so_configured(
    mariadb_database: FreshDatabase,
    monkeypatch: pytest.MonkeyPatch,
    metadata: str,
    row_metadata: SetRowMetadata,
) -> None:
    row_metadata(mariadb_database.server, metadata)
    await check_zero_dates_as_text(mariadb_database, monkeypatch)


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
