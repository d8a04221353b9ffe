"""``pause``, ``resume``, ``seek`` and ``stop``: from a callback, a thread, a task and a signal."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from databus.client import (
    Consumer,
    DatabaseCheckpoints,
    DatabusClient,
    FileCheckpoints,
    OnlineCheckpoint,
    Position,
    Result,
)
from databus.client.testing import Grammar, Recorder, Step
from databus.common.errors import ConfigError
from tests.client.conftest import StartServer
from tests.client.delivery.test_conformance import Brief
from tests.client.scripted_server import CLOCK
from tests.client.shop import orders
from tests.client.test_client import make, serving
from tests.support.waiting import PATIENCE, eventually

MODES: list[dict[str, Any]] = [
    {},
    {"dispatch": "within_window", "workers": 2},
    {"dispatch": "across_windows", "workers": 2},
]


def scns(recorder: Recorder) -> list[int]:
    return [position.scn for position in recorder.positions]


def by_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def by_task(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)


@contextlib.contextmanager
def by_signal() -> Iterator[Callable[[Callable[[], None]], None]]:
    before = signal.getsignal(signal.SIGUSR1)

    def send(call: Callable[[], None]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: call())
        os.kill(os.getpid(), signal.SIGUSR1)

    yield send
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("how", ["thread", "task", "signal", "callback"])
@pytest.mark.parametrize("kind", [Recorder, Brief])
async def test_a_pause_holds_every_call_and_loses_nothing(
    scripted: StartServer, how: str, kind: type[Recorder]
) -> None:
    server = await scripted(*[orders(scn, *range(20)) for scn in range(1, 300)])

    def trouble(step: Step) -> None:
        if how == "callback" and step.call == "onDataEvent" and step.what[2] == Position(3, 5):
            client.pause()

    recorder = kind(trouble)
    client = make(recorder, server.url, buffer_bytes=20_000)
    with by_signal() as send:
        ask = {"thread": by_thread, "task": by_task, "signal": send}.get(how, lambda _: None)
        async with serving(client):
            await recorder.until(lambda r: len(r.positions) > 40)
            ask(client.pause)
            await eventually(lambda: client.status.is_paused)
            await eventually(lambda: client.status.buffered_bytes >= 20_000)
            count = len(recorder.steps)
            if how == "callback":
                assert recorder.positions[-1].scn == 3
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(recorder.steps) == count
            assert client.status.buffered_bytes < 400_000
            if how == "callback":
                client.resume()
            else:
                ask(client.resume)
            await recorder.until(lambda r: len(r.positions) == 299 * 20)
    assert recorder.positions == [Position(scn, n) for scn in range(1, 300) for n in range(20)]


async def test_a_pause_from_before_the_start_holds_and_a_stop_ends_it(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1))
    recorder = Recorder()
    client = make(recorder, server.url)
    client.pause()
    async with serving(client):
        await eventually(lambda: client.status.buffered_bytes > 0)
    assert recorder.calls == ["onStartConsumption", "onStopConsumption"]
    client.resume()
    async with serving(client):
        await recorder.until(lambda r: len(r.positions) == 1)


@pytest.mark.parametrize("settings", MODES, ids=["serial", "within", "across"])
@pytest.mark.parametrize("kind", [Recorder, Brief])
async def test_a_seek_back_delivers_everything_after_it_again(
    scripted: StartServer, tmp_path: Path, settings: dict[str, Any], kind: type[Recorder]
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 40)])
    store = FileCheckpoints(tmp_path / "cp")
    recorder = kind()
    client = make(recorder, server.url, checkpoints=store, **settings)
    async with serving(client):
        # Workers on threads cannot set the recorder's event.
        await eventually(lambda: len(recorder.positions) == 78)
        by_thread(lambda: client.seek(30))
        await eventually(lambda: len(recorder.positions) == 78 + 18)
    assert sorted(scns(recorder)[78:]) == [scn for scn in range(31, 40) for _ in range(2)]
    assert Step("onRollback", Position(30)) in recorder.steps
    if kind is Recorder and not settings:
        Grammar(recorder.steps).check()


async def test_a_seek_within_a_window_waits_for_its_end_and_its_checkpoint(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, *range(10)) for scn in range(1, 9)])
    sought: list[Position] = []

    def trouble(step: Step) -> None:
        if step.call == "onDataEvent" and step.what[2] == Position(2, 3) and not sought:
            sought.append(step.what[2])
            client.seek(6)

    recorder = Recorder(trouble)
    store = FileCheckpoints(tmp_path / "cp")
    client = make(recorder, server.url, checkpoints=store, checkpoint_every_windows=100,
                  checkpoint_every_s=60)  # fmt: skip
    async with serving(client):
        await recorder.until(lambda r: 8 in scns(r))
    assert recorder.positions[:21] == [Position(s, n) for s in (1, 2) for n in range(10)] + [
        Position(7, 0)
    ]
    after = [s for s in recorder.steps if s.call in ("onCheckpoint", "onRollback")]
    before_the_seek = next(s for s in after if s.what.scn == 2)
    assert before_the_seek.call == "onCheckpoint"
    assert after[after.index(before_the_seek) + 1] == Step("onRollback", Position(6))


async def test_what_a_skipped_checkpoint_left_open_is_rolled_back_before_a_seek(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 9)])

    def trouble(step: Step) -> Result | None:
        return (
            Result.SKIP_CHECKPOINT if step.call == "onCheckpoint" and step.what.scn == 8 else None
        )

    recorder = Recorder(trouble)
    client = make(recorder, server.url, checkpoints=FileCheckpoints(tmp_path / "cp"))
    async with serving(client):
        await recorder.until(lambda r: 8 in [p.position.scn for p in r.checkpoints])
        client.seek(2)
        await recorder.until(lambda r: len(r.positions) == 8 + 6)
    rollbacks = [s.what for s in recorder.steps if s.call == "onRollback"]
    assert rollbacks == [Position(7, 1), Position(2)]


async def test_a_seek_is_stored_before_anything_comes(
    scripted: StartServer, tmp_path: Path
) -> None:
    """A kill after ``onRollback`` must not resume at the old checkpoint."""
    server = await scripted(*[orders(scn, 1) for scn in range(1, 9)])
    stored: list[Position | None] = []
    table = DatabaseCheckpoints("one", partial(sqlite3.connect, tmp_path / "cp.db"))
    table.create_table()

    class Watching(Consumer):
        def onRollback(self, checkpoint: Any) -> None:
            row = table.stored()
            stored.append(row.checkpoint.position if row and row.checkpoint else None)

    client = make(Watching(), server.url, checkpoints=table)
    async with serving(client) as task:
        await eventually(lambda: client.status.position == Position(8, 1))
        client.seek(OnlineCheckpoint("shop", CLOCK, Position(4, 1)))
        await eventually(lambda: bool(stored))
        # The store's own row was claimed again: later checkpoints are not refused.
        await eventually(lambda: client.status.checkpoint == OnlineCheckpoint(
            "shop", CLOCK, Position(8, 1)))  # fmt: skip
        assert not task.done()
    assert stored == [Position(4, 1)]


async def test_a_seek_passes_an_event_that_fails(scripted: StartServer) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 9)])

    def trouble(step: Step) -> None:
        if step.call == "onDataEvent" and step.what[2].scn == 4:
            raise ValueError("never")

    recorder = Recorder(trouble)
    client = make(recorder, server.url, retry_s=60.0, retry_most_s=60.0)
    async with serving(client):
        await recorder.until(lambda r: 4 in scns(r))
        client.seek(4)
        await recorder.until(lambda r: 8 in scns(r))
    assert scns(recorder) == list(range(1, 9))


async def test_only_positions_can_be_sought(scripted: StartServer) -> None:
    server = await scripted()
    client = make(Recorder(), server.url)
    wrong: list[Any] = ["latest", 0, -1, OnlineCheckpoint("other", CLOCK, Position(4)), None,
                        dt.datetime(2026, 1, 1)]  # fmt: skip
    for to in wrong:
        with pytest.raises(ConfigError):
            client.seek(to)


class Loop:
    """What a loop's body does: it seeks twice, and commits a window from before a seek."""

    def __init__(self, client: DatabusClient, store: FileCheckpoints) -> None:
        self.client = client
        self.store = store
        self.seen: list[int] = []
        self.first: Any = None

    def take(self, one: Any) -> bool:
        """Whether to commit the first window now."""
        self.first = self.first or one
        self.seen.append(one.scn)
        if len(self.seen) in (3, 5):
            self.client.seek(20 if len(self.seen) == 3 else 2)
        return len(self.seen) == 4

    def check_stored(self) -> None:
        loaded = self.store.load()
        assert loaded is not None
        assert loaded.position == Position(20)

    @property
    def is_done(self) -> bool:
        return len(self.seen) == 7


