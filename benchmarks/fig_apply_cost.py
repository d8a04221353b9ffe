"""Cost of one apply against the size of the table, and a full bootstrap against pyarrow alone.

The same number of changes (half updates, a quarter inserts, a quarter deletes) is merged by
Spark into a chain beside bases of different sizes, as the applier does by itself: the base is
left alone until its changes are a quarter of it.  So the cost of an apply must not grow with
the table.  What a rewrite of the base costs is shown beside it, and what an apply costs with
its share of the next rewrite.

The bootstrap is served over loopback by a server process and read by one process that checks
each frame in the receive buffer, or receives and looks at nothing; the limit is one thread
that reads the same Parquet with pyarrow.

``--only memory`` measures instead how much memory ``databus apply --once`` takes at its defaults,
Python and its JVM apart, for applies of different sizes beside one base.

Making 20 million rows takes minutes: ``--folder DIR --prepare`` makes the bases and ends, and
``--folder DIR`` measures over what lies there, and leaves it as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from benchmarks import harness
from benchmarks.bootstrap_process import RowOrder, read_over_http, receive_over_http, server
from benchmarks.harness import Report, Run, Sample, measure_in_turns, ratio
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.segments import seal
from databus.bootstrap.merging import run_planner
from databus.bootstrap.merging.bucket_tasks import bits_for
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import PARQUET, RunFile, RunKind, describe
from databus.bootstrap.runs.parquet_runs import Run as StoredRun
from databus.bootstrap.runs.run_ids import new_run_id
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.client.splits.frame_tables import SCHEMA, as_table
from databus.common.checkpoint import ORIGIN, Position
from databus.common.compiled import kernels
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op

FRAME_BYTES = 200
KEY_BYTES = 16
GROUP_ROWS = (16 << 20) // FRAME_BYTES
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
SOURCE = frame_format.source_id("shop.orders")
SIZES = "1000000,5000000,20000000"
SMOKE_SIZES = "2000,20000"
APPLIES = "500000,4000000"
SMOKE_APPLIES = "400"
FLOOR_APPLY = 1.5
FLOOR_READ = 0.5


def template(op: Op) -> np.ndarray[Any, Any]:
    """A frame of FRAME_BYTES with a key of KEY_BYTES."""
    header = frame_format.HEADER_BYTES
    after = b"" if op is Op.DELETE else b"x" * (FRAME_BYTES - header - KEY_BYTES)
    packed = frame_format.pack_frame(
        op=op,
        scn=1,
        seq=0,
        source=SOURCE,
        key=b"k" * KEY_BYTES,
        after=after or None,
    )
    return np.frombuffer(packed, dtype=np.uint8)


def frames(keys: np.ndarray[Any, Any], scn: int, first_seq: int, op: Op, payload: int) -> bytes:
    """One frame a key, at (scn, first_seq ..); every CRC is right."""
    one = template(op)
    rows = np.tile(one, (len(keys), 1))
    header = frame_format.HEADER_BYTES
    count = len(keys)
    rows[:, 16:24] = np.frombuffer(np.full(count, scn, "<u8").tobytes(), np.uint8).reshape(-1, 8)
    seqs = np.arange(first_seq, first_seq + count, dtype="<u4")
    rows[:, 24:28] = np.frombuffer(seqs.tobytes(), np.uint8).reshape(-1, 4)
    hashes = (keys.astype(np.uint64) * HASH_FACTOR).astype("<u8")
    rows[:, 32:40] = np.frombuffer(hashes.tobytes(), np.uint8).reshape(-1, 8)
    rows[:, header : header + 8] = np.frombuffer(keys.astype("<u8").tobytes(), np.uint8).reshape(
        -1, 8
    )
    if op is not Op.DELETE:
        # As compressible as text in columns is: 32 letters at random, no word twice.
        rng = np.random.default_rng(payload + int(keys[0]) if len(keys) else 0)
        rows[:, header + KEY_BYTES :] = rng.integers(
            97, 129, (count, rows.shape[1] - header - KEY_BYTES), dtype=np.uint8
        )
    _stamp(rows.reshape(-1), rows.shape[1])
    return rows.tobytes()


@kernels.jit
def _stamp(data: kernels.U8Array, frame_bytes: int) -> None:
    """Write the CRC of each frame."""
    for at in range(0, len(data), frame_bytes):
        crc = kernels.crc32c(data, at + 4, at + frame_bytes)
        for byte in range(4):
            data[at + byte] = (crc >> (8 * byte)) & 255


def make_base(store: Store, rows: int) -> Position:
    """A base of ``rows`` rows as the applier writes it; returns where it ends."""
    stop = Position(2 * (rows // GROUP_ROWS) + 10, 1 << 20)
    run_id = new_run_id(RunKind.BASE, stop)
    folder = store.run_folder(run_id)
    folder.mkdir(parents=True)
    files: list[RunFile] = []
    bits = bits_for(rows * FRAME_BYTES)
    hashes = np.arange(rows, dtype=np.uint64) * HASH_FACTOR
    ordered = np.argsort(hashes)
    at = np.zeros(rows, dtype=np.int64)
    if bits:
        at = (hashes[ordered] >> np.uint64(64 - bits)).astype(np.int64)
    groups = 0
    for number in range(2**bits):
        name, bucket = f"part-{number:05d}.parquet", f"{number:0{bits}b}" if bits else ""
        writer = pq.ParquetWriter(folder / name, SCHEMA, **PARQUET)
        with contextlib.closing(writer):
            first, last = np.searchsorted(at, [number, number + 1])
            for begin in range(int(first), int(last), GROUP_ROWS):
                groups += 1
                keys = ordered[begin : min(begin + GROUP_ROWS, int(last))]
                data = frames(keys, groups, 0, Op.INSERT, 1)
                writer.write_table(as_table(data, frame_format.scan(data, verify=False)))
        files.append(describe(LocalFiles(folder), name, SOURCE, bucket))
    base = StoredRun(
        id=run_id,
        kind=RunKind.BASE,
        start=ORIGIN,
        stop=stop,
        files=tuple(files),
        created_us=1,
    )
    store.switch(lambda manifest: manifest.with_changes(add=base, now_us=1))
    return stop


def write_changes(log: HotLog, store: Store, rows: int, changes: int, scn: int) -> None:
    """``changes`` changes to a table of ``rows`` rows, in four segments."""
    rng = np.random.default_rng(scn)
    part = changes // 4
    for number in range(4):
        at = scn + number
        updated = rng.choice(rows, part // 2, replace=False)
        deleted = rng.choice(rows, part // 4, replace=False)
        inserted = rows + np.arange(part // 4) + part * at
        block = b"".join(
            [
                frames(updated, at, 0, Op.UPDATE, at),
                frames(deleted, at, len(updated), Op.DELETE, at),
                frames(inserted, at, len(updated) + len(deleted), Op.INSERT, at),
                frame_format.pack_frame(
                    op=Op.END_OF_WINDOW,
                    scn=at,
                    seq=len(updated) + len(deleted) + len(inserted),
                    key=b"t",
                    after=bytes(4),
                ),
            ]
        )
        log.append(block, 1, verify=False)
        seal(log, store, 1)


def prepare(folder: Path, rows: int) -> Store:
    """The store whose base has this many rows, made if it is not there."""
    store = Store(folder / f"base-{rows}" / "shop")
    if not store.exists():
        store.create()
        make_base(store, rows)
        log = HotLog(store.folder / "log")
        log.bind("shop", "clock", store.read().snapshot)
        log.put_note("seeding", {"shop.orders": {"state": "seeded"}})
        log.close()
    return store


def borrowed(store: Store, folder: Path) -> Store:
    """A store of its own over the same files, which are linked: runs are never written to."""
    shutil.copytree(store.runs_folder, folder / "runs", copy_function=os.link)
    shutil.copytree(store.folder / "log", folder / "log")
    shutil.copy(store.manifest_path, folder)
    return Store(folder)


class Applying:
    """A store of its own beside a base, to which changes are applied again and again."""

    def __init__(self, spark: Any, store: Store, work: Path, changes: int) -> None:
        from databus.bootstrap.merging.applier import Applier
        from databus.bootstrap.merging.spark_merges import SparkMerges

        base = store.read().base
        assert base is not None
        self._base, self._changes = base, changes
        self._store = borrowed(store, work / "shop")
        self._log = HotLog(self._store.folder / "log")
        self._applier = Applier(self._store, SparkMerges(spark), grace_us=0)

    def apply_s(self, round_number: int) -> float:
        """Seconds of one apply of so many changes."""
        first_scn = self._base.stop.scn + 1 + 4 * round_number
        write_changes(self._log, self._store, self._base.rows, self._changes, first_scn)
        chain = self._store.read().chain[-4:]
        assert len(chain) == 4
        return self._merge_s(Merge(chain, RunKind.DELTA))

    def rewrite_s(self) -> float:
        """Seconds of a rewrite of the base with all those changes."""
        while merge := run_planner.next_merge(self._store.read(), 1 << 40, full=True):
            seconds = self._merge_s(merge)
            if merge.kind is RunKind.BASE:
                return seconds
        raise AssertionError("there is no base to rewrite")

    def _merge_s(self, merge: Merge) -> float:
        began_s = time.perf_counter()
        self._applier._merge(merge, None)
        return time.perf_counter() - began_s

    def close(self) -> None:
        """Let go of the store."""
        self._log.close()
        shutil.rmtree(self._store.folder)


def apply_cost(run: Run, report: Report, folder: Path, sizes: list[int], changes: int) -> None:
    """Measure applies beside each base, alternately, and then a rewrite of each."""
    from databus.bootstrap.merging.spark_merges import start_spark

    spark = start_spark("local[2]", "2g")
    try:
        beside = {
            rows: Applying(spark, prepare(folder, rows), folder / f"work-{rows}", changes)
            for rows in sizes
        }
        seconds: dict[int, list[float]] = {rows: [] for rows in sizes}
        for round_number in range(run.repeats + 1):
            for rows, applying in beside.items():
                spent_s = applying.apply_s(round_number)
                seconds[rows] += [spent_s] if round_number else []  # the first warms Java up
        applies = {rows: Sample(tuple(found)) for rows, found in seconds.items()}
        for rows, sample in applies.items():
            report.add(sample, series="apply", rows=rows, changes=changes)
        rewritten = [] if run.options.no_rewrites else sizes
        rewrites = {rows: beside[rows].rewrite_s() for rows in rewritten}
        for rows, spent_s in rewrites.items():
            report.add(Sample((spent_s,)), series="rewrite of the base", rows=rows)
        for applying in beside.values():
            applying.close()
    finally:
        spark.stop()
    # A rewrite comes once the changes are BASE_SHARE of the base: each apply has its share of it.
    shares = {rows: min(1.0, changes / (run_planner.BASE_SHARE * rows)) for rows in sizes}
    whole = {rows: applies[rows].median + rewrites[rows] * shares[rows] for rows in rewrites}
    least, most = sizes[0], sizes[-1]
    growth = applies[most].median / applies[least].median
    report.settings["apply_ratio"] = growth
    report.note(
        f"an apply of {changes:,} changes at {most:,} rows costs {growth:.2f} of one at "
        f"{least:,} rows; the floor is {FLOOR_APPLY}"
    )
    said = ", ".join(f"{spent_s:.1f} s at {rows:,} rows" for rows, spent_s in whole.items())
    report.note(f"with its share of the next rewrite of the base an apply costs {said or '?'}")


def apply_memory(report: Report, folder: Path, rows: int, applies: list[int]) -> None:
    """Measure what ``databus apply --once`` takes beside one base, for each number of changes."""
    for changes in applies:
        work = folder / f"memory-{changes}"
        work.mkdir()
        base = prepare(folder, rows).read().base
        assert base is not None
        store = borrowed(prepare(folder, rows), work / "data" / "shop")
        log = HotLog(store.folder / "log")
        write_changes(log, store, base.rows, changes, base.stop.scn + 1)
        log.close()
        config = work / "databus.toml"
        config.write_text('[bootstrap]\ndata_dir = "data"\n')
        command = "from databus.cli.main import app; app()"
        peaks = peak_memory([sys.executable, "-c", command, "apply", "--once", "-c", str(config)])
        merged = store.read().applies
        for name, peak_bytes in peaks.items():
            report.add(
                Sample((peak_bytes / 1e6,)), series=f"peak of {name}, MB", rows=rows,
                changes=changes,
            )  # fmt: skip
        peaks_text = ", ".join(
            f"{name} {peak / 1e6:.0f} MB" for name, peak in sorted(peaks.items())
        )
        moved = sum(one["rows_in"] for one in merged)
        report.note(f"{changes:,} changes beside {rows:,} rows, {moved:,} rows read: {peaks_text}")
        shutil.rmtree(work)


def peak_memory(command: list[str]) -> dict[str, int]:
    """The most bytes that a command and the processes below it had resident, by their names."""
    peaks: dict[str, int] = {}
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                root = psutil.Process(process.pid)
                for one in (root, *root.children(recursive=True)):
                    # Not by its name: what Java forks has a thread's, and Java's memory.
                    name = "Java" if Path(one.exe()).name == "java" else "Python"
                    peaks[name] = max(peaks.get(name, 0), peak_bytes(one.pid))
            time.sleep(0.05)
    if process.returncode:
        raise AssertionError(f"{command} ended with {process.returncode}")
    return peaks


def peak_bytes(pid: int) -> int:
    """The kernel's own high-water mark of a process, so that no peak lies between two looks."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def read_with_pyarrow(store: Store) -> float:
    """Seconds that one thread takes to read every column of the base's files."""
    base = store.read().base
    assert base is not None
    began_s = time.perf_counter()
    for file in base.files:
        with pq.ParquetFile(store.run_folder(file.folder or base) / file.name) as opened:
            for index in range(opened.metadata.num_row_groups):
                opened.read_row_group(index, columns=["frame"], use_threads=False)
    return time.perf_counter() - began_s


