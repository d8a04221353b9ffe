"""The whole client against a server on the wire: callbacks, checkpoints, fail-over, bootstrap."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from databus.client import (
    ApplicationCheckpoints,
    BootstrapCheckpoint,
    DatabusClient,
    Event,
    FileCheckpoints,
    NoCheckpoints,
    OnlineCheckpoint,
    Position,
    Result,
    encode_checkpoint,
)
from databus.client.testing import Grammar, Mirror, Recorder, Step, Trouble
from databus.common.checkpoint import ORIGIN
from databus.common.errors import (
    ClockMismatch,
    ConfigError,
    ConsumerFailed,
    LogTooYoung,
    NotSeeded,
    ScnTooOld,
    UnknownSchema,
)
from databus.common.frame.frame_format import Op, iter_frames, pack_frame
from tests.client.conftest import StartServer
from tests.client.scripted_server import CLOCK, Fault, checkpoint_frame
from tests.client.shop import ITEMS, ORDERS, orders, row, window
from tests.support.read_windows import aup_to
from tests.support.waiting import PATIENCE, eventually


def make(consumer: Any, *relays: str, **settings: Any) -> DatabusClient:
    defaults: dict[str, Any] = {
        "database": "shop",
        "relays": list(relays),
        "consumer": consumer,
        "start": "oldest",
        "reconnect_s": 0.001,
        "retry_s": 0.001,
        "seed": 1,
    }
    return DatabusClient(**defaults | settings)


@contextlib.asynccontextmanager
async def serving(client: DatabusClient) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(client.serve())
    try:
        yield task
    finally:
        client.stop()
        async with asyncio.timeout(10 * PATIENCE):
            await asyncio.wait({task})


async def consume(client: DatabusClient, consumer: Recorder, scn: int) -> None:
    """Serve until a checkpoint at or behind ``scn``, then stop."""
    async with serving(client) as task:
        done = asyncio.create_task(
            consumer.until(lambda r: bool(r.checkpoints) and r.checkpoints[-1].position.scn >= scn)
        )
        await asyncio.wait({task, done}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            done.cancel()
            await task
        await done
    await task


async def test_callbacks_come_in_the_order_of_the_paper(scripted: StartServer) -> None:
    server = await scripted(
        window(5, ("c", ORDERS, 1, "new"), ("c", ITEMS, 7, "ink"), ("u", ORDERS, 1, "paid"))
    )
    recorder = Recorder()
    await consume(make(recorder, server.url), recorder, 5)
    assert recorder.calls == [
        "onStartConsumption",
        "onStartDataEventSequence",
        "onStartSource",
        "onDataEvent",
        "onEndSource",
        "onStartSource",
        "onDataEvent",
        "onEndSource",
        "onStartSource",
        "onDataEvent",
        "onEndSource",
        "onEndDataEventSequence",
        "onCheckpoint",
        "onStopConsumption",
    ]
    Grammar(recorder.steps).check()


async def test_an_event_shows_its_row(scripted: StartServer) -> None:
    seen: list[Any] = []

    class Look(Recorder):
        def onDataEvent(self, event: Any) -> Result | None:
            seen.append(
                (
                    event.database,
                    event.source,
                    event.op,
                    event.scn,
                    event.seq,
                    event.key,
                    event.value,
                    event.before,
                    event.txid,
                    event.commit_time.year,
                )
            )
            return super().onDataEvent(event)

    server = await scripted(window(5, ("c", ORDERS, 1, "new"), ("d", ORDERS, 2, None), txid="T"))
    look = Look()
    await consume(make(look, server.url), look, 5)
    new = {"id": 1, "state": "new", "amount": None}
    assert seen == [
        ("shop", "shop.orders", "c", 5, 0, {"id": 1}, new, None, "T", 2023),
        ("shop", "shop.orders", "d", 5, 1, {"id": 2}, None, None, "T", 2023),
    ]


async def test_a_restart_begins_behind_the_stored_checkpoint(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1), orders(2, 2))
    first = Recorder()
    path = tmp_path / "cp"
    await consume(make(first, server.url, checkpoints=FileCheckpoints(path)), first, 2)
    server.append(orders(3, 3))
    second = Recorder()
    await consume(make(second, server.url, checkpoints=FileCheckpoints(path)), second, 3)
    assert [position.scn for position in second.positions] == [3]
    stored = FileCheckpoints(path).load()
    assert stored == OnlineCheckpoint("shop", CLOCK, Position(3, 1))


def fail_once_at(index: int, how: Result | Exception = Result.ERROR) -> Trouble:
    """Trouble at step ``index``, the first time only."""
    count = 0

    def trouble(step: Step) -> Result | None:
        nonlocal count
        count += 1
        if count - 1 == index:
            if isinstance(how, Exception):
                raise how
            return how
        return None

    return trouble


@pytest.mark.parametrize("index", range(1, 25))
@pytest.mark.parametrize("how", [Result.ERROR, ValueError("no")], ids=["result", "exception"])
async def test_a_failure_at_any_callback_is_replayed_from_the_last_checkpoint(
    scripted: StartServer, index: int, how: Any
) -> None:
    server = await scripted(
        *[
            window(scn, ("c", ORDERS, scn, "a"), ("u", ORDERS, scn, "b"), ("c", ITEMS, scn, "c"))
            for scn in (1, 2, 3)
        ]
    )
    recorder = Recorder(fail_once_at(index, how))
    await consume(make(recorder, server.url), recorder, 3)
    grammar = Grammar(recorder.steps)
    grammar.check()
    assert recorder.calls.count("onRollback") == 1
    assert set(recorder.positions) == {Position(scn, seq) for scn in (1, 2, 3) for seq in (0, 1, 2)}
    assert all(len(events) == 3 for events in grammar.windows())


async def test_retries_that_are_used_up_stop_with_on_error(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    recorder = Recorder(lambda step: Result.ERROR if step.call == "onDataEvent" else None)
    with pytest.raises(ConsumerFailed, match="failed 4 times"):
        await consume(make(recorder, server.url, max_retries=3), recorder, 1)
    assert recorder.calls.count("onRollback") == 3
    assert recorder.calls[-2:] == ["onError", "onStopConsumption"]
    Grammar(recorder.steps).check()


async def test_error_fatal_ends_the_client_at_once(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    recorder = Recorder(lambda step: Result.ERROR_FATAL if step.call == "onEndSource" else None)
    with pytest.raises(ConsumerFailed, match="ERROR_FATAL"):
        await consume(make(recorder, server.url), recorder, 1)
    assert "onRollback" not in recorder.calls
    assert recorder.calls[-2:] == ["onError", "onStopConsumption"]


async def test_a_relay_lost_within_a_window_replays_the_window_at_the_next(
    scripted: StartServer,
) -> None:
    made = [orders(1, 1, 2, 3), orders(2, 4, 5, 6), orders(3, 7)]
    first, second = await scripted(*made), await scripted(*made)
    cut = len(made[0]) + 250
    first.faults = [Fault(cut_after_bytes=cut), Fault(status=503)] * 3
    second.faults = [Fault(cut_after_bytes=cut)]
    recorder = Recorder()
    await consume(make(recorder, first.url, second.url), recorder, 3)
    grammar = Grammar(recorder.steps)
    grammar.check()
    assert [len(events) for events in grammar.windows()] == [3, 3, 1]
    assert recorder.calls.count("onRollback") >= 1


class Waiting(Recorder):
    """A consumer whose callback for one event lasts until something has happened elsewhere."""

    def __init__(self, at: Position, happened: Callable[[], bool]) -> None:
        super().__init__()
        self._at = at
        self._happened = happened

    async def onDataEvent(self, event: Event) -> Result | None:
        super().onDataEvent(event)
        async with asyncio.timeout(10 * PATIENCE):
            while event.position == self._at and not self._happened():
                await asyncio.sleep(0.001)
        return None


async def test_a_relay_lost_while_its_window_is_with_a_callback_is_announced(
    scripted: StartServer,
) -> None:
    made = [orders(1, 1, 2, 3), orders(2, 4, 5, 6), orders(3, 7)]
    first, second = await scripted(*made), await scripted(*made)
    cut = len(made[0]) + len(made[1]) * 3 // 4
    first.faults = [Fault(cut_after_bytes=cut), *[Fault(status=503)] * 9]
    second.faults = [Fault(cut_after_bytes=cut)]

    def is_lost() -> bool:
        return len(first.streams()) + len(second.streams()) >= 2

    waiting = Waiting(Position(2, 0), is_lost)
    await consume(make(waiting, first.url, second.url), waiting, 3)
    grammar = Grammar(waiting.steps)
    grammar.check()
    assert [len(events) for events in grammar.windows()] == [3, 3, 1]
    assert "onRollback" in waiting.calls


async def test_a_reader_overtaken_while_its_window_is_with_a_callback_loses_no_row(
    scripted: StartServer,
) -> None:
    made = [orders(1, 1, 2, 3), orders(2, 4, 5, 6), orders(3, 7), orders(4, 8)]
    relay = await scripted(*made)
    cut = len(made[0]) + len(made[1]) * 3 // 4
    relay.faults = [Fault(cut_after_bytes=cut), Fault(error=ScnTooOld("2:1 is gone"))]
    # The log has window 2 once more, from its start: the rows 4, 5 and 6 at their positions.
    rows = [bytes(frame.bytes) for frame in iter_frames(made[1])][:3]
    bootstrap = await scripted(bootstrap_rows=rows, bootstrap_target=Position(2, 3))
    bootstrap.bootstrap_every = 9
    waiting = Waiting(Position(2, 0), lambda: bool(bootstrap.bootstraps()))
    client = make(waiting, relay.url, bootstraps=[bootstrap.url], start="oldest")
    await consume(client, waiting, 4)
    Grammar(waiting.steps).check()
    back = max(index for index, call in enumerate(waiting.calls) if call == "onRollback")
    after = [step[1][3] for step in waiting.steps[back:] if step[0] == "onDataEvent"]
    assert after[-5:] == [(4,), (5,), (6,), (7,), (8,)]


async def test_a_position_behind_the_ring_goes_through_the_bootstrap_and_back(
    scripted: StartServer, tmp_path: Path
) -> None:
    relay = await scripted(*[orders(scn, scn) for scn in range(1, 8)])
    relay.evict_to(4)
    bootstrap = await scripted(bootstrap_rows=_rows(*range(2, 6)), bootstrap_target=Position(5, 1))
    store = FileCheckpoints(tmp_path / "cp")
    store.save(OnlineCheckpoint("shop", CLOCK, Position(1, 1)))
    store.close()
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=[bootstrap.url], checkpoints=store)
    await consume(client, recorder, 7)
    Grammar(recorder.steps).check()
    assert [position.scn for position in recorder.positions] == [2, 3, 4, 5, 6, 7]
    modes = [type(checkpoint).__name__ for checkpoint in recorder.checkpoints]
    assert modes == ["BootstrapCheckpoint", *["OnlineCheckpoint"] * 3]


def _rows(*scns: int) -> list[bytes]:
    """A snapshot's rows, one order with the id of each scn."""
    return [
        pack_frame(
            op=Op.READ,
            scn=scn,
            seq=0,
            source=ORDERS.source_id,
            schema_fp=ORDERS.fingerprint,
            key=ORDERS.encode_key([scn]),
            after=ORDERS.encode_row(row(ORDERS, scn, "boot")),
        )
        for scn in scns
    ]


