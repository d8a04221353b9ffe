"""What a merge of ``databus mirror`` costs against the size of the table, beside ``deltalake``.

The same number of changes goes into Delta tables of different sizes, as one commit: new rows and
updates at the end of the key (``local``), or spread over all keys (``scattered``).  Beside it, on
an equal table in the same run, ``DeltaTable.merge`` in one process, which exports use.  Also the
rows that each of them writes for one that changed.  No servers: the changes are a DataFrame.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.harness import Report, Run, measure_in_turns, numbers, ratio, start
from databus.client.exports.delta_files import DeltaFiles
from databus.client.exports.delta_table import DeltaLakeTable
from databus.client.exports.lake_files import Layout
from databus.client.exports.table_export import ExportMark, TableChanges
from databus.client.spark.mirror_passes import start_session
from databus.client.spark.table_merge import MergeSizes, TableMerge, keys_of, written
from databus.common.checkpoint import Position

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string()), ("total", pa.float64())])
SHAPES = ("local", "scattered")


def rows(ids: Any, seed: int) -> Any:
    """Rows with these keys."""
    rng = np.random.default_rng(seed)
    states = pa.array([f"state {n}" for n in rng.integers(0, 1 << 40, len(ids))])
    return pa.table([pa.array(ids), states, pa.array(rng.random(len(ids)))], schema=SCHEMA)


class Table:
    """A Delta table of ``size`` rows, and changes to it; ``count`` of them each time."""

    def __init__(self, spark: Any, folder: Path, size: int, count: int, file_rows: int) -> None:
        self.folder, self.size, self.count = folder, size, count
        self.sizes = MergeSizes(file_rows, 2)
        self._spark = spark
        self._files = DeltaFiles(str(folder), ("id",), "clock", Layout())
        self._merged = DeltaLakeTable(str(folder), ("id",), "clock")
        self._scn = 1
        writing = self._files.begin(SCHEMA, whole=True)
        batches = rows(np.arange(size), 0).to_batches(file_rows)
        added = list(writing.place.write(iter(batches), file_rows))
        writing.commit(None, added, self._mark())

    def _mark(self) -> ExportMark:
        self._scn += 1
        return ExportMark("clock", Position(self._scn))

    def changes(self, shape: str) -> Any:
        """Half updates and half new rows at the end, or updates everywhere."""
        first = self.size - self.count // 2
        ids = np.arange(first, first + self.count)
        if shape == "scattered":
            ids = np.random.default_rng(self._scn).choice(self.size, self.count, replace=False)
        return rows(ids, self._scn)

    def mirror(self, shape: str) -> float:
        """Seconds of one merge by Spark."""
        own = self.changes(shape)
        own = own.append_column("_op", pa.repeat("u", own.num_rows))
        own = own.append_column("_absent", pa.nulls(own.num_rows, pa.list_(pa.string())))
        changes = self._spark.createDataFrame(own).persist()
        changes.count()
        begun_s = time.perf_counter()
        merge = TableMerge(self._spark, changes, keys_of(changes, "id"), ("id",), self.sizes)
        writing = self._files.begin(SCHEMA, whole=False)
        touched = merge.touched(writing.place, self._files.files())
        count = self.count + sum(one.row_count for one in touched)
        after = merge.rows(writing.place, touched)
        added = written(after, writing.place, ("id",), self.sizes, count)
        writing.commit(touched, added, self._mark())
        taken_s = time.perf_counter() - begun_s
        changes.unpersist()
        return taken_s

    def deltalake(self, shape: str) -> float:
        """Seconds of one merge in this process."""
        own = self.changes(shape)
        begun_s = time.perf_counter()
        self._merged.apply(SCHEMA, TableChanges(own, own.select(["id"]).slice(0, 0)), self._mark())
        return time.perf_counter() - begun_s

    def written_rows(self) -> int:
        """Rows that the last commit wrote."""
        found = pa.table(DeltaTable(str(self.folder)).get_add_actions(flatten=True))
        newest = max(found.column("modification_time").to_pylist())
        times = zip(
            *(found.column(n).to_pylist() for n in ("modification_time", "num_records")),
            strict=True,
        )
        return sum(count for at, count in times if at == newest)


def main() -> None:
    """Measure and write."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sizes", default="1000000,4000000", help="rows of the tables")
        parser.add_argument("--changes", type=int, default=10_000)
        parser.add_argument("--file-rows", type=int, default=250_000)

    run = start("fig_mirror_cost", __doc__, more)
    sizes = [2_000] if run.smoke else numbers(run.options.sizes)
    count = 200 if run.smoke else run.options.changes
    file_rows = 500 if run.smoke else run.options.file_rows
    report = Report(run, "seconds a merge", "s", {"changes": count, "file_rows": file_rows})
    spark = start_session("local[2]", {"spark.driver.memory": "1g"})
    folder = Path(tempfile.mkdtemp(prefix="databus-bench-"))
    try:
        measure_all(run, report, spark, folder, sizes, count, file_rows)
    finally:
        spark.stop()
        shutil.rmtree(folder)
    report.write()


def measure_all(
    run: Run, report: Report, spark: Any, folder: Path, sizes: list[int], count: int, file_rows: int
) -> None:
    """Each shape on tables of each size, by Spark and by ``deltalake`` in turns."""
    for shape in SHAPES:
        found = []
        for size in sizes:
            tables = [
                Table(spark, folder / f"{shape}-{size}-{by}", size, count, file_rows)
                for by in ("mirror", "deltalake")
            ]
            samples = measure_in_turns(
                run,
                {
                    "mirror": partial(tables[0].mirror, shape),
                    "deltalake": partial(tables[1].deltalake, shape),
                },
            )
            for by, table in zip(samples, tables, strict=True):
                report.add(samples[by], series=f"{by}, {shape}", rows=size)
                each = table.written_rows() / count
                report.note(f"{by}, {shape}, {size} rows: {each:.1f} rows written for one changed")
            found.append(samples["mirror"])
        report.note(f"mirror, {shape}: {sizes[-1]} rows take {ratio(found[-1], found[0]):.2f} "
                    f"times as long as {sizes[0]}")  # fmt: skip


if __name__ == "__main__":
    main()
