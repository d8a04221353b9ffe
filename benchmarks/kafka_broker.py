"""Apache Kafka with events in one partition, read by fetches of 4 MiB.

``scripts/jars.sh kafka`` fetches the jars.  The reader walks from one batch of records to the next,
which it must to know the offset of its next fetch, and looks at nothing else.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.brokers import Broker, Nats, Redis, read_nats, read_redis
from databus.cli.demo.private_servers import free_port

TOPIC = b"events"
FETCH_BYTES = 4 << 20
BATCH_BYTES = 1 << 20
FETCH, FETCH_VERSION = 1, 4
_OPTIONS = ("-Xmx1G", "-Xms1G", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
"""Heap and collector of Kafka's own start script."""
_SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
num.network.threads=3
num.io.threads=8
"""


def _jars() -> Path | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "databus-jars"
    return max(cache.glob("kafka-[0-9]*.[0-9]"), default=None)


class Kafka(Broker):
    """One broker in KRaft mode; the topic has one partition."""

    name = "Apache Kafka"
    program = "java"
    source = "scripts/jars.sh kafka"

    @classmethod
    def is_here(cls) -> bool:
        return _jars() is not None and shutil.which("java") is not None

    def _command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        settings = folder / "server.properties"
        settings.write_text(_SETTINGS.format(port=self.port, controller=free_port(), folder=folder))
        java = ["java", *_OPTIONS, "-cp", f"{_jars()}/*"]
        subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", "ZGF0YWJ1cy1iZW5jaG1hcmtz", "-c",
             str(settings)],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return [*java, "kafka.Kafka", str(settings)], dict(os.environ)

    def _fill(self) -> None:
        import confluent_kafka

        settings = {"bootstrap.servers": f"127.0.0.1:{self.port}"}
        producer = confluent_kafka.Producer(
            {**settings, "batch.size": BATCH_BYTES, "linger.ms": 50, "message.max.bytes": 1 << 24}
        )
        for index in range(self.count):
            while True:
                try:
                    producer.produce(TOPIC.decode(), self.payload(index))
                    break
                except BufferError:
                    producer.poll(0.1)
        if producer.flush(60):
            raise RuntimeError("Kafka did not take all events")


def read_kafka(until: float, index: int, port: int, count: int, size: int) -> int:
    """Read the partition again and again until the time is over; the bytes that came."""
    buffer, total, offset = bytearray(FETCH_BYTES + BATCH_BYTES + 4096), 0, 0
    # Correlation, throttling, topic and partition with their counts, error, two offsets, an array.
    head = 4 + 4 + 4 + 2 + len(TOPIC) + 4 + 4 + 2 + 8 + 8 + 4
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while time.perf_counter() < until:
            connection.sendall(fetch_request(offset))
            view = memoryview(buffer)
            _exactly(connection, view[:4])
            length = int.from_bytes(view[:4])
            _exactly(connection, view[:length])
            total += 4 + length
            error = struct.unpack_from(">h", view, head - 4 - 16 - 2)[0]
            if error:
                raise RuntimeError(f"Kafka answered with error {error}")
            offset = next_offset(view[head + 4 : length], offset)
            offset = 0 if offset >= count else offset
    return total


def fetch_request(offset: int) -> bytes:
    """A fetch of ``FETCH_BYTES`` from ``offset`` on."""
    body = struct.pack(">hhih", FETCH, FETCH_VERSION, 1, -1)
    body += struct.pack(">iiiibi", -1, 500, 1, FETCH_BYTES, 0, 1)
    body += struct.pack(f">h{len(TOPIC)}si", len(TOPIC), TOPIC, 1)
    body += struct.pack(">iqi", 0, offset, FETCH_BYTES)
    return struct.pack(">i", len(body)) + body


def next_offset(records: memoryview, offset: int) -> int:
    """The offset after the last whole batch."""
    at = 0
    while at + 27 <= len(records):
        base, length = struct.unpack_from(">qi", records, at)
        if at + 12 + length > len(records):
            break
        offset = base + 1 + struct.unpack_from(">i", records, at + 23)[0]
        at += 12 + length
    return offset


def _exactly(connection: socket.socket, view: memoryview) -> None:
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("Kafka closed the connection")
        view = view[got:]


READERS: dict[type[Broker], Callable[..., int]] = {
    Redis: read_redis,
    Nats: read_nats,
    Kafka: read_kafka,
}
"""The brokers and what reads each: called with a time, an index, port, count and size."""
