"""The algorithm of the paper's figure 3 on a real relay and a real bootstrap server.

Where a client reads depends on where its position lies: in the relay's ring, or older.  The
source is given a history in which every class of position is to be had::

    forgotten        | compacted ................ | logged ........... | ring
    before the log's | in runs that Spark merged, | behind the snapshot, | what the
    beginning        | the snapshot among them    | not in the ring      | relay holds

Each client begins with the source's rows as they were at its position, and has to end with
the rows that the source has in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import signal
import sqlite3
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.shop import Rows, differences
from databus.client import ApplicationCheckpoints, DatabusClient, Position, encode_checkpoint
from databus.client.application.events import Event, Window
from databus.client.testing import Mirror
from databus.common.checkpoint import BootstrapCheckpoint, Checkpoint, OnlineCheckpoint, decode
from databus.common.errors import BadCheckpoint, ClockMismatch, DatabusError, LogTooYoung
from tests.support.mirror_process import stored_facts
from tests.support.processes import Processes
from tests.support.system import System, sqlite_shop
from tests.support.tables import get
from tests.support.waiting import PATIENCE, eventually, eventually_sync

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

BATCH = 10
"""Transactions at a time: fewer than the ring holds, so that no reader falls out of it."""

DOOMED = """
import json, os, signal, sys
from tests.support import mirror_process

class Doomed(mirror_process.StoredMirror):
    left = int(sys.argv[2])

    def onDataEvent(self, event):
        super().onDataEvent(event)
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

mirror_process.StoredMirror = Doomed
mirror_process.main(json.loads(sys.argv[1]))
"""


@dataclass(frozen=True)
class Moment:
    """The source's rows at a position."""

    position: Position
    rows: dict[str, Rows]


class Follower(Mirror):
    """A mirror that begins with the rows of a moment and notes from where events came."""

    def __init__(self, begin: Moment | None) -> None:
        super().__init__()
        self.tables = copy.deepcopy(begin.rows) if begin else {}
        self.events: list[tuple[str, Position, str, tuple[Any, ...], str]] = []
        self.errors: list[DatabusError] = []
        self.mode = ""

    def onStartDataEventSequence(self, window: Window) -> None:
        self.mode = window.mode

    def onDataEvent(self, event: Event) -> None:
        key = tuple(event.key.values())
        self.events.append((self.mode, event.position, event.source, key, event.op))
        super().onDataEvent(event)

    def onError(self, error: DatabusError) -> None:
        self.errors.append(error)

    @property
    def modes(self) -> list[str]:
        """From where the events came: bootstrap, online, or the one and then the other."""
        return sorted({mode for mode, *_ in self.events})

    @property
    def reached(self) -> Position:
        """The position at which the tables are consistent."""
        if self.checkpoint is None or not self.is_consistent:
            return Position(0, 0)
        return self.checkpoint.position


def position(document: dict[str, int]) -> Position:
    return Position(document["scn"], document["seq"])


