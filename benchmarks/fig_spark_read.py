"""Spark reads a table of a bootstrap's store beside the same table as plain, typed Parquet.

The table has ten columns and lies in a base, as the applier writes it.  It is read from the store's
files, over HTTP alone, and with ``spark.read.parquet`` from Spark's own copy of it.  Every value of
every column is read in all three, and discarded.  Bytes are those that the readers of the same
splits read from files in this process: those of Spark's workers include Python's modules.
"""

from __future__ import annotations

import argparse
import datetime as dt
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bootstrap_process import server
from benchmarks.harness import Report, Run, Sample, measure_in_turns, ratio, start
from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.merging.spark_merges import start_spark
from databus.bootstrap.runs.manifest import Store
from databus.client.spark import register
from databus.client.spark.read_options import PARTITIONS
from databus.client.splits.split_planning import planned_splits
from databus.client.splits.split_reader import SplitReader
from databus.client.tables.arrow_rows import RowDecoder
from databus.client.tables.table_reader import Range, TableAddress, TableReader
from databus.common.checkpoint import ORIGIN
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema

SCHEMA = SourceSchema(
    "shop.orders",
    (
        Column("id", Kind.INT, nullable=False),
        Column("customer", Kind.INT),
        Column("quantity", Kind.INT),
        Column("price", Kind.FLOAT),
        Column("is_paid", Kind.BOOL),
        Column("day", Kind.DATE),
        Column("changed", Kind.TIMESTAMP),
        Column("state", Kind.STRING),
        Column("city", Kind.STRING),
        Column("note", Kind.STRING),
    ),
    ("id",),
)
WINDOW_ROWS = 50_000
TEMPLATES = 20_000
"""Rows that differ in more than their key: more than the compression looks back."""
FLOOR_ROWS = 1_500_000
FLOOR_BYTES = 1.1


def make_store(folder: Path, rows: int) -> Store:
    """A store with a base of ``rows`` rows, merged out of its log."""
    store = Store(folder)
    store.create()
    log = HotLog(folder / "log")
    log.bind("shop", "bench:1", ORIGIN)
    log.add_schemas([SCHEMA])
    rng = random.Random(1)
    first = len(SCHEMA.encode_key({"id": 0}))
    rests = [SCHEMA.encode_row(_row(rng))[first:] for _ in range(TEMPLATES)]
    for number in range(0, rows, WINDOW_ROWS):
        builder = WindowBuilder(10 + number // WINDOW_ROWS, 1_700_000_000_000_000)
        for row in range(number, min(rows, number + WINDOW_ROWS)):
            builder.event(
                Op.INSERT,
                SCHEMA.source_id,
                SCHEMA.fingerprint,
                key := SCHEMA.encode_key({"id": row}),
                after=key + rests[row % TEMPLATES],  # fields lie back to back
            )
        log.append(builder.end(f"t{number}"), 1)
        segments.seal(log, store, 1)
    log.put_note("seeding", {SCHEMA.source: {"state": "seeded"}})
    log.close()
    Applier(store, ProcessMerges(folder)).apply(full=True)
    return store


def _row(rng: random.Random) -> dict[str, Any]:
    return {
        "id": 0,
        "customer": rng.randrange(100_000),
        "quantity": rng.randrange(100),
        "price": rng.random() * 1000,
        "is_paid": rng.random() < 0.5,
        "day": dt.date(2025, 1, 1) + dt.timedelta(days=rng.randrange(365)),
        "changed": dt.datetime(2025, 1, 1) + dt.timedelta(microseconds=rng.randrange(10**12)),
        "state": ("new", "paid", "packed", "sent")[rng.randrange(4)],
        "city": f"city {rng.randrange(5000)}",
        "note": f"{rng.getrandbits(120):030x}",
    }


def read_everything(frame: Any) -> float:
    """Seconds to read all columns of all rows."""
    began_s = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began_s


def bytes_read(port: int) -> int:
    """What the readers of all splits of the table read from files."""
    url = f"http://127.0.0.1:{port}"
    reader = TableReader(TableAddress("shop", SCHEMA.source, bootstraps=(url,)))
    decoder = RowDecoder(reader.schema(), reader.schema_of)
    whole = Range("state", None, reader.target(), reader.clock)
    splits = planned_splits(reader, whole, PARTITIONS)
    before = psutil.Process().io_counters().read_chars
    for one in splits:
        for _ in SplitReader(reader, one).batches(decoder):
            pass
    return int(psutil.Process().io_counters().read_chars) - before


def main(run: Run) -> None:
    """Measure and report."""
    rows = run.options.rows or (2_000 if run.smoke else 2_000_000)
    report = Report(run, "Spark reads a table of a store", "rows/s, or as named", {"rows": rows})
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as name:
        store = make_store(Path(name) / "shop", rows)
        base = store.read().base
        assert base is not None and base.rows == rows
        spark = start_spark("local[2]", "2g", scratch=Path(name))
        register(spark)
        try:
            with server(store.folder.parent) as port:
                _measure(run, report, spark, port, Path(name), base.file_bytes, rows)
        finally:
            spark.stop()
    report.write()


def _measure(
    run: Run, report: Report, spark: Any, port: int, folder: Path, store_bytes: int, rows: int
) -> None:
    def table(files: str) -> Any:
        options = {
            "database": "shop",
            "source": SCHEMA.source,
            "bootstraps": f"http://127.0.0.1:{port}",
            "files": files,
        }
        return spark.read.format("databus").options(**options).load()

    copy = str(folder / "copy")
    table("always").write.parquet(copy)
    assert spark.read.parquet(copy).count() == rows
    plain_bytes = sum(path.stat().st_size for path in Path(copy).glob("*.parquet"))
    bytes_read(port)  # the first one loads modules
    read = bytes_read(port)

    def rate(frame: Callable[[], Any]) -> Callable[[], float]:
        return lambda: rows / read_everything(frame())

    found: dict[str, Sample] = measure_in_turns(
        run,
        {
            "from the store's files": rate(lambda: table("always")),
            "over HTTP": rate(lambda: table("never")),
            "spark.read.parquet": rate(lambda: spark.read.parquet(copy)),
        },
    )
    for name, sample in found.items():
        report.add(sample, series=f"{name}, rows/s", rows=rows)
    files, http, plain = found.values()
    report.note(
        f"from the store's files {files.median:,.0f} rows/s, the floor is {FLOOR_ROWS:,}: "
        f"{ratio(files, http):.1f} times as fast as over HTTP, {ratio(files, plain):.2f} of "
        "spark.read.parquet"
    )
    report.note(
        f"{read / store_bytes:.2f} of the table's {store_bytes / 1e6:.1f} MB in the store were "
        f"read, the most is {FLOOR_BYTES}; the plain Parquet has {plain_bytes / 1e6:.1f} MB"
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, help="of the table")


if __name__ == "__main__":
    main(start("fig_spark_read", __doc__.partition("\n")[0], _options))
