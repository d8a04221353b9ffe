"""Sinks: changes written to another system, by a consumer with retries, batches and routing.

In reading order: ``sink`` (the protocol and its contract), ``sink_batch`` (what a sink writes),
``sink_routes`` (source to target), ``route_filter`` (its ``where``), ``refused_rows`` (rows that
are set aside), ``sink_consumer`` (the consumer that drives a sink), ``sink_process`` (one
configured sink from start to stop), ``sink_metrics``, ``sink_kinds`` (the sink of a
configuration), ``sql/`` (mirrors of the tables in a database), ``row_changes`` (rows as what an
envelope takes), ``encoded_records`` (the records of a batch as bytes), ``kafka/`` (records of a
broker), ``redis/`` (streams or hashes), ``nats/`` (messages of JetStream), ``search/`` (documents
of OpenSearch and Elasticsearch), ``files/`` (files by date), ``webhook_sink`` (signed HTTP
requests), ``troubled_sink`` (for tests of a sink).

Imported by applications and by the command line.  It imports the rest of the room.
"""

from __future__ import annotations

from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import SinkBatch, SinkRow, SinkTable
from databus.client.sinks.sink_process import SinkProcess
from databus.client.sinks.sink_routes import SinkRoutes
from databus.client.sinks.troubled_sink import SinkTrouble, TroubledSink

__all__ = [
    "Sink",
    "SinkBatch",
    "SinkContext",
    "SinkProcess",
    "SinkRoutes",
    "SinkRow",
    "SinkTable",
    "SinkTrouble",
    "TroubledSink",
]
