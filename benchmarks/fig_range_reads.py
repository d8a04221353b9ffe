"""What states and net changes of large tables cost, and what their readers do to the log writer.

A store has a base, and as many changes after it in segments.  ``/snapshot`` (base and changes) and
``/changes?mode=net`` (the changes) are read as a whole, over bases of different sizes, each by a
server process of its own: neither the time for a row nor the memory must grow with the table.  The
reader receives and looks at nothing.

Then ``databus bootstrap`` writes the log of a relay's database, and eight readers take net changes
and states of the largest table meanwhile.  This process looks into the log and takes the age of
each event that it sees for the first time, by the relay's stamp.  Beside it, without readers.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bootstrap_process import BUFFER_BYTES, server
from benchmarks.fig_apply_cost import borrowed, peak_bytes, prepare, write_changes
from benchmarks.harness import Report, Run, Sample, measure, numbers, ratio, start
from benchmarks.loopback import http_get
from benchmarks.relay_process import RelayProcess
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.manifest import Store
from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import free_port
from databus.common.checkpoint import ORIGIN
from databus.common.errors import DatabusError
from databus.common.frame import frame_format

SERIES = ("snapshot", "net changes")
READERS = 8
EVENTS_PER_S = 1000
LIMIT_S = 400
FLOOR_GROWTH = 1.3
MEMORY_MB = 400
FLOOR_P99_MS = 100
LOOK_S = 0.005


def main(run: Run) -> None:
    """Measure and report."""
    sizes = run.options.rows or ([2_000, 20_000] if run.smoke else [1_000_000, 5_000_000])
    report = Report(run, "States and net changes of large tables", "us a row")
    report.settings = {"rows": sizes, "readers": READERS, "events_per_s": EVENTS_PER_S}
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        made = {rows: _store(Path(folder), rows) for rows in sizes}
        found = {name: [_measured(run, report, made[rows], rows, name) for rows in sizes]
                 for name in SERIES}  # fmt: skip
        for name, samples in found.items():
            report.note(
                f"{name}: a row of {sizes[-1]:,} takes {ratio(samples[-1], samples[0]):.2f} of one "
                f"of {sizes[0]:,}; the limit is {FLOOR_GROWTH}"
            )
        _beside_readers(run, report, made[sizes[-1]])
    report.output_hash = str(sum(sizes))
    report.write()


def _store(folder: Path, rows: int) -> Store:
    """A base of ``rows`` rows, and as many changes in segments."""
    prepared = prepare(folder, rows)
    base = prepared.read().base
    assert base is not None
    store = borrowed(prepared, folder / f"ranges-{rows}" / "shop")
    with contextlib.closing(HotLog(store.folder / "log")) as log:
        write_changes(log, store, rows, rows, base.stop.scn + 1)
    return store


def _measured(run: Run, report: Report, store: Store, rows: int, name: str) -> Sample:
    """Time for a row that is read, and the server's memory."""
    read, path = (2 * rows if name == "snapshot" else rows), _path(store, name)
    with server(store.folder.parent) as port:
        once = measure(run, lambda: _receive(port, path) * 1e6 / read)
        (child,) = psutil.Process().children()
        report.add(once, series=name, rows=rows)
        report.note(
            f"{name}, {rows:,} rows: the server had {peak_bytes(child.pid) / 1e6:.0f} MB at most; "
            f"the limit is {MEMORY_MB}"
        )
    return once


def _path(store: Store, name: str) -> str:
    if name == "snapshot":
        return "/v1/shop/snapshot"
    since = store.read().snapshot
    return f"/v1/shop/changes?mode=net&since={since.scn}:{since.seq}"


def _receive(port: int, path: str) -> float:
    """Seconds of a whole answer."""
    began_s = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        http_get(connection, path, bytearray(BUFFER_BYTES), began_s + LIMIT_S)
    return time.perf_counter() - began_s


