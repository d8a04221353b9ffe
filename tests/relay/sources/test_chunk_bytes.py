"""A chunk of large rows ends at its bound in bytes, and the next one continues behind it."""

from __future__ import annotations

import sqlite3
import tracemalloc
from pathlib import Path

from databus.common.config import DatabaseConfig, SourceUrl
from databus.relay.sources.configured_keys import NO_KEYS
from databus.relay.sources.generator import GeneratorSource
from databus.relay.sources.source import MAX_CHUNK_BYTES, ChunkRequest
from databus.relay.sources.sqlite_chunks import ChunkReader
from databus.relay.sources.sqlite_log import install

ROWS, ROW_BYTES = 80, 1 << 20


def test_sqlite_reads_rows_of_a_megabyte_a_few_at_a_time(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    install(connection)
    connection.execute("CREATE TABLE wide (id INTEGER PRIMARY KEY, body BLOB)")
    for key in range(ROWS):
        connection.execute("INSERT INTO wide VALUES (?, zeroblob(?))", (key, ROW_BYTES))
    connection.close()
    reader = ChunkReader(str(tmp_path / "shop.db"), NO_KEYS)
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
