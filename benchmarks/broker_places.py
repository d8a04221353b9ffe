"""The targets of ``fig_sinks`` that are no database of SQL: Redis, NATS and Kafka.

Their own bulk loads: ``redis-cli --pipe`` of the same commands, prepared beforehand; messages over
NATS's own protocol without headers, of which each five-hundredth is acknowledged; librdkafka with
values prepared beforehand, in one transaction.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.brokers import Broker, Nats, NatsConnection, Redis, find, resp
from benchmarks.kafka_broker import Kafka
from benchmarks.sink_places import NAMES, Place
from databus.client.sinks.redis.redis_rows import text_of
from databus.common.schema.column_values import to_json_value

BATCH = 500


class BrokerPlace(Place):
    """A target with a private broker."""

    broker: Broker
    make: type[Broker]

    def __init__(self, folder: Path, rows: list[tuple[Any, ...]]) -> None:
        self._stack = contextlib.ExitStack()
        self.broker = self._stack.enter_context(self.make())
        super().__init__(folder, rows)

    @property
    def process_id(self) -> int | None:
        return self.broker.process_id

    def close(self) -> None:
        self._stack.close()


class RedisHashesPlace(BrokerPlace):
    """HSET of each row, by redis-cli --pipe."""

    kind = "redis-hashes"
    make = Redis

    @property
    def section(self) -> dict[str, Any]:
        url = f"redis://127.0.0.1:{self.broker.port}"
        return {"redis": {"url": url, "kind": self.kind.removeprefix("redis-")}}

    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        self.path = self.folder / "commands"
        self.path.write_bytes(b"".join(resp(*self.command(one)) for one in rows))

    def command(self, row: tuple[Any, ...]) -> list[bytes]:
        """What writes a row."""
        texts = [_bytes(text_of(one)) for one in row]
        fields = [word for pair in zip(_NAMES, texts, strict=True) for word in pair]
        return [b"HSET", b"orders:" + texts[0], *fields, b"_scn", b"1", b"_seq", texts[0]]

    def _cli(self, *words: str, path: Path | None = None) -> bytes:
        found = find("redis-cli")
        assert found is not None
        with open(path or "/dev/null", "rb") as commands:
            command = [found[0], "-p", str(self.broker.port), *words]
            return subprocess.check_output(command, env=found[1], stdin=commands)

    def empty(self) -> None:
        self._cli("FLUSHALL")

    def load(self) -> None:
        self._cli("--pipe", path=self.path)

    def count(self) -> int:
        return int(self._cli("DBSIZE")) - 1  # without the checkpoint


class RedisStreamsPlace(RedisHashesPlace):
    """XADD of each row, by redis-cli --pipe."""

    kind = "redis-streams"

    def command(self, row: tuple[Any, ...]) -> list[bytes]:
        """What writes a row."""
        key = json.dumps({"id": row[0]}).encode()
        return [
            b"XADD", b"shop.orders", b"*", b"scn", b"1", b"seq", b"%d" % row[0], b"op", b"c",
            b"key", key, b"value", change_of(row),
        ]  # fmt: skip

    def count(self) -> int:
        return sum(
            int(self._cli("XLEN", name.decode()))
            for name in self._cli("--raw", "KEYS", "*orders").split()
        )


class NatsPlace(BrokerPlace):
    """PUB of each row over the protocol."""

    kind = "nats"
    make = Nats

    @property
    def section(self) -> dict[str, Any]:
        return {"nats": {"servers": [f"nats://127.0.0.1:{self.broker.port}"]}}

    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        self.changes = [change_of(one) for one in rows]

    def empty(self) -> None:
        with NatsConnection(self.broker.port) as nats:
            for name in ("EVENTS", "mirror", "KV_databus_checkpoints"):
                nats.ask(f"$JS.API.STREAM.DELETE.{name}", {})
            made = {"name": "EVENTS", "subjects": ["e"], "storage": "file", "num_replicas": 1}
            nats.ask("$JS.API.STREAM.CREATE.EVENTS", made)

    def load(self) -> None:
        with NatsConnection(self.broker.port) as nats:
            for start in range(0, len(self.changes), BATCH):
                *others, last = self.changes[start : start + BATCH]
                nats.send(b"".join(b"PUB e %d\r\n%b\r\n" % (len(one), one) for one in others))
                nats.ask_bytes(b"e", last)

    def count(self) -> int:
        with NatsConnection(self.broker.port) as nats:
            return int(nats.ask("$JS.API.STREAM.INFO.mirror", {})["state"]["messages"])


class KafkaPlace(BrokerPlace):
    """Records of librdkafka, in a transaction; the sink's are of the flat envelope."""

    kind = "kafka"
    make = Kafka

    @property
    def section(self) -> dict[str, Any]:
        servers = f"127.0.0.1:{self.broker.port}"
        return {
            "kafka": {
                "servers": servers, "envelope": "flat", "prefix": self.prefix,
                "checkpoint_topic": f"{self.prefix}_checkpoints",
            }
        }  # fmt: skip

    @property
    def prefix(self) -> str:
        return f"round{self.number}"

    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        self.number = 0
        self.changes = [(json.dumps({"id": one[0]}).encode(), change_of(one)) for one in rows]

    def empty(self) -> None:
        self.number += 1

    def load(self) -> None:
        import confluent_kafka

        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": f"127.0.0.1:{self.broker.port}", "linger.ms": 20,
                "transactional.id": f"bulk{self.number}", "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 1 << 20,
            }
        )  # fmt: skip
        producer.init_transactions(60)
        producer.begin_transaction()
        for key, value in self.changes:
            producer.produce(f"bulk{self.number}", value=value, key=key)
        producer.commit_transaction(60)

    def count(self) -> int:
        import confluent_kafka

        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": f"127.0.0.1:{self.broker.port}", "group.id": "count",
                "enable.partition.eof": True,
            }
        )  # fmt: skip
        topic = f"{self.prefix}.bench.orders"
        consumer.assign(
            [confluent_kafka.TopicPartition(topic, 0, confluent_kafka.OFFSET_BEGINNING)]
        )
        found, has_ended = 0, False
        while not has_ended:
            messages = consumer.consume(10_000, timeout=1)
            rows = sum(message.error() is None for message in messages)
            found, has_ended = found + rows, rows < len(messages)
        consumer.close()
        return found


_NAMES = [name.encode() for name in NAMES]


def change_of(row: tuple[Any, ...]) -> bytes:
    """The object of NDJSON of an insert."""
    after = {name: to_json_value(one) for name, one in zip(NAMES, row, strict=True)}
    return json.dumps(
        {
            "database": "bench", "source": "shop.orders", "op": "c", "scn": 1, "seq": row[0],
            "ts_us": 1, "txid": "tx1", "key": {"id": row[0]}, "before": None, "after": after,
        },
        separators=(",", ":"),
    ).encode()  # fmt: skip


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
