"""The catalogue of metrics, from the collectors that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from databus.bootstrap.http.bootstrap_metrics import BootstrapCollector
from databus.client.observing.client_metrics import GROUP_METRICS
from databus.client.observing.prometheus_metrics import (
    ClientCollector,
    GroupCollector,
    MergeCollector,
)
from databus.client.sinks.sink_consumer import SinkCounts
from databus.client.sinks.sink_metrics import SinkCollector, SinkFacts
from databus.relay.http.relay_metrics import RelayCollector

_INTRODUCTION = """# Metrics

`GET /metrics` of a relay, a bootstrap server or a sink gives all metrics in Prometheus' text
format; a sink answers at the address of its key `listen`. A
relay's workers share their counters, so any worker answers for all of them.
[Monitoring](../operations/monitoring.md) names the ones to alert on. A client's are
read from your application: see [Observing a client](../clients/observing.md).
"""


def families() -> dict[str, list[Metric]]:
    """All metrics of each server and of a client; one without a database has their names too."""
    relay = RelayCollector(Path(), 0, ())
    bootstrap = BootstrapCollector(dict)
    sink = SinkCollector("", lambda: SinkFacts(SinkCounts()))
    return {
        "Relay": list(relay.collect()),
        "Bootstrap server": list(bootstrap.collect()),
        "Sink": list(sink.collect()),
        "Client": list(ClientCollector().collect()),
        "Member of a group": list(GroupCollector().collect())[: len(GROUP_METRICS)],
        "Merge": list(MergeCollector().collect()),
    }


def page() -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION]
    for server, metrics in families().items():
        parts.append(f"## {server}\n\n| metric | type | labels | |\n|---|---|---|---|")
        parts.extend(_rows(metrics))
        parts.append("")
    return "\n".join(parts)


def _rows(metrics: list[Metric]) -> Iterator[str]:
    for metric in metrics:
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{one}`" for one in getattr(metric, "_labelnames", ()))
        yield f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |"
