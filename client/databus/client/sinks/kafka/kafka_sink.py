"""The Kafka sink: records of an envelope, exactly once for readers of committed records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from databus.client.sinks.encoded_records import EncodedRecords, Headers
from databus.client.sinks.kafka.kafka_checkpoints import (
    create_checkpoint_topic,
    create_topic,
    stored_checkpoint,
)
from databus.client.sinks.kafka.kafka_library import TIMEOUT_S, as_ours, kafka_library
from databus.client.sinks.kafka.registry_client import SchemaRegistry
from databus.client.sinks.row_changes import RowRecords
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import SinkBatch
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, encode
from databus.common.envelopes.avro_encoding import AvroEncoding
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_change import Encoding
from databus.common.errors import CheckpointMoved, DatabusError, SinkRefused, SinkUnavailable
from databus.common.sink_config import REGISTERED_FORMATS, KafkaSinkConfig

IDLE_CHECKPOINT_S = 10.0
"""How often a checkpoint is stored that has no rows before it."""
_POLL_EVERY = 1000


class KafkaSink(Sink):
    """Writes records to Kafka, and the checkpoint in the same transaction.

    Invariants:
        I1. Between two commits there is at most one transaction.  It has the records of every
            row since the last commit, and as its last record the checkpoint.
        I2. The producer's transactional id is the sink's name: a second process with the name
            fences this one, whose open transaction is aborted.

    Durability: after ``commit``, a reader with isolation.level=read_committed sees the records.
    Owner: the sink's thread.
    Raises: SinkUnavailable and SinkRefused.
    """

    stores_checkpoint: ClassVar[bool] = True
    default_target: ClassVar[str] = ""

    def __init__(self, config: KafkaSinkConfig) -> None:
        self._config = config
        self._kafka = kafka_library()
        self._settings: dict[str, Any] = {
            "bootstrap.servers": config.servers,
            **{name: text.reveal for name, text in config.options.items()},
        }
        records = RowRecords(
            config.envelope,
            prefix=config.prefix,
            catalogue=config.catalogue,
            tombstones=config.tombstones,
        )
        self._records = EncodedRecords(records, _encoding(config))
        self._topics: set[str] = set()
        self._context: SinkContext | None = None
        self._producer: Any = None
        self._is_open = False
        self._is_doubtful = self._is_refused = False
        self._committing: Checkpoint | None = None
        self._stored_s = 0.0
        self._produced = 0

    def open(self, context: SinkContext) -> Checkpoint | None:
        """Take over the sink's name, and read its checkpoint."""
        self._context = context
        return self._connect()

    def _connect(self) -> Checkpoint | None:
        """A producer without an open transaction; the checkpoint that was committed last."""
        from confluent_kafka import admin

        assert self._context is not None
        topic = self._config.checkpoint_topic
        with as_ours("connecting"):
            self._producer = self._kafka.Producer(
                {
                    "linger.ms": 20,
                    # The hash of Java's producers, Debezium's too.
                    "partitioner": "murmur2_random",
                    "transaction.timeout.ms": 300_000,
                    "delivery.report.only.error": True,
                    **self._settings,
                    "transactional.id": f"databus-{self._context.name}",
                }
            )
            self._admin = admin.AdminClient(self._settings)
            self._topics = set(self._producer.list_topics(timeout=TIMEOUT_S).topics)
        if topic not in self._topics:
            create_checkpoint_topic(self._admin, topic, self._config.replicas)
            self._topics.add(topic)
        with as_ours("taking over the transactions of the sink"):
            self._producer.init_transactions(TIMEOUT_S)
        found = stored_checkpoint(self._settings, topic, self._context.name)
        self._is_open = self._is_doubtful = False
        return found

    def write(self, batch: SinkBatch) -> None:
        """Give the records of the rows to the producer."""
        self._begin()
        assert self._context is not None
        with self._doing("writing"):
            for topic, key, value, headers in self._records.of(batch, self._context):
                if topic not in self._topics:
                    self._create(topic)
                self._send(topic, key, value, headers)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Commit the records and the checkpoint."""
        now_s = time.monotonic()
        is_idle = not self._is_open and isinstance(checkpoint, OnlineCheckpoint)
        if is_idle and now_s < self._stored_s + IDLE_CHECKPOINT_S:
            return
        assert self._context is not None
        self._begin()
        name = self._context.name.encode()
        with self._doing("committing"):
            self._send(self._config.checkpoint_topic, name, encode(checkpoint).encode(), [])
            self._committing = checkpoint
            self._end_transaction()
        self._is_open = False
        self._committing = None
        self._stored_s = now_s

    def rollback(self) -> None:
        """Abort the transaction.

        Raises:
            CheckpointMoved: its commit was reported as failed, and was made.
        """
        if not self._is_open or self._is_refused:
            return
        if not self._is_doubtful:
            with contextlib.suppress(SinkUnavailable):  # Then a new producer ends it.
                with as_ours("aborting"):
                    self._producer.abort_transaction(TIMEOUT_S)
                self._is_open = False
                return
        committing, self._committing = self._committing, None
        if self._connect() == committing and committing is not None:
            raise CheckpointMoved(
                "the transaction was committed although its commit was reported as failed; start "
                "the sink again"
            )

    def close(self) -> None:
        """Abort what was not committed; otherwise the brokers do after the time-out."""
        if self._producer is not None:
            with contextlib.suppress(DatabusError, self._kafka.KafkaException):
                if self._is_open and not self._is_doubtful:
                    self._producer.abort_transaction(TIMEOUT_S)
            self._producer = None

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Errors as ours.  After one that a retry does not repair, no new producer is made: it
        would fence the process that has the name now."""
        try:
            with as_ours(what):
                yield
        except SinkRefused:
            self._is_refused = True
            raise

    def _begin(self) -> None:
        if not self._is_open:
            with self._doing("beginning a transaction"):
                self._producer.begin_transaction()
            self._is_open = True

    def _end_transaction(self) -> None:
        """Commit, again and again while the answer is missing."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._producer.commit_transaction(TIMEOUT_S)
                return
            except self._kafka.KafkaException as exception:
                error = exception.args[0]
                if not error.retriable() or time.monotonic() > deadline_s:
                    self._is_doubtful = not error.txn_requires_abort()
                    raise

    def _create(self, topic: str) -> None:
        create_topic(
            self._admin,
            topic,
            partitions=self._config.partitions,
            replicas=self._config.replicas,
            settings={},
        )
        self._topics.add(topic)

    def _send(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        """Queue a record; wait for room in the producer's queue."""
        deadline_s = 0.0
        while True:
            try:
                self._producer.produce(topic, value=value, key=key, headers=headers)
                break
            except BufferError:
                now_s = time.monotonic()
                deadline_s = deadline_s or now_s + TIMEOUT_S
                if now_s > deadline_s:
                    raise
                self._producer.poll(0.1)
            except self._kafka.KafkaException as exception:
                if exception.args[0].code() == self._kafka.KafkaError._FATAL:
                    # Of a producer that has failed for good, this call gives the cause.
                    self._producer.commit_transaction(0)
                raise
        self._produced += 1
        if self._produced % _POLL_EVERY == 0:
            self._producer.poll(0)


def _encoding(config: KafkaSinkConfig) -> Encoding:
    if config.registry is None or config.format not in REGISTERED_FORMATS:
        return JsonEncoding(with_schemas=config.format == "json-schemas")
    registry = SchemaRegistry(config.registry.reveal)
    if config.format == "avro":
        return AvroEncoding(registry.register)
    from databus.common.envelopes.protobuf_encoding import ProtobufEncoding

    return ProtobufEncoding(registry)