async def test_a_new_client_takes_the_whole_tables_from_the_bootstrap(
    scripted: StartServer,
) -> None:
    relay = await scripted(*[orders(scn, scn) for scn in range(1, 8)])
    relay.evict_to(4)
    bootstrap = await scripted(bootstrap_rows=_rows(*range(1, 6)), bootstrap_target=Position(5, 1))
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=[bootstrap.url], start="bootstrap")
    await consume(client, recorder, 7)
    assert bootstrap.bootstraps()[0] == {"scn": "0"}
    assert [position.scn for position in recorder.positions] == list(range(1, 8))


async def test_a_target_that_the_ring_has_left_behind_is_bootstrapped_again(
    scripted: StartServer,
) -> None:
    relay = await scripted(*[orders(scn, scn) for scn in range(1, 10)])
    relay.evict_to(6)
    bootstrap = await scripted(bootstrap_rows=_rows(1, 2), bootstrap_target=Position(3, 1))
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=[bootstrap.url], start="bootstrap")
    async with serving(client):
        await recorder.until(lambda r: len(bootstrap.bootstraps()) >= 2 or len(r.checkpoints) > 3)
        bootstrap.bootstrap_rows = _rows(4, 5, 6, 7)
        bootstrap.bootstrap_target = Position(7, 1)
        await recorder.until(lambda r: r.checkpoints[-1].position.scn >= 9)
    assert [position.scn for position in recorder.positions][-2:] == [8, 9]
    assert client.status.bootstrap_count >= 1


