"""Dumps: rows a second into the ring, and what they cost the stream's latency.

A table of ten columns is dumped through the fetcher's own code into a ring; beside it, in the
same run, the database's own client drains the same table (`mariadb -e SELECT`, psql's \\copy)
as the limit, and Debezium takes it by an initial snapshot.  Then a writer commits 1,000 rows a
second: alone, beside a dump as it is by default, which pauses while the stream brings changes, and
beside one that does not; what is compared is the time from a commit's return until its row is in
the ring.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.commit_latency import commit_at_rate
from benchmarks.harness import Report, Run, Sample, measure, start
from benchmarks.peer_runs import Debezium, peers_of
from benchmarks.upstreams import DATABASE, MariaDB, MySQL, Postgres, Upstream, _newest, timed
from databus.cli.demo.private_servers import PASSWORD, USER
from databus.common.errors import MissingDependency
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.relay.capture.intake import Intake
from databus.relay.dumps.dump_records import Dump, DumpState, new_dump
from databus.relay.processes.fetcher import SWITCH_INTERVAL_S, Fetcher
from databus.relay.processes.fetcher_process import settle_heap
from databus.relay.sources.contract import Batch
from tests.support.mysql_server import mysql_launcher

DATABASES: dict[str, type[MariaDB | Postgres]] = {
    "mariadb": MariaDB,
    "mysql": MySQL,
    "postgres": Postgres,
}
TABLE = "dumped"
RATE = 1000
BESIDE: dict[str, dict[str, int] | None] = {
    "alone": None,
    "while a dump runs": {},
    "while a dump runs without pauses": {"share": 100},
}
"""Without pauses a dump takes whatever processor the database and the relay are given."""


class TimedFetcher(Fetcher):
    """Notes when each row that was inserted is in the ring."""

    arrivals_us: dict[int, int]

    def _take(self, intake: Intake, batch: Batch) -> None:
        super()._take(intake, batch)
        if not batch.data:
            return
        now_us = time.time_ns() // 1000
        for view in frame_format.iter_frames(batch.data):
            if view.op == Op.INSERT:
                schema = intake.registry.schemas.by_fingerprint(view.schema_fp)
                self.arrivals_us[schema.decode_key(view.key)["id"]] = now_us


async def _with_fetcher(upstream: Upstream, work: Any) -> Any:
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        fetcher = TimedFetcher(upstream.config(TABLE), Path(folder))
        fetcher.arrivals_us = {}
        running = asyncio.create_task(fetcher.run())
        try:
            try:
                await asyncio.wait_for(settle_heap(fetcher), 30)
            except TimeoutError:
                raise RuntimeError(f"the fetcher does not stream: {fetcher.status.error}") from None
            return await work(fetcher)
        finally:
            fetcher.stop()
            await running


async def _dump(fetcher: Fetcher, **pace: int) -> Dump:
    dump = new_dump({"sources": ["*"], **pace})
    fetcher.book.add(dump)
    await fetcher.dumps_changed()
    while dump.state in (DumpState.QUEUED, DumpState.RUNNING):
        await asyncio.sleep(0.01)
    if dump.state != DumpState.COMPLETED:
        raise RuntimeError(f"the dump is {dump.state}: {dump.error}")
    return dump


def dump_rows_per_s(upstream: Upstream, parallel: int) -> float:
    """One dump of the whole table, from its request to its end on disk."""

    async def work(fetcher: Fetcher) -> float:
        began = time.perf_counter()
        dump = await _dump(fetcher, parallel=parallel)
        rows = sum(table.rows for table in dump.tables or ())
        return rows / (time.perf_counter() - began)

    return float(uvloop.run(_with_fetcher(upstream, work)))


def own_rows_per_s(upstream: Upstream, rows: int) -> float:
    """The database's own client, of MySQL that of MariaDB, drains the table to nowhere."""
    port = f"--port={upstream.server.port}"
    if isinstance(upstream, MariaDB):
        command = [
            "mariadb", "--no-defaults", "--host=127.0.0.1", port, f"--user={USER}",
            f"--password={PASSWORD}", "--quick", "--batch", f"--execute=SELECT * FROM {TABLE}",
            DATABASE,
        ]  # fmt: skip
        command = ["sh", "-c", '"$@" > /dev/null', "sh", *command]
    else:
        command = [
            _newest("psql"), "--host=127.0.0.1", port, f"--username={USER}",
            f"--dbname={DATABASE}", "--no-psqlrc", "--quiet",
            f"--command=\\copy (SELECT * FROM {TABLE} ORDER BY id) TO '/dev/null'",
        ]  # fmt: skip
    return rows / timed(command, PGPASSWORD=PASSWORD).seconds


async def _told(pipe: Connection, writer: BaseProcess) -> Any:
    """What the writer prints next."""
    while not pipe.poll():
        if not writer.is_alive():
            raise RuntimeError(f"the writer ended with exit code {writer.exitcode}")
        await asyncio.sleep(0.01)
    return pipe.recv()


