"""The delivery guarantee of ``Consumer``'s docstring, clause by clause, under random trouble.

Each case is a seed: a random workload on two relays that break off at random bytes, a consumer
that fails at random callbacks, and a client that is ended and started again at random.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from databus.client import Consumer, FileCheckpoints, Position, Result
from databus.client.testing import Grammar, Recorder, Step
from databus.common.frame.window_builder import heartbeat
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.scripted_server import Fault
from tests.client.test_client import make, serving
from tests.support.waiting import PATIENCE

WINDOWS = 40


class Brief(Recorder):
    """Leaves out the callbacks around a window's events, and gets whole windows at once."""

    onStartDataEventSequence = Consumer.onStartDataEventSequence
    onStartSource = Consumer.onStartSource
    onEndSource = Consumer.onEndSource
    onEndDataEventSequence = Consumer.onEndDataEventSequence


@dataclass
class Lives:
    """The traces of one consumer over its restarts, with what was stored at each end."""

    traces: list[list[Step]] = field(default_factory=list)
    stored: list[Position | None] = field(default_factory=list)


async def live(
    scripted: StartServer, path: Path, seed: int, kind: type[Recorder], seeks: int = 0
) -> tuple[Lives, list[Position]]:
    """Consume a workload to its end, with trouble; returns what happened and what there was.

    It is paused, seeks at random and is resumed, ``seeks`` times in all.
    """
    rng = random.Random(seed)
    made, _ = workload(seed, WINDOWS)
    first, second = await scripted(*made), await scripted(*made)
    total = sum(len(one) for one in made)
    for server in (first, second):
        server.faults = [
            Fault(cut_after_bytes=rng.randrange(1, total))
            if rng.random() < 0.7
            else Fault(status=503)
            for _ in range(6)
        ]
        # The last window's checkpoint may be skipped; this one is taken after it.
        server.append(heartbeat(Position(WINDOWS + 1, 0), 0))

    def trouble(step: Step) -> Result | None:
        if step.call in ("onStartConsumption", "onRollback", "onError", "onStopConsumption"):
            return None
        dice = rng.random()
        if dice < 0.01:
            raise RuntimeError("trouble")
        if dice < 0.02:
            return Result.ERROR
        if dice < 0.04 and step.call != "onCheckpoint":
            return rng.choice([Result.CHECKPOINT, Result.SKIP_CHECKPOINT])
        return None

    lives, left = Lives(), seeks
    while not lives.stored or lives.stored[-1] is None or lives.stored[-1].scn < WINDOWS:
        store = FileCheckpoints(path, sync=False)
        recorder = kind(trouble)
        life_steps = rng.randrange(50, 400)
        client = make(
            recorder,
            first.url,
            second.url,
            checkpoints=store,
            checkpoint_every_windows=rng.choice([1, 1, 3]),
            max_retries=1000,
            idle_checkpoint_s=0.01,
            retry_s=0.0001,
            retry_most_s=0.001,
            seed=seed,
        )
        async with serving(client), asyncio.timeout(30 * PATIENCE):
            while len(recorder.steps) < life_steps and (left or not _reached(recorder)):
                if not (left and _reached(recorder)):
                    recorder.changed.clear()
                    await recorder.changed.wait()
                if left and (_reached(recorder) or rng.random() < 0.1):
                    left -= 1
                    client.pause()
                    client.seek(rng.randrange(1, WINDOWS - 5))
                    await asyncio.sleep(0)
                    client.resume()
        loaded = store.load()
        store.close()
        lives.traces.append(recorder.steps)
        lives.stored.append(loaded.position if loaded else None)
    count = Recorder()
    await _consume_whole(scripted, made, count)
    return lives, count.positions


def _reached(recorder: Recorder) -> bool:
    return bool(recorder.checkpoints) and recorder.checkpoints[-1].position.scn >= WINDOWS


async def _consume_whole(scripted: StartServer, made: list[bytes], recorder: Recorder) -> None:
    server = await scripted(*made)
    async with serving(make(recorder, server.url)):
        await recorder.until(_reached)


