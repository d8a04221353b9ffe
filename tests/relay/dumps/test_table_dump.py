"""One table's dump over a scripted source: parallelism, sizes, watermark rows that go wrong."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import SourceUnavailable
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.dumps import table_dump
from databus.relay.dumps.dump_records import (
    ACTIVE,
    FINISHED,
    Dump,
    DumpBook,
    DumpState,
    change_dump,
    new_dump,
)
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.ring import Ring
from databus.relay.sources.contract import Chunk, ChunkRequest
from databus.relay.sources.row_buffers import Row, Rows
from tests.support.scripted_source import COMMIT_US, ITEMS, ScriptedDatabase, ScriptedSource
from tests.support.waiting import eventually, eventually_sync
from tests.support.windows import read_from

REKEYED = SourceSchema(
    "shop.items",
    (Column("id", Kind.INT, False), Column("note", Kind.STRING, False)),
    ("id", "note"),
)
MARKS = SourceSchema(
    "shop.marks", (Column("id", Kind.INT, False), Column("token", Kind.STRING, False)), ("id",)
)
CONFIG = DatabaseConfig(
    name="shop", url=SourceUrl("generator://"), ring_bytes=1 << 20, sync_every=0.02
)


class MarkingSource(ScriptedSource):
    """Writes watermarks, and lets the stream show each ``times`` times."""

    times = 1

    async def schemas(self) -> list[SourceSchema]:
        return [ITEMS, MARKS]

    async def write_watermark(self, table: str, token: str) -> None:
        for _ in range(self.times):
            scn = self.database.resolved + 1
            builder = WindowBuilder(scn, COMMIT_US + scn)
            builder.event(
                Op.UPDATE, MARKS.source_id, MARKS.fingerprint, MARKS.encode_key((1,)),
                after=MARKS.encode_row((1, token)),
            )  # fmt: skip
            self.database.windows.append((scn, builder.end(f"tx{scn}")))
            self.database.advance(scn)


class SilentSource(MarkingSource):
    times = 0


class RepeatingSource(MarkingSource):
    times = 2


class GrowingSource(ScriptedSource):
    """Between the look for the end of the first chunk and its read, rows come into it."""

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        self.database.rows |= dict.fromkeys(range(50), "x")
        return await super().read_chunk(request)


class SlowSource(ScriptedSource):
    """Takes 10 ms or more for each chunk."""

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        began_s = time.monotonic()
        await eventually(lambda: time.monotonic() > began_s + 0.01, 60, poll_s=0.002)
        return await super().read_chunk(request)


@contextlib.asynccontextmanager
async def running(
    database: ScriptedDatabase, folder: Path, kind: type[ScriptedSource] = ScriptedSource
) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(CONFIG, folder, make_source=lambda config: kind(database))
    task = asyncio.create_task(fetcher.run())
    try:
        await fetcher.connected()
        yield fetcher
    finally:
        fetcher.stop()
        await task


async def start(fetcher: Fetcher, **request: Any) -> Dump:
    dump = new_dump({"sources": ["shop.items"], **request})
    fetcher.book.add(dump)
    await fetcher.dumps_changed()
    return dump


async def ended(dump: Dump) -> Dump:
    await eventually(lambda: dump.state in FINISHED, 60)
    return dump


def read_ids(folder: Path, after: Position | None = None) -> list[int]:
    """The dumped rows after a position; without one, all that the ring has."""
    with Ring.open_reader(folder / "shop") as reader:
        data = read_from(reader, reader.snapshot().prev if after is None else after)
        views = list(frame_format.iter_frames(data))
    return [ITEMS.decode_key(view.key)["id"] for view in views if view.op == Op.READ]


def rows_of(count: int) -> ScriptedDatabase:
    database = ScriptedDatabase()
    database.rows = {key: f"note {key}" for key in range(count)}
    return database


async def test_so_many_chunks_are_read_at_once_and_go_out_in_the_order_of_their_keys(
    tmp_path: Path,
) -> None:
    database = rows_of(95)
    database.chunk_gate = asyncio.Event()
    async with running(database, tmp_path) as fetcher:
        dump = await start(fetcher, chunk_rows=10, parallel=3)
        await eventually(lambda: len(database.chunk_reads) == 3, 60)
        assert [request.after for request in database.chunk_reads] == [None, [9], [19]]
        database.chunk_gate.set()
        await ended(dump)
    assert (dump.state, dump.error) == (DumpState.COMPLETED, None)
    assert read_ids(tmp_path) == list(range(95))
    assert dump.tables is not None
    assert dump.tables[0].chunks == 10


async def test_no_chunk_goes_out_before_the_progress_of_the_one_before_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill repeats is what the ring has beyond the record: one chunk."""
    database = rows_of(95)
    loop = asyncio.get_running_loop()
    beyond_the_record: list[int] = []

    def commit() -> concurrent.futures.Future[int]:
        async def committing() -> int:
            return database.commit((1000, None))

        return asyncio.run_coroutine_threadsafe(committing(), loop)

    async with running(database, tmp_path) as fetcher:
        intake, write = fetcher.intake, fetcher.book.write
        assert intake is not None

        def written(content: bytes) -> None:
            scn = commit().result()
            # At the end of a window the next chunk goes out, if it may.
            eventually_sync(lambda: intake.complete.scn >= scn, 60, poll_s=0.002)
            tables = [t for d in DumpBook(fetcher.book.path) for t in d.tables or ()]
            last = max((table.last_key[0] for table in tables if table.last_key), default=-1)
            beyond_the_record.append(sum(key > last for key in read_ids(tmp_path)))
            write(content)

        monkeypatch.setattr(fetcher.book, "write", written)
        dump = await ended(await start(fetcher, chunk_rows=10, parallel=3, share=100))
    assert dump.state == DumpState.COMPLETED
    assert read_ids(tmp_path) == list(range(95))
    assert max(beyond_the_record) == 10, beyond_the_record


