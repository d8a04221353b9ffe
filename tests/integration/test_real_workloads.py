"""sysbench and pgbench, while every process that can end is ended.

At ten moments of the load the source's tables are read in a snapshot whose scn the server reports.
The stream, applied to nothing up to that scn, must give the same rows, and so must the bootstrap,
read for the state at it; at the end a consumer that was killed, and one that came late by the
bootstrap, hold what the source holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import free_port
from databus.cli.demo.shop import differences
from databus.client import Consumer, DatabusClient, Event
from tests.support.config_text import bootstrap_text, relay_text
from tests.support.faulty_proxy import FaultyProxy, Proxies
from tests.support.mirror_process import stored_facts, stored_rows
from tests.support.processes import DatabusProcess, Processes
from tests.support.real_loads import Load, Snapshot, Tables, make_load
from tests.support.system import children_named
from tests.support.waiting import PATIENCE, eventually, eventually_sync

pytestmark = [
    # The client's transports to processes that were killed are closed by the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.timeout(300),
]

SEED = int(os.environ.get("DATABUS_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


class History(Consumer):
    """All that has come, so that the tables can be rebuilt as they were at any scn.

    Invariants:
        I1. What comes again is what came before; what is new lies behind all that has come.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[int, int], tuple[str, str, Any, Any]] = {}
        self.last = self._compared = (-1, -1)

    def onDataEvent(self, event: Event) -> None:
        position = (event.position.scn, event.position.seq)
        key = tuple(event.key.values()) if event.key else ()
        what = (event.op, event.source, key, dict(event.value) if event.value else None)
        if position in self.events:
            assert self.events[position] == what, position
            return
        assert position > self.last, (position, self.last)
        self.events[position] = what
        self.last = position

    def tables(self, scn: int) -> Tables:
        found: Tables = {}
        for (at, _), (op, source, key, row) in self.events.items():
            if at > scn:
                break
            rows = found.setdefault(source, {})
            if op == "t":
                rows.clear()
            elif op == "d":
                del rows[key]
            else:
                rows[key] = row
        return found

    def becomes(self, expected: Tables, scn: int) -> bool:
        """Whether the tables are these; compared again only after further events."""
        before, self._compared = self._compared, self.last
        return before != self.last and self.tables(scn) == expected


class Pipeline:
    """All processes between a load's database and its consumers; each may be ended.

    Owner: the test; ``processes`` ends what is left.
    """

    def __init__(
        self, folder: Path, load: Load, processes: Processes, database: FaultyProxy, port: int
    ) -> None:
        """``port`` is the relay's; ``database`` is how it gets at its database."""
        self.relay = f"http://127.0.0.1:{port}"
        bootstrap_port = free_port()
        self.bootstrap = f"http://127.0.0.1:{bootstrap_port}"
        self.running: dict[str, DatabusProcess] = {}
        self._folder, self._load, self._processes = folder, load, processes
        url = load.server.url("shop").replace(f":{load.server.port}/", f":{database.port}/")
        self._url, self._port, self._bootstrap_port = url, port, bootstrap_port

    def start_relay(self, readers: FaultyProxy) -> None:
        """The relay; all read from it by way of ``readers``."""
        self._readers = readers
        text = relay_text(
            self._url, *self._load.sources, port=self._port, ring_bytes="64MiB"
        ) + bootstrap_text(
            readers.url,
            self._bootstrap_port,
            segment_every="1s",
            run_grace="1h",
            spark_master="local[1]",
        )
        (self._folder / "databus.toml").write_text(text)
        self._start("relay", "relay")
        self.running["relay"].wait_ready(f"{self.relay}/readyz", 90)

    def start_applier(self) -> None:
        """The applier, which takes longest to start and waits for a log."""
        self._start("applier", "apply", "--every", "1s")

    def start_bootstrap(self) -> None:
        """Log writer and server, each in a process of its own."""
        self._start("writer", "bootstrap", "--role", "writer")
        self._start("server", "bootstrap", "--role", "server")

    def _start(self, name: str, command: str, *arguments: str) -> None:
        config = self._folder / "databus.toml"
        self.running[name] = self._processes.start(command, "-c", config, *arguments, name=name)

    def start_consumer(self, name: str) -> None:
        """A consumer that stores its copy of the tables in ``<name>.db``."""
        settings = {
            "path": str(self._mirror(name)),
            "relays": [self._readers.url],
            "bootstraps": [self.bootstrap],
            "start": "bootstrap",
        }
        command = [sys.executable, "-m", "tests.support.mirror_process", json.dumps(settings)]
        self.running[name] = self._processes.start_command(command, name=name)

    def _mirror(self, name: str) -> Path:
        return self._folder / f"{name}.db"

    def copy(self, name: str) -> Tables:
        return stored_rows(self._mirror(name))

    def facts(self, name: str) -> dict[str, Any]:
        """A consumer's counters; no row went back in time."""
        facts, faults = stored_facts(self._mirror(name))
        assert faults == []
        return facts

    def kill(self, name: str) -> None:
        self.running[name].kill9()
        self.running[name].start()

    def kill_fetcher(self) -> None:
        for fetcher in children_named(self.running["relay"], "databus.relay.processes.fetcher"):
            fetcher.kill()

    def status(self) -> dict[str, Any]:
        """The bootstrap's word about the database; empty while it has none."""
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{self.bootstrap}/v1/status", timeout=9 * PATIENCE) as it:
                found = json.load(it)["databases"]
                return dict(found[0]) if found else {}
        return {}

    def is_whole(self) -> bool:
        """Whether the bootstrap has every row of every table."""
        states = self.status().get("seeding", {})
        return all(states.get(one, {}).get("state") == "seeded" for one in self._load.sources)

    def tables(self, scn: int) -> Tables:
        """What the tables held by the bootstrap."""
        url = f"{self.bootstrap}/v1/shop/snapshot?scn={scn}&format=ndjson"
        with urllib.request.urlopen(url, timeout=60 * PATIENCE) as answer:
            lines = [json.loads(line) for line in answer]
        assert lines[-1].get("control") == "checkpoint", "the answer was cut off"
        found: Tables = {}
        for line in lines:
            if "source" in line:
                found.setdefault(line["source"], {})[tuple(line["key"].values())] = line["after"]
        return found


