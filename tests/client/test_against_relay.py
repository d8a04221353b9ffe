"""The client against the real relay: real ring, real HTTP worker, real filters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.client import DatabusClient, FileCheckpoints, OnlineCheckpoint, Position
from databus.client.testing import Grammar, Mirror, Recorder
from databus.common.config import parse
from databus.common.errors import ClockMismatch, ScnTooOld, UnknownDatabase
from databus.common.frame.frame_format import Op, iter_frames
from databus.relay.local_relay import LocalRelay
from tests.client.test_client import consume, make, serving
from tests.support.live_relay import CLOCK, ITEMS, ORDERS, LiveRelay, window
from tests.support.waiting import PATIENCE, eventually


def inserts(scn: int, *ids: int, schema: Any = ORDERS) -> bytes:
    return window(scn, [(Op.INSERT, schema, number) for number in ids])


async def test_callbacks_checkpoints_and_a_restart(relay: LiveRelay, tmp_path: Path) -> None:
    relay.append(*[inserts(scn, scn, scn + 1) for scn in range(1, 51)])
    store = FileCheckpoints(tmp_path / "cp")
    first = Recorder()
    await consume(make(first, relay.url, checkpoints=store), first, 50)
    Grammar(first.steps).check()
    assert first.positions == [Position(scn, seq) for scn in range(1, 51) for seq in (0, 1)]
    assert store.load() == OnlineCheckpoint("shop", CLOCK, Position(50, 2))
    store.close()
    relay.append(inserts(51, 1))
    second = Recorder()
    await consume(make(second, relay.url, checkpoints=store), second, 51)
    assert second.positions == [Position(51, 0)]


async def test_a_client_is_counted_by_the_name_that_it_gives(relay: LiveRelay) -> None:
    relay.append(*[inserts(scn, scn) for scn in range(1, 20)])
    recorder = Recorder()
    await consume(make(recorder, relay.url, client_name="search-index"), recorder, 19)
    async with aiohttp.ClientSession() as http, http.get(f"{relay.url}/v1/status") as answer:
        (database,) = (await answer.json())["databases"]
    (client,) = database["clients"]
    assert (client["name"], client["events"], client["scn"]) == ("search-index", 19, 19)


async def test_a_client_ahead_of_its_relay_reports_it_and_waits_for_new_events(
    relay: LiveRelay, caplog: pytest.LogCaptureFixture
) -> None:
    relay.append(inserts(5, 5))
    recorder = Recorder()
    client = make(recorder, relay.url, start=9)
    async with serving(client):
        await eventually(lambda: client.status.is_ahead)
        assert client.status.is_flowing, "its answer is open"
        assert client.status.newest == Position(5, 1)
        relay.append(*(inserts(scn, scn) for scn in range(6, 11)))
        await recorder.until(lambda r: bool(r.positions))
        await eventually(lambda: not client.status.is_ahead and client.status.is_flowing)
    assert recorder.positions == [Position(10, 0)]
    assert caplog.text.count("has the stream up to 5:1 only") == 1


async def test_what_is_committed_while_following_arrives(relay: LiveRelay) -> None:
    recorder = Recorder()
    async with serving(make(recorder, relay.url, start="latest")):
        await recorder.until(lambda r: bool(r.checkpoints))
        for scn in range(1, 20):
            relay.append(inserts(scn, scn))
        await recorder.until(lambda r: len(r.positions) == 19)


@pytest.mark.slow
async def test_partitions_together_are_the_whole_and_share_no_key(relay: LiveRelay) -> None:
    relay.append(*[inserts(scn, *range(scn, scn + 5)) for scn in range(1, 30)])
    parts = []
    for bucket in range(3):
        recorder = Recorder()
        client = make(recorder, relay.url, partition=f"mod:3:{bucket}")
        await consume(client, recorder, 29)
        Grammar(recorder.steps).check()
        parts.append(recorder)
    keys = [{step.what[3] for step in one.steps if step.call == "onDataEvent"} for one in parts]
    assert not keys[0] & keys[1] | keys[0] & keys[2] | keys[1] & keys[2]
    together = sorted(position for one in parts for position in one.positions)
    assert together == [Position(scn, seq) for scn in range(1, 30) for seq in range(5)]


async def test_windows_filtered_out_move_the_checkpoint(relay: LiveRelay) -> None:
    relay.append(*[inserts(scn, scn, schema=ITEMS) for scn in range(1, 30)])
    recorder = Recorder()
    client = make(recorder, relay.url, sources=["shop.orders"], idle_checkpoint_s=0.01)
    await consume(client, recorder, 29)
    assert recorder.positions == []


@pytest.mark.parametrize("max_bytes", [200, 1000, 5000])
async def test_windows_cut_by_max_bytes_are_closed_also_where_their_rest_is_filtered_out(
    relay: LiveRelay, max_bytes: int
) -> None:
    mixed = [(Op.INSERT, ORDERS, n) for n in range(20)] + [(Op.INSERT, ITEMS, n) for n in range(20)]
    relay.append(*[window(scn, mixed) for scn in range(1, 6)])
    recorder = Recorder()
    client = make(recorder, relay.url, sources=["shop.orders"], max_bytes=max_bytes)
    await consume(client, recorder, 5)
    grammar = Grammar(recorder.steps)
    grammar.check()
    assert [len(events) for events in grammar.windows()] == [20] * 5
    assert "onRollback" not in recorder.calls


async def test_long_polling_gives_the_same_as_following(relay: LiveRelay) -> None:
    relay.append(*[inserts(scn, scn) for scn in range(1, 20)])
    recorder = Recorder()
    async with serving(make(recorder, relay.url, follow=False, wait_ms=200)):
        await recorder.until(lambda r: len(r.positions) == 19)
        relay.append(inserts(20, 1))
        await recorder.until(lambda r: len(r.positions) == 20)


async def test_a_dump_window_at_the_same_scn_is_a_window_of_its_own(relay: LiveRelay) -> None:
    relay.append(
        inserts(1, 1, 2), window(1, [(Op.READ, ORDERS, 7)], first_seq=3, dump=True), inserts(2, 3)
    )
    recorder = Recorder()
    await consume(make(recorder, relay.url), recorder, 2)
    assert [len(events) for events in Grammar(recorder.steps).windows()] == [2, 1, 1]
    assert recorder.positions[2] == Position(1, 3)


async def test_a_position_evicted_from_the_ring_raises_where_no_bootstrap_is(
    tmp_path: Path,
) -> None:
    live = LiveRelay(tmp_path, ring_bytes=64 << 10)
    async with live.served():
        live.append(*[inserts(scn, *range(10)) for scn in range(1, 200)])
        with pytest.raises(ScnTooOld, match="older"):
            await consume(make(Recorder(), live.url, start=1), Recorder(), 199)
    live.close()


async def test_an_unknown_database_and_a_foreign_clock_stop(relay: LiveRelay) -> None:
    relay.append(inserts(1, 1))
    with pytest.raises(UnknownDatabase):
        await consume(make(Recorder(), relay.url, database="other"), Recorder(), 1)
    foreign = OnlineCheckpoint("shop", "foreign", Position(1))
    with pytest.raises(ClockMismatch):
        await consume(make(Recorder(), relay.url, start=foreign), Recorder(), 1)


async def test_raw_windows_are_the_bytes_of_the_ring(relay: LiveRelay) -> None:
    made = [inserts(scn, scn, scn + 1) for scn in range(1, 40)]
    relay.append(*made)
    got = b""
    stream = DatabusClient(database="shop", relays=[relay.url]).raw_windows("oldest")
    async with asyncio.timeout(10 * PATIENCE):
        async for part in stream:
            got += part.data
            if part.position.scn == 39:
                break
    await stream.aclose()
    assert got == b"".join(made)
    assert all(frame.scn <= 39 for frame in iter_frames(got))


async def test_the_generator_is_mirrored_to_the_last_event(tmp_path: Path) -> None:
    config = parse(
        f'[relay]\nlisten = "127.0.0.1:0"\ndata_dir = "{tmp_path}"\n'
        '[[database]]\nname = "gen"\nring_bytes = "16MiB"\n'
        'url = "generator://?events_per_second=max&keys=500&events=20000&payload_bytes=20"\n'
    )
    mirror = Mirror()
    async with LocalRelay(config) as relay:
        await relay.ready()
        client = make(mirror, relay.url, database="gen", checkpoint_every_s=0.05)
        async with serving(client), asyncio.timeout(30 * PATIENCE):
            while mirror.event_count < 20_000:
                await asyncio.sleep(0.005)
    table = mirror.tables["gen.events"]
    assert len(table) == 500
    newest = {row["version"] for row in table.values()}
    assert newest == set(range(19_500, 20_000)), "each row as its last event left it"
    assert mirror.stale == []
