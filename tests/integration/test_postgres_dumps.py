"""Dumps of several PostgreSQL tables of which one cannot be read, and of tables without a key."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from databus.relay.sources.contract import MAX_CHUNK_BYTES, ChunkRequest
from databus.relay.sources.postgres.protocol.replication_connection import ReplicationConnection
from tests.integration.test_suspended_tables import dump, rows_of
from tests.storm.replica import RingReplica
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import config_of, opened
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_table_that_cannot_be_read_ends_no_dump_of_the_others(
    db: FreshDatabase, tmp_path: Path
) -> None:
    folder = tmp_path / "shop"
    for name in ("a_fine", "b_nan", "c_fine"):
        db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, n numeric(5, 2))")
        db.execute(f"INSERT INTO {name} VALUES (1, 1)")
    db.execute("INSERT INTO b_nan VALUES (2, 'NaN')")
    async with capturing(database_config("shop", db.url, "public.*"), tmp_path) as fetcher:
        await streaming(fetcher)
        await dump(folder, "public.*", ends="failed")
        (failed,) = fetcher.book
        assert failed.error is not None
        assert "public.b_nan.n" in failed.error["detail"]
        assert {t.source: t.done for t in failed.tables or ()} == {
            "public.a_fine": True, "public.b_nan": False, "public.c_fine": True,
        }  # fmt: skip
        for name in ("public.a_fine", "public.c_fine"):
            await eventually(lambda name=name: len(rows_of(folder, name)) == 1, 30)


async def test_chunks_of_a_table_without_a_key_do_not_shrink(db: FreshDatabase) -> None:
    db.execute("CREATE TABLE heap (v int)")
    db.execute("CREATE TABLE keyed (id int PRIMARY KEY)")
    for name in ("heap", "keyed"):
        db.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    config = config_of(db).model_copy(update={"keys": {"public.heap": ("*",)}})
    async with opened(config) as source:
        assert (await source.table_size("public.heap")).is_scanned
        assert not (await source.table_size("public.keyed")).is_scanned


async def test_a_chunk_of_large_rows_ends_at_its_bound_and_the_next_one_continues_behind_it(
    db: FreshDatabase,
) -> None:
    row_bytes = 1 << 20
    db.execute("CREATE TABLE wide (id int PRIMARY KEY, body text, d date)")
    db.execute("ALTER TABLE wide ALTER body SET STORAGE EXTERNAL")
    # Small ones first, of which many are requested at once, then large ones.
    db.execute(
        "INSERT INTO wide SELECT n, repeat('x', CASE WHEN n <= 5000 THEN n % 7 ELSE 1048576 END) "
        "FROM generate_series(1, 5080) n"
    )
    db.execute("CREATE TABLE heap (LIKE wide)")
    db.execute("INSERT INTO heap SELECT * FROM wide WHERE id > 5050")
    db.execute("ALTER TABLE heap REPLICA IDENTITY FULL")
    config = config_of(db).model_copy(update={"keys": {"public.heap": ("id",)}})
    counts: dict[str, list[int]] = {"public.wide": [], "public.heap": []}
    async with opened(config) as source:
        await source.read_chunk(ChunkRequest("public.wide", 1))
        tracemalloc.start()
        for name, chunks in counts.items():
            after, done, keys = None, False, set[int]()
            while not done:
                chunk = await source.read_chunk(ChunkRequest(name, 10_000, after=after))
                assert chunk.rows.size_bytes <= MAX_CHUNK_BYTES + row_bytes
                for row in chunk.rows:
                    (key,) = chunk.schema.decode_key(row.key).values()
                    assert key not in keys
                    keys.add(key)
                after, done = chunk.last_key, chunk.done
                chunks.append(len(chunk.rows))
            assert len(keys) == (5080 if name == "public.wide" else 30)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        remaining = [[n] for n in (*range(4991, 5010), 7000, *range(5041, 5061))]
        found, missing = 0, []
        while remaining:
            chunk = await source.read_chunk(ChunkRequest("public.wide", 50, keys=remaining))
            assert chunk.rows.size_bytes <= MAX_CHUNK_BYTES + row_bytes
            assert chunk.done == (chunk.key_count == len(remaining))
            found, missing = found + len(chunk.rows), missing + chunk.missing
            remaining = remaining[chunk.key_count :]
        assert (found, missing) == (39, [[7000]])
    assert counts["public.wide"] == [5016, 16, 16, 16, 16, 0]
    assert counts["public.heap"] in ([16, 14], [16, 14, 0])
    assert peak_bytes < 6 * MAX_CHUNK_BYTES, "two chunks, and one whose buffer grows"


async def test_a_suspended_table_that_is_empty_is_followed_where_the_stream_has_emptied_it(
    db: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletes of rows that no consumer has any more come while it is resynchronised."""
    held, waits = asyncio.Event(), list[int]()
    receive = ReplicationConnection.receive

    async def receiving(*arguments: Any, **named: Any) -> Any:
        if held.is_set():
            waits.append(1)
            return await asyncio.sleep(0.02)
        return await receive(*arguments, **named)

    monkeypatch.setattr(ReplicationConnection, "receive", receiving)
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    config = database_config(
        "shop", db.url, "public.*", discover_every="200ms", publication="given", slot="given"
    ).model_copy(update={"resync": "auto"})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (1), (2)")
        replica = RingReplica(tmp_path / "shop")
        await eventually(lambda: bool(replica.read() or replica.tables), 30, "followed")
        held.set()
        await eventually(lambda: bool(waits), 30, "the stream is held")
        db.execute("DELETE FROM t")
        db.execute("ALTER PUBLICATION given SET (publish = 'insert')")
        db.execute("ALTER PUBLICATION given SET (publish = 'insert, update, delete, truncate')")
        await eventually(lambda: any(dump.is_running for dump in fetcher.book), 60, "it begins")
        waits.clear()
        await eventually(lambda: len(waits) > 25, 30, "the dump had time to end")
        assert fetcher.tables.document(), "the stream has not come to where it was emptied"
        held.clear()
        await eventually(lambda: not fetcher.tables.document(), 60, "followed again")
        db.execute("INSERT INTO t VALUES (3)")
        await eventually(
            lambda: bool(replica.read()) or list(replica.tables["public.t"].rows) == [(3,)], 30, "3"
        )
    assert not replica.faults
    replica.close()
