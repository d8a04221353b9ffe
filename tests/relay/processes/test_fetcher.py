"""The fetcher over a scripted source: restarts, losses, acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from functools import partial
from operator import contains
from pathlib import Path

import pytest

from databus.common.errors import (
    PreflightFailed,
    SourceUnavailable,
    UnsupportedChange,
)
from databus.common.frame.frame_format import Op
from databus.relay.processes.wakeup import WakeupSender, make_wakeup
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.schema_registry import RegistryReader
from databus.relay.sources.contract import ChunkRequest
from tests.support.scripted_fetcher import (
    DATABASE,
    PACE,
    ask,
    frames,
    opened,
    reached,
    running,
    status_in,
)
from tests.support.scripted_source import ITEMS, ScriptedDatabase
from tests.support.waiting import eventually, within


async def read_once(database: ScriptedDatabase, folder: Path) -> None:
    """A fetcher reads one commit, and ends."""
    database.commit((1, "a"))
    async with running(database, folder) as fetcher:
        await eventually(reached(fetcher, 1))


@pytest.fixture
def database() -> ScriptedDatabase:
    return ScriptedDatabase()


async def test_windows_reach_the_ring_and_their_schema_the_registry_before(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"), (2, "b"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
        reader = RegistryReader(tmp_path / "shop" / "schemas.jsonl")
        reader.refresh()
        assert ITEMS.fingerprint in reader.schemas
    found = [(view.scn, view.seq, view.op) for view in frames(tmp_path)]
    assert found == [(1, 0, Op.INSERT), (1, 1, Op.INSERT), (1, 2, Op.END_OF_WINDOW)]


async def test_a_restart_resumes_after_the_last_window_without_repeating_any(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    for number in range(5):
        database.commit((number, "x"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 5))
    database.commit((9, "y"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 6))
    assert [view.scn for view in frames(tmp_path) if view.op == Op.END_OF_WINDOW] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip


async def test_a_lost_connection_in_mid_window_neither_loses_nor_repeats_an_event(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.batch_bytes = 1
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        # Larger than the ring's part_bytes, so that readers see it in parts.
        database.held_after_batches = 120
        database.commit(*((key, "n" * 500) for key in range(200)))
        intake = opened(fetcher)
        await eventually(lambda: intake.ring.last.seq == 119)
        assert intake.ring.state.max.seq > 50
        database.release()
        database.cut(SourceUnavailable("cut by the test"))
        await eventually(reached(fetcher, 1))
        assert fetcher.status.reconnect_count == 1
        assert database.opened == 2
    seqs = [view.seq for view in frames(tmp_path) if view.scn == 1]
    assert seqs == list(range(201))


async def test_a_window_that_was_torn_by_a_restart_is_completed_once(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.batch_bytes = 1
    database.held_after_batches = 120
    database.commit(*((key, "n" * 500) for key in range(200)))
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.intake is not None)
        await eventually(lambda: opened(fetcher).ring.last.seq == 119)
    database.release()
    torn = frames(tmp_path)[-1]
    assert torn.op != Op.END_OF_WINDOW
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
    assert [view.seq for view in frames(tmp_path)] == list(range(201))


async def test_another_clock_is_refused_loudly_and_nothing_of_it_reaches_the_ring(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    await read_once(database, tmp_path)
    other = ScriptedDatabase("clock-2")
    other.commit((1, "z"), scn=7)
    async with running(other, tmp_path):
        assert (await status_in(tmp_path, "failed"))["error"]["code"] == "clock_mismatch"
        code, live = await ask(tmp_path, "GET", "/status")
        assert (code, live["state"]) == (200, "failed")
    assert {view.scn for view in frames(tmp_path)} == {1}


async def test_a_database_is_not_read_into_a_child_relays_ring_that_a_reader_could_block(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    Ring.create(tmp_path / "shop", DATABASE.ring_bytes, clock=database.clock, block=True).close()
    database.commit((1, "a"))
    async with running(database, tmp_path):
        error = (await status_in(tmp_path, "failed"))["error"]
        assert error["code"] == "config_error"
        assert "shop: its ring was made in block mode" in error["detail"]


@pytest.mark.parametrize("error", [PreflightFailed("no"), UnsupportedChange("no")])
async def test_what_cannot_pass_by_itself_is_shown_and_tried_again_slowly(
    database: ScriptedDatabase, tmp_path: Path, error: Exception
) -> None:
    database.open_error = error
    async with running(database, tmp_path) as fetcher:
        assert (await status_in(tmp_path, "failed"))["error"]["detail"] == "no"
        database.open_error = None
        database.commit((1, "a"))
        await eventually(reached(fetcher, 1))
        assert (await status_in(tmp_path, "streaming"))["error"] is None


async def test_a_purged_log_is_a_failure_and_not_a_gap(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    await read_once(database, tmp_path)
    database.commit((2, "b"))
    database.forgotten = 2
    async with running(database, tmp_path):
        assert (await status_in(tmp_path, "failed"))["error"]["code"] == "source_position_lost"
    assert frames(tmp_path)[-1].scn == 1


async def test_an_unforeseen_fault_of_a_source_is_shown_and_survived(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        database.cut(ZeroDivisionError("a bug in a driver"))
        assert (await status_in(tmp_path, "failed"))["error"]["code"] == "internal_error"
        database.commit((1, "a"))
        await eventually(reached(fetcher, 1))


async def test_it_stops_while_a_source_is_closed_that_hides_the_cancellation(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await may_close.wait()

    async with within(30), running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        database.on_close = close
        database.cut(SourceUnavailable("the connection is lost"))
        await closing.wait()
        fetcher.stop()
        asyncio.get_running_loop().call_later(0.1, may_close.set)


async def test_an_idle_source_moves_readers_on_by_an_empty_window(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
        database.advance(50)
        await eventually(reached(fetcher, 50))
        await eventually(lambda: 50 in database.acks)
        database.commit((2, "b"))
        await eventually(reached(fetcher, 51))
    last = frames(tmp_path)[2:]
    assert [(v.scn, v.seq, v.op) for v in last] == [
        (50, 0, Op.END_OF_WINDOW),
        (51, 0, Op.INSERT),
        (51, 1, Op.END_OF_WINDOW),
    ]
    assert last[0].event_count == 0


async def test_the_reader_of_a_chunk_waits_for_no_idle_window(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    never = dataclasses.replace(PACE, idle_window_s=3600.0)
    database.commit((1, "a"))
    async with running(database, tmp_path, pace=never) as fetcher:
        await eventually(reached(fetcher, 1))
        database.advance(50)
        await eventually(lambda: fetcher.intake is not None and fetcher.intake.resolved == 50)
        _, chunk = await fetcher.read_chunk(ChunkRequest("shop.items", 10))
        assert chunk.snapshot.high == 50
        await eventually(reached(fetcher, 50))
        database.advance(60)
        await eventually(lambda: fetcher.intake is not None and fetcher.intake.resolved == 60)
    assert [(v.scn, v.op) for v in frames(tmp_path)[2:]] == [(50, Op.END_OF_WINDOW)]


async def test_only_what_is_on_disk_is_acknowledged_to_the_source(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    def on_ack(scn: int) -> None:
        file = RingFile(tmp_path / "shop" / "ring", writable=False)
        try:
            seen.append((scn, file.newest_control().state.max.scn))
        finally:
            file.close()

    database.on_ack = on_ack
    async with running(database, tmp_path) as fetcher:
        for number in range(1, 6):
            database.commit((number, "a"))
            await eventually(reached(fetcher, number))
            await eventually(partial(contains, database.acks, number), message="the ack")
    assert [scn for scn, _ in seen] == sorted(scn for scn, _ in seen)
    assert all(scn <= on_disk for scn, on_disk in seen)


async def test_the_open_part_of_a_large_window_is_not_acknowledged(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    database.batch_bytes = 1
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: 1 in database.acks)
        scn, whole = database.resolved + 1, len(database.windows)
        database.commit(*((key, "n" * 500) for key in range(300)))
        database.windows[whole] = (scn, database.windows[whole][1][:-80])
        intake = opened(fetcher)
        await eventually(lambda: intake.ring.state.max.scn == scn)
        synced = intake.ring.state.tail
        await eventually(lambda: fetcher._durability.synced_tail >= synced)
        assert max(database.acks) == 1


async def test_a_commit_wakes_the_workers(database: ScriptedDatabase, tmp_path: Path) -> None:
    fd = make_wakeup()
    async with running(database, tmp_path, wakeup=WakeupSender((os.dup(fd),))) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
        database.commit((1, "a"))
        await eventually(reached(fetcher, 1))
        assert os.eventfd_read(fd) == 1
    os.close(fd)


async def test_a_second_fetcher_on_one_ring_waits_with_a_reason(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    async with running(database, tmp_path) as first:
        await eventually(reached(first, 1))
        async with running(database, tmp_path) as second:
            await eventually(lambda: second.status.error is not None)
            assert second.status.error is not None
            assert second.status.error.code == "store_busy"
            assert second.status.state == "reconnecting"
