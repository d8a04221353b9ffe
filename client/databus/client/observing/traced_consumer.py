"""Traces of a consumer through OpenTelemetry's API."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from databus.client.application.consumer import Consumer
from databus.client.application.events import Window
from databus.client.tables.data_batch import DataBatch
from databus.common.extras import imports_of_extra

with imports_of_extra("observe", package="opentelemetry-api", needed_by="a traced consumer"):
    from opentelemetry import context, trace

_CALLBACKS = tuple(name for name in vars(Consumer) if name.startswith("on"))


def trace_id(database: str, scn: int) -> int:
    """The trace of a transaction: the same in every process that reads it."""
    return int.from_bytes(hashlib.blake2b(f"{database}:{scn}".encode(), digest_size=16).digest())


class TracedConsumer(Consumer):
    """Calls ``consumer`` within spans: one for each window, or for each batch.

    A window's span belongs to the trace ``trace_id(database, scn)`` and has the attributes
    ``databus.database``, ``databus.scn``, ``databus.txid`` and ``databus.event_count``.  It is the
    current span in the callbacks on the event loop, so what they call adds its spans to it.  All
    consumers of a transaction share the trace, and a search for ``databus.txid`` finds it.

    A batch's span has the positions and the number of its rows.

    Owner: one client.
    """

    def __init__(self, consumer: Consumer, tracer: trace.Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("databus.client")
        self._consumer = consumer
        self._span: trace.Span | None = None
        self._token: Any = None
        overridden = [
            name
            for name in _CALLBACKS
            if getattr(getattr(consumer, name), "__func__", None) is not getattr(Consumer, name)
        ]
        for name in overridden:
            setattr(self, name, getattr(consumer, name))
        wrapped: dict[str, Callable[..., Any]] = {
            "onRollback": self._roll_back,
            "onStopConsumption": self._stop,
        }
        if "onDataBatch" in overridden:
            wrapped["onDataBatch"] = self._batch
        else:
            wrapped["onStartDataEventSequence"] = self._start
            wrapped["onEndDataEventSequence"] = self._end
        for name, function in wrapped.items():
            setattr(self, name, function)

    def _start(self, window: Window) -> Any:
        self._open(
            "databus.window",
            window.database,
            window.scn,
            {"databus.mode": window.mode},
        )
        return self._consumer.onStartDataEventSequence(window)

    def _end(self, window: Window) -> Any:
        assert self._span is not None
        self._span.set_attribute("databus.txid", window.txid or "")
        self._span.set_attribute("databus.event_count", window.event_count or 0)
        return self._then_close(self._consumer.onEndDataEventSequence(window))

    def _batch(self, batch: DataBatch) -> Any:
        self._open(
            "databus.batch",
            "",
            batch.first.scn,
            {
                "databus.source": batch.source,
                "databus.rows": len(batch),
                "databus.last": str(batch.last),
            },
        )
        return self._then_close(self._consumer.onDataBatch(batch))

    def _roll_back(self, checkpoint: Any) -> Any:
        if self._span is not None:
            self._span.set_status(trace.StatusCode.ERROR, "rolled back")
        self._close()
        return self._consumer.onRollback(checkpoint)

    def _stop(self) -> Any:
        self._close()
        return self._consumer.onStopConsumption()

    def _open(self, name: str, database: str, scn: int, attributes: dict[str, Any]) -> None:
        self._close()
        parent = context.Context()
        if database:
            number = trace_id(database, scn)
            of_trace = trace.SpanContext(
                number, number >> 64 or 1, is_remote=True, trace_flags=trace.TraceFlags(1)
            )
            parent = trace.set_span_in_context(trace.NonRecordingSpan(of_trace), parent)
            attributes = {"databus.database": database, **attributes}
        self._span = self._tracer.start_span(
            name, parent, trace.SpanKind.CONSUMER, {"databus.scn": scn, **attributes}
        )
        self._token = context.attach(trace.set_span_in_context(self._span))

    def _then_close(self, answer: Any) -> Any:
        if inspect.isawaitable(answer):
            return self._closed_after(answer)
        self._close()
        return answer

    async def _closed_after(self, answer: Awaitable[Any]) -> Any:
        result = await answer
        self._close()
        return result

    def _close(self) -> None:
        if self._span is not None:
            self._span.end()
            self._span = None
            context.detach(self._token)