@pytest.mark.parametrize("kind", [Recorder, Brief])
@pytest.mark.parametrize("seed", range(6))
async def test_the_guarantee_holds_under_random_trouble(
    scripted: StartServer, tmp_path: Path, seed: int, kind: type[Recorder]
) -> None:
    lives, expected = await live(scripted, tmp_path / "cp", seed, kind)
    before: Position | None = None
    delivered: set[Position] = set()
    for trace, stored in zip(lives.traces, lives.stored, strict=True):
        if kind is Recorder:
            _order(trace)
            _whole_windows(trace, expected)
        _durability(trace, expected, before, delivered)
        before = stored
    assert delivered == set(expected), "U1: every change arrives"


@pytest.mark.parametrize("kind", [Recorder, Brief])
@pytest.mark.parametrize("seed", range(6))
async def test_the_guarantee_holds_under_random_seeks_and_pauses(
    scripted: StartServer, tmp_path: Path, seed: int, kind: type[Recorder]
) -> None:
    """What follows a seek begins just behind it, and a life behind what the one before stored."""
    lives, expected = await live(scripted, tmp_path / "cp", seed, kind, seeks=8)
    before: Position | None = None
    for trace, stored in zip(lives.traces, lives.stored, strict=True):
        if kind is Recorder:
            _order(trace)
            _whole_windows(trace, expected)
        # A seek forward skips windows by request.
        _durability(trace, expected, before, set(expected), seeks=True)
        before = stored


def _order(trace: list[Step]) -> None:
    """O1, O2, D2, F3: the grammar, and events that only grow between rollbacks."""
    Grammar(trace).check()


def _whole_windows(trace: list[Step], expected: list[Position]) -> None:
    """O2: a window that is ended has all of its events, in commit order."""
    for events in Grammar(trace).windows():
        scn = events[0][2].scn
        assert [event[2] for event in events] == [one for one in expected if one.scn == scn]


def _durability(
    trace: list[Step],
    expected: list[Position],
    before: Position | None,
    delivered: set[Position],
    *,
    seeks: bool = False,
) -> None:
    """D1, U1: a life begins just behind what was stored, and checkpoints cover only what came."""
    position = before
    floor = Position(0, 0) if seeks else before or Position(0, 0)
    for call, what, _ in trace:
        if call == "onDataEvent":
            following = next((one for one in expected if position is None or one > position), None)
            assert what[2] == following, f"{what[2]} came after {position}"
            position = what[2]
            delivered.add(what[2])
        elif call == "onRollback":
            assert what is None or what >= floor, "F1: never back behind a stored checkpoint"
            position = what
        elif call == "onCheckpoint":
            missing = [one for one in expected if one <= what and one not in delivered]
            assert not missing, f"the checkpoint {what} covers {missing}, which never came"


async def test_a_failing_start_is_an_error_and_stops(scripted: StartServer) -> None:
    """F2, F3."""
    server = await scripted()
    recorder = Recorder(lambda step: Result.ERROR if step.call == "onStartConsumption" else None)
    with pytest.raises(Exception, match="onStartConsumption failed"):
        await make(recorder, server.url).serve()
    assert recorder.calls == ["onStartConsumption", "onError", "onStopConsumption"]


async def test_a_failing_rollback_is_an_error_and_stops(scripted: StartServer) -> None:
    """F2."""
    made, _ = workload(1, 3)
    server = await scripted(*made)

    def trouble(step: Step) -> Result | None:
        return Result.ERROR if step.call in ("onEndSource", "onRollback") else None

    recorder = Recorder(trouble)
    with pytest.raises(Exception, match="onRollback failed"):
        await make(recorder, server.url).serve()
    assert recorder.calls[-3:] == ["onRollback", "onError", "onStopConsumption"]


async def test_a_result_that_is_none_is_refused(scripted: StartServer) -> None:
    made, _ = workload(1, 3)
    server = await scripted(*made)

    class Wrong(Consumer):
        def onDataEvent(self, event: Any) -> Any:
            return True

    with pytest.raises(Exception, match="neither a Result nor None"):
        await make(Wrong(), server.url, max_retries=1).serve()


async def test_cancelling_the_task_still_calls_on_stop_consumption(scripted: StartServer) -> None:
    """F3."""
    server = await scripted(*workload(1, 3)[0])
    recorder = Recorder()
    task = asyncio.create_task(make(recorder, server.url).serve())
    await recorder.until(lambda r: bool(r.checkpoints))
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert recorder.calls[-1] == "onStopConsumption"