async def test_a_bootstrap_that_was_cut_off_resumes_at_its_last_checkpoint(
    scripted: StartServer,
) -> None:
    relay = await scripted(orders(8, 1))
    relay.evict_to(7)
    relay.prev = Position(7, 1)
    rows = _rows(*range(1, 7))
    bootstrap = await scripted(bootstrap_rows=rows, bootstrap_target=Position(7, 1))
    size = sum(len(one) for one in rows)
    bootstrap.faults = [Fault(cut_after_bytes=size + 150)]
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=[bootstrap.url], start="bootstrap")
    await consume(client, recorder, 8)
    requests = bootstrap.bootstraps()
    assert len(requests) == 2
    assert '"row":2' in requests[1]["checkpoint"]
    assert sorted({position.scn for position in recorder.positions}) == [1, 2, 3, 4, 5, 6, 8]


async def test_a_gap_without_a_bootstrap_is_an_error_by_default(scripted: StartServer) -> None:
    relay = await scripted(*[orders(scn, scn) for scn in range(1, 5)])
    relay.evict_to(2)
    recorder = Recorder()
    with pytest.raises(ScnTooOld):
        await consume(make(recorder, relay.url, start=1), recorder, 4)
    assert recorder.calls == ["onStartConsumption", "onError", "onStopConsumption"]


