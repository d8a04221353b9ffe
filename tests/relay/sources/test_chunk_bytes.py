"""A chunk of large rows ends at its bound in bytes, and the next one continues behind it."""

from __future__ import annotations

import contextlib
import sqlite3
import tracemalloc
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import UnsupportedChange
from databus.relay.sources.configured_keys import NO_KEYS
from databus.relay.sources.contract import MAX_CHUNK_BYTES, ChunkRequest
from databus.relay.sources.generator.generator_source import GeneratorSource
from databus.relay.sources.row_buffers import warm_up
from databus.relay.sources.sqlite.sqlite_chunks import SqliteChunkReader
from databus.relay.sources.sqlite.sqlite_log import install

ROWS, ROW_BYTES = 80, 1 << 20


def test_sqlite_reads_rows_of_a_megabyte_a_few_at_a_time(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    install(connection)
    connection.execute("CREATE TABLE wide (id INTEGER PRIMARY KEY, body BLOB)")
    for key in range(ROWS):
        connection.execute("INSERT INTO wide VALUES (?, zeroblob(?))", (key, ROW_BYTES))
    connection.close()
    reader = SqliteChunkReader(str(tmp_path / "shop.db"), NO_KEYS)
    warm_up()  # What the compiler takes is not the chunk's.
    tracemalloc.start()
    after, count, done = None, 0, False
    while not done:
        chunk = reader.read(ChunkRequest("main.wide", 10_000, after=after))
        assert chunk.rows.size_bytes <= MAX_CHUNK_BYTES + ROW_BYTES
        after, done, count = chunk.last_key, chunk.done, count + len(chunk.rows)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reader.close()
    assert count == ROWS
    assert peak_bytes < 5 * MAX_CHUNK_BYTES, "rows, packed rows, their buffer"


def test_of_a_list_of_keys_sqlite_looks_for_as_many_as_fit(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    install(connection)
    connection.execute("CREATE TABLE wide (id INTEGER PRIMARY KEY, body BLOB)")
    for key in range(20):
        connection.execute("INSERT INTO wide VALUES (?, zeroblob(?))", (key, ROW_BYTES))
    connection.close()
    reader = SqliteChunkReader(str(tmp_path / "shop.db"), NO_KEYS)
    remaining, count, missing, done = [[key] for key in range(22)], 0, [], False
    while not done:
        request = ChunkRequest("main.wide", 100, keys=remaining, max_bytes=4 * ROW_BYTES)
        chunk = reader.read(request)
        assert chunk.rows.size_bytes <= 5 * ROW_BYTES
        remaining, done = remaining[chunk.key_count :], chunk.done
        count, missing = count + len(chunk.rows), missing + chunk.missing
    assert (count, missing, remaining) == (20, [[20], [21]], [])
    reader.close()


def test_an_sqlite_chunk_that_failed_leaves_no_snapshot_behind(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        install(db)
        db.execute("CREATE TABLE odd (id INTEGER PRIMARY KEY, v TEXT)")
        db.execute("INSERT INTO odd VALUES (1, 'a'), (2, CAST(x'61ff' AS TEXT)), (3, 'c')")
        reader = SqliteChunkReader(str(tmp_path / "shop.db"), NO_KEYS)
        with pytest.raises(UnsupportedChange, match="not UTF-8") as _kept:
            reader.read(ChunkRequest("main.odd", 10))
        db.execute("UPDATE odd SET v = 'b' WHERE id = 2")
        # A reader that holds a snapshot prevents the log from being emptied: "busy" is 1.
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        assert len(reader.read(ChunkRequest("main.odd", 10)).rows) == 3
        reader.close()


async def test_the_generator_does_so_too() -> None:
    url = SourceUrl(
        f"generator://?payload_bytes={ROW_BYTES}&keys=40&events=40&events_per_second=max"
    )
    source = GeneratorSource(DatabaseConfig(name="gen", url=url, sources=("gen.*",)))
    async for batch in source.stream(0):
        if batch.resolved >= 4:
            break
    after, count, done = None, 0, False
    while not done:
        chunk = await source.read_chunk(ChunkRequest("gen.events", 10_000, after=after))
        assert chunk.rows.size_bytes <= MAX_CHUNK_BYTES + ROW_BYTES
        after, done, count = chunk.last_key, chunk.done, count + len(chunk.rows)
    assert count == 40
