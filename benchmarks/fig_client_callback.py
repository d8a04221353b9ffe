"""What a row costs the client's processor on its way from a filled ring to the application.

A worker in a process of its own serves a ring of rows of ten columns, with one row a commit or a
thousand.  One client after the other reads all of it, by callbacks or by the iterator, with the
values of each row or without.  Processor time is reported: other processes of the machine have
no part in it.  Its inverse is what one core can do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import decimal
import hashlib
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, Run, measure, numbers, start
from databus.client import Consumer, DataBatch, DatabusClient, Event
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.support.live_relay import LiveRelay

SCHEMA = SourceSchema(
    "bench.orders",
    (
        Column("id", Kind.INT, nullable=False),
        *(Column(name, Kind.INT) for name in "abc"),
        *(Column(name, Kind.STRING) for name in ("name", "email")),
        Column("price", Kind.DECIMAL, precision=12, scale=2),
        *(Column(name, Kind.TIMESTAMP) for name in ("created", "updated")),
        Column("note", Kind.STRING),
    ),
    ("id",),
)
FLOORS = {1: 100_000, 1000: 300_000}
FRAME_ROOM_BYTES = 512
START_S = 120
PULL_FAILURES = 5
_DAY = dt.datetime(2024, 1, 1)
_QUARTER = decimal.Decimal("0.25")


def row(number: int) -> tuple[Any, ...]:
    """The row with this number, as those of the captured tables of ``upstreams``."""
    text = hashlib.md5(str(number).encode()).hexdigest()
    return (
        number, number * 7919 % 1_000_000_007, number % 1000, number * 4_294_967_291,
        text[:20], f"{text[:18]}@example.com", decimal.Decimal(number % 1_000_000) + _QUARTER,
        _DAY + dt.timedelta(microseconds=number * 1_000_003),
        _DAY + dt.timedelta(seconds=number % 86400), text[:20] * 5,
    )  # fmt: skip


def window(scn: int, first: int, count: int) -> bytes:
    """One commit of rows ``first`` .. ``first + count - 1``."""
    builder = WindowBuilder(scn, scn * 1000, 0)
    for number in range(first, first + count):
        builder.event(
            Op.INSERT, SCHEMA.source_id, SCHEMA.fingerprint, SCHEMA.encode_key((number,)),
            before=None, after=SCHEMA.encode_row(row(number)),
        )  # fmt: skip
    return builder.end(f"tx{scn}")


def serve_ring(answer: Connection, rows: int, per_commit: int) -> None:
    """Fill a ring and serve it until the other end of ``answer`` is closed."""

    async def serve(folder: Path) -> None:
        live = LiveRelay(
            folder, database="bench", ring_bytes=rows * FRAME_ROOM_BYTES * 2, schemas=[SCHEMA]
        )
        for scn in range(1, rows // per_commit + 1):
            live.append(window(scn, (scn - 1) * per_commit + 1, per_commit))
        async with live.served():
            answer.send(live.url)
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(answer.recv)
        live.close()

    with tempfile.TemporaryDirectory(prefix="databus-bench-") as name:
        asyncio.run(serve(Path(name)))


@contextlib.contextmanager
def served_ring(rows: int, per_commit: int) -> Iterator[str]:
    """The address of a worker that serves so many rows."""
    ours, theirs = mp.Pipe()
    context = mp.get_context("spawn")
    process = context.Process(target=serve_ring, args=(theirs, rows, per_commit), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the ring is not served within {START_S} s")
        yield str(ours.recv())
    finally:
        ours.close()
        process.join(20)
        process.kill()


class Counting(Consumer):
    """Takes so many rows, then stops its client."""

    def __init__(self, rows: int, *, values: bool) -> None:
        self.left = rows
        self._values = values
        self.client: DatabusClient | None = None

    def onDataEvent(self, event: Event) -> None:
        if self._values and event.value is None:
            raise RuntimeError(f"{event} has no value")
        self.left -= 1
        if not self.left:
            assert self.client is not None
            self.client.stop()


class CountingBatches(Counting):
    """Takes rows in batches, as Arrow columns."""

    def onDataBatch(self, batch: DataBatch) -> None:
        self.left -= batch.arrow.num_rows
        if not self.left:
            assert self.client is not None
            self.client.stop()


def by_callbacks(
    url: str, rows: int, *, values: bool, kind: type[Counting] = Counting, **options: Any
) -> None:
    """Read so many rows by ``onDataEvent``, or by ``onDataBatch``.

    Raises:
        RuntimeError: not all of them came.
    """
    consumer = kind(rows, values=values)
    consumer.client = DatabusClient(
        database="bench",
        relays=[url],
        consumer=consumer,
        start="oldest",
        max_pull_failures=PULL_FAILURES,
        **options,
    )
    consumer.client.run()
    if consumer.left:
        raise RuntimeError(f"{consumer.left} rows of {rows} did not come")


def by_windows(url: str, rows: int, *, values: bool) -> None:
    """Read so many rows by the iterator."""
    left = rows
    client = DatabusClient(
        database="bench", relays=[url], start="oldest", max_pull_failures=PULL_FAILURES
    )
    for each in client.windows():
        for event in each:
            if values and event.value is None:
                raise RuntimeError(f"{event} has no value")
            left -= 1
        if not left:
            return


WAYS: dict[str, Callable[[str, int], None]] = {
    "callbacks, no values": partial(by_callbacks, values=False),
    "callbacks, values": partial(by_callbacks, values=True),
    "callbacks, values, a checkpoint every 0.2 s": partial(
        by_callbacks, values=True, checkpoint_every_s=0.2
    ),
    "onDataBatch, Arrow columns": partial(by_callbacks, values=True, kind=CountingBatches),
    "windows(), values": partial(by_windows, values=True),
}


def microseconds(way: Callable[[str, int], None], url: str, rows: int) -> float:
    """Processor time of this process for each row."""
    before = time.process_time()
    way(url, rows)
    return (time.process_time() - before) / rows * 1e6


def main(run: Run) -> None:
    """Measure and report."""
    rows = 2000 if run.smoke else run.options.rows
    report = Report(run, "Client's processor time, filled ring, ten columns", "us/row")
    report.settings = {"rows": rows, "floors_rows_per_s": FLOORS}
    digest = hashlib.sha256()
    for per_commit in run.options.per_commit:
        digest.update(window(1, 1, per_commit))
        with served_ring(rows, per_commit) as url:
            for name, way in WAYS.items():
                sample = measure(run, partial(microseconds, way, url, rows))
                report.add(sample, series=name, rows_a_commit=per_commit)
                report.note(
                    f"{per_commit} rows a commit, {name}: one core does "
                    f"{1e6 / sample.median:,.0f} rows/s; the floor with values is "
                    f"{FLOORS.get(per_commit, 0):,}"
                )
    report.output_hash = digest.hexdigest()[:16]
    report.write()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part."""
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--per-commit", type=numbers, default=[1, 1000], help="such as 1,1000")


if __name__ == "__main__":
    main(start("fig_client_callback", __doc__.partition("\n")[0], add_options))
