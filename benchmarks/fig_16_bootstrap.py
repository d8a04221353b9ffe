"""Figure 16 of the paper: bringing a consumer up over one hour of changes, by log and by delta.

A store of our own with the changes of an hour, a part of which are updates of keys that changed
in that hour already.  The same server serves it before the applier has merged it (the log) and
after (the delta); the consumer receives, checks, decodes and stores every row.  In the paper
applying the snapshot beats replaying the log once about half of the changes are such updates.

Making the stores takes longer than measuring: ``--folder DIR --prepare`` makes them and ends,
and ``--folder DIR`` measures what lies there.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.fig_apply_cost import borrowed
from benchmarks.harness import Report, Run, measure_in_turns, ratio, start
from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.spark_merges import SparkMerges, start_spark
from databus.bootstrap.runs.manifest import Store
from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import free_port
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    FrameSplitter,
    Op,
    iter_frames,
    scan,
    trusted_frame,
)
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema

ORDERS = SourceSchema(
    "shop.orders",
    (
        Column("id", Kind.INT, nullable=False),
        Column("state", Kind.STRING),
        Column("total", Kind.DECIMAL, precision=12, scale=2),
        Column("note", Kind.STRING),
    ),
    ("id",),
)
CLOCK = "bench:1"
SINCE = Position(1, 0)
SEGMENTS = 8
WINDOW_CHANGES = 10
HOUR_US = 3600 * 10**6
START_S = 60
PAPER = "paper: the snapshot is faster once about one half are updates of existing keys"


def main(run: Run) -> None:
    """Measure and report."""
    given = run.options
    parts = given.percents or ([0, 50, 90] if run.smoke else list(range(0, 100, 10)))
    count = given.changes or (4_000 if run.smoke else 400_000)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="databus-bench-"))
    try:
        _prepare(folder, parts, count, run.seed)
        if not given.prepare:
            _measured(run, folder, parts, count)
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def _measured(run: Run, folder: Path, parts: list[int], count: int) -> None:
    report = Report(run, "Bringing a consumer up over an hour of changes", "ms")
    report.settings = {"changes": count, "segments": SEGMENTS, "window_changes": WINDOW_CHANGES}
    digest = hashlib.sha256()
    found: dict[int, float] = {}
    for percent in parts:
        case = _case_folder(folder, percent, count)
        with _server(case / "log") as log_url, _server(case / "delta") as delta_url:
            log, delta = _Reading(log_url), _Reading(delta_url)
            times = measure_in_turns(run, {"log": log.once, "delta": delta.once})
        if log.state != delta.state:
            raise AssertionError(f"at {percent} % log and delta give different states")
        digest.update(log.state.encode())
        for series, sample in times.items():
            report.add(sample, series=series, updates_percent=percent)
        found[percent] = ratio(times["log"], times["delta"])
        report.note(
            f"{percent} % updates: the delta is {found[percent]:.2f} times as fast "
            f"({log.rows:,} rows by log, {delta.rows:,} by delta)"
        )
    even = [percent for percent, ratio in found.items() if ratio >= 1]
    report.note(f"break-even at {min(even)} % or less; {PAPER}" if even else f"none; {PAPER}")
    report.note("floor: 0.90 or more everywhere, 2.0 at 50 %, 5.0 at 90 %")
    report.output_hash = digest.hexdigest()[:16]
    report.write()


def _case_folder(folder: Path, percent: int, count: int) -> Path:
    return folder / f"hour-{count}-{percent}"


def _prepare(folder: Path, parts: list[int], count: int, seed: int) -> None:
    """Make the stores that are not there: the same hour as a log alone, and merged."""
    missing = [part for part in parts if not (_case_folder(folder, part, count) / "delta").exists()]
    if not missing:
        return
    spark = start_spark("local[2]", "1g")
    try:
        for percent in missing:
            case = _case_folder(folder, percent, count)
            shutil.rmtree(case, ignore_errors=True)
            store = _hour(case / "log" / "shop", count, percent / 100, seed)
            Applier(borrowed(store, case / "merging" / "shop"), SparkMerges(spark)).apply()
            (case / "merging").rename(case / "delta")
    finally:
        spark.stop()


def _hour(folder: Path, count: int, part: float, seed: int) -> Store:
    """A store whose segments hold ``count`` changes, ``part`` of them of keys changed before."""
    chosen = random.Random(seed)
    store = Store(folder)
    store.create()
    log = HotLog(folder / "log")
    log.bind("shop", CLOCK, SINCE)
    log.add_schemas([ORDERS])
    keys = 0
    for number in range(SEGMENTS):
        windows = []
        for window in range(count // SEGMENTS // WINDOW_CHANGES):
            scn = 2 + number * (count // SEGMENTS // WINDOW_CHANGES) + window
            builder = WindowBuilder(scn, HOUR_US * scn // count)
            for _ in range(WINDOW_CHANGES):
                again = keys > 0 and chosen.random() < part
                key = chosen.randrange(keys) if again else keys
                keys += not again
                row = (key, "paid" if again else "new", None, f"note {scn} " + "x" * 200)
                builder.event(
                    Op.UPDATE if again else Op.INSERT,
                    ORDERS.source_id,
                    ORDERS.fingerprint,
                    ORDERS.encode_key((key,)),
                    before=None,
                    after=ORDERS.encode_row(row),
                )
            windows.append(builder.end(f"tx{scn}"))
        log.append(b"".join(windows), 1)
        segments.seal(log, store, 1)
    log.close()
    return store


class _Reading:
    """Brings consumers up from one server: what the last had then, and the rows that it read.

    Owner: the run.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.state = ""
        self.rows = 0

    def once(self) -> float:
        """How long one takes, in ms."""
        began_s = time.perf_counter()
        table, self.rows = _consume(self._url)
        spent_ms = (time.perf_counter() - began_s) * 1e3
        self.state = hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()
        return spent_ms


