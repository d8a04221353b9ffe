"""One table's dump over a scripted source: lanes, sizes, watermark rows that go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from databus.common import frame
from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import SourceUnavailable
from databus.common.frame import Op
from databus.common.schema import Column, Kind, SourceSchema
from databus.common.window import WindowBuilder
from databus.relay import dump_flights
from databus.relay.dumps import FINISHED, Dump, DumpState, new_dump
from databus.relay.fetcher import Fetcher
from databus.relay.ring import Ring
from databus.relay.sources.source import Chunk, ChunkRequest
from tests.support.scripted_source import COMMIT_US, ITEMS, ScriptedDatabase, ScriptedSource
from tests.support.waiting import eventually

MARKS = SourceSchema(
    "shop.marks", (Column("id", Kind.INT, False), Column("token", Kind.STRING, False)), ("id",)
)
CONFIG = DatabaseConfig(
    name="shop", url=SourceUrl("generator://"), ring_bytes=1 << 20, sync_every=0.02
)


class MarkingSource(ScriptedSource):
    """Writes watermarks, and lets the stream show each as often as ``times`` says."""

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


def read_ids(folder: Path) -> list[int]:
    with Ring.open_reader(folder / "shop") as reader:
        data, _ = reader.read(reader.snapshot().head, 1 << 30)
        views = list(frame.iter_frames(bytes(data)))
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


async def test_rows_that_come_into_the_range_of_a_lane_are_read_as_a_chunk_of_their_own(
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
    assert new_dump({"sources": ["*"]}).chunk_ms > 0, "who names no size gets the time"


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
    monkeypatch.setattr(dump_flights, "WATERMARK_WAIT_S", 0.3)
    async with running(rows_of(25), tmp_path, kind) as fetcher:
        dump = await start(fetcher, watermark_table="shop.marks", chunk_rows=10)
        await ended(dump)
        assert dump.state == DumpState.FAILED
        assert named in str(dump.error)
    assert read_ids(tmp_path) == []


async def test_a_source_that_is_lost_for_a_moment_costs_a_lane_one_more_read(
    tmp_path: Path,
) -> None:
    database = rows_of(45)
    database.chunk_error = SourceUnavailable("gone")
    async with running(database, tmp_path) as fetcher:
        dump = await ended(await start(fetcher, chunk_rows=10, parallel=3))
    assert (dump.state, dump.reread_chunks) == (DumpState.COMPLETED, 1)
    assert read_ids(tmp_path) == list(range(45))
