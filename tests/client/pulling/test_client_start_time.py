"""A client's start by commit time, against the real relay and the real bootstrap server."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.manifest import Store
from databus.client import DatabusClient, FileCheckpoints, OnlineCheckpoint, Position
from databus.client.pulling.pull_machine import first_resume
from databus.client.testing import Recorder, Step
from databus.common.checkpoint import AtTime
from databus.common.config import BootstrapConfig
from databus.common.errors import ConfigError, LogTooYoung, ScnTooOld
from databus.common.frame.frame_format import Op
from databus.common.http.listening_socket import listening_socket
from tests.client.test_client import consume, make, serving
from tests.support.live_relay import CLOCK, ITEMS, ORDERS, LiveRelay, window
from tests.support.waiting import PATIENCE, eventually

BEGIN = Position(3)
"""Where the relay and the log begin: not with their clock."""


def at(second: float) -> dt.datetime:
    """The commit time of the window with this scn, in a zone that is not UTC."""
    zone = dt.timezone(dt.timedelta(hours=5, minutes=30))
    return dt.datetime.fromtimestamp(second, zone)


def orders(*scns: int) -> list[bytes]:
    return [window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in scns]


def scns(recorder: Recorder) -> list[int]:
    return [position.scn for position in recorder.positions]


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[LiveRelay]:
    live = LiveRelay(tmp_path / "relay", start=BEGIN)
    async with live.served():
        yield live
    live.close()


@contextlib.asynccontextmanager
async def small_relay(folder: Path, windows: list[bytes]) -> AsyncIterator[LiveRelay]:
    """A relay that has evicted the first of these windows."""
    live = LiveRelay(folder, ring_bytes=64 << 10, start=BEGIN)
    live.append(*windows)
    async with live.served():
        yield live
    live.close()


@contextlib.asynccontextmanager
async def bootstrap_of(folder: Path, windows: list[bytes]) -> AsyncIterator[str]:
    """The URL of a server over a log of these windows; the first half of them is a run."""
    store = Store(folder / "shop")
    store.create()
    with contextlib.closing(HotLog(folder / "shop" / "log")) as log:
        log.bind("shop", CLOCK, BEGIN)
        log.add_schemas([ORDERS, ITEMS])
        if windows:
            half = len(windows) // 2
            log.append(b"".join(windows[:half]), 1)
            segments.seal(log, store, 1)
            log.append(b"".join(windows[half:]), 1)
    config = BootstrapConfig(data_dir=folder, listen="127.0.0.1:0", databases=("shop",))
    listener, stop = listening_socket(config.listen), asyncio.Event()
    serving = asyncio.create_task(serve_bootstrap(config, listener, stop))
    try:
        yield "http://{}:{}".format(*listener.getsockname()[:2])
    finally:
        stop.set()
        await serving


@contextlib.asynccontextmanager
async def both(
    folder: Path, windows: list[bytes], logged: list[bytes]
) -> AsyncIterator[tuple[LiveRelay, str]]:
    """A relay that has evicted the first windows, and the URL of a bootstrap server."""
    async with (
        small_relay(folder / "relay", windows) as relay,
        bootstrap_of(folder / "bootstrap", logged) as url,
    ):
        yield relay, url


def test_a_time_is_a_moment_whatever_its_zone() -> None:
    noon = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
    here = noon.astimezone(dt.timezone(dt.timedelta(hours=-8)))
    for time in (noon, here):
        assert first_resume(time, True) == AtTime(1_772_366_400_000_000)
    assert first_resume(at(6.000001), False) == AtTime(6_000_001)
    assert first_resume(dt.datetime(1969, 7, 20, tzinfo=dt.UTC), False) == AtTime(0)


def test_a_time_without_a_zone_is_refused_before_any_request() -> None:
    naive = dt.datetime(2026, 3, 1, 12)
    with pytest.raises(ConfigError, match="2026-03-01 12:00:00 without a zone"):
        make(Recorder(), "http://127.0.0.1:9", start=naive)
    for wrong in (naive.date(), "2026-03-01T12:00:00Z"):
        with pytest.raises(ConfigError, match="a datetime with a zone"):
            make(Recorder(), "http://127.0.0.1:9", start=wrong)


@pytest.mark.parametrize(
    ("start", "first"), [(at(6), 6), (at(5.999999), 6), (at(6.000001), 8), (at(8), 8)]
)
async def test_the_first_window_is_the_first_that_is_not_earlier(
    relay: LiveRelay, start: dt.datetime, first: int
) -> None:
    relay.append(*orders(4, 6, 8))
    recorder = Recorder()
    await consume(make(recorder, relay.url, start=start), recorder, 8)
    assert scns(recorder) == [scn for scn in (6, 8) if scn >= first]


async def test_raw_windows_begin_at_a_time_too(relay: LiveRelay) -> None:
    made = orders(4, 6, 8)
    relay.append(*made)
    got = b""
    windows = DatabusClient(database="shop", relays=[relay.url]).raw_windows(at(5))
    async with asyncio.timeout(10 * PATIENCE), contextlib.aclosing(windows) as parts:
        async for part in parts:
            got += part.data
            if part.position.scn == 8:
                break
    assert got == b"".join(made[1:])


async def test_a_checkpoint_that_is_stored_goes_before_the_time(
    relay: LiveRelay, tmp_path: Path
) -> None:
    relay.append(*orders(4, 6, 8))
    store = FileCheckpoints(tmp_path / "cp")
    store.save(OnlineCheckpoint("shop", CLOCK, Position(6)))
    recorder = Recorder()
    await consume(make(recorder, relay.url, start=at(5), checkpoints=store), recorder, 8)
    assert scns(recorder) == [8]


async def test_a_time_ahead_of_the_stream_begins_with_the_next_event(relay: LiveRelay) -> None:
    relay.append(*orders(4, 6))
    recorder = Recorder()
    async with serving(make(recorder, relay.url, start=at(100))):
        await recorder.until(lambda r: bool(r.checkpoints))
        assert recorder.checkpoints == [OnlineCheckpoint("shop", CLOCK, Position(6, 1))]
        relay.append(*orders(7, 8))
        await recorder.until(lambda r: len(r.positions) == 2)
    assert scns(recorder) == [7, 8]


async def test_a_window_after_a_time_ahead_of_the_stream_is_read_again_and_not_lost(
    tmp_path: Path,
) -> None:
    live = LiveRelay(tmp_path, start=BEGIN, heartbeat="1h")
    live.append(*orders(4, 6))
    failed: list[Position] = []

    def trouble(step: Step) -> None:
        if step.call == "onDataEvent" and step.what[2].seq == 1999 and not failed:
            failed.append(step.what[2])
            raise ValueError("not yet")

    recorder = Recorder(trouble)
    async with live.served():
        # The buffer has dropped the window's beginning, and there is no checkpoint.
        client = make(recorder, live.url, start=at(100), buffer_bytes=1000)
        async with serving(client):
            await eventually(lambda: client.status.is_flowing)
            live.append(window(7, [(Op.INSERT, ORDERS, key) for key in range(2000)]))
            await recorder.until(lambda r: bool(r.checkpoints))
    live.close()
    assert failed
    assert recorder.checkpoints[0].position == Position(7, 2000)
    assert recorder.positions[-2000:] == [Position(7, seq) for seq in range(2000)]


async def test_a_time_that_the_ring_has_left_is_an_error_where_no_bootstrap_is(
    tmp_path: Path,
) -> None:
    async with small_relay(tmp_path, orders(*range(4, 900))) as relay:
        with pytest.raises(ScnTooOld, match="commit time 6000000 us is not after") as caught:
            await consume(make(Recorder(), relay.url, start=at(6)), Recorder(), 899)
        assert "bootstrap" in caught.value.hint
        recorder = Recorder()
        client = make(recorder, relay.url, start=at(6), on_gap="oldest")
        await consume(client, recorder, 899)
        assert client.status.gap_count == 1
        assert scns(recorder) == list(range(scns(recorder)[0], 900))


@pytest.mark.parametrize("first", [10, 500])
async def test_a_time_that_the_ring_has_left_goes_through_the_bootstrap_and_back(
    tmp_path: Path, first: int
) -> None:
    made = orders(*range(4, 900))
    async with both(tmp_path, made, made[:-20]) as (relay, url):
        assert relay.writer.state.min.scn > 500
        recorder = Recorder()
        client = make(recorder, relay.url, bootstraps=[url], start=at(first - 0.5))
        await consume(client, recorder, 899)
    assert scns(recorder) == list(range(first, 900))
    assert client.status.bootstrap_count == 1


@pytest.mark.parametrize("retained", [slice(200, None), slice(0)], ids=["later", "nothing"])
async def test_a_time_that_no_server_holds_is_an_error_and_never_a_gap(
    tmp_path: Path, retained: slice
) -> None:
    made = orders(*range(4, 900))
    async with both(tmp_path, made, made[retained]) as (relay, url):
        with pytest.raises(LogTooYoung, match="committed at 9999999 us or before") as caught:
            await consume(
                make(Recorder(), relay.url, bootstraps=[url], start=at(10)), Recorder(), 899
            )
        assert "start=bootstrap" in caught.value.hint


@pytest.mark.parametrize("first", [10, 500, 880])
async def test_a_seek_to_a_time_is_a_position_that_relay_or_bootstrap_reports(
    tmp_path: Path, first: int
) -> None:
    made = orders(*range(4, 900))
    store = FileCheckpoints(tmp_path / "cp")
    async with both(tmp_path, made, made[:-20]) as (relay, url):
        recorder = Recorder()
        client = make(recorder, relay.url, bootstraps=[url], start=at(890), checkpoints=store)
        async with serving(client):
            await recorder.until(lambda r: 899 in scns(r))
            client.seek(at(first - 0.5))
            await recorder.until(lambda r: scns(r).count(899) == 2)
    assert scns(recorder)[10:] == list(range(first, 900))
    (rollback,) = [step.what for step in recorder.steps if step.call == "onRollback"]
    assert rollback.scn == first - 1


async def test_a_seek_to_a_time_that_nobody_holds_ends_the_client(tmp_path: Path) -> None:
    async with small_relay(tmp_path, orders(*range(4, 900))) as relay:
        recorder = Recorder()
        client = make(recorder, relay.url, start=at(890))
        with pytest.raises(ScnTooOld):
            async with serving(client) as task:
                await recorder.until(lambda r: 899 in scns(r))
                client.seek(at(6))
                await task
    assert recorder.calls[-2:] == ["onError", "onStopConsumption"]
