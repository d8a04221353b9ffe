"""What Prometheus reads of the bootstrap server, gathered when it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from databus.bootstrap.served import SEEDED, ServedDatabase

_GAUGES: Mapping[str, tuple[str, Callable[[ServedDatabase], float]]] = {
    "log_scn": ("SCN of the last whole window in the log.", lambda d: d.state().window.scn),
    "log_bytes": ("Bytes of frames in the hot log.", lambda d: d.state().frame_bytes),
    "snapshot_scn": ("SCN of the base run.", lambda d: d.store.read().snapshot.scn),
    "runs": ("Live runs, segments included.", lambda d: len(d.store.read().runs)),
    "run_bytes": (
        "Bytes of live runs on disk.",
        lambda d: sum(run.file_bytes for run in d.store.read().runs),
    ),
    "unseeded_sources": (
        "Sources that are not whole yet.",
        lambda d: sum(one.get("state") != SEEDED for one in d.seeding().values()),
    ),
    "gaps": ("Ranges that the log has lost.", lambda d: len(d.log.note("gaps") or [])),
    "readers": ("Bootstraps being served.", lambda d: d.readers),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[ServedDatabase], float]]] = {
    "requests": ("Bootstrap requests.", lambda d: d.requests),
    "served_bytes": ("Bytes sent to readers.", lambda d: d.bytes_served),
    "served_rows": ("Rows read for readers.", lambda d: d.rows_served),
}


class BootstrapCollector(Collector):
    """One sample a database and metric.

    Owner: the registry; called on the server's event loop.
    """

    def __init__(self, databases: Callable[[], Mapping[str, ServedDatabase]]) -> None:
        self._databases = databases

    def collect(self) -> Iterator[Metric]:
        """The samples of now; a database without a log has none."""
        ready = [database for database in self._databases().values() if database.is_ready]
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"databus_bootstrap_{name}", text, labels=["database"])
            for database in ready:
                gauge.add_metric([database.name], value(database))
            yield gauge
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(f"databus_bootstrap_{name}", text, labels=["database"])
            for database in ready:
                counter.add_metric([database.name], value(database))
            yield counter

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are known only when there is a database."""
        return iter(())
