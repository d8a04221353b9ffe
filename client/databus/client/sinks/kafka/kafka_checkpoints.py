"""The topic of the checkpoints: compacted, one partition, the sink's name is the key."""

from __future__ import annotations

import time
from typing import Any

from databus.client.sinks.kafka.kafka_library import TIMEOUT_S, as_ours, kafka_library
from databus.common.checkpoint import Checkpoint, decode
from databus.common.errors import SinkUnavailable

_SETTINGS = {
    "cleanup.policy": "compact",
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
}


def create_topic(
    admin: Any, name: str, *, partitions: int, replicas: int, settings: dict[str, str]
) -> None:
    """Create a topic unless it is there.

    Raises:
        SinkUnavailable, SinkRefused: the brokers did not create it.
    """
    from confluent_kafka.cimpl import NewTopic

    kafka = kafka_library()
    with as_ours(f"creating the topic {name}"):
        topic = NewTopic(name, partitions, replicas, config=settings)
        try:
            admin.create_topics([topic])[name].result(TIMEOUT_S)
        except kafka.KafkaException as error:
            if error.args[0].code() != kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise


def create_checkpoint_topic(admin: Any, topic: str, replicas: int) -> None:
    """Create the topic of the checkpoints unless it is there."""
    create_topic(admin, topic, partitions=1, replicas=replicas, settings=_SETTINGS)


def stored_checkpoint(settings: dict[str, Any], topic: str, name: str) -> Checkpoint | None:
    """The last committed checkpoint of a sink.

    No transaction of the sink may be open: ``init_transactions`` of its producer has ended them.
    """
    kafka = kafka_library()
    consumer = kafka.Consumer(
        {
            **settings,
            "group.id": f"databus-{name}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    found: Checkpoint | None = None
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        with as_ours(f"reading the checkpoint from the topic {topic}"):
            consumer.assign([kafka.TopicPartition(topic, 0, kafka.OFFSET_BEGINNING)])
            while time.monotonic() < deadline_s:
                for message in consumer.consume(10_000, timeout=0.1):
                    error = message.error()
                    if error is None:
                        if message.key() == name.encode() and message.value() is not None:
                            found = decode(message.value())
                    elif error.code() == kafka.KafkaError._PARTITION_EOF:
                        return found
                    elif not error.retriable():
                        raise kafka.KafkaException(error)
    finally:
        consumer.close()
    raise SinkUnavailable(f"the topic {topic} was not read to its end within {TIMEOUT_S:g} s")
