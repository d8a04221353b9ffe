"""Parallel dispatch, budgets and memory: the same end, whatever the way."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from typing import Any

import pytest

from databus.client import Consumer, Position, Result
from databus.client.testing import Grammar, Mirror, Recorder, Step
from databus.common.errors import ConsumerFailed
from tests.client.conftest import StartServer
from tests.client.shop import ITEMS, ORDERS, Change, orders, row, window
from tests.client.test_client import consume, make, serving
from tests.support.waiting import PATIENCE, eventually

MODES = ["serial", "within_window", "across_windows"]


def workload(seed: int, windows: int) -> tuple[list[bytes], dict[str, dict[Any, Any]]]:
    """Random windows over a few keys, and the tables that they lead to."""
    rng = random.Random(seed)
    tables: dict[str, dict[Any, Any]] = {"shop.orders": {}, "shop.items": {}}
    made = []
    for scn in range(1, windows + 1):
        changes: list[Change] = []
        for number in range(rng.randrange(1, 12)):
            schema = rng.choice([ORDERS, ITEMS])
            table, key = tables[schema.source], rng.randrange(20)
            op = rng.choice("uud") if (key,) in table else "c"
            if rng.random() < 0.01:
                op = "t"
            text = f"{scn}.{number}"
            changes.append((op, schema, key, text))
            if op == "t":
                table.clear()
            elif op == "d":
                del table[key,]
            else:
                table[key,] = row(schema, key, text)
        made.append(window(scn, *changes))
    return made, tables


class OrderChecking(Mirror):
    """Applies under a lock, and records keys with two events at once."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._running: dict[Any, int] = defaultdict(int)
        self.overlaps: list[Any] = []
        self.threads: set[int] = set()

    def onDataEvent(self, event: Any) -> Result | None:
        key = (event.source, event.key_bytes)
        with self._lock:
            self.threads.add(threading.get_ident())
            self._running[key] += 1
            if self._running[key] > 1:
                self.overlaps.append(key)
        with self._lock:
            super().onDataEvent(event)
            self._running[key] -= 1
        return None


class AsyncMirror(Mirror):
    """Applies after a yield to the loop, so that workers interleave."""

    async def onDataEvent(self, event: Any) -> Result | None:
        await asyncio.sleep(0)
        self.apply(event)
        return None


async def serve_until(consumer: Mirror, scn: int, *urls: str, **options: Any) -> None:
    async with serving(make(consumer, *urls, **options)) as task:
        async with asyncio.timeout(20 * PATIENCE):
            while consumer.checkpoint is None or consumer.checkpoint.position.scn < scn:
                await asyncio.sleep(0.001)
                if task.done():
                    await task


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [OrderChecking, AsyncMirror])
async def test_all_modes_lead_to_the_same_tables(
    scripted: StartServer, mode: str, kind: type[Mirror]
) -> None:
    made, tables = workload(7, 150)
    server = await scripted(*made)
    mirror = kind()
    await serve_until(mirror, 150, server.url, dispatch=mode, workers=3)
    assert mirror.differences(tables) == []
    assert mirror.stale == []
    if isinstance(mirror, OrderChecking):
        assert mirror.overlaps == []
        assert len(mirror.threads) == (1 if mode == "serial" else 3)


@pytest.mark.parametrize("mode", MODES)
async def test_all_modes_recover_from_failures_to_the_same_tables(
    scripted: StartServer, mode: str
) -> None:
    made, tables = workload(11, 100)
    server = await scripted(*made)
    rng = random.Random(3)

    class Failing(OrderChecking):
        def onDataEvent(self, event: Any) -> Result | None:
            if rng.random() < 0.01:
                raise RuntimeError("now and then")
            return super().onDataEvent(event)

        def onRollback(self, checkpoint: Any) -> Result | None:
            self._running.clear()
            return super().onRollback(checkpoint)

    mirror = Failing()
    options = {"dispatch": mode, "workers": 3, "max_retries": 1000}
    await serve_until(mirror, 100, server.url, **options)
    assert mirror.differences(tables) == []
    assert mirror.stale == []
    assert mirror.rollback_count > 0


