"""MariaDB and MySQL: a dump's chunks are bounded in bytes, and a row of 64 MiB ends no stream."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from tests.integration.test_suspended_tables import dump
from tests.support.capture import capturing, database_config, streaming, upserted
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import source_of
from tests.support.opened_source import open_source
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, ROW_BYTES, MAX_BYTES = 40, 1 << 20, 4 << 20
MIB = 1 << 20


@pytest.fixture
async def source(database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    database.execute("CREATE TABLE wide (id INT PRIMARY KEY, body LONGTEXT)")
    for key in range(ROWS):
        database.execute(f"INSERT INTO wide VALUES ({key}, REPEAT('x', {ROW_BYTES}))")
    opened = await open_source(source_of(database))
    yield opened
    await opened.close()


@pytest.fixture
def large_packets(database: FreshDatabase) -> Iterator[None]:
    ((before,),) = database.execute("SELECT @@global.max_allowed_packet")
    database.execute(f"SET GLOBAL max_allowed_packet = {256 * MIB}")
    yield
    database.execute(f"SET GLOBAL max_allowed_packet = {before}")


@pytest.mark.parametrize("in_text", [False, True], ids=["binary", "text"])
async def test_a_chunk_ends_with_the_row_that_fills_it_and_the_next_one_follows(
    database: FreshDatabase,
    source: MySqlSource,
    monkeypatch: pytest.MonkeyPatch,
    in_text: bool,
) -> None:
    if in_text:
        monkeypatch.setattr("databus.relay.sources.mysql.chunks.mysql_chunks.COMPILED", False)
    wide = f"{database.name}.wide"
    await source.read_chunk(ChunkRequest(wide, 1))  # The kernels are compiled.
    tracemalloc.start()
    after, found, done = None, [], False
    while not done:
        request = ChunkRequest(wide, 10_000, after=after, is_filtered=True, max_bytes=MAX_BYTES)
        chunk = await source.read_chunk(request)
        assert chunk.rows.size_bytes <= MAX_BYTES + 2 * ROW_BYTES
        found += [key_of(chunk.schema, row.key) for row in chunk.rows]
        after, done = chunk.last_key, chunk.done
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == list(range(ROWS))
    assert peak_bytes < ROWS * ROW_BYTES
    sessions = "SELECT count(*) FROM information_schema.PROCESSLIST WHERE DB IS NULL"

    def are_few() -> bool:
        ((count,),) = database.execute(sessions)
        return int(str(count)) <= 8

    await eventually(are_few, 60, "what was cut off is gone at the server")


async def test_of_a_list_of_keys_as_many_are_looked_for_as_fit(
    database: FreshDatabase, source: MySqlSource
) -> None:
    keys = [[key] for key in range(-3, ROWS + 3)]
    remaining, found, missing = list(keys), [], []
    while remaining:
        chunk = await source.read_chunk(
            ChunkRequest(f"{database.name}.wide", 1000, keys=remaining, max_bytes=MAX_BYTES)
        )
        assert chunk.rows.size_bytes <= MAX_BYTES + 2 * ROW_BYTES
        found += [key_of(chunk.schema, row.key) for row in chunk.rows]
        missing += chunk.missing
        assert chunk.key_count is not None
        remaining = remaining[chunk.key_count :]
        assert chunk.done == (not remaining)
    assert found == list(range(ROWS))
    assert missing == [key for key in keys if not 0 <= key[0] < ROWS]


def key_of(schema: SourceSchema, key: bytes) -> int:
    return int(schema.decode_key(key)["id"])


async def test_a_dump_of_wide_rows_adapts_to_what_a_chunk_may_hold(
    database: FreshDatabase, source: MySqlSource, tmp_path: Path
) -> None:
    config = DatabaseConfig.model_validate(
        database_config("shop", database.url, f"{database.name}.*").model_dump()
        | {"ring_bytes": "128MiB"}
    )
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await dump(tmp_path / "shop", f"{database.name}.wide")
        (done,) = fetcher.book
        assert done.tables is not None
        assert done.tables[0].rows == ROWS
        assert done.tables[0].chunks <= 8
    assert len(upserted(tmp_path / "shop", f"{database.name}.wide")[0]) == ROWS


async def test_a_row_of_64_mib_suspends_its_table_alone_and_fails_its_dump_alone(
    database: FreshDatabase, large_packets: None, tmp_path: Path
) -> None:
    for table in ("calm", "wide", "older"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, body LONGTEXT)")
    database.execute("INSERT INTO older VALUES (1, 's')")
    database.execute(f"INSERT INTO older VALUES (2, REPEAT('x', {64 * MIB}))")
    folder, name = tmp_path / "shop", database.name
    config = database_config("shop", database.url, f"{name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute(f"INSERT INTO wide VALUES (1, REPEAT('x', {64 * MIB}))")
        database.execute("INSERT INTO calm VALUES (1, 's')")
        calm = f"{name}.calm"
        await eventually(lambda: (1,) in upserted(folder, calm)[0], 90, "the other continues")
        (record,) = fetcher.tables.document()
        assert record["source"] == f"{name}.wide"
        assert "takes a frame of 67,1" in record["reason"]
        await dump(folder, f"{name}.older", ends="failed")
        assert "its row with the key [2] takes a frame of 67,1" in str(
            next(iter(fetcher.book)).error
        )
        await dump(folder, calm)
        database.execute("INSERT INTO calm VALUES (2, 's')")
        await eventually(lambda: (2,) in upserted(folder, calm)[0], 60, "the stream continues")
        assert [record["source"] for record in fetcher.tables.document()] == [f"{name}.wide"]
        assert fetcher.status.state == "streaming"
