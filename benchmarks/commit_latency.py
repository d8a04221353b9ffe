"""How long after its commit a row is in the application's hands: relay, client, callback.

Everything is a process of its own, as it is in production: the relay (``databus relay``), the
application with its client, which notes when its callback gets a row, and the writers, which
commit one row at a time at a steady rate and note when each commit has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.peer_runs import Debezium
from benchmarks.upstreams import DATABASE, MariaDB, Upstream
from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import PASSWORD, USER, free_port
from databus.client import Consumer, DatabusClient, Event

PERCENTILES = (50, 95, 99)
WARM_UP_S = 0.5
PEER_WARM_UP_S = 10.0
"""A virtual machine compiles what it has run often."""
ARRIVE_S = 60.0
START_S = 90.0
COMMITS_OF_A_WRITER = 2000


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of each row, in microseconds, from the end of its commit to the callback."""

    latencies_us: npt.NDArray[np.int64]
    commits_per_s: float

    @property
    def count(self) -> int:
        return len(self.latencies_us)

    def latency_ms(self, percent: float) -> float:
        """A percentile; a callback may come before the writer gets its commit's result."""
        return float(np.percentile(self.latencies_us, percent)) / 1000


class _Arrivals(Consumer):
    """Notes when each row comes."""

    def __init__(self, count: int) -> None:
        self.at_us = np.zeros(count, dtype=np.int64)
        self.left = count
        self.all_here = asyncio.Event()

    def onDataEvent(self, event: Event) -> None:
        number = int(event.key["id"])
        if self.at_us[number] == 0:
            self.at_us[number] = time.time_ns() // 1000
            self.left -= 1
            if not self.left:
                self.all_here.set()


def measured_latencies(upstream: Upstream, table: str, rate: int, seconds: float) -> Latencies:
    """Commit ``rate`` rows a second for so long, and follow them."""
    warm_up = int(WARM_UP_S * rate)
    count = warm_up + int(seconds * rate)
    with _relay(upstream, table) as url, _application(url, table, count) as arrived:
        commits = _write(upstream, table, rate, count)
        if not arrived.poll(ARRIVE_S):
            raise RuntimeError(f"not all of {count} rows have come within {ARRIVE_S:g} s")
        arrivals = arrived.recv()
    spent_s = (commits.max() - commits[0]) / 1e6
    return Latencies((arrivals - commits)[warm_up:], (count - 1) / spent_s)


def peer_latencies(peer: Debezium, table: str, rate: int, seconds: float) -> Latencies:
    """The same for a peer's callback, without a relay between."""
    warm_up = int(PEER_WARM_UP_S * rate)
    count = warm_up + int(seconds * rate)
    with peer.following(table, count) as arrived:
        commits = _write(peer.upstream, table, rate, count)
        arrivals = arrived()
    spent_s = (commits.max() - commits[0]) / 1e6
    return Latencies((arrivals - commits)[warm_up:], (count - 1) / spent_s)


@contextlib.contextmanager
def _relay(upstream: Upstream, table: str) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as name:
        folder = Path(name)
        database = upstream.config(table)
        (folder / "databus.toml").write_text(
            f'[relay]\nlisten = "127.0.0.1:{port}"\ndata_dir = "{folder}/relay"\n'
            f'[[database]]\nname = "{table}"\nurl = "{database.url.reveal}"\n'
            f"sources = {list(database.sources)}\n"
        )
        command = "from databus.cli.main import app; app()"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", command, "relay", "-c", str(folder / "databus.toml")],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        guardian = Guardian(process.pid, group=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(f"{url}/readyz", folder / "log")
            yield url
        finally:
            process.terminate()
            process.wait(20)
            guardian.release()


def _wait_ready(url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(url, timeout=5):
                return
        time.sleep(0.05)
    raise RuntimeError(f"the relay is not ready: {log.read_text(errors='replace')[-1000:]}")


@contextlib.contextmanager
def _application(url: str, table: str, count: int) -> Iterator[Connection]:
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(
        target=_apply, args=(theirs, url, table, count), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S) or ours.recv() != "ready":
            raise RuntimeError("the application did not start")
        yield ours
    finally:
        process.join(5)
        process.kill()


def _apply(answer: Connection, url: str, table: str, count: int) -> None:
    uvloop.run(_consume(answer, url, table, count))


async def _consume(answer: Connection, url: str, table: str, count: int) -> None:
    arrivals = _Arrivals(count)
    client = DatabusClient(database=table, relays=[url], consumer=arrivals, start="oldest")
    serving = asyncio.create_task(client.serve())
    while not client.status.is_flowing:
        await asyncio.sleep(0.01)
    answer.send("ready")
    await arrivals.all_here.wait()
    answer.send(arrivals.at_us)
    client.stop()
    await serving


def _write(upstream: Upstream, table: str, rate: int, count: int) -> npt.NDArray[np.int64]:
    """Let the rows be committed; when each of them was."""
    writers = 1 + rate // COMMITS_OF_A_WRITER
    statements = [upstream.insert_one(table, number) for number in range(count)]
    found = np.zeros(count, dtype=np.int64)
    running = []
    for number in range(writers):
        ours, theirs = mp.Pipe()
        process = mp.get_context("spawn").Process(
            target=commit_at_rate,
            args=(
                theirs, isinstance(upstream, MariaDB), upstream.server.port,
                statements[number::writers], rate, number, writers,
            ),
            daemon=True,
        )  # fmt: skip
        process.start()
        theirs.close()
        running.append((number, process, ours))
    for _, _, ours in running:
        if not ours.poll(START_S) or ours.recv() != "ready":
            raise RuntimeError("a writer did not start")
    start_s = time.time() + 0.1
    for _, _, ours in running:
        ours.send(start_s)
    for number, process, ours in running:
        try:
            if not ours.poll(60 + 10 * count / rate):
                raise RuntimeError("a writer did not finish")
            found[number::writers] = ours.recv()
        finally:
            process.join(5)
            process.kill()
    return found


def commit_at_rate(
    answer: Connection, is_mariadb: bool, port: int, statements: list[str], rate: int,
    first: int, step: int,
) -> None:  # fmt: skip
    """Commit every ``step``-th statement of a rate from ``first`` on, from the moment on that it is
    sent to it after it printed "ready"; answers when each commit returned, in microseconds."""
    cursor = _connect(is_mariadb, port).cursor()
    committed = np.zeros(len(statements), dtype=np.int64)
    answer.send("ready")
    start_s: float = answer.recv()
    for number, statement in enumerate(statements):
        wait_s = start_s + (first + number * step) / rate - time.time()
        if wait_s > 0:
            time.sleep(wait_s)
        cursor.execute(statement)
        committed[number] = time.time_ns() // 1000
    answer.send(committed)


def _connect(is_mariadb: bool, port: int) -> Any:
    if is_mariadb:
        import pymysql

        return pymysql.connect(
            host="127.0.0.1", port=port, user=USER, password=PASSWORD, database=DATABASE,
            autocommit=True,
        )  # fmt: skip
    import psycopg

    url = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{port}/{DATABASE}"
    return psycopg.connect(url, autocommit=True)
