"""The log writer against a real relay with the generator: seeding, restarts, gaps."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from databus.bootstrap.http.bootstrap_server import BootstrapServer
from databus.bootstrap.log import log_gaps, segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import run_planner
from databus.bootstrap.processes import log_writer as writer_module
from databus.bootstrap.processes import log_writers as writers_module
from databus.bootstrap.processes.log_writer import LogWriter
from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.bootstrap.runs.manifest import Store
from databus.client import RawWindows
from databus.common.checkpoint import OnlineCheckpoint, Position
from databus.common.config import BootstrapConfig
from databus.common.errors import FormatError, LogTooYoung, ScnTooOld, StoreError
from databus.common.frame.frame_format import iter_frames
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.bootstrap.model import CLOCK, START
from tests.support.generator_log import relay_end, relay_of, seeding_of, writing
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.timeout(120)


async def test_a_new_log_takes_everything_and_has_the_sources_seeded(tmp_path: Path) -> None:
    async with relay_of(tmp_path, 2000) as relay, writing(tmp_path, relay.url) as (log, _):
        await eventually(
            lambda: seeding_of(log).get("gen.events", {}).get("state") == "seeded", 20.0
        )
        end = await relay_end(relay, 2000)
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


async def test_a_writer_resumes_where_it_was(tmp_path: Path) -> None:
    async with relay_of(tmp_path, 1000) as relay:
        for _ in range(3):
            async with writing(tmp_path, relay.url) as (log, _):
                await eventually(lambda log=log: not log.is_new() and log.state().window.scn, 20.0)
                assert log.note("origin") == log.state().start.to_json()
        end = await relay_end(relay, 1000)
        async with writing(tmp_path, relay.url) as (log, _):
            await eventually(lambda: log.state().window >= end, 20.0)
            log.check()


@pytest.mark.slow
@pytest.mark.parametrize("had_copy", [True, False])
async def test_a_range_that_the_relay_has_lost_is_recorded_and_repaired(
    tmp_path: Path, had_copy: bool
) -> None:
    old = tmp_path / "bootstrap" / "gen"
    async with relay_of(tmp_path, 20_000, "256KiB") as relay:
        await relay_end(relay, 20_000)
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
            # Where the dump itself overwrites the small ring, there is one more.
            gap = log.note("gaps")[0]
            assert gap["from"] == start.to_json()
            assert gap["to"]["scn"] > 1
            assert gap["bridged"] == had_copy
            if had_copy:
                await eventually(lambda: "repaired_us" in log.note("gaps")[0], 30.0)
                assert run_planner.plan(store.read(), start, log.state().start) == ()
                with pytest.raises(LogTooYoung):
                    log_gaps.require_every_change(log, start, log.state().window)
            else:
                assert log.note("origin") == log.note("gaps")[-1]["to"], (
                    "past states go back to here, no further"
                )
                with pytest.raises(LogTooYoung):
                    run_planner.plan(store.read(), start, log.state().start)


def test_a_log_that_was_requested_before_its_writer_began_is_written(tmp_path: Path) -> None:
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
        end = await relay_end(relay, 4000)
        async with writing(tmp_path, relay.url) as (log, _):
            await eventually(lambda: not log.is_new() and log.state().last >= end, 30.0)
            assert log.window_count >= 800
            assert log.append_count <= log.window_count / 10


async def test_a_gap_is_not_undone_by_a_reader_that_follows_a_dump_which_it_has_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump's answer comes just when the gap has been written down."""
    source, oldest = "shop.orders", Position(10, 0)
    requested, recorded, answered = asyncio.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    cancelled: list[str] = []

    class Relay:
        async def sources(self, database: str) -> dict[str, Any]:
            ends = {"prev": oldest.to_json(), "max": {"scn": 60, "seq": 0}}
            return {"clock": CLOCK, "sources": [{"name": source}], **ends}

        async def cancel_dump(self, database: str, dump: str) -> None:
            cancelled.append(dump)

        async def dump(self, database: str, dump: str, reader: Position) -> dict[str, Any]:
            requested.set()
            try:
                await recorded.wait()
                return {"state": "completed", "end": {"scn": 40, "seq": 0}, "rows": 3}
            finally:
                answered.set()

    finish = segments.finish

    def finishing(log: HotLog, *arguments: Any) -> Any:
        if log.note("gaps"):
            loop.call_soon_threadsafe(recorded.set)
            assert answered.wait(20 * PATIENCE)
        return finish(log, *arguments)

    async def reading() -> None:
        nonlocal oldest
        await requested.wait()
        oldest = Position(50, 0)
        raise ScnTooOld("the ring has turned")

    monkeypatch.setattr(segments, "finish", finishing)
    logs = OpenLogs(writes=True)
    store = Store(tmp_path / "shop")
    store.create()
    writer = LogWriter(BootstrapConfig(data_dir=tmp_path, relays=("",)), "shop", logs, store)
    monkeypatch.setattr(writer, "_read", reading)
    writer.log.bind("shop", CLOCK, oldest)
    writer.log.put_note("seeding", {source: {"state": "dumping", "dump": "d1", "rows": 0}})
    try:
        await writer._follow(Relay())
        assert [gap.stop for gap in log_gaps.gaps_of(writer.log)] == [oldest]
        assert seeding_of(writer.log) == {source: {"state": "unseeded"}}, "its rows are lost"
        assert cancelled == ["d1"], "the rest is not needed"
    finally:
        logs.close()


