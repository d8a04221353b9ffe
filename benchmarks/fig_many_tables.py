"""What 10,000 tables in one database, and 100 databases in one server, cost a bootstrap server.

The stores are made here: each table has ten columns, one row in the base and one change after it.
Measured are the start of a server process and its memory, requests that concern everything
(``/v1/status``, ``/sources``, ``/register``) and one table (``/register`` and ``/bootstrap`` of it:
the plan and the first row), a seal and an apply after a change of one row, and ``databus restore``.
What concerns one table must not grow as the tables do.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from benchmarks.bootstrap_process import server
from benchmarks.harness import Report, Run, Sample, measure, numbers, start
from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import FOLDER, HotLog
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.processes.log_restore import restore_log
from databus.bootstrap.processes.writer_leases import writer_leases
from databus.bootstrap.runs.manifest import Store
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema

COLUMNS = (
    Column("id", Kind.INT, nullable=False),
    *(Column(f"c{number}", Kind.STRING) for number in range(9)),
)
TABLES_OF_MANY = 20
"""Tables in each of many databases."""
ROW = b"x" * 100


def main(run: Run) -> None:
    """Measure and report."""
    sizes = run.options.tables or ([20, 60] if run.smoke else [1_000, 10_000])
    databases = run.options.databases or (3 if run.smoke else 100)
    report = Report(run, "Many tables and many databases in one bootstrap server", "ms")
    report.settings = {"tables": sizes, "databases": databases, "columns": len(COLUMNS)}
    digest = hashlib.sha256()
    for count in sizes:
        with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
            _measured(run, report, Path(folder), ["shop"], count, digest)
    names = ["shop", *(f"d{number:03d}" for number in range(1, databases))]
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        _measured(run, report, Path(folder), names, TABLES_OF_MANY, digest)
    report.output_hash = digest.hexdigest()[:16]
    report.write()


class Database:
    """One database's store and log, and a writer and an applier that are called by hand."""

    def __init__(self, folder: Path, tables: int) -> None:
        self.folder = folder
        self.store = Store(folder)
        self.store.create()
        self.log = HotLog(folder / FOLDER)
        self.log.bind(folder.name, "bench:1", Position(1, 0))
        self.schemas = [
            SourceSchema(f"{folder.name}.t{number:05d}", COLUMNS, ("id",))
            for number in range(tables)
        ]
        self.log.add_schemas(self.schemas)
        self.scn = 1
        self.write(self.schemas)
        seeded = {"state": "seeded", "dump": "d1", "rows": tables}
        end = self.log.state().window.to_json()
        states = {schema.source: {**seeded, "end": end} for schema in self.schemas}
        self.log.put_note("seeding", states)
        segments.seal(self.log, self.store, 1)

    def write(self, schemas: list[SourceSchema]) -> None:
        """One window, with a change of each of these tables."""
        self.scn += 1
        builder = WindowBuilder(self.scn, 1)
        for schema in schemas:
            builder.event(Op.UPDATE, schema.source_id, schema.fingerprint, b"\x02", after=ROW)
        self.log.append(builder.end("t"), 1)

    def seal_one(self) -> float:
        """Milliseconds of a seal after one change."""
        self.write(self.schemas[:1])
        return _ms(lambda: segments.seal(self.log, self.store, 1))

    def apply(self) -> None:
        """Merge what there is, without Java."""
        scratch = self.folder.parent / ".scratch"
        scratch.mkdir(exist_ok=True)
        list(Applier(self.store, ProcessMerges(scratch), grace_us=0).apply())

    def apply_one(self) -> float:
        """Milliseconds of an apply after one change."""
        self.seal_one()
        return _ms(self.apply)

    def restore(self) -> float:
        """Milliseconds of a restore of the log."""
        shutil.rmtree(self.folder / FOLDER)
        with writer_leases(self.folder, self.store):
            return _ms(lambda: restore_log(self.folder.name, self.folder, self.store))


def _ms(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1e3


def _measured(
    run: Run, report: Report, folder: Path, names: list[str], tables: int, digest: hashlib._Hash
) -> None:
    labels = {"databases": len(names), "tables": tables}
    for name in names:
        database = Database(folder / name, tables)
        database.apply()
        if name == "shop":
            report.add(measure(run, database.seal_one), series="seal of one change", **labels)
            report.add(measure(run, database.apply_one), series="apply of one change", **labels)
        database.write(database.schemas)
        database.log.close()
    began_s = time.perf_counter()
    with server(folder) as port:
        started = Sample(((time.perf_counter() - began_s) * 1e3,))
        report.add(started, series="start until ready", **labels)
        (child,) = psutil.Process().children()
        for series, path in _paths():
            once = partial(_request_ms, port, path)
            digest.update(series.encode())
            report.add(Sample((once(),)), series=f"first {series}", **labels)
            report.add(measure(run, once), series=series, **labels)
        report.note(
            f"{len(names)} databases of {tables:,} tables: the server has "
            f"{child.memory_info().rss / 1e6:.0f} MB"
        )
    if len(names) == 1:
        report.add(Sample((database.restore(),)), series="restore of the log", **labels)


def _paths() -> Iterator[tuple[str, str]]:
    yield "status", "/v1/status"
    yield "sources", "/v1/shop/sources"
    yield "register", "/v1/shop/register"
    yield "register of one", "/v1/shop/register?sources=shop.t00003"
    yield "bootstrap of one", "/v1/shop/bootstrap?sources=shop.t00003"
    yield "metrics", "/metrics"


def _request_ms(port: int, path: str) -> float:
    """Milliseconds until the whole answer is there."""

    def request() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
            answer.read()

    return _ms(request)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=numbers, help="tables of one database, such as 100,10000")
    parser.add_argument("--databases", type=int, help="databases of one server")


if __name__ == "__main__":
    main(start("fig_many_tables", __doc__.partition("\n")[0], _options))
