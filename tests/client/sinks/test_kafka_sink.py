"""The Kafka sink with a real broker: each change once for readers of committed records.

Skipped, with the reason, without Kafka's jars.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fastavro
import pytest

from databus.client.sinks import SinkContext, SinkRoutes
from databus.client.sinks.kafka.kafka_sink import KafkaSink
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position
from databus.common.errors import (
    CheckpointMoved,
    MissingDependency,
    SinkRefused,
    SinkUnavailable,
)
from databus.common.frame.frame_format import iter_frames
from databus.common.sink_config import KafkaSinkConfig, SinkConfig
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.scripted_server import Fault
from tests.client.shop import ORDERS, orders, window
from tests.client.sinks.sink_runs import Watched
from tests.common.envelopes.test_protobuf_encoding import compiled
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_broker import kafka_broker as kafka_broker  # a fixture
from tests.support.processes import Processes
from tests.support.schema_registry_server import SchemaRegistryServer
from tests.support.schema_registry_server import registry as registry  # a fixture
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def config_of(broker: KafkaBroker, name: str, *relays: str, **settings: Any) -> SinkConfig:
    kafka = {"servers": broker.servers, "prefix": name, "checkpoint_topic": "checkpoints"}
    return SinkConfig.model_validate(
        {
            "name": name,
            "database": "shop",
            "relays": list(relays),
            "start": "oldest",
            "commit_every": 0,
            "retry": 0.001,
            "retry_most": 0.002,
            "kafka": kafka | settings.pop("kafka", {}),
        }
        | settings
    )


def sink_of(config: SinkConfig) -> KafkaSink:
    assert config.kafka is not None
    return KafkaSink(config.kafka)


def position_of(message: Any) -> tuple[int, int]:
    headers = dict(message.headers())
    return int(headers["scn"]), int(headers["seq"])


def positions_of(blocks: list[bytes]) -> list[tuple[int, int]]:
    frames = (frame for block in blocks for frame in iter_frames(block))
    return [(frame.scn, frame.seq) for frame in frames if not frame.is_control]


async def test_every_change_is_a_record_of_its_topic_with_the_position_in_the_headers(
    scripted: StartServer, kafka_broker: KafkaBroker
) -> None:
    server = await scripted(
        window(1, ("c", ORDERS, 7, "new"), ("u", ORDERS, 7, "paid")),
        window(2, ("d", ORDERS, 7, "paid")),
    )
    config = config_of(kafka_broker, "plain", server.url, kafka={"envelope": "debezium"})
    await Watched(config, sink_of(config)).until_scn(2)
    records = kafka_broker.committed("plain.shop.orders")
    assert [position_of(one) for one in records] == [(1, 0), (1, 1), (2, 0), (2, 0)]
    assert {one.key() for one in records} == {b'{"id":7}'}
    values = [one.value() and json.loads(one.value()) for one in records]
    assert [value and value["op"] for value in values] == ["c", "u", "d", None]
    assert values[1]["after"]["state"] == "paid"


async def test_avro_records_name_their_schema_in_the_registry(
    scripted: StartServer, kafka_broker: KafkaBroker, registry: SchemaRegistryServer
) -> None:
    server = await scripted(orders(1, 7), orders(2, 7, op="d"))
    settings = {"envelope": "debezium", "format": "avro", "registry": registry.url}
    config = config_of(kafka_broker, "avro", server.url, kafka=settings)
    await Watched(config, sink_of(config)).until_scn(2)
    records = kafka_broker.committed("avro.shop.orders")
    assert registry.subjects == {"avro.shop.orders-key": [1], "avro.shop.orders-value": [2]}
    assert [one.key()[:5] for one in records] == [b"\0\0\0\0\1"] * 3
    assert [one.value() and one.value()[:5] for one in records] == [b"\0\0\0\0\2"] * 2 + [None]
    schema = fastavro.parse_schema(registry.schemas[1])
    value: Any = fastavro.schemaless_reader(io.BytesIO(records[0].value()[5:]), schema, None)
    assert (value["op"], value["after"]["id"], value["source"]["lsn"]) == ("c", 7, 1)


async def test_protobuf_records_name_their_schema_in_the_registry(
    scripted: StartServer, kafka_broker: KafkaBroker, registry: SchemaRegistryServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 7), orders(2, 7, op="d"))
    settings = {"envelope": "flat", "format": "protobuf", "registry": registry.url}
    config = config_of(kafka_broker, "proto", server.url, kafka=settings)
    await Watched(config, sink_of(config)).until_scn(2)
    created, deleted, tombstone = kafka_broker.committed("proto.shop.orders")
    assert registry.subjects == {"proto.shop.orders-key": [1], "proto.shop.orders-value": [2]}
    assert [one.key()[:6] for one in (created, deleted)] == [b"\0\0\0\0\1\0"] * 2
    assert tombstone.key() == deleted.key() and tombstone.value() is None
    make = compiled(registry.schemas[1], tmp_path)
    values = [make.FromString(one.value()[6:]) for one in (created, deleted)]
    assert [(one.id, getattr(one, "__op")) for one in values] == [(7, "c"), (7, "d")]


@pytest.mark.parametrize("seed", range(3))
async def test_each_change_comes_once_and_in_order_under_random_trouble(
    scripted: StartServer, kafka_broker: KafkaBroker, seed: int
) -> None:
    rng = random.Random(seed)
    made, _ = workload(seed, 30)
    server = await scripted(*made)
    server.faults = [Fault(cut_after_bytes=rng.randrange(1, sum(map(len, made)))) for _ in range(4)]
    name = f"trouble{seed}"
    config = config_of(
        kafka_broker,
        name,
        server.url,
        batch_rows=rng.choice([1, 7, 1000]),
        route=[{"source": "*", "target": name}],
    )

    class Troubled(KafkaSink):
        failures = 0

        def _send(self, *arguments: Any) -> None:
            super()._send(*arguments)
            if rng.random() < 0.03:
                Troubled.failures += 1
                raise SinkUnavailable("trouble")

    assert config.kafka is not None
    await Watched(config, Troubled(config.kafka)).until_scn(30)
    assert Troubled.failures > 0
    found = [position_of(one) for one in kafka_broker.committed(name)]
    assert found == positions_of(made)


async def test_each_change_comes_once_although_the_sink_is_killed_again_and_again(
    scripted: StartServer, kafka_broker: KafkaBroker, processes: Processes, tmp_path: Path
) -> None:
    server = await scripted(schemas=[ORDERS])
    path = tmp_path / "sink.toml"
    path.write_text(
        f'[sink]\nname = "killed"\ndatabase = "shop"\nrelays = ["{server.url}"]\n'
        'start = "oldest"\ncommit_every = "1ms"\nbatch_rows = 50\n'
        f'[sink.kafka]\nservers = "{kafka_broker.servers}"\npartitions = 3\n'
        'checkpoint_topic = "checkpoints"\n'
        '[[sink.route]]\nsource = "*"\ntarget = "killed"\n'
    )
    rng = random.Random(5)
    scn = 0
    made: list[bytes] = []
    wanted: list[int] = []
    process = processes.start("sink", "-c", path)
    for kill in range(4):
        blocks = [orders(scn + 1 + n, *range(rng.randrange(1, 30))) for n in range(150)]
        scn += 150
        made += blocks
        wanted.append(len(positions_of(made)) - rng.randrange(len(positions_of(blocks))))
        server.append(*blocks)
        await eventually(
            lambda: process.running and count(kafka_broker) >= wanted[-1], timeout_s=60
        )
        if kill < 3:
            process.kill9()
            process.start()
    total = len(positions_of(made))
    records = kafka_broker.committed("killed", at_least=total)
    found = Counter(position_of(one) for one in records)
    assert found == Counter(positions_of(made))
    assert {one.partition() for one in records} == {0, 1, 2}
    by_key: dict[bytes, list[tuple[int, int]]] = {}
    for one in records:
        by_key.setdefault(one.key(), []).append(position_of(one))
    assert all(sorted(positions) == positions for positions in by_key.values())
    assert process.stop() == 0


def count(broker: KafkaBroker) -> int:
    return len(broker.committed("killed")) if "killed" in topics_of(broker) else 0


def topics_of(broker: KafkaBroker) -> set[str]:
    from confluent_kafka import admin

    client = admin.AdminClient({"bootstrap.servers": broker.servers})
    return set(client.list_topics(timeout=30 * PATIENCE).topics)


def opened(
    config: SinkConfig, clock: str = "mariadb:0:shop"
) -> tuple[KafkaSink, Checkpoint | None]:
    sink = sink_of(config)
    context = SinkContext(name=config.name, database="shop", routes=SinkRoutes("shop"))
    return sink, sink.open(context)


def at(scn: int) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", "mariadb:0:shop", Position(scn, 0))


def test_the_checkpoint_is_that_of_the_last_committed_transaction(
    kafka_broker: KafkaBroker,
) -> None:
    config = config_of(kafka_broker, "stored")
    sink, found = opened(config)
    assert found is None
    sink.commit(at(5))
    sink._begin()
    sink._send("checkpoints", b"stored", b"{}", [])
    sink.close()
    other, found = opened(config_of(kafka_broker, "other"))
    assert found is None
    other.close()
    again, found = opened(config)
    assert found == at(5)
    again.close()


def test_a_second_process_of_the_name_takes_over_and_the_first_one_is_refused(
    kafka_broker: KafkaBroker,
) -> None:
    config = config_of(kafka_broker, "twice")
    first, _ = opened(config)
    first.commit(at(1))
    first._begin()
    first._send("twice.rows", b"k", b"never seen", [])
    first._producer.flush(10)
    second, found = opened(config)
    assert found == at(1)
    with pytest.raises(SinkRefused, match="another process has taken over"):
        first.commit(at(2))
    first.rollback()  # It does not take the name back.
    first.close()
    second._begin()
    second._send("twice.rows", b"k", b"seen", [])
    second.commit(at(2))
    second.close()
    assert [one.value() for one in kafka_broker.committed("twice.rows")] == [b"seen"]


def test_a_commit_of_which_the_answer_is_lost_is_not_made_again(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import confluent_kafka as kafka

    config = config_of(kafka_broker, "doubtful")
    sink, _ = opened(config)
    made = sink._producer

    class Lossy:
        """Commits, and reports that it did not."""

        def __getattr__(self, name: str) -> Any:
            return getattr(made, name)

        def commit_transaction(self, timeout_s: float) -> None:
            made.commit_transaction(timeout_s)
            raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._TIMED_OUT))

    monkeypatch.setattr(sink, "_producer", Lossy())
    with pytest.raises(SinkUnavailable, match="committing"):
        sink.commit(at(3))
    with pytest.raises(CheckpointMoved, match="start the sink again"):
        sink.rollback()
    sink.close()
    again, found = opened(config)
    assert found == at(3)
    again.close()


def test_a_commit_that_was_not_made_is_rolled_back(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import confluent_kafka as kafka

    sink, _ = opened(config_of(kafka_broker, "lost"))
    sink.commit(at(1))
    made = sink._producer

    class Away:
        def __getattr__(self, name: str) -> Any:
            return getattr(made, name)

        def commit_transaction(self, timeout_s: float) -> None:
            raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._TIMED_OUT))

    monkeypatch.setattr(sink, "_producer", Away())
    sink._begin()
    with pytest.raises(SinkUnavailable):
        sink.commit(at(2))
    sink.rollback()
    sink._begin()
    sink._send("lost.rows", None, b"once", [("scn", "2")])
    sink.commit(at(2))
    sink.close()
    assert [one.value() for one in kafka_broker.committed("lost.rows")] == [b"once"]


def test_a_broker_that_is_away_is_named() -> None:
    config = KafkaSinkConfig(servers="127.0.0.1:1", options={"socket.timeout.ms": "300"})
    sink = KafkaSink(config)
    context = SinkContext(name="n", database="shop", routes=SinkRoutes("shop"))
    with pytest.raises(SinkUnavailable, match="connecting"):
        sink._context = context
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("databus.client.sinks.kafka.kafka_sink.TIMEOUT_S", 0.5)
            sink.open(context)


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingDependency, match=r"databus-cdc\[kafka\]"):
        KafkaSink(KafkaSinkConfig(servers="127.0.0.1:1"))
