"""The log writer seals windows into segments beside its appending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.processes.log_writer import LogWriter
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.common.config import BootstrapConfig, parse
from databus.common.errors import StoreError
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.relay.local_relay import LocalRelay
from tests.bootstrap.model import CLOCK, START, History
from tests.support.config_text import relay_text
from tests.support.generator_log import relay_end, relay_of, seeding_of, writing
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.timeout(120)


async def test_a_log_is_cut_into_segments_by_size_and_does_not_resume_without_their_manifest(
    tmp_path: Path,
) -> None:
    # More than the writer takes at once.
    async with relay_of(tmp_path, 12_000) as relay:
        end = await relay_end(relay, 12_000)
        small = {"segment_bytes": 50_000}
        async with writing(tmp_path, relay.url, **small) as (log, store):

            def is_settled() -> bool:
                # The rows of the seeding dump come behind the stream, and make segments too.
                state = log.state()
                is_seeded = seeding_of(log).get("gen.events", {}).get("state") == "seeded"
                return (
                    is_seeded and state.window >= end and state.frame_bytes < small["segment_bytes"]
                )

            await eventually(lambda: not log.is_new() and is_settled(), 20.0)
            chain = store.read().chain
            assert len(chain) >= 2
            assert chain[-1].stop == log.state().start
            assert store.check() == []
        aside = tmp_path / "aside"
        store.manifest_path.rename(aside)
        async with writing(tmp_path, relay.url, **small) as (log, store):

            def says(state: str, error: str) -> bool:
                noted = log.note("writer") or {}
                return noted["state"] == state and error in noted.get("error", "")

            lost = f"store_error: the log has dropped everything up to {log.state().start} "
            await eventually(lambda: says("failing", lost), 10.0)
            assert set(store.storage.run_ids()) >= {run.id for run in chain}
            assert not store.exists()
            aside.rename(store.manifest_path)
            await eventually(lambda: says("running", ""), 10.0)
            assert store.read().chain == chain
            assert store.check() == []


def test_windows_that_are_old_enough_are_sealed_and_retention_counts_from_then(
    tmp_path: Path,
) -> None:
    """``segment_every`` after the oldest frame came, however many have come since."""
    clock_us = began_us = 1_800_000_000_000_000
    every_us = 60_000_000
    config = BootstrapConfig(data_dir=tmp_path, segment_every=every_us / 1e6)
    logs = OpenLogs(writes=True)
    store = Store(tmp_path / "shop")
    store.create()
    writer = LogWriter(config, "shop", logs, store, lambda: clock_us)
    history = History(3)
    writer.log.bind("shop", CLOCK, START)

    def left_us() -> int:
        return round(asyncio.run(writer.seal_what_is_old()) * 1e6)

    assert left_us() == every_us, "nothing is there that could be old"
    writer.log.append(history.block(5), clock_us)
    clock_us += every_us - 1
    writer.log.append(history.block(5), clock_us)
    assert left_us() == 1
    assert store.read().chain == ()
    clock_us += 1
    builder = WindowBuilder(history.position.scn + 10, 1)
    builder.event(Op.INSERT, 5, 1, b"k", after=b"x")
    writer.log.append(builder.take(), clock_us)
    assert left_us() == 0
    (sealed,) = store.read().chain
    assert (sealed.start, sealed.stop) == (START, history.position)
    assert writer.log.state().since_us == clock_us == began_us + every_us
    # The window that had not ended is no older than the last seal; until its end it stays.
    clock_us += every_us + 1
    assert left_us() == -1
    assert store.read().chain == (sealed,)
    writer.log.append(builder.end(), clock_us)
    assert left_us() == -1
    assert [run.start for run in store.read().chain] == [START, sealed.stop]
    assert writer.log.state().frame_bytes == writer.log.state().since_us == 0
    assert left_us() == every_us
    assert store.check() == []
    logs.close()


async def test_a_log_that_gets_nothing_more_is_sealed_all_the_same(tmp_path: Path) -> None:
    clock_us = 1_800_000_000_000_000
    async with relay_of(tmp_path, 500) as relay:
        end = await relay_end(relay, 500)
        config = BootstrapConfig(data_dir=tmp_path / "own", relays=(relay.url,), segment_every=60)
        logs, store = OpenLogs(writes=True), Store(tmp_path / "own" / "gen")
        writer = LogWriter(config, "gen", logs, store, lambda: clock_us)
        running = asyncio.create_task(writer.run())
        try:

            def is_settled() -> bool:
                log = writer.log
                is_seeded = seeding_of(log).get("gen.events", {}).get("state") == "seeded"
                return is_seeded and log.state().window >= end

            await eventually(is_settled, 20.0)
            assert store.read().chain == ()
            clock_us += 60_000_000
            await eventually(lambda: store.read().chain, 10.0)
            sealed = store.read().chain[-1].stop
            assert sealed >= end
            await eventually(lambda: writer.log.state().start == sealed, 10.0)
        finally:
            running.cancel()
            await asyncio.wait({running})
            logs.close()


async def test_a_reader_that_fails_while_a_segment_is_made_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next start would take the segment for one that a killed writer has left."""
    begun, resume = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Relay:
        async def sources(self, database: str) -> dict[str, Any]:
            ends = {"prev": START.to_json(), "max": START.to_json()}
            return {"clock": CLOCK, "sources": [], **ends}

    async def reading() -> None:
        await begun.wait()
        raise StoreError("the disk is full")

    logs, store = OpenLogs(writes=True), Store(tmp_path / "shop")
    store.create()
    switch = store.switch

    def switching(change: Callable[[Manifest], Manifest]) -> Manifest:
        loop.call_soon_threadsafe(begun.set)
        assert resume.wait(20 * PATIENCE)
        return switch(change)

    writer = LogWriter(BootstrapConfig(data_dir=tmp_path, relays=("",)), "shop", logs, store)
    monkeypatch.setattr(writer, "_read", reading)
    monkeypatch.setattr(store, "switch", switching)
    writer.log.bind("shop", CLOCK, START)
    writer.log.append(History(3).block(5), 1)
    following = asyncio.create_task(writer._follow(Relay()))
    try:
        await begun.wait()
        for _ in range(100):
            await asyncio.sleep(0)
            following.cancel()
        assert not following.done()
    finally:
        resume.set()
        await asyncio.wait({following})
        logs.close()
    log = HotLog(tmp_path / "shop" / "log")
    assert segments.finish(log, store, 2).stop == log.state().start != START
    assert store.check() == []
    log.close()


