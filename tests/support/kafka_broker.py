"""A private Kafka: one process in KRaft mode, from Maven Central's jars."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import free_port
from tests.support.maven_jars import jars_or_skip
from tests.support.waiting import PATIENCE

_numbers = itertools.count(1)
_CLUSTER = "ZGF0YWJ1cy10ZXN0cy1rYQ"
_SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/log
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
"""


class KafkaBroker:
    """One broker in a folder of its own.

    Owner: one test process.
    """

    def __init__(self, folder: Path) -> None:
        self._jars = jars_or_skip("kafka")
        self._folder = folder
        folder.mkdir(parents=True)
        self._settings = folder / "server.properties"
        self._log = (folder / "broker.log").open("w")
        self._choose_ports()
        settings = str(self._settings)
        format_ = self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", settings)
        assert format_.wait() == 0, (folder / "broker.log").read_text()[-3000:]
        try:
            self.start()
        except AssertionError as error:
            if "BindException" not in str(error):
                raise
            self._choose_ports()  # Another process has taken one meanwhile.
            self.start()

    def _choose_ports(self) -> None:
        self.port = free_port()
        self.servers = f"127.0.0.1:{self.port}"
        self._settings.write_text(
            _SETTINGS.format(port=self.port, controller=free_port(), folder=self._folder)
        )

    def _java(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", f"{self._jars}/*", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self.process = self._java("kafka.Kafka", str(self._settings))
        deadline_s = time.monotonic() + 60 * PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                log = self._folder / "broker.log"
                assert self.process.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < deadline_s, log.read_text()[-3000:]
                time.sleep(0.05)

    def kill9(self) -> None:
        """Kill it, as a crash would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End it; its data are of no use any more."""
        if self.process.poll() is None:
            self.kill9()
        self._log.close()

    def committed(self, *topics: str, at_least: int = 0) -> list[Any]:
        """The committed records of topics, by topic and partition, to their present ends.

        Waits until there are ``at_least`` so many.
        """
        import confluent_kafka as kafka

        consumer = kafka.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": f"reader-{next(_numbers)}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        known = consumer.list_topics(timeout=30 * PATIENCE).topics
        parts = [
            kafka.TopicPartition(topic, number, kafka.OFFSET_BEGINNING)
            for topic in topics
            for number in known[topic].partitions
        ]
        consumer.assign(parts)
        records: list[Any] = []
        ended: set[Any] = set()
        deadline_s = time.monotonic() + 60 * PATIENCE
        try:
            while len(ended) < len(parts) or len(records) < at_least:
                assert time.monotonic() < deadline_s, f"{len(records)} records of {at_least}"
                for message in consumer.consume(1000, timeout=0.1):
                    if message.error() is None:
                        records.append(message)
                        ended.discard((message.topic(), message.partition()))
                    else:
                        ended.add((message.topic(), message.partition()))
        finally:
            consumer.close()
        return records


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker for the whole run; skipped, with the reason, without its jars."""
    broker = KafkaBroker(tmp_path_factory.mktemp("kafka") / "broker")
    yield broker
    broker.close()