async def disturb(
    load: Load, pipeline: Pipeline, links: list[FaultyProxy], moments: random.Random
) -> list[Snapshot]:
    """Snapshots while the load runs; before each something is ended, or cut off."""
    killed = ("relay", "relay", "writer", "server", "applier", "consumer")
    faults = [(f"kill {one}", functools.partial(pipeline.kill, one)) for one in killed]
    faults += [("kill fetcher", pipeline.kill_fetcher), ("restart", load.server.restart)]
    faults += [(f"cut {number}", link.cut) for number, link in enumerate(links)]
    moments.shuffle(faults)
    print(*(name for name, _ in faults), sep=", ", file=sys.stderr)
    found = []
    for name, fault in faults:
        await asyncio.sleep(moments.uniform(0.1, 0.5))
        if name.startswith("cut"):  # The proxies belong to this thread.
            fault()
        else:
            await asyncio.to_thread(fault)
        found.append(await asyncio.to_thread(load.snapshot))
    return found


@pytest.mark.parametrize("name", ["oltp_read_write", "oltp_write_only", "pgbench"])
async def test_stream_bootstrap_and_consumers_are_the_source_at_ten_moments_and_at_the_end(
    name: str,
    tmp_path: Path,
    processes: Processes,
    faulty_proxy: Proxies,
) -> None:
    print(f"DATABUS_KILL_SEED={SEED}", file=sys.stderr)
    load = make_load(name, tmp_path)
    with load.server:
        await asyncio.to_thread(load.create)
        port = free_port()
        links = [await faulty_proxy("127.0.0.1", one) for one in (load.server.port, port)]
        pipeline = Pipeline(tmp_path, load, processes, links[0], port)
        await asyncio.to_thread(pipeline.start_relay, links[1])
        pipeline.start_applier()
        history = History()
        client = DatabusClient(
            database="shop", relays=[links[1].url], consumer=history, start="oldest"
        )
        serving = asyncio.create_task(client.serve())
        try:
            await asyncio.to_thread(load.fill)
            pipeline.start_bootstrap()
            pipeline.start_consumer("consumer")
            with load.running():
                await eventually(lambda: len(history.events) > 1000, 90, "the load has begun")
                await asyncio.to_thread(eventually_sync, pipeline.is_whole, 90, "it is seeded")
                moments = random.Random(f"{name}-{SEED}")
                snapshots = await disturb(load, pipeline, links, moments)
                pipeline.start_consumer("late")
            end = await asyncio.to_thread(load.last_snapshot)
            await eventually(
                lambda: serving.done() or history.becomes(end.tables, end.scn), 120, poll_s=0.2
            )
            await asyncio.to_thread(follow, pipeline, snapshots, end)
        finally:
            client.stop()
            await serving
    assert len({one.scn for one in snapshots}) > len(snapshots) // 2, "the load stopped"
    for number, one in enumerate([*snapshots, end]):
        unequal = differences(one.tables, history.tables(one.scn))
        assert not unequal, (number, one.scn, len(unequal), unequal[:3])


def follow(pipeline: Pipeline, snapshots: list[Snapshot], end: Snapshot) -> None:
    """The consumers come to the end; the bootstrap has merged, and has every moment."""
    for name in ("consumer", "late"):
        equal = functools.partial(_is_equal, pipeline, name, end)
        eventually_sync(equal, 120, f"{name} is the source", poll_s=0.2)
        assert pipeline.facts(name)["windows_bootstrap"] > 0
    eventually_sync(lambda: pipeline.status().get("applies"), 90, "runs are merged")
    for number, one in enumerate(snapshots):
        unequal = differences(one.tables, pipeline.tables(one.scn))
        assert not unequal, (number, one.scn, len(unequal), unequal[:3])


def _is_equal(pipeline: Pipeline, name: str, end: Snapshot) -> bool:
    return not differences(end.tables, pipeline.copy(name))