async def test_frames_are_appended_while_a_segment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, resume = threading.Event(), threading.Event()
    write = segments._write_segment

    def writing_slowly(*arguments: Any) -> Any:
        begun.set()
        assert resume.wait(60 * PATIENCE)
        return write(*arguments)

    monkeypatch.setattr(segments, "_write_segment", writing_slowly)
    text = relay_text(
        "generator://?events_per_second=2000&payload_bytes=100&keys=200&events_per_window=5",
        name="gen",
        data_dir=tmp_path / "relay",
    )
    async with LocalRelay(parse(text)) as relay:
        large = {"segment_bytes": 100_000}
        async with writing(tmp_path, relay.url, **large) as (log, store):
            try:
                await eventually(begun.is_set, 30.0)
                at = log.state().last
                await eventually(lambda: log.state().last.scn >= at.scn + 50, 30.0)
                assert log.state().start < at, "nothing is dropped before it is sealed"
            finally:
                resume.set()
            await eventually(lambda: store.read().stop is not None, 30.0)
            await eventually(lambda: log.state().start >= at, 30.0)
        log = HotLog(tmp_path / "bootstrap" / "gen" / "log")
        assert store.check() == []
        log.check()
        assert store.read().stop == log.state().start
        log.close()


async def test_reading_waits_while_sealing_is_two_segments_behind(tmp_path: Path) -> None:
    logs, store = OpenLogs(writes=True), Store(tmp_path / "shop")
    store.create()
    config = BootstrapConfig(data_dir=tmp_path, relays=("",), segment_bytes=4096)
    writer = LogWriter(config, "shop", logs, store)
    writer.log.bind("shop", CLOCK, START)
    builder = WindowBuilder(START.scn + 1, 1)
    builder.event(Op.INSERT, 5, 1, b"k", after=bytes(3 * 4096))
    try:
        writer.log.append(builder.take(), 1)
        await writer._room()  # An open window cannot be sealed, so it is not waited for.
        writer.log.append(builder.end("t"), 1)
        waiting = asyncio.create_task(writer._room())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        await writer.seal_what_is_old()
        await waiting
        assert writer.log.state().frame_bytes == 0
    finally:
        logs.close()
