"""Metrics of clients through OpenTelemetry's API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from databus.client.client import DatabusClient
from databus.client.observing.client_metrics import CLIENT_METRICS, ClientMetric
from databus.common.extras import imports_of_extra

with imports_of_extra("observe", package="opentelemetry-api", needed_by="observe_clients"):
    from opentelemetry import metrics


def observe_clients(*clients: DatabusClient, meter: metrics.Meter | None = None) -> None:
    """Give the metrics of ``clients`` to each export, as ``databus.client.events`` and so on.

    ``meter`` is one of the global provider if it is not given.
    """
    meter = meter or metrics.get_meter("databus.client")
    for metric in CLIENT_METRICS:
        create = (
            meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
        )
        create(
            f"databus.client.{metric.name}",
            callbacks=[_callback(metric, clients)],
            description=metric.meaning,
        )


def _callback(
    metric: ClientMetric, clients: tuple[DatabusClient, ...]
) -> Callable[[Any], Iterable[metrics.Observation]]:
    def observe(_: Any) -> Iterable[metrics.Observation]:
        return [
            metrics.Observation(value, dict(labels)) for value, labels in metric.samples(clients)
        ]

    return observe