def _beside_readers(run: Run, report: Report, store: Store) -> None:
    """The age of events when the log has them, without readers and with them."""
    seconds = 2.0 if run.smoke else 20.0
    source = f"generator://?events_per_second={EVENTS_PER_S}&payload_bytes=200&clock=real"
    with (
        RelayProcess(source, 64 << 20, until_scn=1) as relay,
        _bootstrap(relay.url, store) as (port, log),
    ):
        _settle(log)
        for readers in (0, READERS):
            with _reading(port, store, readers) as answers:
                ages = _ages_ms(log, seconds)
            series = f"ring to log, {readers} readers, ms"
            for percent in (50, 99):
                value = float(np.percentile(ages, percent))
                report.add(Sample((value,)), series=series, percentile=percent)
            report.note(
                f"{readers} readers, {answers()} whole answers, {len(ages):,} events: the "
                f"oldest was {ages.max():.0f} ms old; the limit of p99 is {FLOOR_P99_MS} ms"
            )


@contextlib.contextmanager
def _bootstrap(relay: str, store: Store) -> Iterator[tuple[int, Path]]:
    """``databus bootstrap`` over the store and the relay: its port, and the log of ``gen``."""
    folder, port = store.folder.parent, free_port()
    config = folder / "databus.toml"
    config.write_text(
        f'[bootstrap]\nlisten = "127.0.0.1:{port}"\ndata_dir = "{folder}"\n'
        f'relays = ["{relay}"]\ndatabases = ["gen", "shop"]\n'
    )
    command = "from databus.cli.main import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "bootstrap", "--no-apply", "-c", str(config)],
        start_new_session=True,
    )
    guardian = Guardian(process.pid, group=True)
    try:
        log = folder / "gen" / "log"
        deadline_s = time.monotonic() + 60
        while not _has_begun(log):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the log has not begun")
            time.sleep(0.1)
        yield port, log
    finally:
        process.terminate()
        process.wait(60)
        guardian.release()


def _has_begun(folder: Path) -> bool:
    try:
        with contextlib.closing(HotLog(folder, read_only=True)) as log:
            return log.state().window > ORIGIN
    except DatabusError:
        return False


def _settle(log: Path) -> None:
    """Wait until the processes have their kernels and the log has caught up."""
    deadline_s = time.monotonic() + LIMIT_S
    while np.median(_ages_ms(log, 2.0)) > FLOOR_P99_MS and time.monotonic() < deadline_s:
        pass


@contextlib.contextmanager
def _reading(port: int, store: Store, count: int) -> Iterator[Callable[[], int]]:
    """So many readers, in processes of their own, that read one answer after the other; how many
    answers there were."""
    context = multiprocessing.get_context("spawn")
    answers = context.Value("i", 0)
    paths = [_path(store, SERIES[number % len(SERIES)]) for number in range(count)]
    readers = [
        context.Process(target=_read_forever, args=(port, path, answers), daemon=True)
        for path in paths
    ]
    for reader in readers:
        reader.start()
    try:
        yield lambda: answers.value
    finally:
        for reader in readers:
            reader.terminate()
            reader.join()


def _read_forever(port: int, path: str, answers: Any) -> None:
    while True:
        _receive(port, path)
        with answers.get_lock():
            answers.value += 1


def _ages_ms(folder: Path, seconds: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The age of each event at the first look that finds it in the log."""
    found: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    with contextlib.closing(HotLog(folder, read_only=True)) as log:
        seen = log.state().window
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(LOOK_S)
            window, now_us = log.state().window, time.time_ns() // 1000
            while window > seen and (piece := log.read(seen, window, 1 << 20)) is not None:
                stamps = frame_format.scan(piece.data, verify=False).commit_us
                found.append((now_us - stamps.astype(np.float64)) / 1e3)
                seen = piece.stop
    return np.concatenate(found or [np.array([1e3 * seconds])])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=numbers, help="rows of the bases, such as 1000000,5000000")


if __name__ == "__main__":
    main(start("fig_range_reads", __doc__.partition("\n")[0], _options))
