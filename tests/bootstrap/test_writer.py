"""The log writer against a real relay with the generator: seeding, restarts, gaps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.bootstrap import gaps, planner
from databus.bootstrap.log import HotLog
from databus.bootstrap.manifest import Store
from databus.bootstrap.served import OpenLogs
from databus.bootstrap.writer import write_logs
from databus.common.checkpoint import Position
from databus.common.config import BootstrapConfig, parse
from databus.common.errors import LogTooYoung, StoreError
from databus.common.frame import iter_frames
from databus.relay.relay import LocalRelay
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(60)


@contextlib.asynccontextmanager
async def relay_of(
    folder: Path, events: int, ring: str = "64MiB", port: int = 0
) -> AsyncIterator[LocalRelay]:
    url = (
        "generator://?events_per_second=max&payload_bytes=100&events_per_window=5&keys=200"
        f"&events={events}&seed=3"
    )
    config = parse(
        f'''
        [relay]
        listen = "127.0.0.1:{port}"
        data_dir = "{folder / "relay"}"
        [[database]]
        name = "gen"
        url = "{url}"
        ring_bytes = "{ring}"
        '''
    )
    async with LocalRelay(config) as relay:
        yield relay


@contextlib.asynccontextmanager
async def writing(folder: Path, relay: str, **changes: Any) -> AsyncIterator[tuple[HotLog, Store]]:
    config = BootstrapConfig(
        data_dir=folder / "bootstrap", relays=(relay,), segment_every=3600.0, **changes
    )
    logs, stop = OpenLogs(writes=True), asyncio.Event()
    task = asyncio.create_task(write_logs(config, logs, stop))
    database = folder / "bootstrap" / "gen"
    try:
        yield logs.to_write(database / "log"), Store(database)
    finally:
        stop.set()
        await task
        logs.close()


async def relay_end(relay: LocalRelay) -> Position:
    """Where the relay's stream ends, once it stands still."""
    seen: list[dict[str, int]] = []
    async with aiohttp.ClientSession() as session:

        async def stands_still() -> bool:
            async with session.get(f"{relay.url}/v1/gen/sources") as answer:
                found = await answer.json()
            seen.append(found.get("max") or {"scn": 0, "seq": 0})
            return seen[-1]["scn"] > 0 and seen[-3:] == [seen[-1]] * 3

        await eventually(stands_still, 20.0, "the relay stands still", poll_s=0.1)
    return Position(**seen[-1])


def seeding_of(log: HotLog) -> dict[str, Any]:
    return dict(log.note("seeding") or {}) if not log.is_new() else {}


async def test_a_new_log_takes_everything_and_has_the_sources_seeded(tmp_path: Path) -> None:
    async with relay_of(tmp_path, 2000) as relay, writing(tmp_path, relay.url) as (log, _):
        await eventually(
            lambda: seeding_of(log).get("gen.events", {}).get("state") == "seeded", 20.0
        )
        end = await relay_end(relay)
        await eventually(lambda: log.state().window >= end, 10.0)
        part = log.read(log.state().start, log.state().window, 1 << 30)
        assert part is not None
        positions = [one.position for one in iter_frames(part.data)]
        assert positions == sorted(set(positions))
        async with aiohttp.ClientSession() as session:
            async with session.get(
                f"{relay.url}/v1/gen/stream",
                params={"start": "oldest"},
                headers={"Accept": "application/vnd.databus.frames"},
            ) as answer:
                streamed = await answer.read()
        rows = [bytes(one.bytes) for one in iter_frames(streamed) if one.op != 65]
        assert [bytes(one.bytes) for one in iter_frames(part.data)] == rows
        assert log.schemas()[0].source == "gen.events"
        log.check()


