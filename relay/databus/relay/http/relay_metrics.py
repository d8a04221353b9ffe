"""Prometheus metrics of a relay; one worker answers for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from databus.common.errors import DatabusError
from databus.common.table_state import CaptureState
from databus.relay.serving.counters.client_counters import read_clients
from databus.relay.serving.counters.worker_counters import read_counters
from databus.relay.serving.database_view import DatabaseView

_COUNTED = {
    "requests": "Stream requests.",
    "errors": "Stream requests refused, and streams ended by an error.",
    "too_old": "Requests for positions that the ring no longer has.",
    "ahead": "Requests for positions that the stream had not reached.",
    "overtaken": "Readers overtaken by the writer in the middle of an answer.",
    "bytes": "Bytes of stream bodies sent, before any content coding.",
    "events": "Events sent.",
}
_COUNTED_BY_CLIENT = {
    "requests": "Stream requests of a client.",
    "too_old": "Requests of a client for positions that the ring no longer has.",
    "overtaken": "Answers to a client in which the writer overtook it.",
    "bytes": "Bytes of stream bodies sent to a client, before any content coding.",
    "events": "Events sent to a client.",
}


class RelayCollector(Collector):
    """Collects the workers' counters, the rings' states and the fetchers' lag at a scrape.

    Owner: one worker; it reads what all of them write.
    """

    def __init__(self, data_dir: Path, workers: int, databases: Collection[DatabaseView]) -> None:
        self.data_dir = data_dir
        self.workers = workers
        self.databases = databases

    def describe(self) -> list[Metric]:
        """Nothing: the metrics are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, labelled by database."""
        yield from self._counters()
        yield from self._clients()
        yield from self._rings()
        yield from self._fetchers()
        yield from self._dumps()
        yield from self._tables()

    def _counters(self) -> Iterator[Metric]:
        sums = {
            database.name: read_counters(self.data_dir, self.workers, database.name)
            for database in self.databases
        }
        for counter, meaning in _COUNTED.items():
            family = CounterMetricFamily(f"databus_relay_{counter}", meaning, labels=["database"])
            for name, counts in sums.items():
                family.add_metric([name], counts[counter])
            yield family
        readers = _gauge("readers", "Stream answers that are open now.")
        for name, counts in sums.items():
            readers.add_metric([name], counts["readers"])
        yield readers

    def _clients(self) -> Iterator[Metric]:
        """By the names that readers give themselves; client_counters.py bounds their number."""
        found = [
            ([database.name, name], client, _newest_us(database))
            for database in self.databases
            for name, client in read_clients(self.data_dir, self.workers, database.name).items()
        ]
        for counter, meaning in _COUNTED_BY_CLIENT.items():
            family = CounterMetricFamily(
                f"databus_relay_client_{counter}", meaning, labels=["database", "client"]
            )
            for labels, client, _ in found:
                family.add_metric(labels, client.counts[counter])
            yield family
        readers = _client_gauge("readers", "Answers to a client that are open now.")
        lag = _client_gauge(
            "lag_seconds", "Commit time of the newest frame, less that of the last one sent."
        )
        scn = _client_gauge("scn", "SCN that was sent to a client last.")
        for labels, client, newest_us in found:
            readers.add_metric(labels, client.counts["readers"])
            lag_us = client.lag_us(newest_us)
            if lag_us is not None:
                lag.add_metric(labels, lag_us / 1e6)
                scn.add_metric(labels, client.scn)
        yield from (readers, lag, scn)

    def _rings(self) -> Iterator[Metric]:
        scn = GaugeMetricFamily(
            "databus_relay_ring_scn", "Range of the ring.", labels=["database", "edge"]
        )
        size = _gauge("ring_capacity_bytes", "Size of the ring.")
        used = _gauge("ring_used_bytes", "Bytes of the frames in the ring.")
        commit = _gauge("last_commit_timestamp_seconds", "Commit time of the newest frame.")
        frames = _counter("ring_frames", "Frames ever written.")
        windows = _counter("ring_windows", "Windows ever written.")
        evicted = _counter("ring_evicted_windows", "Windows ever evicted.")
        for database in self.databases:
            if not database.is_ready:
                continue
            state = database.ring.snapshot()
            for edge, position in (("prev", state.prev), ("min", state.min), ("max", state.max)):
                scn.add_metric([database.name, edge], position.scn)
            size.add_metric([database.name], database.ring.ring_bytes)
            used.add_metric([database.name], state.tail - state.head)
            commit.add_metric([database.name], state.max_commit_us / 1e6)
            frames.add_metric([database.name], state.frames)
            windows.add_metric([database.name], state.windows)
            evicted.add_metric([database.name], state.evicted_windows)
        yield from (scn, size, used, commit, frames, windows, evicted)

    def _fetchers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "databus_relay_fetcher_state",
            "1 for the fetcher's state.",
            labels=["database", "state"],
        )
        lag = _gauge("fetcher_lag_seconds", "How far the ring is behind the source.")
        retained = _gauge(
            "source_retained_bytes", "Bytes of log that the source retains for this relay."
        )
        safe = _gauge(
            "source_safe_bytes",
            "Bytes of log that the source may still retain before the position is lost.",
        )
        warnings = _gauge("source_warnings", "Warnings about the source; /v1/status has them.")
        for database in self.databases:
            fetcher = database.fetcher_state()
            facts = fetcher.document.get("source")
            if isinstance(facts, dict):
                for family, key in ((retained, "retained_bytes"), (safe, "safe_wal_bytes")):
                    if isinstance(facts.get(key), int):
                        family.add_metric([database.name], facts[key])
                warnings.add_metric([database.name], len(facts.get("warnings") or ()))
            up.add_metric([database.name, fetcher.name], 1)
            lag_us = fetcher.document.get("lag_us")
            if isinstance(lag_us, int | float):
                lag.add_metric([database.name], lag_us / 1e6)
        yield from (up, lag, retained, safe, warnings)

    def _tables(self) -> Iterator[Metric]:
        """One sample for each captured table: 1 for its state."""
        family = GaugeMetricFamily(
            "databus_relay_table_state",
            "1 for the state of a captured table: followed, suspended, resynchronising.",
            labels=["database", "table", "state"],
        )
        for database in self.databases:
            # The fetcher's state names a damaged file; the other tables are shown.
            with contextlib.suppress(DatabusError):
                database.refresh_schemas()
            states = {name: str(CaptureState.FOLLOWED) for name in database.schemas.sources}
            for name, state in {**states, **database.table_states()}.items():
                family.add_metric([database.name, name, state], 1)
        yield family

    def _dumps(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "databus_relay_dumps", "Number of dumps in this state.", labels=["database", "state"]
        )
        counted = {
            "sent_rows": _counter("dump_sent_rows", "Rows of dumps sent into the stream."),
            "dropped_rows": _counter(
                "dump_dropped_rows",
                "Rows of dumps that were dropped because the stream had a newer change.",
            ),
            "chunks": _counter("dump_chunks", "Chunks of dumps that are on disk."),
        }
        running = {
            "rows_read": _gauge("dump_rows", "Rows that the running dump has read."),
            "estimated_rows": _gauge("dump_estimated_rows", "Rows that the running dump expects."),
            "rows_per_s": _gauge("dump_rows_per_second", "Rows per second of the running dump."),
            "eta_s": _gauge("dump_eta_seconds", "Expected remaining seconds of the running dump."),
        }
        for database in self.databases:
            dumps = database.fetcher_state().document.get("dumps") or {}
            for state in ("active", "failed"):
                states.add_metric([database.name, state], dumps.get(state, 0))
            for name, family in counted.items():
                family.add_metric([database.name], dumps.get(name, 0))
            for name, gauge in running.items():
                value = dumps.get("running", {}).get(name)
                if value is not None:
                    gauge.add_metric([database.name], value)
        yield from (states, *counted.values(), *running.values())


def _gauge(name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"databus_relay_{name}", meaning, labels=["database"])


def _counter(name: str, meaning: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"databus_relay_{name}", meaning, labels=["database"])


def _client_gauge(name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"databus_relay_client_{name}", meaning, labels=["database", "client"])


def _newest_us(database: DatabaseView) -> int:
    """Commit time of the newest frame in the ring, 0 if there is none."""
    return database.ring.snapshot().max_commit_us if database.is_ready else 0