async def test_a_seek_in_a_loop_mixes_no_windows(scripted: StartServer, tmp_path: Path) -> None:
    """Windows that were loaded before it never come, and their commits do nothing."""
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 30)])
    store = FileCheckpoints(tmp_path / "cp")
    async with make(None, server.url, checkpoints=store) as client:
        loop = Loop(client, store)
        async for one in client.awindows():
            if loop.take(one):
                await loop.first.acommit()
                loop.check_stored()
            if loop.is_done:
                break
    assert loop.seen == [1, 2, 3, 21, 22, 3, 4]


async def test_a_seek_in_a_plain_loop_mixes_no_windows(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 30)])
    store = FileCheckpoints(tmp_path / "cp")

    def read() -> list[int]:
        with make(None, server.url, checkpoints=store) as client:
            loop = Loop(client, store)
            for one in client.windows():
                if loop.take(one):
                    loop.first.commit()
                    loop.check_stored()
                if loop.is_done:
                    break
        return loop.seen

    assert await asyncio.to_thread(read) == [1, 2, 3, 21, 22, 3, 4]


async def test_a_pause_holds_a_loop_between_windows(scripted: StartServer) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 9)])
    client = make(None, server.url)
    seen: list[int] = []
    paused = threading.Event()

    def read() -> None:
        for one in client.windows(idle_s=1.0):
            seen.append(one.scn)
            if one.scn == 3:
                client.pause()
                paused.set()

    reading = asyncio.create_task(asyncio.to_thread(read))
    await asyncio.to_thread(paused.wait)
    done, _ = await asyncio.wait({reading}, timeout=1.2)
    assert not done, "a pause is not idle time"
    assert seen == [1, 2, 3]
    client.resume()
    await asyncio.wait_for(reading, 5 * PATIENCE)
    assert seen == list(range(1, 9))


async def test_the_end_of_async_with_ends_serving_in_order(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    recorder = Recorder()
    async with make(recorder, server.url) as client:
        serving = asyncio.create_task(client.serve())
        await recorder.until(lambda r: bool(r.checkpoints))
    assert serving.done()
    assert recorder.calls[-1] == "onStopConsumption"