async def test_windows_that_cannot_be_stored_leave_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Client:
        schemas = SchemaSet()

        def __init__(self, **options: Any) -> None:
            pass

        async def raw_windows(self, start: OnlineCheckpoint) -> AsyncIterator[RawWindows]:
            try:
                yield RawWindows(b"no frame", START, complete=True)
            finally:
                closed.append(start.database)

    monkeypatch.setattr("databus.bootstrap.processes.log_writer.DatabusClient", Client)
    logs = OpenLogs(writes=True)
    writer = LogWriter(BootstrapConfig(data_dir=tmp_path), "shop", logs)
    writer.log.bind("shop", CLOCK, START)
    try:
        with pytest.raises(FormatError):
            await writer._read()
        assert closed == ["shop"]
    finally:
        logs.close()


async def test_the_schemas_of_another_relay_are_retained_though_it_has_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [
        SourceSchema("shop.orders", (Column("id", kind, nullable=False),), ("id",))
        for kind in (Kind.INT, Kind.STRING)
    ]
    known = iter(versions)

    class Client:
        def __init__(self, **options: Any) -> None:
            self.schemas = SchemaSet((next(known),))

        async def raw_windows(self, start: OnlineCheckpoint) -> AsyncIterator[RawWindows]:
            yield RawWindows(b"", START, complete=True)

    monkeypatch.setattr("databus.bootstrap.processes.log_writer.DatabusClient", Client)
    logs = OpenLogs(writes=True)
    writer = LogWriter(BootstrapConfig(data_dir=tmp_path), "shop", logs)
    writer.log.bind("shop", CLOCK, START)
    try:
        for count in (1, 2):
            await writer._read()
            assert writer.log.schemas() == versions[:count]
    finally:
        logs.close()


@pytest.mark.parametrize("is_later", [False, True])
async def test_a_store_that_cannot_be_had_ends_the_start_and_later_only_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_later: bool
) -> None:
    served = ["gen"] if is_later else ["gen", "late"]
    following: list[str] = []

    async def databases(*_: Any) -> list[str]:
        return served

    async def follow(self: LogWriter, relay: object) -> None:
        self._note("running", "")
        following.append(self.database)
        await asyncio.Event().wait()

    monkeypatch.setattr(writers_module, "listed_databases", databases)
    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)
    monkeypatch.setattr(writers_module, "RETRY_S", 0.01)
    monkeypatch.setattr(writers_module, "SEEDED_POLL_S", 0.01)
    monkeypatch.setattr(LogWriter, "_follow", follow)
    blocking_file = tmp_path / "late"
    blocking_file.touch()
    config, logs, stop = BootstrapConfig(data_dir=tmp_path), OpenLogs(writes=True), asyncio.Event()
    server = BootstrapServer(config, logs)

    def words_of(name: str) -> dict[str, Any]:
        found = server.databases().get(name)
        return found.status_document()["writer"] if found else {}

    writing = asyncio.create_task(write_logs(config, logs, stop))
    try:
        if not is_later:
            with pytest.raises(StoreError, match="late"):
                await writing
            return
        await eventually(lambda: following == ["gen"])
        served.append("late")
        await eventually(lambda: writing.done() or words_of("late").get("state") == "failing")
        assert not writing.done()
        assert f"store_error: {blocking_file}" in words_of("late")["error"]
        assert words_of("gen")["state"] == "running"
        blocking_file.unlink()
        await eventually(lambda: following == ["gen", "late"])
        assert words_of("late")["state"] == "running"
    finally:
        stop.set()
        await asyncio.wait({writing})
        logs.close()


async def test_an_unexpected_error_is_shown_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states: list[dict[str, Any]] = []

    async def follow(self: LogWriter, relay: object) -> None:
        states.append(self.log.note("writer"))
        if len(states) < 3:
            raise RuntimeError("can't start new thread")
        await asyncio.Event().wait()

    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)
    monkeypatch.setattr(LogWriter, "_follow", follow)
    config = BootstrapConfig(data_dir=tmp_path, databases=("shop",))
    logs, stop = OpenLogs(writes=True), asyncio.Event()
    writing = asyncio.create_task(write_logs(config, logs, stop))
    try:
        await eventually(lambda: writing.done() or len(states) == 3)
        assert not writing.done()
        assert states[-1]["state"] == "failing"
        assert states[-1]["error"] == "internal_error: RuntimeError: can't start new thread"
        assert "Traceback" in caplog.text
    finally:
        stop.set()
        await asyncio.wait({writing})
        logs.close()


@pytest.mark.parametrize("left", [None, b"", b"log-1\n"])
def test_a_log_has_one_name_though_a_killed_writer_may_have_left_it_empty(
    tmp_path: Path, left: bytes | None
) -> None:
    owners: list[str | None] = []

    def lease(role: str, owner: str | None) -> contextlib.AbstractContextManager[None]:
        owners.append(owner)
        return contextlib.nullcontext()

    far: Any = SimpleNamespace(
        storage=SimpleNamespace(folder=None), create=lambda: None, lease=lease
    )
    Store(tmp_path / "shop").create()
    if left is not None:
        (tmp_path / "shop" / "owner").write_bytes(left)
    for _ in range(2):
        writer = LogWriter(BootstrapConfig(data_dir=tmp_path), "shop", OpenLogs(), far)
        with contextlib.ExitStack() as held:
            writer._begin(held)
    assert owners[0]
    assert owners == [owners[0]] * 2
    assert owners[0] == "log-1" or not left
