"""A consumer is notified which tables the stream does not give whole."""

from __future__ import annotations

import json
import time
from pathlib import Path

import aiohttp
import pytest

from databus.client import FileCheckpoints
from databus.client.application.consumer import Result
from databus.client.testing import Grammar, Recorder, Step
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.table_state import CaptureState, TableState
from tests.client.test_client import consume, make
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window

SUSPENDED = TableState("shop.orders", CaptureState.SUSPENDED, 2, "RENAME TABLE", "dump it")


def state_window(scn: int, seq: int, *states: TableState, emptied: bool = False) -> bytes:
    builder = WindowBuilder(scn, scn * 1_000_000, seq)
    for state in states:
        builder.control(Op.TABLE_STATE, source=ORDERS.source_id, after=state.encode())
    if emptied:
        builder.event(Op.TRUNCATE, ORDERS.source_id, ORDERS.fingerprint, b"")
    return builder.end(dump=True)


def inserts(scn: int) -> bytes:
    return window(scn, [(Op.INSERT, ORDERS, scn)])


def story() -> list[bytes]:
    """A suspension, with what the relay does about it."""
    again = TableState("shop.orders", CaptureState.RESYNCHRONISING, 2, "RENAME TABLE", "wait")
    followed = TableState("shop.orders", CaptureState.FOLLOWED)
    return [
        inserts(1),
        window(2, [(Op.INSERT, ITEMS, 2)]),
        state_window(2, 2, SUSPENDED),
        state_window(2, 4, again, emptied=True),
        window(2, [(Op.READ, ORDERS, 1)], first_seq=7, dump=True),
        state_window(2, 9, followed),
        inserts(3),
    ]


STATES = ["suspended", "resynchronising", "followed"]


@pytest.mark.parametrize("dispatch", ["serial", "within_window", "across_windows"])
async def test_states_are_reported_between_windows_in_the_order_of_the_stream(
    relay: LiveRelay, dispatch: str
) -> None:
    relay.append(*story())
    recorder = Recorder()
    await consume(make(recorder, relay.url, dispatch=dispatch), recorder, 3)
    if dispatch != "across_windows":  # whose callbacks of rows do not nest
        Grammar(recorder.steps).check()
    steps = [
        step.what[1] for step in recorder.steps if step.call in ("onTableState", "onDataEvent")
    ]
    assert steps == ["c", "c", "suspended", "resynchronising", "t", "r", "followed", "c"]


async def test_a_filter_on_sources_takes_the_states_of_its_tables_alone(relay: LiveRelay) -> None:
    relay.append(*story())
    orders, items = Recorder(), Recorder()
    await consume(make(orders, relay.url, sources=["shop.orders"]), orders, 3)
    assert [s.what[1] for s in orders.steps if s.call == "onTableState"] == STATES
    relay.append(window(4, [(Op.INSERT, ITEMS, 4)]))  # else a heartbeat brings the checkpoint
    await consume(make(items, relay.url, sources=["shop.items"]), items, 4)
    assert "onTableState" not in items.calls


async def test_a_callback_that_fails_is_called_again_and_a_restart_repeats_no_state(
    relay: LiveRelay, tmp_path: Path
) -> None:
    relay.append(*story())
    failures = iter([True])

    def trouble(step: Step) -> Result | None:
        is_due = step.call == "onTableState" and step.what[1] == "resynchronising"
        return Result.ERROR if is_due and next(failures, False) else None

    recorder = Recorder(trouble)
    store = FileCheckpoints(tmp_path / "cp")
    await consume(make(recorder, relay.url, checkpoints=store), recorder, 3)
    Grammar(recorder.steps).check()
    states = [step.what[1] for step in recorder.steps if step.call == "onTableState"]
    assert states.count("resynchronising") == 2
    assert states[-1] == "followed"
    relay.append(inserts(4))
    again = Recorder()
    await consume(make(again, relay.url, checkpoints=FileCheckpoints(tmp_path / "cp")), again, 4)
    assert "onTableState" not in again.calls
    store.close()


async def test_a_consumer_that_begins_later_learns_of_the_suspended_table_at_its_start(
    relay: LiveRelay,
) -> None:
    relay.append(inserts(1))
    document = {"state": "streaming", "tables": [SUSPENDED.to_json()], "updated_us": time.time()}
    relay.folder.status.write_text(json.dumps(document))
    recorder = Recorder()
    await consume(make(recorder, relay.url, start="oldest"), recorder, 1)
    Grammar(recorder.steps).check()
    assert recorder.calls[:3] == ["onStartConsumption", "onTableState", "onStartDataEventSequence"]
    assert recorder.steps[1].what == ("shop.orders", "suspended")
    async with aiohttp.ClientSession() as http:
        answer = await http.get(f"{relay.url}/v1/shop/sources")
        sources = {one["name"]: one["state"] for one in (await answer.json())["sources"]}
        assert sources == {"shop.orders": "suspended", "shop.items": "followed"}
        metrics = await (await http.get(f"{relay.url}/metrics")).text()
    for table, state in (("shop.orders", "suspended"), ("shop.items", "followed")):
        labels = f'database="shop",state="{state}",table="{table}"'
        assert f"databus_relay_table_state{{{labels}}} 1.0" in metrics


async def test_windows_name_the_tables_whose_state_has_changed_before_them(
    relay: LiveRelay,
) -> None:
    relay.append(*story())
    found = []
    async for one in make(None, relay.url).awindows():
        found.append(([str(state.state) for state in one.table_states], [e.op async for e in one]))
        if one.scn == 3:
            break
    assert found == [
        ([], ["c"]),
        ([], ["c"]),
        (["suspended", "resynchronising"], ["t"]),
        ([], ["r"]),
        (["followed"], ["c"]),
    ]


async def test_json_lines_show_the_state(relay: LiveRelay) -> None:
    relay.append(*story())
    lines: list[dict[str, object]] = []
    headers = {"Accept": "application/x-ndjson"}
    async with aiohttp.ClientSession() as http:
        answer = await http.get(f"{relay.url}/v1/shop/stream?start=oldest", headers=headers)
        lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    shown = [line for line in lines if line.get("control") == "table_state"]
    assert [line["state"] for line in shown] == STATES
    assert shown[0] == {
        "control": "table_state", **SUSPENDED.to_json(), "scn": 2, "seq": 2, "ts_us": 2_000_000,
    }  # fmt: skip
