"""When a checkpoint is taken, and what it covers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from databus.client import FileCheckpoints, Result, Window
from databus.client.delivery import consumer_calls
from databus.client.testing import Grammar, Recorder, Step
from tests.client.conftest import StartServer
from tests.client.shop import orders
from tests.client.test_client import consume, make
from tests.support.waiting import within


async def test_a_skipped_checkpoint_is_not_stored(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(orders(1, 1), orders(2, 2), orders(3, 3))

    def skip_two(step: Step) -> Result | None:
        skipped = step.call == "onCheckpoint" and step.what.scn == 3
        return Result.SKIP_CHECKPOINT if skipped else None

    recorder = Recorder(skip_two)
    store = FileCheckpoints(tmp_path / "cp")
    await consume(make(recorder, server.url, checkpoints=store), recorder, 3)
    stored = store.load()
    store.close()
    assert stored is not None
    assert stored.position.scn == 2


async def test_a_window_skipped_by_its_events_takes_no_checkpoint(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1), orders(2, 2), orders(3, 3))

    def skip(step: Step) -> Result | None:
        skips = step.call == "onDataEvent" and step.what[2].scn == 2
        return Result.SKIP_CHECKPOINT if skips else None

    recorder = Recorder(skip)
    await consume(make(recorder, server.url), recorder, 3)
    assert [checkpoint.position.scn for checkpoint in recorder.checkpoints] == [1, 3]


async def test_the_cadence_counts_windows_and_an_idle_stream_is_checkpointed(
    scripted: StartServer,
) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 12)])
    recorder = Recorder()
    await consume(make(recorder, server.url, checkpoint_every_windows=4), recorder, 11)
    # The very first is taken at once, so that "latest" and "oldest" are pinned.
    assert [checkpoint.position.scn for checkpoint in recorder.checkpoints] == [1, 5, 9, 11]


@pytest.mark.parametrize("call", ["onDataEvent", "onEndDataEventSequence"])
async def test_a_checkpoint_requested_within_a_window_covers_that_window(
    scripted: StartServer, call: str
) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 5)])

    def ask(step: Step) -> Result | None:
        at = step.what[2].scn if step.call == "onDataEvent" else step.what
        return Result.CHECKPOINT if step.call == call and at == 3 else None

    recorder = Recorder(ask)
    await consume(make(recorder, server.url, checkpoint_every_windows=9), recorder, 4)
    assert [checkpoint.position.scn for checkpoint in recorder.checkpoints] == [1, 3, 4]
    Grammar(recorder.steps).check()


async def test_a_client_that_stops_at_the_end_of_a_window_has_its_checkpoint(
    scripted: StartServer,
) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 5)])

    class Stopping(Recorder):
        async def onEndDataEventSequence(self, window: Window) -> None:
            super().onEndDataEventSequence(window)
            if window.scn == 3:
                client.stop()
                await asyncio.sleep(0)

    recorder = Stopping()
    client = make(recorder, server.url, checkpoint_every_windows=9)
    await client.serve()
    assert [checkpoint.position.scn for checkpoint in recorder.checkpoints] == [1, 3]


async def test_a_stop_by_a_callback_that_takes_long_ends_a_stream_without_further_events(
    scripted: StartServer,
) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 5)])

    def stop_slowly(step: Step) -> None:
        if step.call == "onCheckpoint" and step.what.scn == 4:
            time.sleep(2 * consumer_calls._YIELD_S)
            client.stop()

    recorder = Recorder(stop_slowly)
    client = make(recorder, server.url)
    async with within(30):
        await client.serve()
    assert [checkpoint.position.scn for checkpoint in recorder.checkpoints] == [1, 2, 3, 4]


async def test_a_checkpoint_that_comes_due_within_a_window_covers_that_window(
    scripted: StartServer,
) -> None:
    """An application that stores it with its state would have more than the checkpoint covers."""
    server = await scripted(*[orders(scn, 2) for scn in range(1, 200)])

    def take_time(step: Step) -> None:
        until_s = time.monotonic() + 0.0003
        while step.call == "onDataEvent" and time.monotonic() < until_s:
            pass

    recorder = Recorder(take_time)
    await consume(make(recorder, server.url, checkpoint_every_s=0.002), recorder, 199)
    assert len(recorder.checkpoints) > 10
    Grammar(recorder.steps).check()