class RekeyedSource(ScriptedSource):
    """The table gets another key between the plan of a dump and its first chunk."""

    is_rekeyed = False

    async def schemas(self) -> list[SourceSchema]:
        return [REKEYED if type(self).is_rekeyed else ITEMS]

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        chunk = await super().read_chunk(request)
        if request.is_probe:
            return chunk
        type(self).is_rekeyed = True
        rows = Rows.of(
            Row(REKEYED.encode_key((key, note)), REKEYED.encode_row((key, note)))
            for key, note in self.database.rows.items()
        )
        return replace(chunk, schema=REKEYED, rows=rows)


async def test_rows_do_not_go_out_under_another_key_than_readers_have(tmp_path: Path) -> None:
    database = rows_of(5)
    async with running(database, tmp_path, RekeyedSource) as fetcher:
        scn = database.commit((2, "two"))
        intake = fetcher.intake
        assert intake is not None
        await eventually(lambda: intake.complete.scn >= scn, 60)
        first = await ended(await start(fetcher))
        assert first.state == DumpState.FAILED
        assert "its key was (id) and is (id, note)" in str(first.error)
        assert read_ids(tmp_path) == []
        again = await ended(await start(fetcher))
        assert again.state == DumpState.COMPLETED
        with Ring.open_reader(tmp_path / "shop") as reader:
            data = read_from(reader, reader.snapshot().prev)
        ops = [view.op for view in frame_format.iter_frames(data)]
        assert ops[1:].count(Op.READ) == 5
        assert ops.index(Op.SCHEMA_CHANGE) < ops.index(Op.TRUNCATE) < ops.index(Op.READ)


async def test_rows_that_come_into_the_range_of_a_chunk_are_read_as_a_chunk_of_their_own(
    tmp_path: Path,
) -> None:
    database = rows_of(0)
    database.rows = dict.fromkeys(range(0, 400, 10), "x")
    async with running(database, tmp_path, GrowingSource) as fetcher:
        dump = await ended(await start(fetcher, chunk_rows=10, parallel=2))
    assert dump.state == DumpState.COMPLETED
    assert read_ids(tmp_path) == sorted(database.rows)
    assert len(database.rows) == 85


