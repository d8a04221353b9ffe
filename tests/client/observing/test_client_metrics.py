"""Lag, metrics and traces of a client."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer, get_current_span
from prometheus_client import CollectorRegistry, generate_latest

from databus.client import Consumer, DataBatch, Event, Position
from databus.client.observing.opentelemetry_metrics import observe_clients
from databus.client.observing.prometheus_metrics import ClientCollector
from databus.client.observing.traced_consumer import TracedConsumer, trace_id
from databus.client.testing import Recorder
from databus.common.errors import MissingDependency
from databus.common.frame.window_builder import heartbeat
from tests.client.conftest import StartServer
from tests.client.shop import ORDERS, orders, window
from tests.client.test_client import make, serving
from tests.support.waiting import eventually, within


async def test_the_lag_is_that_of_what_has_arrived_and_is_not_delivered(
    scripted: StartServer,
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in (1, 2, 3)])
    recorder = Recorder()
    client = make(recorder, server.url)
    assert client.status.lag_s is None
    assert client.status.lag_windows == 0
    client.pause()
    async with serving(client):
        await eventually(lambda: client.status.lag_windows == 3, 30)
        committed_s = 1_700_000_000 + 0.001
        assert client.status.lag_s == pytest.approx(time.time() - committed_s, abs=60)
        client.resume()
        server.append(heartbeat(Position(4, 0), 0))
        await eventually(lambda: client.status.lag_s == 0.0, 30)
        assert client.status.lag_windows == 0


async def test_prometheus_and_opentelemetry_give_the_status_at_each_scrape(
    scripted: StartServer,
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in (1, 2, 3)])
    recorder = Recorder()
    client = make(recorder, server.url, client_name="test")
    registry = CollectorRegistry()
    registry.register(ClientCollector(client))
    reader = InMemoryMetricReader()
    observe_clients(client, meter=MeterProvider([reader]).get_meter("test"))
    labels = '{client="test",database="shop"}'
    assert f"databus_client_events_total{labels} 0.0" in generate_latest(registry).decode()
    async with serving(client):
        await eventually(lambda: client.status.window_count == 3, 30)
        text = generate_latest(registry).decode()
    assert f"databus_client_events_total{labels} 6.0" in text
    assert f"databus_client_position_scn{labels} 3.0" in text
    data: Any = reader.get_metrics_data()
    points = {
        metric.name: metric.data.data_points[0]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.data.data_points
    }
    assert points["databus.client.events"].value == 6
    assert dict(points["databus.client.windows"].attributes) == {
        "database": "shop",
        "client": "test",
    }


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


async def test_a_row_is_found_by_its_txid_and_spans_of_the_application_belong_to_it(
    scripted: StartServer, exporter: InMemorySpanExporter, tracer: Tracer
) -> None:
    server = await scripted(
        window(1, ("c", ORDERS, 1, "x"), txid="7-1"), window(2, ("c", ORDERS, 2, "y"), txid="7-2")
    )
    failures = [RuntimeError("once")]

    class Application(Consumer):
        async def onDataEvent(self, event: Event) -> None:
            if event.position.scn == 2 and failures:
                raise failures.pop()
            with tracer.start_as_current_span("write", attributes={"id": event.key["id"]}):
                pass
            if event.position.scn == 2:
                client.stop()

    client = make(TracedConsumer(Application(), tracer), server.url)
    async with within(30):
        await client.serve()
    assert not get_current_span().get_span_context().is_valid
    spans = exporter.get_finished_spans()
    by_txid = {
        (span.attributes or {}).get("databus.txid"): span
        for span in spans
        if span.name == "databus.window"
    }
    first = by_txid["7-1"]
    assert first.context.trace_id == trace_id("shop", 1)
    assert (first.attributes or {})["databus.event_count"] == 1
    (write,) = [s for s in spans if s.name == "write" and (s.attributes or {})["id"] == 1]
    assert write.parent is not None
    assert write.parent.span_id == first.context.span_id
    assert any(span.status.status_code is StatusCode.ERROR for span in spans), "the rollback"


async def test_a_batch_has_a_span(
    scripted: StartServer, exporter: InMemorySpanExporter, tracer: Tracer
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in (1, 2)])

    class Application(Consumer):
        def onDataBatch(self, batch: DataBatch) -> None:
            if batch.last.scn == 2:
                client.stop()

    client = make(TracedConsumer(Application(), tracer), server.url)
    async with within(30):
        await client.serve()
    spans = exporter.get_finished_spans()
    assert {span.name for span in spans} == {"databus.batch"}
    rows: list[Any] = [(span.attributes or {})["databus.rows"] for span in spans]
    assert sum(rows) == 4


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("prometheus_metrics", "prometheus_client.core"),
        ("opentelemetry_metrics", "opentelemetry"),
        ("traced_consumer", "opentelemetry"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"databus.client.observing.{name}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=r"databus-cdc\[observe\]"):
        __import__(f"databus.client.observing.{name}")