async def test_across_windows_a_checkpoint_waits_for_every_event_before_it(
    scripted: StartServer,
) -> None:
    server = await scripted(*[orders(scn, scn) for scn in range(1, 9)])
    release = asyncio.Event()
    delivered: set[int] = set()
    checkpoints: list[tuple[int, set[int]]] = []

    class Slow(Consumer):
        async def onDataEvent(self, event: Any) -> None:
            if event.scn == 3:
                await release.wait()
            delivered.add(event.scn)

        def onCheckpoint(self, checkpoint: Any) -> Result | None:
            checkpoints.append((checkpoint.position.scn, set(delivered)))
            return None

    client = make(Slow(), server.url, dispatch="across_windows", workers=4)
    async with serving(client):
        async with asyncio.timeout(10 * PATIENCE):
            while len(delivered) < 6:
                await asyncio.sleep(0.001)
            assert all(scn < 3 for scn, _ in checkpoints)
            release.set()
            while not checkpoints or checkpoints[-1][0] < 8:
                await asyncio.sleep(0.001)
    for scn, done in checkpoints:
        assert done >= set(range(1, scn + 1))


async def test_across_windows_no_checkpoint_covers_an_event_that_fails_during_the_one_before(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1), orders(2, 2))
    first, second = asyncio.Event(), asyncio.Event()
    delivered: list[int] = []
    failed: list[int] = []
    checkpoints: list[tuple[int, list[int]]] = []

    class Failing(Consumer):
        async def onDataEvent(self, event: Any) -> None:
            await (first if event.scn == 1 else second).wait()
            if event.scn == 2 and not failed:
                failed.append(event.scn)
                raise RuntimeError("once")
            delivered.append(event.scn)

        async def onEndDataEventSequence(self, window: Any) -> None:
            if window.scn == 2:
                first.set()
                await loop_iterations()

        async def onCheckpoint(self, checkpoint: Any) -> None:
            checkpoints.append((checkpoint.position.scn, list(delivered)))
            second.set()
            await loop_iterations()

    async with serving(make(Failing(), server.url, dispatch="across_windows", workers=2)):
        await eventually(lambda: checkpoints and checkpoints[-1][0] == 2)
    assert failed == [2]
    assert checkpoints == [(1, [1]), (2, [1, 2])]


