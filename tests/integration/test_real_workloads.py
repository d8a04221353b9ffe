"""Loads that nobody here wrote, with processes killed under them: sysbench and pgbench.

At ten moments of the load the source's tables are read in a snapshot whose scn the server tells;
the stream, applied to nothing up to that scn, must give the same rows, and at the end as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from databus.cli.guardian import Guardian
from databus.cli.servers import (
    PASSWORD,
    USER,
    MariaDBServer,
    PostgresServer,
    PrivateServer,
    free_port,
)
from databus.client import Consumer, DatabusClient, Event
from tests.support.processes import DatabusProcess, Processes
from tests.support.system import children_named
from tests.support.waiting import eventually, eventually_sync

pytestmark = [
    # The client's transports to processes that were killed are closed by the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

SNAPSHOTS = 10
SEED = int(os.environ.get("DATABUS_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
State = dict[tuple[str, tuple[Any, ...]], dict[str, Any]]
CONFIG = """
[relay]
listen = "127.0.0.1:{port}"
data_dir = "relay"

[[database]]
name = "shop"
url = "{url}"
sources = {sources}
ring_bytes = "64MiB"
"""


@dataclass(frozen=True)
class Snapshot:
    """What the tables held when exactly the commits up to ``scn`` were visible."""

    scn: int
    rows: State


class Load(ABC):
    """A database server, and a program that works on it until it is told to end."""

    server: PrivateServer
    sources: list[str]

    @abstractmethod
    def create(self) -> None:
        """Whatever must be there before the relay starts."""

    @abstractmethod
    def fill(self) -> None:
        """The first rows."""

    @abstractmethod
    def command(self) -> list[str]:
        """The load, without end."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The tables now, and the scn of this now."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The load; it is started again when a restart of the server has ended it."""
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                with subprocess.Popen(
                    self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ) as process:
                    guardian = Guardian(process.pid)
                    while process.poll() is None and not ended.wait(0.05):
                        pass
                    process.kill()
                    process.wait()
                    guardian.release()

        thread = threading.Thread(target=work, name="load")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def run(self, command: list[str]) -> None:
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        subprocess.run(command, check=True, capture_output=True, env=environment)

    def rows(self, cursor: Any, source: str, columns: tuple[str, ...]) -> State:
        cursor.execute(f"SELECT {', '.join(columns)} FROM {source.partition('.')[2]}")
        return {(source, (row[0],)): dict(zip(columns, row, strict=True)) for row in cursor}


class Sysbench(Load):
    """Two tables of sysbench on a MariaDB of its own."""

    def __init__(self, folder: Path, script: str) -> None:
        self.server = MariaDBServer(folder / "mariadb")
        self.sources = ["shop.sbtest1", "shop.sbtest2"]
        self._script = script

    def create(self) -> None:
        self.server.create_database("shop")

    def _sysbench(self, action: str, *options: str) -> list[str]:
        return [
            "sysbench", self._script, "--db-driver=mysql", "--mysql-host=127.0.0.1",
            f"--mysql-port={self.server.port}", f"--mysql-user={USER}",
            f"--mysql-password={PASSWORD}", "--mysql-db=shop", "--tables=2", "--table-size=400",
            *options, action,
        ]  # fmt: skip

    def fill(self) -> None:
        self.run(self._sysbench("prepare"))

    def command(self) -> list[str]:
        return self._sysbench("run", "--threads=3", "--time=600", "--rate=120")

    def snapshot(self) -> Snapshot:
        with contextlib.closing(self.server.connect("shop")) as connection:
            cursor = connection.cursor()
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SHOW STATUS LIKE 'binlog_snapshot_%'")
            place = {name.lower(): value for name, value in cursor.fetchall()}
            file, offset = place["binlog_snapshot_file"], place["binlog_snapshot_position"]
            cursor.execute("SELECT BINLOG_GTID_POS(%s, %s)", (file, int(offset)))
            scn = int(cursor.fetchall()[0][0].rpartition("-")[2])
            rows: State = {}
            for source in self.sources:
                rows |= self.rows(cursor, source, ("id", "k", "c", "pad"))
            return Snapshot(scn, rows)


class Pgbench(Load):
    """pgbench's tables but the history, which has no key, on a PostgreSQL of its own."""

    COLUMNS: ClassVar = {
        "public.pgbench_accounts": ("aid", "bid", "abalance", "filler"),
        "public.pgbench_tellers": ("tid", "bid", "tbalance", "filler"),
        "public.pgbench_branches": ("bid", "bbalance", "filler"),
    }

    def __init__(self, folder: Path) -> None:
        self.server = PostgresServer(folder / "postgres")
        self.sources = list(self.COLUMNS)

    def create(self) -> None:
        self.server.create_database("shop")
        self.run(self._pgbench("--initialize", "--init-steps=dtp"))

    def _pgbench(self, *options: str) -> list[str]:
        found = shutil.which("pgbench") or str(
            max(Path("/usr/lib/postgresql").glob("*/bin/pgbench"))
        )
        return [
            found, "--host=127.0.0.1", f"--port={self.server.port}", f"--username={USER}",
            *options, "shop",
        ]  # fmt: skip

    def fill(self) -> None:
        with contextlib.closing(self.server.connect("shop")) as connection:
            # Of its 100,000 accounts the first few: an update of another one changes nothing.
            connection.execute("INSERT INTO pgbench_branches VALUES (1, 0)")
            connection.execute(
                "INSERT INTO pgbench_tellers SELECT n, 1, 0 FROM generate_series(1, 10) n"
            )
            connection.execute(
                "INSERT INTO pgbench_accounts SELECT n, 1, 0, '' FROM generate_series(1, 3000) n"
            )

    def command(self) -> list[str]:
        load = self._pgbench(
            "--no-vacuum", "--client=3", "--time=600", "--rate=150", "--max-tries=3"
        )
        return ["env", f"PGPASSWORD={PASSWORD}", *load]

    def snapshot(self) -> Snapshot:
        import psycopg

        # A new slot's snapshot shows exactly the commits whose record lies before its position.
        url = self.server.url("shop")
        with (
            contextlib.closing(psycopg.connect(f"{url}?replication=database", autocommit=True)) as
            maker, contextlib.closing(self.server.connect("shop")) as connection,
        ):  # fmt: skip
            name = f"snapshot_{time.monotonic_ns()}"
            made = maker.execute(
                f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            ).fetchall()[0]
            high, low = (int(part, 16) for part in made[1].split("/"))
            cursor = connection.cursor()
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{made[2]}'")
            rows: State = {}
            for source, columns in self.COLUMNS.items():
                rows |= self.rows(cursor, source, columns)
            return Snapshot((high << 32 | low) - 1, rows)


