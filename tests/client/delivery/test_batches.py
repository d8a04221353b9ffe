"""Rows in batches: each row once and in order, whole windows, and the same guarantee."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from databus.client import Consumer, DataBatch, Position, Result, tables
from databus.client.testing import Recorder
from databus.common.errors import ConfigError, MissingDependency
from databus.common.frame.window_builder import heartbeat
from tests.client.conftest import StartServer
from tests.client.delivery.test_conformance import live
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.shop import ITEMS, ORDERS, orders, window
from tests.client.test_client import make, serving
from tests.support.waiting import eventually, within


class Batches(Recorder):
    """Records each batch: its source, and op, position and key of its rows."""

    onStartDataEventSequence = Consumer.onStartDataEventSequence
    onStartSource = Consumer.onStartSource
    onEndSource = Consumer.onEndSource
    onEndDataEventSequence = Consumer.onEndDataEventSequence

    def onDataBatch(self, batch: DataBatch) -> Any:
        columns = batch.arrow.to_pydict()
        positions = [Position(*one) for one in zip(columns["_scn"], columns["_seq"], strict=True)]
        assert len(batch) == len(positions) > 0
        assert (batch.first, batch.last) == (positions[0], positions[-1])
        rows = list(zip(columns["_op"], positions, columns["id"], strict=True))
        return self._note("onDataBatch", (batch.source, rows))

    @property
    def sizes(self) -> list[int]:
        return [len(step.what[1]) for step in self.steps if step.call == "onDataBatch"]

    @property
    def rows(self) -> list[tuple[str, str, Position, int | None]]:
        return [
            (step.what[0], *row)
            for step in self.steps
            if step.call == "onDataBatch"
            for row in step.what[1]
        ]


async def consume(recorder: Batches, server: Any, count: int, **options: Any) -> None:
    async with serving(make(recorder, server.url, **options)):
        await recorder.until(lambda _: len(recorder.rows) >= count, 30)


async def test_a_batch_holds_whole_windows_of_one_source_up_to_its_size(
    scripted: StartServer,
) -> None:
    server = await scripted(
        *[orders(scn, *range(3)) for scn in range(1, 5)], orders(5, *range(9)), orders(6, *range(7))
    )
    recorder = Batches()
    await consume(recorder, server, 28, batch_rows=7, batch_ms=3_600_000)
    assert recorder.sizes == [6, 6, 9, 7]
    assert [row[2].scn for row in recorder.rows] == [*[1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]] + (
        [5] * 9 + [6] * 7
    )
    assert [one.position.scn for one in recorder.checkpoints] == [2, 4, 5, 6]


async def test_rows_of_several_sources_and_ops_are_those_of_the_events(
    scripted: StartServer,
) -> None:
    made, _ = workload(3, 30)
    server = await scripted(*made)
    events = Recorder()
    async with serving(make(events, server.url)):
        await events.until(
            lambda one: bool(one.checkpoints) and one.checkpoints[-1].position.scn >= 30
        )
    batches = Batches()
    await consume(batches, server, len(events.positions))
    for source in ("shop.orders", "shop.items"):
        wanted = [
            (source, op, position, key[0] if key else None)
            for one, op, position, key in (s.what for s in events.steps if s.call == "onDataEvent")
            if one == source
        ]
        assert [row for row in batches.rows if row[0] == source] == wanted


async def test_the_values_are_those_of_the_rows_and_absent_ones_are_named(
    scripted: StartServer,
) -> None:
    server = await scripted(
        window(1, ("c", ORDERS, 1, "näme"), ("u", ORDERS, 2, None), ("d", ORDERS, 1, None)),
        window(2, ("t", ITEMS, 0, None)),
    )
    found: dict[str, list[dict[str, Any]]] = {}

    class Keeping(Consumer):
        def onDataBatch(self, batch: DataBatch) -> None:
            found.setdefault(batch.source, []).extend(batch.arrow.to_pylist())
            if batch.last.scn == 2:
                client.stop()

    client = make(Keeping(), server.url)
    async with within(30):
        await client.serve()
    values = [(one["id"], one["state"], one["_op"]) for one in found["shop.orders"]]
    assert values == [(1, "näme", "c"), (2, None, "u"), (1, None, "d")]
    assert [(one["id"], one["_op"]) for one in found["shop.items"]] == [(None, "t")]
    assert {one["_commit_time"].year for one in found["shop.orders"]} == {2023}


@pytest.mark.parametrize("seed", range(6))
async def test_the_guarantee_holds_for_batches_under_random_trouble(
    scripted: StartServer, tmp_path: Path, seed: int
) -> None:
    lives, expected = await live(scripted, tmp_path / "cp", seed, Batches)
    before: Position | None = None
    delivered: set[Position] = set()
    for trace, stored in zip(lives.traces, lives.stored, strict=True):
        begin = before
        latest: dict[str, Position] = {}
        for call, what, _ in trace:
            if call == "onDataBatch":
                source, rows = what
                for _op, position, _key in rows:
                    assert position > (begin or Position(0, 0)), "it lies before the checkpoint"
                    assert position > latest.get(source, Position(0, 0)), "rows are in order"
                    latest[source] = position
                    delivered.add(position)
            elif call == "onRollback":
                begin = what
                latest.clear()
            elif call == "onCheckpoint":
                missing = [one for one in expected if one <= what and one not in delivered]
                assert not missing, f"the checkpoint {what} covers {missing}, which never came"
        before = stored
    assert delivered == set(expected)


async def test_a_batch_waits_for_rows_and_not_for_ever(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    recorder = Batches()
    client = make(recorder, server.url, batch_rows=3, batch_ms=3_600_000)
    async with serving(client):
        await eventually(lambda: client.status.buffered_bytes > 0, 30)
        server.append(orders(2, 2))
        await asyncio.sleep(0.05)
        assert recorder.sizes == []
        server.append(orders(3, 3))
        await recorder.until(lambda _: recorder.sizes == [3], 30)
    short = Batches()
    await consume(short, server, 3, batch_rows=100, batch_ms=50)
    assert short.sizes == [3]


async def test_a_stop_ends_the_wait_for_rows(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    client = make(Batches(), server.url, batch_ms=3_600_000)
    serving_ = asyncio.create_task(client.serve())
    await eventually(lambda: client.status.buffered_bytes > 0, 30)
    client.stop()
    async with within(30):
        await serving_


async def test_a_checkpoint_that_is_requested_or_skipped_counts_for_the_batch(
    scripted: StartServer,
) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 7)], heartbeat(Position(7, 0), 0))

    def skip(step: Any) -> Result | None:
        if step.call != "onDataBatch":
            return None
        scn = step.what[1][-1][1].scn
        return {2: Result.SKIP_CHECKPOINT, 4: Result.CHECKPOINT}.get(scn)

    recorder = Batches(skip)
    await consume(
        recorder, server, 6, batch_rows=2, batch_ms=3_600_000, checkpoint_every_windows=99
    )
    assert recorder.sizes == [2, 2, 2]
    assert 2 not in [one.position.scn for one in recorder.checkpoints]
    assert 4 in [one.position.scn for one in recorder.checkpoints]


async def test_workers_by_key_and_batches_exclude_each_other(scripted: StartServer) -> None:
    server = await scripted()
    with pytest.raises(ConfigError, match="this consumer has onDataBatch"):
        await make(Batches(), server.url, dispatch="within_window").serve()


async def test_without_pyarrow_the_error_names_the_extra(
    scripted: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await scripted()
    monkeypatch.delitem(sys.modules, "databus.client.tables.arrow_rows", raising=False)
    monkeypatch.delattr(tables, "arrow_rows", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"databus-cdc\[export\]"):
        async with within(30):
            await make(Batches(), server.url).serve()