async def test_the_size_of_chunks_follows_the_time_that_they_may_take(tmp_path: Path) -> None:
    database = rows_of(300)
    async with running(database, tmp_path) as fetcher:
        dump = await start(fetcher, chunk_rows=10, chunk_ms=60_000)
        await ended(dump)
        assert [request.limit for request in database.chunk_reads][:4] == [10, 20, 40, 80]
        fixed = await start(fetcher, chunk_rows=30)
        database.chunk_reads.clear()
        await ended(fixed)
        assert {request.limit for request in database.chunk_reads} == {30}
    assert new_dump({"sources": ["*"]}).chunk_ms > 0, "a request without a size gets the time"


async def test_chunks_that_take_too_long_become_smaller_down_to_the_least(tmp_path: Path) -> None:
    database = rows_of(325)
    async with running(database, tmp_path, SlowSource) as fetcher:
        dump = await ended(await start(fetcher, chunk_rows=160, chunk_ms=1))
    assert [request.limit for request in database.chunk_reads] == [160, 80, 40, 20, 10, 10, 10]
    assert dump.chunk_rows == table_dump.LEAST_CHUNK_ROWS
    assert read_ids(tmp_path) == list(range(325))


async def test_beside_a_live_stream_a_dump_reads_for_a_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = rows_of(30)
    database.chunk_gate = asyncio.Event()
    async with running(database, tmp_path) as fetcher:
        dump = await start(fetcher, chunk_rows=10, share=1)
        await eventually(lambda: len(database.chunk_reads) == 1, 60)
        began_s = time.monotonic()
        await eventually(lambda: time.monotonic() > began_s + 0.1, 60)
        scn = database.commit((7, "changed meanwhile"))
        await eventually(
            lambda: fetcher.intake is not None and fetcher.intake.complete.scn >= scn, 60
        )
        database.chunk_gate.set()
        await eventually(lambda: dump.tables is not None and dump.tables[0].chunks == 1, 60)
        # A hundredth of the time: the next chunk would come ten seconds later.
        assert len(database.chunk_reads) == 1
        # Nor is any rest longer than the longest.
        monkeypatch.setattr(table_dump, "MAX_READ_DELAY_S", 0.01)
        await fetcher.dumps_changed()
        await eventually(lambda: len(database.chunk_reads) == 2, 2)
        change_dump(dump, {"share": 100})
        await fetcher.dumps_changed()
        await ended(dump)
        quiet = await ended(await start(fetcher, chunk_rows=10, share=100))
    assert (dump.state, quiet.state) == (DumpState.COMPLETED, DumpState.COMPLETED)
    assert read_ids(tmp_path) == [*range(7), *range(8, 30), *range(30)]


async def test_a_chunk_goes_out_between_its_two_watermarks(tmp_path: Path) -> None:
    database = rows_of(25)
    async with running(database, tmp_path, MarkingSource) as fetcher:
        request = {"watermark_table": "shop.marks", "chunk_rows": 10, "parallel": 2}
        dump = await ended(await start(fetcher, **request))
        again = await ended(await start(fetcher, **request))
    assert (dump.state, again.state) == (DumpState.COMPLETED, DumpState.COMPLETED)
    assert read_ids(tmp_path) == [*range(25), *range(25)]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (ScriptedSource, "writes no watermarks"),
        (SilentSource, "has not come in the stream"),
        (RepeatingSource, "streamed twice"),
    ],
)
async def test_nothing_goes_out_where_the_watermarks_are_not_as_they_should_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ScriptedSource],
    named: str,
) -> None:
    monkeypatch.setattr(table_dump, "WATERMARK_WAIT_S", 0.3)
    async with running(rows_of(25), tmp_path, kind) as fetcher:
        dump = await start(fetcher, watermark_table="shop.marks", chunk_rows=10)
        await ended(dump)
        assert dump.state == DumpState.FAILED
        assert named in str(dump.error)
    assert read_ids(tmp_path) == []


