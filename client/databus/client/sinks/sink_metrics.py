"""Prometheus metrics of a sink, and the small server that answers with them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from databus.client.client import Status
from databus.client.sinks.sink_consumer import SinkCounts


@dataclass(frozen=True, slots=True)
class SinkFacts:
    """A sink as of now; without a status before it was started."""

    counts: SinkCounts
    status: Status | None = None

    @property
    def checkpoint_scn(self) -> int:
        """SCN of the last commit."""
        checkpoint = self.status.checkpoint if self.status else None
        return checkpoint.position.scn if checkpoint else 0

    @property
    def newest_scn(self) -> int:
        """The newest SCN that a server has reported."""
        newest = self.status.newest if self.status else None
        return newest.scn if newest else 0


_COUNTERS: Mapping[str, tuple[str, Callable[[SinkFacts], float]]] = {
    "rows": ("Rows written, repetitions included.", lambda f: f.counts.rows),
    "batches": ("Batches written.", lambda f: f.counts.batches),
    "commits": ("Commits.", lambda f: f.counts.commits),
    "rollbacks": ("Rollbacks, after failures and lost servers.", lambda f: f.counts.rollbacks),
    "write_seconds": ("Seconds spent in writes.", lambda f: f.counts.write_s),
    "commit_seconds": ("Seconds spent in commits.", lambda f: f.counts.commit_s),
}
_GAUGES: Mapping[str, tuple[str, Callable[[SinkFacts], float]]] = {
    "checkpoint_scn": ("SCN of the last commit.", lambda f: f.checkpoint_scn),
    "newest_scn": ("Newest SCN that a server has reported.", lambda f: f.newest_scn),
    "bootstrapping": (
        "1 while a bootstrap runs.",
        lambda f: f.status is not None and f.status.mode == "bootstrap",
    ),
    "buffered_bytes": (
        "Bytes received and not yet written.",
        lambda f: f.status.buffered_bytes if f.status else 0,
    ),
}


class SinkCollector(Collector):
    """Gives the metrics at each scrape."""

    def __init__(self, name: str, facts: Callable[[], SinkFacts]) -> None:
        self._name = name
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """All metrics, with the name of the sink as their label."""
        facts = self._facts()
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(f"databus_sink_{name}", text, labels=["sink"])
            counter.add_metric([self._name], float(value(facts)))
            yield counter
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"databus_sink_{name}", text, labels=["sink"])
            gauge.add_metric([self._name], float(value(facts)))
            yield gauge


@contextlib.asynccontextmanager
async def served_metrics(address: str, collector: SinkCollector) -> AsyncIterator[str]:
    """Serve ``/metrics`` at HOST:PORT; gives the address, with the port that was free for 0."""
    registry = CollectorRegistry()
    registry.register(collector)

    async def answer(_: web.Request) -> web.Response:
        body = generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()
