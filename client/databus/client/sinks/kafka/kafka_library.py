"""confluent-kafka: imported late, with an error that names the extra, and its errors as ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from databus.common.errors import SinkRefused, SinkUnavailable
from databus.common.extras import imports_of_extra

TIMEOUT_S = 60.0
"""What a call may wait for the brokers."""
_FENCED = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
_REFUSED = (
    "MSG_SIZE_TOO_LARGE",
    "TOPIC_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "INVALID_TOPIC_EXCEPTION",
    "_INVALID_ARG",
)


def kafka_library() -> Any:
    """The module ``confluent_kafka``.

    Raises:
        MissingDependency: it is not installed.
    """
    with imports_of_extra("kafka", package="confluent-kafka", needed_by="a sink to Kafka"):
        import confluent_kafka
    return confluent_kafka


@contextlib.contextmanager
def as_ours(doing: str) -> Iterator[None]:
    """Errors of the driver as errors of a sink.

    Raises:
        SinkRefused: another process has the sink's name, or a retry cannot help.
        SinkUnavailable: any other error.
    """
    kafka = kafka_library()
    try:
        yield
    except BufferError as full:
        raise SinkUnavailable(f"{doing}: the brokers take no records: {full}") from full
    except kafka.KafkaException as exception:
        error = exception.args[0]
        if error.name() in _FENCED:
            raise SinkRefused(
                f"{doing}: another process has taken over the sink's name; stop one of the two"
            ) from exception
        if error.name() in _REFUSED:
            raise SinkRefused(f"{doing}: {error.str()} ({error.name()})") from exception
        raise SinkUnavailable(f"{doing}: {error.str()} ({error.name()})") from exception
