"""The catalogue of metrics, from the collectors that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from databus.bootstrap.http.bootstrap_metrics import BootstrapCollector
from databus.relay.http.relay_metrics import RelayCollector

_INTRODUCTION = """# Metrics

`GET /metrics` of a relay or bootstrap server gives all metrics in Prometheus' text format. A
relay's workers share their counters, so any worker answers for all of them.
[Monitoring](../operations/monitoring.md) names the ones to alert on.
"""


def families() -> dict[str, list[Metric]]:
    """All metrics of each server; a server without a database has their names too."""
    relay = RelayCollector(Path(), 0, ())
    bootstrap = BootstrapCollector(dict)
    return {"Relay": list(relay.collect()), "Bootstrap server": list(bootstrap.collect())}


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