def bootstrap_read(run: Run, report: Report, store: Store) -> None:
    """Measure a full bootstrap of the store against reading it, alternately."""
    base = store.read().base
    assert base is not None
    with server(store.folder.parent) as port:
        order = RowOrder()
        seen = read_over_http(port, order.add)

        def checked() -> float:
            found = read_over_http(port)
            if found.frame_bytes != seen.frame_bytes:
                raise AssertionError(f"{found} are not the {seen.frame_bytes} bytes of the first")
            return base.rows / found.seconds

        found = measure_in_turns(
            run,
            {
                "bootstrap, each frame checked": checked,
                "bootstrap, received only": lambda: base.rows / receive_over_http(port),
                "pyarrow alone": lambda: base.rows / read_with_pyarrow(store),
            },
        )
    for name, rows in found.items():
        size = Sample(tuple(one * seen.frame_bytes / base.rows / 1e6 for one in rows.values))
        report.add(rows, series=f"{name}, rows/s", rows=base.rows)
        report.add(size, series=f"{name}, MB/s", rows=base.rows)
    report.output_hash += order.hash
    limit = found.pop("pyarrow alone")
    ratios = ", ".join(f"{ratio(rows, limit):.2f} ({name})" for name, rows in found.items())
    report.note(
        f"a full bootstrap of {base.rows:,} rows runs at {ratios} of pyarrow reading the frame "
        f"column alone in one thread; the floor is {FLOOR_READ}"
    )


