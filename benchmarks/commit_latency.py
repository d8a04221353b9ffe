"""How long after its commit a row is in the application's hands: relay, client, callback.

A writer in a process of its own commits one row at a time, at a steady rate, and notes when
each commit has returned; the application, behind a relay of this process, notes when its
callback gets the row.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.upstreams import DATABASE, MariaDB, Upstream
from databus.cli.servers import PASSWORD, USER
from databus.client import Consumer, DatabusClient, Event
from databus.common.config import Config, RelayConfig
from databus.relay.relay import LocalRelay

PERCENTILES = (50, 95, 99)
WARM_UP_S = 0.5
ARRIVE_S = 60.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of each row, in microseconds, from the end of its commit to the callback."""

    latencies_us: npt.NDArray[np.int64]
    commits_per_s: float

    @property
    def count(self) -> int:
        return len(self.latencies_us)

    def latency_ms(self, percent: float) -> float:
        """A percentile; a callback may come before the writer hears of its commit."""
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
    return uvloop.run(_measure(upstream, table, rate, seconds))


async def _measure(upstream: Upstream, table: str, rate: int, seconds: float) -> Latencies:
    warm_up = int(WARM_UP_S * rate)
    count = warm_up + int(seconds * rate)
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        config = Config(
            relay=RelayConfig(listen="127.0.0.1:0", data_dir=Path(folder)),
            database=(upstream.config(table),),
        )
        async with LocalRelay(config) as relay:
            await relay.ready(60)
            arrivals = _Arrivals(count)
            client = DatabusClient(
                database=table, relays=[relay.url], consumer=arrivals, start="oldest"
            )
            serving = asyncio.create_task(client.serve())
            try:
                commits = await asyncio.to_thread(_write, upstream, table, rate, count)
                async with asyncio.timeout(ARRIVE_S):
                    await arrivals.all_here.wait()
            finally:
                client.stop()
                await serving
    spent_s = (commits[-1] - commits[0]) / 1e6
    return Latencies((arrivals.at_us - commits)[warm_up:], (count - 1) / spent_s)


def _write(upstream: Upstream, table: str, rate: int, count: int) -> npt.NDArray[np.int64]:
    ours, theirs = mp.Pipe()
    statements = [upstream.insert_one(table, number) for number in range(count)]
    process = mp.get_context("spawn").Process(
        target=_commit,
        args=(theirs, isinstance(upstream, MariaDB), upstream.server.port, statements, rate),
        daemon=True,
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(60 + 10 * count / rate):
            raise RuntimeError("the writer did not finish")
        found: npt.NDArray[np.int64] = ours.recv()
    finally:
        process.join(5)
        process.kill()
    return found


def _commit(
    answer: Connection, is_mariadb: bool, port: int, statements: list[str], rate: int
) -> None:
    cursor = _connect(is_mariadb, port).cursor()
    committed = np.zeros(len(statements), dtype=np.int64)
    started = time.perf_counter()
    for number, statement in enumerate(statements):
        wait_s = started + number / rate - time.perf_counter()
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