def latencies_ms(
    upstream: Upstream, first: int, seconds: float, pace: dict[str, int] | None
) -> tuple[Any, float]:
    """From the return of a commit until its row is in the ring; milliseconds of each row.

    ``pace`` is that of the dumps that run meanwhile, one after the other; None: there are none.
    Their rows a second come second.
    """
    count = int(RATE * seconds)
    statements = [upstream.insert_one(TABLE, first + number) for number in range(count)]

    async def work(fetcher: TimedFetcher) -> tuple[Any, float]:
        ours, theirs = mp.Pipe()
        writer = mp.get_context("spawn").Process(
            target=commit_at_rate,
            args=(
                theirs,
                isinstance(upstream, MariaDB),
                upstream.server.port,
                statements,
                RATE,
                0,
                1,
            ),
            daemon=True,
        )
        writer.start()
        dumps = None if pace is None else asyncio.create_task(_forever(fetcher, pace))
        await _told(ours, writer)
        began_s, rows_before = time.perf_counter(), _dumped_rows(fetcher)
        ours.send(time.time())
        committed = await _told(ours, writer)
        dumped = (_dumped_rows(fetcher) - rows_before) / (time.perf_counter() - began_s)
        while first + count - 1 not in fetcher.arrivals_us:
            await asyncio.sleep(0.01)
        if dumps is not None:
            dumps.cancel()
        await asyncio.to_thread(writer.join)
        arrived = np.array([fetcher.arrivals_us[first + number] for number in range(count)])
        return (arrived - committed)[min(count // 2, RATE // 2) :] / 1000, dumped

    found: tuple[Any, float] = uvloop.run(_with_fetcher(upstream, work))
    return found


def _dumped_rows(fetcher: Fetcher) -> int:
    return sum(table.rows for dump in fetcher.book for table in dump.tables or ())


async def _forever(fetcher: Fetcher, pace: dict[str, int]) -> None:
    while True:
        await _dump(fetcher, **pace)


def run(run_: Run, rows: int, seconds: float) -> None:
    report = Report(run_, "Dumps", "rows/s", {"rows": rows, "rate": RATE})
    seen = []
    for name in run_.options.databases:
        upstream: Upstream = DATABASES[name]()
        absent = _absent(upstream)
        if absent is not None:
            report.note(f"{upstream.name}: absent ({absent})")
            continue
        with upstream:
            upstream.create_table(TABLE)
            upstream.fill(TABLE, rows, min(rows, 1_000))
            limit = measure(run_, partial(own_rows_per_s, upstream, rows))
            report.add(limit, database=upstream.name, series="own client")
            for parallel in (2,) if run_.smoke else (1, 2):
                sample = measure(run_, partial(dump_rows_per_s, upstream, parallel))
                report.add(sample, database=upstream.name, series="dump", parallel=parallel)
                report.note(
                    f"{upstream.name}, parallel={parallel}: {sample.median / limit.median:.2f} of "
                    "its own client, which converts nothing"
                )
            for number, (what, pace) in enumerate(BESIDE.items()):
                found, dumped = latencies_ms(upstream, rows + number * 1_000_000, seconds, pace)
                p50, p99 = np.percentile(found, (50, 99))
                report.note(
                    f"{upstream.name}: commit to ring at {RATE}/s {what}: "
                    f"p50 {p50:.2f} ms, p99 {p99:.2f} ms; {dumped:,.0f} rows/s dumped meanwhile"
                )
                report.points.append(
                    {"database": upstream.name, "series": f"latency_ms, {what}",
                     "p50": float(p50), "p99": float(p99), "dumped_rows_per_s": dumped}
                )  # fmt: skip
            if not run_.smoke:
                _snapshots(report, upstream, rows)
            seen.append(upstream.name)
    report.output_hash = "-".join(seen)
    report.write()


def _absent(upstream: Upstream) -> str | None:
    """Why there is no server of this kind here; None if there is one."""
    if isinstance(upstream, MySQL):
        try:
            mysql_launcher()
        except MissingDependency as error:
            return error.message
    return None


def _snapshots(report: Report, upstream: Upstream, rows: int) -> None:
    """Debezium's, of the same table."""
    for peer in peers_of(upstream):
        if isinstance(peer, Debezium):
            if peer.absent is None:
                taken = [peer.snapshot(TABLE, rows, n) for n in range(report.run.repeats)]
                sample = Sample(tuple(one.rows / one.seconds for one in taken))
                report.add(sample, database=upstream.name, series=f"{peer.name}, snapshot")
            else:
                report.note(f"{peer.name}: absent ({peer.absent})")
        peer.close()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, help="of the table")
    parser.add_argument("--databases", nargs="*", default=list(DATABASES), choices=list(DATABASES))


def main() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    run_ = start("capture_dump", __doc__.partition("\n")[0], _options)
    rows = run_.options.rows or (5_000 if run_.smoke else 1_000_000)
    run(run_, rows, 0.5 if run_.smoke else 10)


if __name__ == "__main__":
    main()
