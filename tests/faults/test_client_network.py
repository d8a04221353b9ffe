"""The client on a broken network and under kill -9: every event, no torn window."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from databus.client import Position
from databus.client.testing import Grammar, Recorder
from databus.common.frame.frame_format import Op
from tests.client.test_client import make, serving
from tests.support.faulty_proxy import Proxies
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.faults


def inserts(scn: int, *ids: int) -> bytes:
    return window(scn, [(Op.INSERT, ORDERS, number) for number in ids])


def reached(recorder: Recorder, scn: int) -> bool:
    return bool(recorder.checkpoints) and recorder.checkpoints[-1].position.scn >= scn


def port_of(relay: LiveRelay) -> int:
    return int(relay.url.rpartition(":")[2])


async def test_connections_cut_again_and_again_lose_and_double_nothing(
    relay: LiveRelay, faulty_proxy: Proxies
) -> None:
    relay.append(*[inserts(scn, *range(10)) for scn in range(1, 101)])
    proxy = await faulty_proxy("127.0.0.1", port_of(relay))
    recorder = Recorder()
    async with serving(make(recorder, proxy.url)):
        cut_bytes = 3_001
        while not reached(recorder, 100):
            proxy.cut_after(cut_bytes)
            cut_bytes += 1_777
            seen = len(recorder.positions)
            await recorder.until(
                lambda r, seen=seen: len(r.positions) > seen or len(r.positions) == 1000
            )
            await asyncio.sleep(0)
    assert recorder.positions == [Position(scn, seq) for scn in range(1, 101) for seq in range(10)]
    Grammar(recorder.steps).check()
    assert proxy.accepted_count > 3


async def test_cut_within_windows_between_two_relays_replays_whole_windows(
    relay: LiveRelay, faulty_proxy: Proxies
) -> None:
    relay.append(*[inserts(scn, *range(40)) for scn in range(1, 41)])
    one = await faulty_proxy("127.0.0.1", port_of(relay))
    other = await faulty_proxy("127.0.0.1", port_of(relay))
    recorder = Recorder()
    async with serving(make(recorder, one.url, other.url)) as task:
        cut_bytes = 5_003
        while not reached(recorder, 40):
            for proxy in (one, other):
                proxy.cut_after(cut_bytes)
            cut_bytes += 2_221
            seen = len(recorder.steps)
            await recorder.until(lambda r, seen=seen: len(r.steps) > seen or reached(r, 40))
            assert not task.done()
            await asyncio.sleep(0)
    grammar = Grammar(recorder.steps)
    grammar.check()
    assert all(len(events) == 40 for events in grammar.windows())
    assert set(recorder.positions) == {
        Position(scn, seq) for scn in range(1, 41) for seq in range(40)
    }


async def test_a_relay_that_falls_silent_is_left_for_another(
    relay: LiveRelay, faulty_proxy: Proxies
) -> None:
    relay.append(inserts(1, 1))
    proxy = await faulty_proxy("127.0.0.1", port_of(relay))
    recorder = Recorder()
    client = make(recorder, proxy.url, silence_timeout_s=0.3, answer_timeout_s=0.3)
    async with serving(client):
        await recorder.until(lambda r: len(r.positions) == 1)
        proxy.stall()
        relay.append(inserts(2, 2))
        await eventually(lambda: client.status.failure_count > 0)
        proxy.resume()
        await recorder.until(lambda r: len(r.positions) == 2)


async def test_a_refusing_relay_is_tried_until_it_accepts(
    relay: LiveRelay, faulty_proxy: Proxies
) -> None:
    relay.append(inserts(1, 1))
    proxy = await faulty_proxy("127.0.0.1", port_of(relay))
    proxy.refuse()
    recorder = Recorder()
    client = make(recorder, proxy.url)
    async with serving(client):
        await eventually(lambda: client.status.failure_count > 3)
        proxy.refuse(False)
        await recorder.until(lambda r: len(r.positions) == 1)
    assert "onError" not in recorder.calls


_KEEPER = """
import sqlite3, sys
from databus.client import *
url, path = sys.argv[1:]
db = sqlite3.connect(path, isolation_level=None)
db.execute("CREATE TABLE IF NOT EXISTS seen (scn, seq, PRIMARY KEY (scn, seq))")
db.execute("CREATE TABLE IF NOT EXISTS progress (one INTEGER PRIMARY KEY, checkpoint)")
class Keeper(Consumer):
    def onStartDataEventSequence(self, window): db.execute("BEGIN") if not db.in_transaction else 0
    # An insert without REPLACE: an event that took effect before would fail here.
    def onDataEvent(self, e): db.execute("INSERT INTO seen VALUES (?, ?)", (e.scn, e.seq))
    def onCheckpoint(self, c):
        db.execute("REPLACE INTO progress VALUES (1, ?)", (encode_checkpoint(c),))
        if db.in_transaction: db.execute("COMMIT")
    def onRollback(self, c):
        if db.in_transaction: db.execute("ROLLBACK")
def load():
    row = db.execute("SELECT checkpoint FROM progress").fetchone()
    return row and row[0]
DatabusClient(database="shop", relays=[url], start="oldest", consumer=Keeper(), max_retries=0,
              checkpoints=ApplicationCheckpoints(load), reconnect_s=0.01).run()
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
async def test_kill_9_of_a_consumer_with_its_own_checkpoints_takes_effect_exactly_once(
    relay: LiveRelay, tmp_path: Path
) -> None:
    path, scn, expected = tmp_path / "seen.db", 0, set()

    def seen() -> list[tuple[int, int]]:
        if not path.exists():
            return []
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            try:
                rows = database.execute("SELECT scn, seq FROM seen").fetchall()
            except sqlite3.OperationalError:
                rows = []
        database.close()
        return rows

    for round_number in range(4):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _KEEPER, relay.url, str(path)
        )
        before = len(seen())
        for _ in range(150):
            scn += 1
            relay.append(inserts(scn, 1, 2, 3))
            expected |= {(scn, seq) for seq in range(3)}
        await eventually(lambda before=before: len(seen()) > before + 30, 40)
        if round_number < 3:
            process.kill()
        else:
            await eventually(lambda scn=scn: len(seen()) == 3 * scn, 40)
            os.kill(process.pid, signal.SIGINT)
        async with asyncio.timeout(20 * PATIENCE):
            assert await process.wait() == (-9 if round_number < 3 else 0)
        torn = {one for one, _ in seen() if sum(scn == one for scn, _ in seen()) != 3}
        assert not torn
    assert set(seen()) == expected