class History:
    """Relay, bootstrap and a source whose past has every class of position.

    Owner: the tests of this file, one after another.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.path = folder / "shop.db"
        shop, url = sqlite_shop(self.path)
        self.system = System(folder, shop, url, processes, ring_bytes="64KiB")
        self.processes = processes
        self._newest_id = 0
        self._has_log = False

    # -- what there is -----------------------------------------------------------------

    def relay(self) -> dict[str, Any]:
        found: dict[str, Any] = get(f"{self.system.relay_url}/v1/shop/sources")
        return found

    def bootstrap(self) -> dict[str, Any]:
        (found,) = get(f"{self.system.bootstrap_url}/v1/status")["databases"]
        assert isinstance(found, dict)
        return found

    @property
    def oldest_in_ring(self) -> Position:
        return position(self.relay()["prev"])

    @property
    def snapshot(self) -> Position:
        return position(get(f"{self.system.bootstrap_url}/v1/shop/startSCN"))

    @property
    def requests(self) -> int:
        """How often a client has bootstrapped."""
        return int(self.bootstrap()["served"]["requests"])

    @property
    def clock(self) -> str:
        return str(self.relay()["clock"])

    def now(self) -> Moment:
        """The source as it is; no writer runs."""
        self._catch_up()
        return Moment(position(self.relay()["max"]), self.system.shop.rows())

    # -- what happens ------------------------------------------------------------------

    def work(self, transactions: int) -> None:
        """So many transactions, in batches that relay and log have when this returns."""
        with self.system.shop.session() as step:
            for number in range(1, transactions + 1):
                step()
                if number % BATCH == 0 or number == transactions:
                    self._catch_up()

    def _catch_up(self) -> None:
        with closing(sqlite3.connect(self.path, timeout=30)) as connection:
            (newest,) = connection.execute("SELECT max(id) FROM databus_log").fetchone()
        self._newest_id = max(self._newest_id, newest or 0)

        def is_there() -> bool:
            newest = self.relay().get("max")
            if newest is None or newest["scn"] < self._newest_id:
                return False
            if not self._has_log:
                return True
            stored = self.bootstrap().get("max")
            return stored is not None and position(stored) >= position(newest)

        eventually_sync(is_there, 30.0, "relay and log have caught up")

    def forget(self, moment: Moment) -> None:
        """Work until the ring has evicted the moment."""
        for _ in range(200):
            if self.oldest_in_ring > moment.position:
                return
            self.work(BATCH)
        raise AssertionError(f"{moment.position} is still in the ring: {self.relay()}")

    def start_bootstrap(self) -> None:
        self.system.start_bootstrap("--no-apply").wait_ready(
            f"{self.system.bootstrap_url}/readyz", 60.0
        )
        eventually_sync(lambda: self.bootstrap()["state"] == "seeded", 60.0, "seeded")
        self._has_log = True

    def seal(self) -> None:
        """Return when all that the log has is in segments."""
        count = len(self.bootstrap()["runs"])
        self.work(BATCH)
        eventually_sync(lambda: len(self.bootstrap()["runs"]) > count, 30.0, "a segment is sealed")

    def apply(self) -> None:
        done = self.processes.run("apply", "-c", self.system.config, "--once", timeout_s=150)
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Past:
    """A history and the moments in it."""

    history: History
    forgotten: Moment
    compacted: Moment
    logged: Moment


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    folder = tmp_path_factory.mktemp("figure_3")
    processes = Processes(folder)
    history = History(folder, processes)
    try:
        history.system.start_relay()
        history.work(2 * BATCH)
        forgotten = history.now()
        history.forget(forgotten)
        history.start_bootstrap()
        compacted = history.now()
        for _ in range(5):
            history.seal()
        history.forget(compacted)
        history.seal()
        history.apply()
        logged = history.now()
        history.forget(logged)
        yield Past(history, forgotten, compacted, logged)
    finally:
        processes.end_all()


@contextlib.asynccontextmanager
async def following(
    history: History,
    follower: Follower,
    start: Position | Checkpoint | str,
    **options: Any,
) -> AsyncIterator[tuple[DatabusClient, asyncio.Task[None]]]:
    """A client of the real servers, stopped at the end."""
    client = DatabusClient(
        database="shop",
        relays=[history.system.relay_url],
        bootstraps=[history.system.bootstrap_url],
        consumer=follower,
        start=start,
        checkpoint_every_s=0.0,
        **options,
    )
    task = asyncio.create_task(client.serve())
    try:
        yield client, task
    finally:
        client.stop()
        await asyncio.wait({task}, timeout=10 * PATIENCE)


async def until(task: asyncio.Task[None], follower: Follower, end: Position) -> None:
    """Return when the follower has reached ``end``; raise what its client died of."""

    def is_there() -> bool:
        if task.done():
            task.result()
        return follower.reached >= end

    await eventually(is_there, 40.0, f"{end} is reached")


def assert_equal(follower: Follower, end: Moment) -> None:
    assert differences(end.rows, follower.tables) == []
    assert follower.stale == []


def checkpoint_at(history: History, moment: Moment) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", history.clock, moment.position)


async def test_a_position_in_the_ring_is_read_from_the_relay_alone(past: Past) -> None:
    history = past.history
    begin, requests = history.now(), history.requests
    history.work(BATCH)
    end = history.now()
    assert history.oldest_in_ring <= begin.position < end.position
    follower = Follower(begin)
    async with following(history, follower, checkpoint_at(history, begin)) as (client, task):
        await until(task, follower, end.position)
        assert client.status.bootstrap_count == 0
        assert client.status.mode == "relay"
    assert follower.modes == ["online"]
    assert history.requests == requests, "no request went to the bootstrap server"
    assert_equal(follower, end)


async def test_a_position_ahead_of_the_stream_waits_and_gets_what_comes_after_it(
    past: Past,
) -> None:
    history = past.history
    begin, requests = history.now(), history.requests
    ahead = Position(begin.position.scn + 25)
    waiting, witness = Follower(None), Follower(begin)
    async with (
        following(history, waiting, ahead) as (client, task),
        following(history, witness, checkpoint_at(history, begin)) as (_, other),
    ):
        await eventually(lambda: client.status.is_flowing, 20.0, "it waits at the relay")
        await asyncio.to_thread(history.work, 1)
        first = history.now()
        assert first.position < ahead
        await until(other, witness, first.position)
        assert waiting.events == []
        for _ in range(BATCH):
            # One at a time: what SQLite is polled for at once is one window.
            await asyncio.to_thread(history.work, 1)
        end = history.now()
        await until(task, waiting, end.position)
        await until(other, witness, end.position)
        assert client.status.bootstrap_count == 0
    assert waiting.events == [one for one in witness.events if one[1] > ahead]
    assert 0 < len(waiting.events) < len(witness.events)
    assert history.requests == requests
    assert_equal(witness, end)


async def test_a_position_behind_the_snapshot_is_read_from_the_log_event_by_event(
    past: Past,
) -> None:
    history = past.history
    end = history.now()
    assert history.snapshot <= past.logged.position < history.oldest_in_ring
    follower, requests = Follower(past.logged), history.requests
    async with following(history, follower, checkpoint_at(history, past.logged)) as (client, task):
        await until(task, follower, end.position)
        await eventually(lambda: client.status.mode == "relay", 20.0, "it has come back")
        assert client.status.bootstrap_count == 1
    assert "bootstrap" in follower.modes
    assert history.requests > requests
    assert_equal(follower, end)
    assert follower.rollback_count == 0
    positions = [where for _, where, *_ in follower.events]
    assert positions == sorted(set(positions))
    keys = [(source, key) for _, _, source, key, _ in follower.events]
    assert len(keys) > len(set(keys)), "the log has every change of a key, not only the last"


async def test_an_old_position_gets_the_net_changes_from_the_runs_deletes_among_them(
    past: Past,
) -> None:
    history = past.history
    end = history.now()
    snapshot = history.snapshot
    assert past.compacted.position < snapshot < history.oldest_in_ring
    assert "delta" in [run["kind"] for run in history.bootstrap()["runs"]]
    follower, requests = Follower(past.compacted), history.requests
    async with following(history, follower, checkpoint_at(history, past.compacted)) as (
        client,
        task,
    ):
        await until(task, follower, end.position)
        assert client.status.bootstrap_count == 1
    assert history.requests > requests
    assert_equal(follower, end)
    assert follower.rollback_count == 0
    merged = [one for one in follower.events if one[1] <= snapshot]
    assert {mode for mode, *_ in merged} == {"bootstrap"}
    keys = [(source, key) for _, _, source, key, _ in merged]
    assert len(keys) == len(set(keys)), "each changed row comes once"
    deleted = {(source, key) for _, _, source, key, op in merged if op == "d"}
    held = {(source, key) for source, rows in past.compacted.rows.items() for key in rows}
    assert deleted & held, "rows that the client had are deleted"


async def test_a_position_before_the_log_began_is_an_error_with_what_to_do(past: Past) -> None:
    history = past.history
    follower = Follower(past.forgotten)
    start = checkpoint_at(history, past.forgotten)
    async with following(history, follower, start) as (client, task):
        await asyncio.wait({task}, timeout=40 * PATIENCE)
        with pytest.raises(LogTooYoung, match="is older than the bootstrap log's oldest"):
            task.result()
        assert client.status.bootstrap_count == 1
    assert follower.events == []
    (error,) = follower.errors
    assert error.code == "log_too_young"
    assert "start=bootstrap" in error.hint


async def test_a_client_that_accepts_the_gap_continues_at_the_oldest_event(past: Past) -> None:
    history = past.history
    end = history.now()
    follower = Follower(past.forgotten)
    start = checkpoint_at(history, past.forgotten)
    async with following(history, follower, start, on_gap="oldest") as (client, task):
        await until(task, follower, end.position)
        assert client.status.gap_count == 1
    assert follower.errors == []
    assert min(where for _, where, *_ in follower.events) > past.logged.position


async def test_a_new_client_gets_the_whole_tables_and_comes_to_the_relay(past: Past) -> None:
    history = past.history
    end = history.now()
    follower, requests = Follower(None), history.requests
    async with following(history, follower, "bootstrap") as (client, task):
        await until(task, follower, end.position)
        await eventually(lambda: client.status.mode == "relay", 20.0, "it comes to the relay")
        assert client.status.bootstrap_count == 1
    assert follower.modes[0] == "bootstrap"
    assert follower.rollback_count == 0
    assert history.requests > requests
    assert_equal(follower, end)


@pytest.mark.parametrize("age", ["compacted", "now"])
async def test_a_checkpoint_of_another_clock_ends_the_client_with_nothing_delivered(
    past: Past, age: str
) -> None:
    history = past.history
    moment: Moment = history.now() if age == "now" else past.compacted
    follower, requests = Follower(moment), history.requests
    foreign = OnlineCheckpoint("shop", "foreign:1", moment.position)
    async with following(history, follower, foreign) as (client, task):
        await asyncio.wait({task}, timeout=40 * PATIENCE)
        with pytest.raises(ClockMismatch, match="foreign:1"):
            task.result()
        assert client.status.bootstrap_count == 0
    assert [error.code for error in follower.errors] == ["clock_mismatch"]
    assert follower.events == []
    assert history.requests == requests


async def test_a_checkpoint_of_another_database_is_refused_with_nothing_delivered(
    past: Past,
) -> None:
    history = past.history
    foreign = OnlineCheckpoint("stock", history.clock, past.logged.position)
    follower = Follower(past.logged)
    async with following(
        history, follower, "bootstrap", checkpoints=ApplicationCheckpoints(lambda: foreign)
    ) as (_, task):
        await asyncio.wait({task}, timeout=40 * PATIENCE)
        with pytest.raises(BadCheckpoint, match="stock"):
            task.result()
    assert follower.events == []


async def test_servers_refuse_a_checkpoint_of_another_database_too(past: Past) -> None:
    system = past.history.system
    foreign = OnlineCheckpoint("stock", past.history.clock, past.logged.position)
    query = urllib.parse.urlencode({"checkpoint": encode_checkpoint(foreign)})
    for url in (f"{system.relay_url}/v1/shop/stream", f"{system.bootstrap_url}/v1/shop/bootstrap"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(get, f"{url}?{query}")
        with refused.value as answer:
            assert answer.code == 400
            assert json.loads(answer.read())["code"] == "bad_checkpoint"


@pytest.mark.faults
@pytest.mark.parametrize("events", [40, 150])
def test_a_client_killed_in_mid_bootstrap_resumes_where_it_was(past: Past, events: int) -> None:
    history, system = past.history, past.history.system
    name = f"doomed{events}"
    settings = {
        "path": str(system.mirror(name)),
        "relays": [system.relay_url],
        "bootstraps": [system.bootstrap_url],
        "start": "bootstrap",
        "options": {"max_bytes": 4096, "checkpoint_every_s": 0.0},
    }
    command = [sys.executable, "-c", DOOMED, json.dumps(settings), str(events)]
    doomed = history.processes.start_command(command, name=name)
    assert doomed.wait(60.0) == -signal.SIGKILL, doomed.log
    facts, _ = stored_facts(system.mirror(name))
    stored = decode(facts["checkpoint"])
    assert isinstance(stored, BootstrapCheckpoint)
    assert (stored.position, stored.row) > (Position(0, 0), 0)
    held = sum(map(len, system.copy(name).values()))
    assert 0 < held < sum(map(len, system.shop.rows().values()))
    history.now()
    system.start_consumer(name)
    system.wait_until_equal(name)
    facts = system.assert_faultless(name)
    assert decode(facts["checkpoint"]).position >= stored.target
