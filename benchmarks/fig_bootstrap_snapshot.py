"""A full bootstrap of a real table beside Debezium's snapshot of the same table.

A table of ten columns is dumped by the relay's own code, kept in a log, sealed, and merged into
a base by Spark, as a bootstrap server has it.  Then one consumer takes the whole table from the
server, checked frame by frame, and Debezium takes it from the database by an initial snapshot.
Neither is charged with its start: the server runs, and Debezium counts from its first batch.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import uvloop

from benchmarks.bootstrap_process import RowOrder, read_over_http, server
from benchmarks.harness import Report, Run, Sample, start
from benchmarks.peer_runs import Debezium, peers_of
from benchmarks.upstreams import MariaDB, Postgres, Upstream
from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.spark_merges import SparkMerges, start_spark
from databus.bootstrap.runs.manifest import Store
from databus.common.checkpoint import ORIGIN
from databus.relay.dumps.dump_records import DumpState, new_dump
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.ring import Ring

TABLE = "dumped"
DATABASES = ("mariadb", "postgres")
FLOOR = 5.0
CONNECT_S = 60
RING_BYTES = 1 << 30
PART_BYTES = 16 << 20


async def keep_dump(upstream: Upstream, log: HotLog) -> None:
    """Dump the whole table into a ring, and the ring into a log."""
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        config = upstream.config(TABLE).model_copy(update={"ring_bytes": RING_BYTES})
        fetcher = Fetcher(config, Path(folder))
        running = asyncio.create_task(fetcher.run())
        try:
            await asyncio.wait_for(fetcher.connected(), CONNECT_S)
            dump = new_dump({"sources": ["*"]})
            fetcher.book.add(dump)
            await fetcher.dumps_changed()
            while dump.state in (DumpState.QUEUED, DumpState.RUNNING):
                await asyncio.sleep(0.01)
            if dump.state != DumpState.COMPLETED or fetcher.intake is None:
                raise RuntimeError(f"the dump is {dump.state}: {dump.error}")
            log.add_schemas(fetcher.intake.registry.schemas)
            with Ring.open_reader(fetcher.intake.ring.directory) as reader:
                ring_position = reader.snapshot().head
                while ring_position < reader.snapshot().tail:
                    data, ring_position = reader.read(ring_position, PART_BYTES)
                    log.append(bytes(data), 1)
        finally:
            fetcher.stop()
            await running


def make_store(upstream: Upstream, folder: Path) -> Store:
    """A store with a base of the whole table, dumped from the database."""
    store = Store(folder)
    store.create()
    log = HotLog(folder / "log")
    log.bind("shop", "bench:1", ORIGIN)
    uvloop.run(keep_dump(upstream, log))
    segments.seal(log, store, 1)
    log.put_note("seeding", {f"{upstream.schema}.{TABLE}": {"state": "seeded"}})
    log.close()
    spark = start_spark("local[2]", "1g")
    try:
        Applier(store, SparkMerges(spark)).apply()
    finally:
        spark.stop()
    return store


def bootstraps(report: Report, store: Store, database: str) -> Sample:
    """Take a full bootstrap again and again; rows/s."""
    with server(store.folder.parent) as port:
        order = RowOrder()
        seen = read_over_http(port, order.add)
        found = [read_over_http(port) for _ in range(report.run.repeats)]
    if any(one.frame_bytes != seen.frame_bytes for one in found):
        raise AssertionError(f"{found} are not the {seen.frame_bytes} bytes of the first")
    rows = Sample(tuple(order.rows / one.seconds for one in found))
    size = Sample(tuple(one.frame_bytes / one.seconds / 1e6 for one in found))
    report.add(rows, series="bootstrap, rows/s", database=database)
    report.add(size, series="bootstrap, MB/s", database=database)
    report.output_hash += order.hash
    return rows


def measure_one(report: Report, upstream: Upstream, rows: int) -> None:
    """Both of one database's table, one after the other."""
    upstream.create_table(TABLE)
    upstream.fill(TABLE, rows, min(rows, 10_000))
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as name:
        store = make_store(upstream, Path(name) / "shop")
        ours = bootstraps(report, store, upstream.name)
    for peer in peers_of(upstream):
        if isinstance(peer, Debezium):
            _beside(report, upstream, peer, ours, rows)
        peer.close()


def _beside(report: Report, upstream: Upstream, peer: Debezium, ours: Sample, rows: int) -> None:
    if peer.absent is not None or report.run.smoke:
        report.note(f"{peer.name}: {peer.absent or 'not in a smoke run'}")
        return
    taken = [peer.snapshot(TABLE, rows, number) for number in range(report.run.repeats)]
    theirs = Sample(tuple(one.rows / one.seconds for one in taken))
    report.add(theirs, database=upstream.name, series=f"{peer.name}, snapshot")
    report.note(
        f"{upstream.name}: a bootstrap is {ours.median / theirs.median:.1f} times as fast as "
        f"the snapshot of {peer.name}; the floor is {FLOOR}"
    )


def main(run: Run) -> None:
    """Measure and report."""
    rows = run.options.rows or (5_000 if run.smoke else 1_000_000)
    report = Report(
        run, "A full bootstrap beside a snapshot", "rows/s, or as named", {"rows": rows}
    )
    for name in run.options.databases:
        with MariaDB() if name == "mariadb" else Postgres() as upstream:
            measure_one(report, upstream, rows)
    report.write()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, help="of the table")
    parser.add_argument("--databases", nargs="*", default=DATABASES, choices=DATABASES)


if __name__ == "__main__":
    main(start("fig_bootstrap_snapshot", __doc__.partition("\n")[0], _options))
