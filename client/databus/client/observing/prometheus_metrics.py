"""Metrics of clients for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from databus.client.client import DatabusClient
from databus.client.observing.client_metrics import CLIENT_METRICS
from databus.common.errors import MissingDependency

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingDependency(
        "metrics for Prometheus need prometheus_client: pip install 'databus-cdc[observe]'"
    ) from error

_LABELS = ("database", "client")


class ClientCollector(Collector):
    """Reads the status of clients at a scrape: ``REGISTRY.register(ClientCollector(client))``."""

    def __init__(self, *clients: DatabusClient) -> None:
        self._clients = clients

    def describe(self) -> list[Metric]:
        """Nothing: the metrics are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, labelled by database and client name."""
        for metric in CLIENT_METRICS:
            family: CounterMetricFamily | GaugeMetricFamily
            name = f"databus_client_{metric.name}"
            if metric.is_counter:
                family = CounterMetricFamily(name, metric.meaning, labels=_LABELS)
            else:
                family = GaugeMetricFamily(name, metric.meaning, labels=_LABELS)
            for value, labels in metric.samples(self._clients):
                family.add_metric([labels[name] for name in _LABELS], value)
            yield family
