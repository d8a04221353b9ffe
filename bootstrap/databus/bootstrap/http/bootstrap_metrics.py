"""Prometheus metrics of the bootstrap server, collected at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from databus.bootstrap.log.hot_log import LogState
from databus.bootstrap.log.seeding import GONE, SEEDED
from databus.bootstrap.reading.stored_database import StoredDatabase
from databus.bootstrap.runs.apply_progress import applier_document
from databus.bootstrap.runs.manifest import Manifest


@dataclass(frozen=True)
class Facts:
    """One database as of now: each document is read once, however many samples it gives."""

    database: StoredDatabase
    manifest: Manifest
    log: LogState
    applier: Mapping[str, Any]

    @property
    def last_apply(self) -> Mapping[str, Any]:
        """The record of the last merge."""
        return self.manifest.applies[-1] if self.manifest.applies else {}


def _facts(database: StoredDatabase) -> Facts:
    store = database.store
    return Facts(database, store.read(), database.state(), applier_document(store.storage))


_GAUGES: Mapping[str, tuple[str, Callable[[Facts], float]]] = {
    "log_scn": ("SCN of the last whole window in the log.", lambda f: f.log.window.scn),
    "log_bytes": ("Bytes of frames in the hot log.", lambda f: f.log.frame_bytes),
    "snapshot_scn": ("SCN of the base run.", lambda f: f.manifest.snapshot.scn),
    "runs": ("Live runs, segments included.", lambda f: len(f.manifest.runs)),
    "run_bytes": (
        "Bytes of live runs on disk.",
        lambda f: sum(run.file_bytes for run in f.manifest.runs),
    ),
    "unseeded_sources": (
        "Sources whose first dump has not ended.",
        lambda f: sum(
            one.get("state") not in (SEEDED, GONE) for one in f.database.seeding().values()
        ),
    ),
    "gaps": ("Ranges that the log has lost.", lambda f: len(f.database.log.note("gaps") or [])),
    "apply_seconds": (
        "Seconds that the last merge took.",
        lambda f: float(f.last_apply.get("seconds", 0.0)),
    ),
    "apply_rows": (
        "Rows that the last merge wrote.",
        lambda f: float(f.last_apply.get("rows_out", 0)),
    ),
    "apply_finished_us": (
        "When the last merge was done, in microseconds since 1970.",
        lambda f: float(f.last_apply.get("finished_us", 0)),
    ),
    "applier_failed": (
        "1 if the last merge failed, or if the applier died in one.",
        lambda f: float(f.applier.get("state") in ("failed", "down")),
    ),
    "applier_tasks": (
        "Tasks of the running merge.",
        lambda f: float(f.applier.get("tasks", 0)),
    ),
    "applier_tasks_done": (
        "Finished tasks of the running merge.",
        lambda f: float(f.applier.get("tasks_done", 0)),
    ),
    "writer": (
        "Number of the log writer that has the database; 0 if it has not reported one.",
        lambda f: float(f.database.writer_document().get("number", 0)),
    ),
    "writer_failed": (
        "1 if the database's log writer fails or is down.",
        lambda f: float(f.database.writer_document().get("state") in ("failing", "down")),
    ),
    "readers": ("Open bootstrap answers.", lambda f: f.database.readers),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[StoredDatabase], float]]] = {
    "requests": ("Bootstrap requests.", lambda d: d.requests),
    "served_bytes": ("Bytes sent to readers.", lambda d: d.bytes_served),
    "row_groups_read": ("Parquet row groups read for readers.", lambda d: d.groups_read),
    "row_groups_skipped": (
        "Row groups that their statistics made unnecessary.",
        lambda d: d.groups_skipped,
    ),
    "served_rows": ("Rows read for readers.", lambda d: d.rows_served),
}


class BootstrapCollector(Collector):
    """One sample a database and metric.

    Owner: the registry; called in a thread, because a store may be far away.
    """

    def __init__(self, databases: Callable[[], Mapping[str, StoredDatabase]]) -> None:
        self._databases = databases

    def collect(self) -> Iterator[Metric]:
        """The samples of now; a database without a log has none."""
        ready = [database for database in self._databases().values() if database.is_ready]
        facts = [_facts(database) for database in ready]
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"databus_bootstrap_{name}", text, labels=["database"])
            for one in facts:
                gauge.add_metric([one.database.name], value(one))
            yield gauge
        for name, (text, count) in _COUNTERS.items():
            counter = CounterMetricFamily(f"databus_bootstrap_{name}", text, labels=["database"])
            for database in ready:
                counter.add_metric([database.name], count(database))
            yield counter

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are known only when there is a database."""
        return iter(())
