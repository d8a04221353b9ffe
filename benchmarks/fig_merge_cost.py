"""What a merge into a large base costs, beside a plain Spark copy of the same base.

A base of clustered files, and changes all over it in segments (half updates, a quarter inserts, a
quarter deletes).  Spark merges the segments into a delta, and the delta into the base, as
``databus apply --full`` does.  Measured are the seconds, the bytes that Spark shuffled (its own
metric) beside the bytes of the changes, and the seconds of ``spark.read.parquet(base)`` written as
Parquet again.  Then changes in a hundredth of the hashes are merged: what was written of the base?
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fig_apply_cost import HASH_FACTOR, borrowed, frames, prepare, write_changes
from benchmarks.harness import Report, Run, Sample, start
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.segments import seal
from databus.bootstrap.merging import run_planner
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op

FLOORS = {"shuffled": 1.2, "seconds": 1.5, "written": 0.05}
PART = 0.01
LARGEST = 1 << 40


def shuffled_bytes(spark: Any) -> int:
    """The bytes that all stages of the session have written for shuffles."""
    context = spark.sparkContext
    quantiles = context._gateway.new_array(context._jvm.double, 0)
    stages = context._jsc.sc().statusStore().stageList(None, False, False, quantiles, None)
    return sum(int(stages.apply(number).shuffleWriteBytes()) for number in range(stages.size()))


class Merging:
    """A store of its own over a base, and what its merges cost.

    Owner: one measurement.
    """

    def __init__(self, spark: Any, store: Store, work: Path) -> None:
        from databus.bootstrap.merging.spark_merges import SparkMerges

        self._spark, self._work = spark, work
        self.store = borrowed(store, work / "shop")
        self.log = HotLog(self.store.folder / "log")
        self._applier = Applier(self.store, SparkMerges(spark), grace_us=0)

    def apply(self) -> dict[str, float]:
        """Merge everything into the base: seconds of each kind of merge, and bytes shuffled."""
        spent = {"delta": 0.0, "base": 0.0}
        shuffled = shuffled_bytes(self._spark)
        while merge := run_planner.next_merge(self.store.read(), LARGEST, full=True):
            began_s = time.perf_counter()
            self._applier._merge(merge, None)
            spent[merge.kind.value] += time.perf_counter() - began_s
            if merge.kind is RunKind.BASE:
                break
        return {**spent, "shuffled": float(shuffled_bytes(self._spark) - shuffled)}

    def close(self) -> None:
        """Remove the store."""
        self.log.close()
        shutil.rmtree(self._work)


def copy_s(spark: Any, store: Store, to: Path) -> float:
    """Seconds of a plain copy of the base by Spark."""
    base = store.read().base
    assert base is not None
    paths = [str(store.run_folder(base.id) / one.name) for one in base.files]
    began_s = time.perf_counter()
    spark.read.parquet(*paths).write.parquet(str(to))
    spent_s = time.perf_counter() - began_s
    shutil.rmtree(to)
    return spent_s


def write_part(log: HotLog, store: Store, rows: int, changes: int, at: int) -> None:
    """Updates of keys in a hundredth of the hashes."""
    keys = np.arange(rows, dtype=np.uint64)
    chosen = keys[(keys * HASH_FACTOR) < np.uint64(int(PART * 2**64))][:changes]
    block = frames(chosen, at, 0, Op.UPDATE, at) + frame_format.pack_frame(
        op=Op.END_OF_WINDOW, scn=at, seq=len(chosen), key=b"t", after=bytes(4)
    )
    log.append(block, 1, verify=False)
    seal(log, store, 1)


def main(run: Run) -> None:
    """Measure and report."""
    from databus.bootstrap.merging.spark_merges import start_spark

    rows, changes = (20_000, 4_000) if run.smoke else (run.options.rows, run.options.changes)
    report = Report(run, "Merges into a base of 200-byte rows", "s")
    report.settings = {"rows": rows, "changes": changes, "master": run.options.master} | FLOORS
    folder = Path(tempfile.mkdtemp(prefix="databus-bench-"))
    spark = start_spark(run.options.master, "2g")
    try:
        store = prepare(folder, rows)
        copies: list[float] = []
        merges: list[dict[str, float]] = []
        for number in range(run.repeats + (not run.smoke)):
            copies.append(copy_s(spark, store, folder / "copy"))
            merges.append(_measured(spark, store, folder / f"work-{number}", _all_over(changes)))
        del copies[: -run.repeats], merges[: -run.repeats]  # the first warms Java up
        report.add(Sample(tuple(copies)), series="plain copy of the base", rows=rows)
        for kind in ("delta", "base"):
            report.add(Sample(tuple(one[kind] for one in merges)), series=kind, rows=rows)
        whole = Sample(tuple(one["delta"] + one["base"] for one in merges)).median
        ratio = whole / Sample(tuple(copies)).median
        shuffled = merges[-1]["shuffled"] / merges[-1]["changed"]
        report.note(
            f"{changes:,} changes into {rows:,} rows: {ratio:.2f} of a plain copy "
            f"(floor {FLOORS['seconds']}); shuffled {shuffled:.2f} of the bytes of the changes "
            f"(floor {FLOORS['shuffled']})"
        )
        part = _measured(spark, store, folder / "part", _in_a_part(max(changes // 100, 20)))
        report.add(Sample((part["delta"] + part["base"],)), series="a hundredth", rows=rows)
        report.note(
            f"changes in a hundredth of the hashes: {part['written']:.3f} of the base's bytes "
            f"were written (floor {FLOORS['written']})"
        )
    finally:
        spark.stop()
        shutil.rmtree(folder)
    report.output_hash = f"{rows}/{changes}"
    report.write()


Writes = Callable[[HotLog, Store, int, int], object]
"""Writes changes: to a log and its store, of a table of so many rows, from an SCN on."""


def _all_over(changes: int) -> Writes:
    return lambda log, store, rows, scn: write_changes(log, store, rows, changes, scn)


def _in_a_part(changes: int) -> Writes:
    return lambda log, store, rows, scn: write_part(log, store, rows, changes, scn)


def _measured(spark: Any, store: Store, work: Path, write: Writes) -> dict[str, float]:
    merging = Merging(spark, store, work)
    try:
        before = merging.store.read()
        assert before.base is not None
        base = before.base
        write(merging.log, merging.store, base.rows, base.stop.scn + 1)
        changed = sum(run.frame_bytes for run in merging.store.read().chain) - sum(
            run.frame_bytes for run in before.chain
        )
        found = merging.apply()
        after = merging.store.read().base
        assert after is not None
        names = {(one.folder or base.id, one.name) for one in base.files}
        new = [one for one in after.files if (one.folder or after.id, one.name) not in names]
        written = sum(one.file_bytes for one in new) / sum(one.file_bytes for one in base.files)
        return {**found, "changed": float(changed), "written": written}
    finally:
        merging.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part."""
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--changes", type=int, default=5_000_000)
    parser.add_argument("--master", default="local[2]", help="such as spark://host:7077")


if __name__ == "__main__":
    main(start("fig_merge_cost", __doc__.partition("\n")[0], add_options))