async def test_a_log_is_cut_into_segments_by_size(tmp_path: Path) -> None:
    async with (
        relay_of(tmp_path, 3000) as relay,
        writing(tmp_path, relay.url, segment_bytes=50_000) as (log, store),
    ):
        end = await relay_end(relay)
        await eventually(lambda: not log.is_new() and log.state().window >= end, 20.0)
        chain = store.read().chain
        assert len(chain) >= 2
        assert chain[-1].stop == log.state().start
        assert store.check() == []


async def test_a_writer_goes_on_where_it_was(tmp_path: Path) -> None:
    async with relay_of(tmp_path, 1000) as relay:
        for _ in range(3):
            async with writing(tmp_path, relay.url) as (log, _):
                await eventually(lambda log=log: not log.is_new() and log.state().window.scn, 20.0)
                assert log.note("origin") == log.state().start.to_json()
        end = await relay_end(relay)
        async with writing(tmp_path, relay.url) as (log, _):
            await eventually(lambda: log.state().window >= end, 20.0)
            log.check()


@pytest.mark.slow
@pytest.mark.parametrize("had_copy", [True, False])
async def test_a_range_that_the_relay_has_lost_is_recorded_and_mended(
    tmp_path: Path, had_copy: bool
) -> None:
    old = tmp_path / "bootstrap" / "gen"
    async with relay_of(tmp_path, 20_000, "256KiB") as relay:
        await relay_end(relay)
        store = Store(old)
        store.create()
        log = HotLog(old / "log")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{relay.url}/v1/gen/sources") as answer:
                clock = (await answer.json())["clock"]
        # A log that stopped long ago.
        start = Position(1, 0)
        log.bind("gen", clock, start)
        log.put_note("origin", start.to_json())
        log.put_note("seeding", {"gen.events": {"state": "seeded" if had_copy else "unseeded"}})
        log.close()
        async with writing(tmp_path, relay.url) as (log, store):
            await eventually(lambda: bool(log.note("gaps")), 20.0)
            await eventually(lambda: seeding_of(log)["gen.events"].get("state") == "seeded", 30.0)
            # Where the dump itself makes the little ring turn, there is one more.
            gap = log.note("gaps")[0]
            assert gap["from"] == start.to_json()
            assert gap["to"]["scn"] > 1
            assert gap["bridged"] == had_copy
            if had_copy:
                await eventually(lambda: "repaired_us" in log.note("gaps")[0], 30.0)
                assert planner.plan(store.read(), start, log.state().start) == ()
                with pytest.raises(LogTooYoung):
                    gaps.require_every_change(log, start, log.state().window)
            else:
                assert log.note("origin") == log.note("gaps")[-1]["to"], (
                    "past states go back to here, no further"
                )
                with pytest.raises(LogTooYoung):
                    planner.plan(store.read(), start, log.state().start)


def test_a_log_that_was_asked_for_before_its_writer_began_is_written(tmp_path: Path) -> None:
    HotLog(tmp_path / "log").close()
    logs = OpenLogs(writes=True)
    try:
        with pytest.raises(StoreError, match="no log yet"):
            logs.to_read(tmp_path / "elsewhere")
        read = logs.to_read(tmp_path / "log")
        logs.to_write(tmp_path / "log").put_note("writer", {"state": "running"})
        assert read.note("writer") == {"state": "running"}
    finally:
        logs.close()


async def test_a_relay_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, free_port: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    async with writing(tmp_path, f"http://127.0.0.1:{port}") as (log, _):
        await eventually(lambda: "waiting for a relay" in caplog.text, 10.0)
        assert log.is_new()
        async with relay_of(tmp_path, 100, port=port):
            await eventually(lambda: not log.is_new() and log.state().window.scn > 0, 20.0)


async def test_windows_that_wait_are_committed_together(tmp_path: Path) -> None:
    async with relay_of(tmp_path, 4000) as relay:
        end = await relay_end(relay)
        async with writing(tmp_path, relay.url) as (log, _):
            await eventually(lambda: not log.is_new() and log.state().last >= end, 30.0)
            assert log.window_count >= 800
            assert log.append_count <= log.window_count / 10