@pytest.mark.parametrize("error", [SourceUnavailable("gone"), asyncio.CancelledError()])
async def test_a_source_that_is_lost_for_a_moment_costs_one_chunk_one_more_read(
    tmp_path: Path, error: BaseException
) -> None:
    database = rows_of(45)
    database.chunk_error = error
    async with running(database, tmp_path) as fetcher:
        dump = await ended(await start(fetcher, chunk_rows=10, parallel=3))
    assert (dump.state, dump.reread_chunks) == (DumpState.COMPLETED, 1)
    assert read_ids(tmp_path) == list(range(45))


async def test_no_rows_overtake_a_reader_that_must_have_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_dump, "READER_WAIT_S", 0.15)
    database = ScriptedDatabase()
    database.rows = dict.fromkeys(range(4000), "x" * 1000)
    sent: list[int] = []
    async with running(database, tmp_path) as fetcher:
        _, intake = await fetcher.connected()
        ring, at = intake.ring, intake.ring.last
        dump = await start(fetcher, reader=at.to_json())
        for is_last in (False, False, True):
            # It stops where the reader has about a quarter of the ring before it, and fails.
            await eventually(lambda: dump.state == DumpState.FAILED, 60)
            assert dump.error is not None
            assert dump.error["reader"] == at.to_json()
            share = ring.bytes_after(at) / ring.ring_bytes
            assert 1 / table_dump.READER_SHARE <= share < 1 / 3
            sent += read_ids(tmp_path, at)
            at = ring.last
            if is_last:  # The reader comes from now on, if not at once.
                monkeypatch.setattr(table_dump, "READER_WAIT_S", 60.0)
            change_dump(dump, {"state": "running", "reader": at.to_json()})
            await fetcher.dumps_changed()

        def continues(at: Position) -> bool:
            return ring.last > at or dump.state == DumpState.COMPLETED

        while dump.state in ACTIVE:
            await eventually(partial(continues, at), 60)
            sent += read_ids(tmp_path, at)
            at = ring.last
            change_dump(dump, {"reader": at.to_json()})
            await fetcher.dumps_changed()
    assert dump.state == DumpState.COMPLETED
    assert sorted(set(sent)) == list(range(4000)), "more than four times the ring"


@pytest.mark.parametrize("broken", ["pack_window", "ChunkWindow.observe"])
async def test_a_fault_in_a_dump_fails_the_dump_and_not_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("an unexpected error")

    database = rows_of(30)
    database.chunk_gate = asyncio.Event()
    async with running(database, tmp_path) as fetcher:
        _, intake = await fetcher.connected()
        dump = await start(fetcher, chunk_rows=10)
        await eventually(lambda: len(database.chunk_reads) == 1, 60)
        monkeypatch.setattr(f"databus.relay.dumps.table_dump.{broken}", fail)
        scns = [database.commit((7, "changed meanwhile")) for _ in range(3)]
        await eventually(lambda: intake.complete.scn >= scns[-1], 60)
        database.chunk_gate.set()
        await ended(dump)
        monkeypatch.undo()
        assert dump.state == DumpState.FAILED
        assert "an unexpected error" in str(dump.error)
        last = database.commit((8, "changed after"))
        await eventually(lambda: intake.complete.scn >= last, 60)
        assert fetcher.status.reconnect_count == 0
        again = await ended(await start(fetcher, chunk_rows=10))
    assert again.state == DumpState.COMPLETED
    assert read_ids(tmp_path) == list(range(30))


async def test_the_dump_of_a_table_that_was_emptied_ends_where_the_stream_empties_it(
    tmp_path: Path,
) -> None:
    database = rows_of(3)
    database.held_after_batches = 0
    async with running(database, tmp_path) as fetcher:
        emptied = database.commit(*((key, None) for key in range(3)))
        dump = await start(fetcher)
        await eventually(lambda: dump.tables is not None, 60)
        assert not database.rows
        assert dump.state in ACTIVE, "the stream has not come to where the rows were deleted"
        await eventually(lambda: database.chunk_reads, 60)
        assert dump.state in ACTIVE
        database.release()
        await ended(dump)
    assert (dump.state, read_ids(tmp_path)) == (DumpState.COMPLETED, [])
    assert dump.end is not None
    assert dump.end.scn >= emptied
