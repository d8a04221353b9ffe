"""What thousands of tables in one database cost a relay.

Each table has ten columns.  Measured are the relay's first start until it streams, a restart, the
time until a change of one row is in the ring, the time until a change of each table is there, each
in a commit of its own, and requests that concern everything.  Nothing of this may grow faster than
the number of tables, and a change of one row not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.harness import Report, Run, Sample, measure, numbers, start
from benchmarks.relay_process import RelayProcess
from benchmarks.upstreams import MariaDB, Postgres, Upstream

COLUMNS = ", ".join(f"c{number} VARCHAR(40)" for number in range(9))
RING_BYTES = 256 << 20

Execute = Callable[[str], object]
DATABASES = ("sqlite", "mariadb", "postgres")


def main(run: Run) -> None:
    """Measure and report."""
    sizes = run.options.tables or ([20, 60] if run.smoke else [1_000, 4_000])
    chosen = run.options.databases.split(",")
    report = Report(run, "Many tables in one database, at the relay", "ms")
    report.settings = {"tables": sizes, "databases": chosen, "columns": 10}
    digest = hashlib.sha256()
    for name in chosen:
        for count in sizes:
            with (
                tempfile.TemporaryDirectory(prefix="databus-bench-") as folder,
                _database(name, Path(folder)) as (url, execute),
            ):
                for number in range(count):
                    execute(f"CREATE TABLE t{number:05d} (id INTEGER PRIMARY KEY, {COLUMNS})")
                events = _measured(run, report, Path(folder), url, execute, name, count)
            digest.update(f"{name} {count} {events}".encode())
    report.output_hash = digest.hexdigest()[:16]
    report.write()


@contextlib.contextmanager
def _database(name: str, folder: Path) -> Iterator[tuple[str, Execute]]:
    """An empty database: its URL for a relay, and a connection's ``execute``, which commits."""
    if name == "sqlite":
        path = folder / "shop.db"
        with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")  # The writer is not what is measured.
            yield f"sqlite:///{path}", db.execute
        return
    upstream: Upstream = MariaDB() if name == "mariadb" else Postgres()
    with upstream, contextlib.closing(upstream.server.connect("bench")) as connection:
        connection.autocommit = True
        with contextlib.closing(connection.cursor()) as cursor:
            yield upstream.server.url("bench"), cursor.execute


def _measured(
    run: Run, report: Report, folder: Path, url: str, execute: Execute, name: str, tables: int
) -> int:
    """Measure one database; how many events the relay has at the end."""
    labels = {"database": name, "tables": tables}
    row = 0

    def write(count: int) -> None:
        """One row for each of the first tables."""
        nonlocal row
        row += 1
        for number in range(count):
            execute(f"INSERT INTO t{number:05d} (id, c0) VALUES ({row}, 'x')")

    def changed_ms(relay: RelayProcess, count: int) -> float:
        expected = _events(relay) + count

        def change() -> None:
            write(count)
            _wait(lambda: _events(relay) >= expected)

        return _ms(change)

    relay = RelayProcess(url, RING_BYTES, until_scn=0, folder=folder / "relay", start_s=600)
    for series in ("first start", "restart"):
        began_s = time.perf_counter()
        with relay:
            _wait(lambda: relay.status()["state"] == "streaming")
            started = Sample(((time.perf_counter() - began_s) * 1e3,))
            report.add(started, series=f"{series} until streaming", **labels)
            if series == "restart":
                break
            report.add(measure(run, lambda: changed_ms(relay, 1)), series="a change", **labels)
            every = Sample((changed_ms(relay, tables),))
            report.add(every, series="the first change of every table", **labels)
            report.add(
                measure(run, lambda: changed_ms(relay, tables)),
                series="a change of every table",
                **labels,
            )
            report.add(measure(run, lambda: _ms(relay.status)), series="status", **labels)
            events = _events(relay)
            fetcher = psutil.Process(relay.status()["fetcher"]["pid"])
            report.note(
                f"{name}, {tables:,} tables: the fetcher has "
                f"{fetcher.memory_info().rss / 1e6:.0f} MB"
            )
    return events


def _events(relay: RelayProcess) -> int:
    """How many events were ever in the ring."""
    ring = relay.status()["ring"]
    return int(ring["frames_ever"] - ring["windows_ever"])


def _ms(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1e3


def _wait(is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 600
    while True:
        with contextlib.suppress(ConnectionError):  # A worker restarts when it has its kernels.
            if is_done():
                return
        if time.monotonic() > deadline_s:
            raise TimeoutError("the relay has not come so far within 600 s")
        time.sleep(0.01)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=numbers, help="tables of one database, such as 100,10000")
    parser.add_argument("--databases", default=",".join(DATABASES))


if __name__ == "__main__":
    main(start("fig_relay_tables", __doc__.partition("\n")[0], _options))