async def test_a_gap_is_crossed_where_the_options_allow_it(scripted: StartServer) -> None:
    relay = await scripted(*[orders(scn, scn) for scn in range(1, 5)])
    relay.evict_to(2)
    recorder = Recorder()
    client = make(recorder, relay.url, start=1, on_gap="oldest")
    await consume(client, recorder, 4)
    assert [position.scn for position in recorder.positions] == [3, 4]
    assert client.status.gap_count == 1


async def test_a_log_that_is_too_young_is_an_error_with_a_hint(scripted: StartServer) -> None:
    relay = await scripted(orders(9, 1))
    relay.prev = Position(8, 1)
    bootstrap = await scripted(bootstrap_since=Position(5, 0), bootstrap_target=Position(8, 1))
    recorder = Recorder()
    with pytest.raises(LogTooYoung) as caught:
        await consume(make(recorder, relay.url, bootstraps=[bootstrap.url], start=2), recorder, 9)
    assert "start=bootstrap" in caught.value.hint


async def test_a_bootstrap_that_is_not_seeded_is_waited_for(scripted: StartServer) -> None:
    relay = await scripted(orders(2, 2))
    relay.prev = Position(1, 1)
    bootstrap = await scripted(bootstrap_rows=_rows(1), bootstrap_target=Position(1, 1))
    bootstrap.faults = [Fault(error=NotSeeded("rows 10 of 20"))] * 3
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=[bootstrap.url], start="bootstrap")
    await consume(client, recorder, 2)
    assert len(bootstrap.bootstraps()) == 4
    assert [position.scn for position in recorder.positions] == [1, 2]