def _consume(url: str) -> tuple[dict[int, dict[str, object]], int]:
    """Read from ``SINCE`` on to the target, row by row into a table in memory."""
    table: dict[int, dict[str, object]] = {}
    rows = 0
    splitter = FrameSplitter()
    snapshot_url = f"{url}/v1/shop/bootstrap?scn={SINCE.scn}:{SINCE.seq}&format=frames"
    with urllib.request.urlopen(snapshot_url, timeout=600) as answer:
        while chunk := answer.read1(1 << 18):
            data = memoryview(splitter.feed(chunk))
            if not data:
                continue
            columns = scan(data, verify=False)
            for at, op in zip(columns.offset.tolist(), columns.op.tolist(), strict=True):
                if op < FIRST_CONTROL_OP:
                    row = ORDERS.decode_row(trusted_frame(data, at).after or b"")
                    table[row["id"]] = row
                    rows += 1
                elif op == Op.ERROR:
                    raise RuntimeError(str(next(iter_frames(data[at:])).after))
    return table, rows


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """A bootstrap server alone, in a process of its own."""
    port = free_port()
    config = folder / "databus.toml"
    config.write_text(
        f'[bootstrap]\nlisten = "127.0.0.1:{port}"\ndata_dir = "{folder}"\n'
        'relays = ["http://127.0.0.1:9"]\n'
    )
    command = "from databus.cli.main import app; app()"
    arguments = ["bootstrap", "-c", str(config), "--role", "server"]
    process = subprocess.Popen([sys.executable, "-c", command, *arguments], start_new_session=True)
    guardian = Guardian(process.pid, group=True)
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                    break
            except OSError:
                if time.monotonic() > deadline_s or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)
        guardian.release()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--percents", type=int, nargs="*", help="updates of keys changed before")
    parser.add_argument("--changes", type=int, help="in the hour")
    parser.add_argument("--folder", type=Path, help="where the stores stay for another run")
    parser.add_argument("--prepare", action="store_true", help="make the stores there, and end")


if __name__ == "__main__":
    main(start("fig_16_bootstrap", __doc__.partition("\n")[0], _options))
