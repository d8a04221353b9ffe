"""Metrics of clients for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from databus.client.client import DatabusClient
from databus.client.groups.group_client import GroupClient
from databus.client.merged.merged_client import MergedClient
from databus.client.observing.client_metrics import (
    CLIENT_METRICS,
    GROUP_METRICS,
    MERGE_METRICS,
    ClientMetric,
    GroupMetric,
    MergeMetric,
)
from databus.common.extras import imports_of_extra

with imports_of_extra("observe", package="prometheus-client", needed_by="ClientCollector"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

_LABELS = ("database", "client")
_GROUP_LABELS = ("group", "member")
_MERGE_LABELS = ("stream", "client")


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
            yield _family(metric, _LABELS, metric.samples(self._clients))


class GroupCollector(Collector):
    """Reads the status of members of groups, and of the clients of their partitions.

    Owner: one registry that has no other collector of these clients.
    """

    def __init__(self, *members: GroupClient) -> None:
        self._members = members

    def describe(self) -> list[Metric]:
        """Nothing: the metrics are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of the members, and those of each partition as of a client."""
        for metric in GROUP_METRICS:
            yield _family(metric, _GROUP_LABELS, metric.samples(self._members))
        clients = tuple(client for one in self._members for client in one.clients.values())
        yield from ClientCollector(*clients).collect()


class MergeCollector(Collector):
    """Reads the status of merges, by stream."""

    def __init__(self, *merges: MergedClient) -> None:
        self._merges = merges

    def describe(self) -> list[Metric]:
        """Nothing: the metrics are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, labelled by stream and client name."""
        for metric in MERGE_METRICS:
            yield _family(metric, _MERGE_LABELS, metric.samples(self._merges))


def _family(
    metric: ClientMetric | GroupMetric | MergeMetric,
    labels: tuple[str, ...],
    samples: Iterator[tuple[float, dict[str, str]]],
) -> Metric:
    name = f"databus_client_{metric.name}"
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.is_counter:
        family = CounterMetricFamily(name, metric.meaning, labels=labels)
    else:
        family = GaugeMetricFamily(name, metric.meaning, labels=labels)
    for value, values in samples:
        family.add_metric([values[label] for label in labels], value)
    return family