async def test_another_clock_ends_the_client_with_on_error(
    scripted: StartServer, tmp_path: Path
) -> None:
    relay = await scripted(orders(1, 1))
    store = FileCheckpoints(tmp_path / "cp")
    store.save(OnlineCheckpoint("shop", "clock-b", Position(0, 0)))
    recorder = Recorder()
    with pytest.raises(ClockMismatch, match="clock-b"):
        await consume(make(recorder, relay.url, checkpoints=store), recorder, 1)
    assert recorder.calls == ["onStartConsumption", "onError", "onStopConsumption"]


async def test_rows_of_an_unlisted_schema_reach_no_callback(
    scripted: StartServer,
) -> None:
    relay = await scripted(orders(1, 1), hidden_schemas={ORDERS.fingerprint})
    recorder = Recorder()
    with pytest.raises(UnknownSchema, match=f"{ORDERS.fingerprint:016x}"):
        await consume(make(recorder, relay.url, max_pull_failures=2), recorder, 1)
    assert recorder.positions == []


async def test_a_schema_registered_later_is_fetched_when_its_rows_come(
    scripted: StartServer,
) -> None:
    relay = await scripted(orders(1, 1), hidden_schemas={ITEMS.fingerprint})
    recorder = Recorder()
    async with serving(make(recorder, relay.url)):
        await recorder.until(lambda r: len(r.checkpoints) == 1)
        relay.hidden_schemas.clear()
        relay.append(window(2, ("c", ITEMS, 1, "ink")))
        await recorder.until(lambda r: len(r.positions) == 2)


async def test_stop_before_serve_ends_it_at_once(scripted: StartServer) -> None:
    relay = await scripted(orders(1, 1))
    recorder = Recorder()
    client = make(recorder, relay.url)
    client.stop()
    async with asyncio.timeout(5 * PATIENCE):
        await client.serve()
    assert recorder.calls == ["onStartConsumption", "onStopConsumption"]


async def test_a_mirror_equals_the_source(scripted: StartServer) -> None:
    relay = await scripted(
        window(1, ("c", ORDERS, 1, "a"), ("c", ORDERS, 2, "b"), ("c", ITEMS, 1, "ink")),
        window(2, ("u", ORDERS, 1, "c"), ("d", ORDERS, 2, None)),
        window(3, ("t", ITEMS, 0, None), ("c", ITEMS, 5, "pen")),
    )
    mirror = Mirror()
    async with serving(make(mirror, relay.url)):
        async with asyncio.timeout(5 * PATIENCE):
            while mirror.checkpoint is None or mirror.checkpoint.position.scn < 3:
                await asyncio.sleep(0.001)
    assert (
        mirror.differences(
            {
                "shop.orders": {(1,): row(ORDERS, 1, "c")},
                "shop.items": {(5,): row(ITEMS, 5, "pen")},
            }
        )
        == []
    )
    assert mirror.stale == []


def test_workers_that_run_ahead_of_checkpoints_are_refused_with_the_applications_own() -> None:
    with pytest.raises(ConfigError, match="within_window"):
        make(
            Recorder(),
            "http://127.0.0.1:9",
            checkpoints=ApplicationCheckpoints(lambda: None),
            dispatch="across_windows",
        )


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean max_retries"):
        make(Recorder(), "http://127.0.0.1:1", max_retry=3)


