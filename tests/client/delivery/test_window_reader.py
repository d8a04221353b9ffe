"""The iterator: windows taken and committed, with and without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from databus.client import DatabusClient, FileCheckpoints, Position
from databus.common.errors import InternalError, ScnTooOld, StoreBusy, UsageError
from tests.client.conftest import StartServer
from tests.client.scripted_server import Fault
from tests.client.shop import orders
from tests.support.read_windows import aup_to, up_to
from tests.support.waiting import PATIENCE, eventually


def make(*urls: str, **settings: Any) -> DatabusClient:
    defaults: dict[str, Any] = {"database": "shop", "relays": list(urls), "start": "oldest"}
    return DatabusClient(**defaults | {"reconnect_s": 0.001, "seed": 1} | settings)


async def test_windows_come_in_order_and_commit_moves_the_checkpoint(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 6)])
    store = FileCheckpoints(tmp_path / "cp")
    seen = []
    async for one in aup_to(5, make(server.url, checkpoints=store)):
        seen.append((one.scn, one.txid, [event.seq async for event in one]))
        if one.scn == 3:
            await one.acommit()
    assert seen == [(scn, f"tx{scn}", [0, 1]) for scn in range(1, 6)]
    stored = store.load()
    assert stored is not None
    assert stored.position == Position(3, 2)
    store.close()
    again = [one.scn async for one in make(server.url, checkpoints=store).awindows(idle_s=1.0)]
    assert again == [4, 5]


async def test_a_commit_stores_whatever_the_cadence(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 6)])
    store = FileCheckpoints(tmp_path / "cp")
    client = make(server.url, checkpoints=store, checkpoint_every_s=60, checkpoint_every_windows=9)
    async for one in aup_to(5, client):
        if one.scn == 3:
            await one.acommit()
    stored = store.load()
    assert stored is not None
    assert stored.position == Position(3, 2)


async def test_windows_work_without_an_event_loop(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 6)])
    store = FileCheckpoints(tmp_path / "cp")

    def read() -> list[Any]:
        seen = []
        for one in up_to(5, make(server.url, checkpoints=store)):
            seen.append((one.scn, [event.key["id"] for event in one]))
            one.commit()
        return seen

    seen = await asyncio.to_thread(read)
    assert seen == [(scn, [1, 2]) for scn in range(1, 6)]
    stored = store.load()
    assert stored is not None
    assert stored.position == Position(5, 2)


async def test_a_window_larger_than_the_buffer_is_read_while_it_is_iterated(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, *range(5000)), orders(2, 1))
    client = make(server.url, buffer_bytes=30_000)

    def read() -> list[Any]:
        return [(one.scn, sum(1 for _ in one)) for one in up_to(2, client)]

    assert await asyncio.to_thread(read) == [(1, 5000), (2, 1)]


async def test_events_that_are_not_read_are_skipped(scripted: StartServer) -> None:
    server = await scripted(orders(1, *range(5000)), orders(2, 1))
    client = make(server.url, buffer_bytes=30_000)
    assert [one.scn async for one in aup_to(2, client)] == [1, 2]


async def test_stop_from_another_thread_ends_the_iteration(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    client = make(server.url)

    def read() -> list[int]:
        seen = []
        for one in client.windows():
            seen.append(one.scn)
            threading.Thread(target=client.stop).start()
        return seen

    assert await asyncio.to_thread(read) == [1]


@pytest.mark.parametrize("commits", [False, True])
async def test_a_stop_within_a_window_ends_the_iteration(
    scripted: StartServer, commits: bool
) -> None:
    server = await scripted(orders(1, *range(50)))
    server.frames = server.frames[:20]
    client = make(server.url)

    def read() -> list[int]:
        seen = []
        for one in client.windows():
            seen.append(one.scn)
            client.stop()
            if commits:
                one.commit()
        return seen

    # A loop that spun could not be timed out by its own thread.
    reading = asyncio.create_task(asyncio.to_thread(read))
    assert await asyncio.wait_for(reading, 5 * PATIENCE) == [1]


async def test_a_window_that_a_stop_cut_short_is_not_committed(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, *range(50)))
    server.frames, rest = server.frames[:20], server.frames[20:]
    store = FileCheckpoints(tmp_path / "cp")
    client = make(server.url, checkpoints=store)
    seen = []
    async for one in client.awindows():
        async for event in one:
            seen.append(event.seq)
            if len(seen) == 1:
                server.append(*rest)
                await eventually(lambda: client.status.newest == Position(1, 50))
                client.stop()
                await asyncio.sleep(0)
        await one.acommit()
    assert seen == list(range(20))
    assert store.load() is None
    store.close()


async def test_an_error_ends_the_iteration_after_the_windows_before_it(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1), orders(2, 2), holds_open=False)
    server.faults = [Fault(), Fault(error=ScnTooOld("gone"))]
    seen = []

    async def read() -> None:
        async for one in make(server.url).awindows():
            seen.append(one.scn)

    with pytest.raises(ScnTooOld):
        await read()
    assert seen == [1, 2]


async def test_a_relay_lost_within_a_window_gives_each_event_once(scripted: StartServer) -> None:
    made = [orders(scn, *range(50)) for scn in range(1, 6)]
    size = len(made[0])
    one, other = await scripted(*made), await scripted(*made)
    one.faults = [Fault(cut_after_bytes=size + 777), Fault(cut_after_bytes=900)]
    other.faults = [Fault(cut_after_bytes=2 * size + 333), Fault(cut_after_bytes=500)]
    seen = []
    async for window in aup_to(5, make(one.url, other.url)):
        seen += [event.position async for event in window]
    assert seen == [Position(scn, seq) for scn in range(1, 6) for seq in range(50)]


async def test_leaving_the_loop_closes_every_connection(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1), orders(2, 2))
    client = make(server.url)
    before = set(threading.enumerate())
    during: set[threading.Thread] = set()

    def read() -> None:
        for _ in client.windows():
            during.update(threading.enumerate())
            break

    await asyncio.to_thread(read)
    loops = {thread for thread in during - before if thread.name == "databus-loop"}
    assert loops
    assert not loops & set(threading.enumerate())


async def test_windows_that_are_held_can_be_read_when_the_iteration_has_ended(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1), orders(2, *range(5000)))
    client = make(server.url, buffer_bytes=30_000)

    def read() -> None:
        taken = list(itertools.islice(client.windows(), 2))
        assert [event.seq for event in taken[0]] == [0]
        for late in (taken[0].commit, lambda: list(taken[1])):
            with pytest.raises(InternalError, match="the iteration has ended"):
                late()

    await asyncio.to_thread(read)


async def test_awindows_that_are_held_can_be_read_when_the_iteration_has_ended(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1), orders(2, *range(5000)))
    taken = []
    async with contextlib.aclosing(make(server.url, buffer_bytes=30_000).awindows()) as windows:
        async for one in windows:
            taken.append(one)
            if one.scn == 2:
                break
    assert [event.seq async for event in taken[0]] == [0]
    with pytest.raises(InternalError, match="the iteration has ended"):
        _ = [event async for event in taken[1]]
    with pytest.raises(InternalError, match="the iteration has ended"):
        await taken[0].acommit()


async def test_the_events_of_a_window_can_be_read_twice(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1, 2), orders(2, *range(3000)))

    def read() -> list[list[int]]:
        found = []
        with make(server.url, buffer_bytes=30_000).windows(idle_s=1.0) as windows:
            for one in windows:
                assert one.events is one.events
                assert [event.seq for event in one] == [event.seq for event in one.events]
                found.append([event.seq for event in one])
        return found

    expected = [[0, 1], list(range(3000))]
    assert await asyncio.to_thread(read) == expected
    async with make(server.url, buffer_bytes=30_000).awindows(idle_s=1.0) as windows:
        seen = [([e.seq for e in await one.aevents()], one) async for one in windows]
    assert [seqs for seqs, _ in seen] == expected
    assert [[event.seq async for event in one] for _, one in seen] == expected


async def test_events_that_were_iterated_over_are_not_silently_missing(
    scripted: StartServer,
) -> None:
    """In a small window and in one that is larger than the buffer."""
    server = await scripted(orders(1, 1, 2), orders(2, *range(3000)))

    def read() -> int:
        count = 0
        for one in up_to(2, make(server.url, buffer_bytes=30_000)):
            assert next(iter(one)).seq == 0
            for again in (lambda: list(one), lambda: one.events):  # noqa: B023 - called at once
                with pytest.raises(UsageError, match="have been iterated over"):
                    again()
            count += 1
        return count

    assert await asyncio.to_thread(read) == 2
    async for window in aup_to(2, make(server.url, buffer_bytes=30_000)):
        assert [event.seq async for event in window]
        with pytest.raises(UsageError, match="have been iterated over"):
            await window.aevents()


@pytest.mark.parametrize("leaves", ["break", "return", "error", "never"])
async def test_a_loop_that_is_left_ends_without_a_word(scripted: StartServer, leaves: str) -> None:
    """``asyncio.run`` after it reports nothing, and every connection is closed."""
    server = await scripted(orders(1, 1), orders(2, 2))
    reported: list[dict[str, Any]] = []

    async def first(client: DatabusClient) -> int:
        async for one in client.awindows():
            if leaves == "break":
                break
            if leaves == "error":
                raise KeyError
            return one.scn
        return 0

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        if leaves == "never":
            windows = make(server.url).awindows()
            await anext(windows)
            main.__dict__["windows"] = windows
            return
        with contextlib.suppress(KeyError):
            await first(make(server.url))

    await asyncio.to_thread(asyncio.run, main())
    main.__dict__.clear()
    gc.collect()
    assert reported == []


async def test_a_loop_that_is_left_closes_its_connection_while_the_program_runs(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1), orders(2, 2))
    path = tmp_path / "cp"
    async for one in make(server.url, checkpoints=FileCheckpoints(path)).awindows():
        await one.acommit()
        break

    def is_unlocked() -> bool:
        with contextlib.suppress(StoreBusy), contextlib.closing(FileCheckpoints(path)) as store:
            return store.load() is not None
        return False

    await eventually(is_unlocked)