async def loop_iterations() -> None:
    """Iterations of the loop in which what can run does."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_grammar_holds_within_windows(scripted: StartServer) -> None:
    made, _ = workload(5, 60)
    server = await scripted(*made)
    recorder = Recorder()
    await consume(make(recorder, server.url, dispatch="within_window", workers=1), recorder, 60)
    Grammar(recorder.steps).check()


@pytest.mark.parametrize("error", [StopIteration, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_a_callback_that_raises_what_means_something_to_the_loop_has_failed(
    scripted: StartServer, mode: str, is_async: bool, error: type[BaseException]
) -> None:
    server = await scripted(orders(1, 1), orders(2, 2, 3))

    class Odd(Recorder):
        def onDataEvent(self, event: Any) -> Result | None:
            super().onDataEvent(event)
            if event.position == Position(2, 0) and self.positions.count(event.position) == 1:
                raise error
            return None

    class AsyncOdd(Odd):
        async def onDataEvent(self, event: Any) -> Result | None:
            return super().onDataEvent(event)

    recorder = AsyncOdd() if is_async else Odd()
    await consume(make(recorder, server.url, dispatch=mode, workers=1), recorder, 2)
    assert recorder.calls.count("onRollback") == 1
    assert recorder.positions.count(Position(2, 0)) == 2


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancellation_ends_the_client_within_a_callback(
    scripted: StartServer, mode: str
) -> None:
    server = await scripted(orders(1, 1))

    class Hanging(Recorder):
        async def onDataEvent(self, event: Any) -> Result | None:
            super().onDataEvent(event)
            await asyncio.Event().wait()
            return None

    recorder = Hanging()
    serving = asyncio.create_task(make(recorder, server.url, dispatch=mode).serve())
    await eventually(lambda: recorder.positions)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert recorder.calls[-1] == "onStopConsumption"
    assert "onRollback" not in recorder.calls


async def test_a_cancelled_client_delivers_nothing_that_was_queued(scripted: StartServer) -> None:
    server = await scripted(*[orders(scn, *range(20)) for scn in range(1, 21)])
    gate, began = threading.Event(), threading.Event()
    delivered: list[Position] = []

    class Slow(Recorder):
        def onDataEvent(self, event: Any) -> Result | None:
            began.set()
            gate.wait(60 * PATIENCE)
            delivered.append(event.position)
            return None

    recorder = Slow()
    client = make(recorder, server.url, dispatch="across_windows", workers=2)
    serving = asyncio.create_task(client.serve())
    await eventually(lambda: recorder.calls.count("onEndDataEventSequence") == 20)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    gate.set()
    await eventually(
        lambda: not {"databus-0", "databus-1"} & {t.name for t in threading.enumerate()}
    )
    assert began.is_set()
    assert len(delivered) <= 2, "the events that were running when the client ended"


async def test_an_async_callback_that_hangs_is_cancelled_and_replayed(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1, 2))
    cancelled = []

    class Hanging(Recorder):
        async def onDataEvent(self, event: Any) -> Result | None:
            super().onDataEvent(event)
            if event.seq == 1 and not cancelled:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(event.position)
                    raise
            return None

    recorder = Hanging()
    await consume(make(recorder, server.url, callback_budget_s=0.05), recorder, 1)
    assert cancelled == [Position(1, 1)]
    assert recorder.calls.count("onRollback") == 1
    assert [position.seq for position in recorder.positions] == [0, 1, 0, 1]


async def test_a_plain_callback_that_hangs_on_a_worker_ends_the_client(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1, 2))
    release = threading.Event()

    class Hanging(Recorder):
        def onDataEvent(self, event: Any) -> Result | None:
            super().onDataEvent(event)
            release.wait(60 * PATIENCE)
            return None

    recorder = Hanging()
    client = make(recorder, server.url, dispatch="within_window", workers=1, callback_budget_s=0.5)
    with pytest.raises(ConsumerFailed, match="has not returned for"):
        await consume(client, recorder, 1)
    release.set()
    assert recorder.calls[-2:] == ["onError", "onStopConsumption"]
    assert "onRollback" not in recorder.calls


async def test_a_callback_over_its_budget_is_a_failure(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    waited = []

    class Late(Recorder):
        def onEndSource(self, source: str, schema: Any) -> Result | None:
            if not waited:
                waited.append(threading.Event().wait(0.6))
            return super().onEndSource(source, schema)

    recorder = Late()
    await consume(make(recorder, server.url, callback_budget_s=0.5), recorder, 1)
    assert recorder.calls.count("onRollback") == 1


async def test_a_slow_consumer_bounds_what_is_buffered_and_loses_nothing(
    scripted: StartServer,
) -> None:
    budget = 200_000
    made = [orders(scn, *range(300)) for scn in range(1, 101)]
    total = sum(len(one) for one in made)
    server = await scripted(*made)
    most = 0

    class Slow(Recorder):
        async def onEndDataEventSequence(self, window: Any) -> Result | None:
            nonlocal most
            await asyncio.sleep(0)
            most = max(most, client.status.buffered_bytes)
            super().onEndDataEventSequence(window)
            return None

    recorder = Slow()
    client = make(recorder, server.url, buffer_bytes=budget)
    await consume(client, recorder, 100)
    assert len(recorder.positions) == 30_000
    # One block over the budget may wait; a read of the socket is of 256 KiB at most.
    assert most <= budget + (1 << 18) + (1 << 16)
    assert total > 3 * most


@pytest.mark.parametrize("failing_seq", [10, 1500, 2999])
async def test_a_window_larger_than_the_buffer_is_replayed_by_reading_it_again(
    scripted: StartServer, failing_seq: int
) -> None:
    server = await scripted(orders(1, 1), orders(2, *range(3000)), orders(3, 1))
    server.faults = []
    failed: list[Step] = []

    def trouble(step: Step) -> Result | None:
        if (
            step.call == "onDataEvent"
            and step.what[2] == Position(2, failing_seq)
            and len(failed) < 2
        ):
            failed.append(step)
            return Result.ERROR
        return None

    recorder = Recorder(trouble)
    client = make(recorder, server.url, buffer_bytes=20_000, max_bytes=15_000)
    await consume(client, recorder, 3)
    grammar = Grammar(recorder.steps)
    grammar.check()
    assert [len(events) for events in grammar.windows()] == [1, 3000, 1]
    assert recorder.calls.count("onRollback") == 2