class History(Consumer):
    """All that has come, so that the tables can be told as they were at any scn.

    Invariants:
        I1. What comes again is what came before; what is new lies behind all that has come.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[int, int], tuple[str, str, Any, Any]] = {}
        self.last = (-1, -1)

    def onDataEvent(self, event: Event) -> None:
        place = (event.position.scn, event.position.seq)
        key = tuple(event.key.values()) if event.key else ()
        what = (event.op, event.source, key, dict(event.value) if event.value else None)
        if place in self.events:
            assert self.events[place] == what, place
            return
        assert place > self.last, (place, self.last)
        self.events[place] = what
        self.last = place

    def state(self, scn: int) -> State:
        found: State = {}
        for (at, _), (op, source, key, row) in self.events.items():
            if at > scn:
                break
            if op == "t":
                found = {place: row for place, row in found.items() if place[0] != source}
            elif op == "d":
                del found[source, key]
            else:
                found[source, key] = row
        return found


def make_load(name: str, folder: Path) -> Load:
    if name == "pgbench":
        return Pgbench(folder)
    if shutil.which("sysbench") is None:
        pytest.skip("there is no sysbench; on Debian: apt-get install sysbench")
    return Sysbench(folder, name)


def disturb(load: Load, relay: DatabusProcess, moments: random.Random) -> list[Snapshot]:
    """Snapshots while the load runs; between them the relay, a fetcher and the server end."""

    def kill_relay() -> None:
        relay.kill9()
        relay.start()

    def kill_fetcher() -> None:
        for fetcher in children_named(relay, "databus.relay.fetcher"):
            fetcher.kill()

    def nothing() -> None:
        pass

    faults = [kill_relay, kill_fetcher, load.server.restart, kill_fetcher, kill_relay]
    faults += [nothing] * (SNAPSHOTS - len(faults))
    moments.shuffle(faults)
    found = []
    for fault in faults:
        time.sleep(moments.uniform(0.1, 0.5))
        fault()
        found.append(load.snapshot())
    return found


@pytest.mark.parametrize("name", ["oltp_read_write", "oltp_write_only", "pgbench"])
async def test_what_the_stream_makes_is_what_the_source_held_at_ten_moments_and_at_the_end(
    name: str, tmp_path: Path, processes: Processes
) -> None:
    print(f"DATABUS_KILL_SEED={SEED}", file=sys.stderr)
    load = make_load(name, tmp_path)
    with load.server:
        await asyncio.to_thread(load.create)
        port = free_port()
        config = tmp_path / "databus.toml"
        config.write_text(
            CONFIG.format(port=port, url=load.server.url("shop"), sources=load.sources)
        )
        relay = processes.start("relay", "-c", config, name="relay")
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(relay.wait_ready, f"{url}/readyz", 90)
        history = History()
        client = DatabusClient(database="shop", relays=[url], consumer=history, start="oldest")
        serving = asyncio.create_task(client.serve())
        try:
            await asyncio.to_thread(load.fill)
            with load.running():
                await eventually(lambda: len(history.events) > 1000, 90, "the load has begun")
                moments = random.Random(f"{name}-{SEED}")
                snapshots = await asyncio.to_thread(disturb, load, relay, moments)
            snapshots.append(await asyncio.to_thread(_last, load))
            end = snapshots[-1]
            await eventually(
                lambda: serving.done() or history.state(end.scn) == end.rows, 120, poll_s=0.5
            )
        finally:
            client.stop()
            await serving
    assert len({snapshot.scn for snapshot in snapshots}) > SNAPSHOTS // 2, "the load stood still"
    for number, snapshot in enumerate(snapshots):
        found = history.state(snapshot.scn)
        unequal = [
            (place, snapshot.rows.get(place), found.get(place))
            for place in snapshot.rows.keys() | found.keys()
            if snapshot.rows.get(place) != found.get(place)
        ]
        assert not unequal, (number, snapshot.scn, len(unequal), unequal[:3])


def _last(load: Load) -> Snapshot:
    """The end: once nothing moves any more, for a killed program's statement may still run."""
    before = load.snapshot()

    def still() -> bool:
        nonlocal before
        now = load.snapshot()
        same, before = now.rows == before.rows, now
        return same

    eventually_sync(still, 60, poll_s=0.2)
    return before