def _bootstrap_checkpoint(run: str, number: int) -> bytes:
    checkpoint = BootstrapCheckpoint(
        "shop", CLOCK, since=ORIGIN, target=Position(7, 1), run=run, row=number, position=ORIGIN
    )
    return checkpoint_frame(encode_checkpoint(checkpoint), ORIGIN)


async def test_a_bootstrap_that_restarts_is_announced_by_a_rollback(
    scripted: StartServer,
) -> None:
    """The server's run was merged away under the reader: its rows come again."""
    relay = await scripted(orders(8, 1))
    relay.prev = Position(7, 1)
    rows = _rows(1, 2, 3)
    served = [_bootstrap_checkpoint("run-1", 0), rows[0], rows[1]]
    served += [_bootstrap_checkpoint("run-1", 2), _bootstrap_checkpoint("run-2", 0)]
    served += [*rows, _bootstrap_checkpoint("run-2", 3)]
    bootstrap = await scripted(
        bootstrap_rows=served, bootstrap_target=Position(7, 1), bootstrap_every=1000
    )
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=[bootstrap.url], start="bootstrap")
    await consume(client, recorder, 8)
    assert recorder.calls.count("onRollback") == 1
    at = recorder.calls.index("onRollback")
    before = [step.what[2].scn for step in recorder.steps[:at] if step.call == "onDataEvent"]
    after = [step.what[2].scn for step in recorder.steps[at:] if step.call == "onDataEvent"]
    assert (before, after) == ([1, 2], [1, 2, 3, 8])
    assert recorder.calls[at - 1] == "onCheckpoint", "what came before is made durable first"
    Grammar(recorder.steps).check()


async def test_deletions_sent_before_another_base_are_made_durable_before_the_rollback(
    scripted: StartServer, tmp_path: Path
) -> None:
    """A reader comes back within a base that is gone: what was deleted since comes first, under
    the checkpoint that it came with, and then another base, which no longer names it."""
    relay = await scripted(orders(8, 1))
    relay.prev = Position(7, 1)
    gone, *rows = _rows(1, 2, 3)
    served = [b"", b"", gone, _bootstrap_checkpoint("run-1", 2), _bootstrap_checkpoint("run-2", 0)]
    served += [*rows, _bootstrap_checkpoint("run-2", 2)]
    bootstrap = await scripted(
        bootstrap_rows=served, bootstrap_target=Position(7, 1), bootstrap_every=1000
    )
    store = FileCheckpoints(tmp_path / "checkpoint")
    store.save(
        BootstrapCheckpoint(
            "shop", CLOCK, since=ORIGIN, target=Position(7, 1), run="run-1", row=2, position=ORIGIN
        )
    )
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=[bootstrap.url], checkpoints=store)
    await consume(client, recorder, 8)
    assert recorder.calls.count("onRollback") == 1
    at = recorder.calls.index("onRollback")
    assert recorder.calls[:at].count("onDataEvent") == 1
    assert recorder.calls[at - 1] == "onCheckpoint", "a consumer that rolls back retains it"
    Grammar(recorder.steps).check()


async def test_a_quiet_relay_that_is_polled_does_not_end_the_client(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    recorder = Recorder()
    client = make(recorder, server.url, follow=False, max_pull_failures=1)
    async with serving(client) as task:
        await eventually(lambda: task.done() or len(server.streams()) > 10)
        assert not task.done()
        server.append(orders(2, 2))
        await recorder.until(lambda r: len(r.positions) == 2)
    assert client.status.failure_count == 0


async def test_a_client_that_stores_no_checkpoints_warns_once(
    scripted: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = await scripted(orders(1, 1))
    for settings, expected in (({}, 1), ({"checkpoints": NoCheckpoints()}, 0)):
        caplog.clear()
        client = make(None, server.url, **settings)
        for _ in range(2):
            assert [one.scn async for one in aup_to(1, client)] == [1]
        warned = [one for one in caplog.messages if "nothing stores checkpoints" in one]
        assert len(warned) == expected