def main(run: Run) -> None:
    """Measure and report."""
    given = run.options
    sizes = [
        int(size) for size in (given.sizes or (SMOKE_SIZES if run.smoke else SIZES)).split(",")
    ]
    changes = given.changes or (400 if run.smoke else 500_000)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="databus-apply-"))
    try:
        for rows in sizes:
            prepare(folder, rows)
        if given.prepare:
            return
        report = Report(run, "Cost of an apply by table size; a full bootstrap", "s, or as named")
        report.settings = {"sizes": sizes, "changes": changes, "frame_bytes": FRAME_BYTES}
        if given.only in (None, "read"):
            for rows in sizes:
                bootstrap_read(run, report, prepare(folder, rows))
        if given.only in (None, "apply"):
            apply_cost(run, report, folder, sizes, changes)
        if given.only == "memory":
            found = given.applies or (SMOKE_APPLIES if run.smoke else APPLIES)
            apply_memory(report, folder, sizes[-1], [int(one) for one in found.split(",")])
        report.write()
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", help="rows of the tables, with commas between")
    parser.add_argument("--changes", type=int, help="changes in an apply")
    parser.add_argument("--folder", type=Path, help="where the bases stay for another run")
    parser.add_argument("--prepare", action="store_true", help="make the bases there, and end")
    parser.add_argument("--no-rewrites", action="store_true", help="leave the bases as they are")
    parser.add_argument("--only", choices=("apply", "read", "memory"), help="measure one part")
    parser.add_argument("--applies", help="changes of the applies whose memory is measured")


if __name__ == "__main__":
    main(harness.start("fig_apply_cost", __doc__.partition("\n")[0], _options))
