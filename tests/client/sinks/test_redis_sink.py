"""The Redis sink with a real server: rows and checkpoint take effect together."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import free_port
from databus.client.sinks import SinkBatch, SinkContext, SinkProcess, SinkRoutes, TroubledSink
from databus.client.sinks.redis.redis_rows import hash_key, keys_pattern, text_of
from databus.client.sinks.redis.redis_sink import RedisSink
from databus.client.sinks.sink_kinds import sink_of
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position, decode
from databus.common.errors import (
    CheckpointMoved,
    ConfigError,
    MissingDependency,
    RowRefused,
    SinkRefused,
    SinkUnavailable,
)
from databus.common.sink_config import SinkConfig
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.scripted_server import Fault
from tests.client.shop import ITEMS, ORDERS, orders, window
from tests.client.sinks.sink_runs import Watched, sink_config
from tests.client.sinks.test_every_sink import expected_changes
from tests.support.key_value_servers import RedisServer
from tests.support.key_value_servers import redis_server as redis_server  # a fixture
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, warm_process

pytestmark = [pytest.mark.processes]
KINDS = ["streams", "hashes"]
SOURCES = {"shop.orders", "shop.items"}


@pytest.fixture(autouse=True)
def _empty(redis_server: RedisServer) -> Iterator[None]:
    yield
    redis_server.ask("FLUSHALL")


def config_of(server: RedisServer, kind: str, *relays: str, **settings: Any) -> SinkConfig:
    redis = {"url": server.url, "kind": kind} | settings.pop("redis", {})
    return sink_config(*relays, sql=None, redis=redis, **settings)


def entries(server: RedisServer, stream: str) -> list[dict[str, str]]:
    """The entries of a stream."""
    with server.client() as client:
        return [texts(fields) for _, fields in client.xrange(stream)]


def hash_of(server: RedisServer, key: Any) -> dict[str, str]:
    with server.client() as client:
        return texts(client.hgetall(key))


def texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def changes_in(server: RedisServer, *streams: str) -> list[tuple[int, int, str, str]]:
    return [
        (int(one["scn"]), int(one["seq"]), stream, one["op"])
        for stream in streams
        for one in entries(server, stream)
    ]


def tables_in(server: RedisServer) -> dict[str, dict[Any, Any]]:
    """The hashes as the tables of a workload."""
    tables: dict[str, dict[Any, Any]] = {source: {} for source in SOURCES}
    for key in server.ask("KEYS", "shop.*"):
        source, _, number = key.decode().partition(":")
        fields = hash_of(server, key)
        names = ["id", "state", "amount"] if source == "shop.orders" else ["id", "name"]
        row: dict[str, Any] = {name: fields.get(name) for name in names}
        assert set(fields) <= {*names, "_scn", "_seq"}
        tables[source][int(number),] = row | {"id": int(fields["id"])}
    return tables


def stored(server: RedisServer) -> Checkpoint | None:
    text = server.ask("HGET", "databus:copy:checkpoint", "checkpoint")
    return decode(text) if text else None


def check_target(server: RedisServer, kind: str, seed: int, windows: int) -> None:
    if kind == "hashes":
        assert tables_in(server) == workload(seed, windows)[1]
        return
    found = changes_in(server, *SOURCES)
    assert sorted(found) == sorted(expected_changes(seed, windows))
    for source in SOURCES:
        positions = [one[:2] for one in found if one[2] == source]
        assert all(one < other for one, other in pairwise(positions))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_failure_at_any_call_loses_nothing(
    scripted: StartServer, redis_server: RedisServer, kind: str, after: bool
) -> None:
    server = await scripted(*workload(11, 6)[0])
    for fails_at in range(40):
        redis_server.ask("FLUSHALL")
        config = config_of(redis_server, kind, server.url, batch_rows=4)
        sink = TroubledSink(sink_of(config), fails_at, after=after)
        await Watched(config, sink, buffer_bytes=400).until_scn(6)
        sink.check()
        check_target(redis_server, kind, 11, 6)
        if sink.call_count <= fails_at:
            break
    assert 6 <= fails_at < 39


@pytest.mark.parametrize("kind", KINDS)
async def test_each_change_takes_effect_once_under_random_trouble(
    scripted: StartServer, redis_server: RedisServer, kind: str
) -> None:
    rng = random.Random(3)
    made = workload(3, 60)[0]
    server = await scripted(*made)
    server.faults = [Fault(cut_after_bytes=rng.randrange(1, sum(map(len, made)))) for _ in range(4)]
    config = config_of(redis_server, kind, server.url, batch_rows=10)
    sink = sink_of(config)
    assert isinstance(sink, RedisSink)
    write, commit, lost = sink.write, sink.commit, 0

    def troubled(batch: Any) -> None:
        """Sometimes the connection ends in the middle of a transaction."""
        write(batch)
        if rng.random() < 0.1:
            redis_server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def without_answer(checkpoint: Checkpoint) -> None:
        """Sometimes the answer to EXEC is lost."""
        nonlocal lost
        before = sink._stored
        commit(checkpoint)
        if rng.random() < 0.2:
            lost += 1
            sink._stored, sink._committing = before, checkpoint
            raise SinkUnavailable("the answer was lost")

    sink.write = troubled  # type: ignore[method-assign]  # trouble beside it
    sink.commit = without_answer  # type: ignore[method-assign]  # trouble beside it
    process = Watched(config, sink)
    await process.until_scn(60)
    assert lost
    assert process.consumer.counts.rollbacks > lost
    check_target(redis_server, kind, 3, 60)


@pytest.mark.faults
@pytest.mark.slow
async def test_kill_9_of_sink_and_server_leaves_the_target_equal_to_the_source(
    scripted: StartServer, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    target = RedisServer(tmp_path / "redis", "--appendfsync", "always")
    try:
        async with warm_process("tests.client.sinks.forked_sinks") as forked:
            for kind in KINDS:
                await kill_again_and_again(scripted, forked, target, kind, choice)
    finally:
        target.close()


async def kill_again_and_again(
    scripted: StartServer,
    forked: WarmProcess,
    target: RedisServer,
    kind: str,
    choice: random.Random,
) -> None:
    target.ask("FLUSHALL")
    seed, kills, every = choice.randrange(1 << 32), 4, 20
    made = workload(seed, every * (kills + 1))[0]
    server = await scripted()
    config = config_of(target, kind, server.url, batch_rows=choice.choice([10, 1000]))
    settings = config.model_dump(mode="json", exclude_none=True)
    settings |= {"redis": {"url": target.url, "kind": kind}, "relays": [server.url]}
    for number in range(kills):
        server.append(*made[number * every : (number + 1) * every])
        before = scn_of(target)
        pid = await forked.start(settings)
        if number % 2:
            await eventually(committed_after(target, before), 30, "it has committed")
            target.kill9()
            target.start()
        await asyncio.sleep(choice.uniform(0, 0.05))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert await forked.exit_code() == -signal.SIGKILL
        check_target(target, kind, seed, scn_of(target))
    server.append(*made[kills * every :])
    await Watched(config, sink_of(config)).until_scn(len(made))
    check_target(target, kind, seed, len(made))


def scn_of(server: RedisServer) -> int:
    checkpoint = stored(server)
    return checkpoint.position.scn if checkpoint else 0


def committed_after(server: RedisServer, scn: int) -> Callable[[], bool]:
    return lambda: scn_of(server) > scn


def opened(config: SinkConfig, clock: str = "") -> tuple[RedisSink, Checkpoint | None]:
    sink = sink_of(config)
    assert isinstance(sink, RedisSink)
    context = SinkContext(
        name=config.name, database="shop", routes=SinkRoutes("shop"), clock=lambda: clock
    )
    return sink, sink.open(context)


def at(scn: int) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", "mariadb:0:shop", Position(scn, 0))


def test_a_second_process_takes_over_and_the_first_one_is_refused(
    redis_server: RedisServer,
) -> None:
    config = config_of(redis_server, "streams")
    first, found = opened(config)
    assert found is None
    first.commit(at(1))
    transactions = first._begun()
    transactions.run("return redis.call('XADD', 'twice', '*', 'a', 'b')", [], [])
    second, found = opened(config)
    assert found == at(1)
    with pytest.raises(CheckpointMoved, match="another process"):
        first.commit(at(2))
    first.rollback()
    with pytest.raises(CheckpointMoved, match="was taken over by"):
        first._begun()
    second.commit(at(3))
    assert stored(redis_server) == at(3)
    assert not redis_server.ask("EXISTS", "twice")
    first.close()
    second.close()


def test_a_checkpoint_that_the_server_has_touched_itself_is_committed_at_the_next_attempt(
    redis_server: RedisServer,
) -> None:
    """A server that reads its file after a restart writes the keys that are watched."""
    sink, _ = opened(config_of(redis_server, "streams"))
    sink.commit(at(1))
    sink._begun()
    redis_server.ask("HSET", "databus:copy:checkpoint", "note", "touched")
    with pytest.raises(SinkUnavailable, match="was written meanwhile"):
        sink.commit(at(2))
    sink.rollback()
    sink.commit(at(2))
    assert stored(redis_server) == at(2)
    sink.close()


def test_a_checkpoint_is_not_stored_if_a_command_before_it_failed(
    redis_server: RedisServer,
) -> None:
    sink, _ = opened(config_of(redis_server, "streams"))
    sink.commit(at(1))
    redis_server.ask("SET", "taken", "text")
    sink._begun().run("return redis.call('XADD', 'taken', '*', 'a', 'b')", [], [])
    with pytest.raises(SinkRefused, match="WRONGTYPE"):
        sink.commit(at(2))
    assert stored(redis_server) == at(1)
    sink.close()


def test_a_server_that_lost_commits_stops_the_sink_and_the_next_start_repeats_them(
    redis_server: RedisServer,
) -> None:
    config = config_of(redis_server, "hashes")
    sink, _ = opened(config)
    sink.commit(at(1))
    older = redis_server.ask("HGET", "databus:copy:checkpoint", "checkpoint")
    sink.commit(at(2))
    redis_server.ask("HSET", "databus:copy:checkpoint", "checkpoint", older)
    sink.rollback()
    with pytest.raises(CheckpointMoved, match="start the sink again"):
        sink.commit(at(3))
    sink.close()
    sink, found = opened(config)
    assert found == at(1)
    sink.close()


async def test_a_hash_has_the_columns_of_its_row_and_loses_those_that_are_null(
    scripted: StartServer, redis_server: RedisServer
) -> None:
    server = await scripted(
        window(1, ("c", ORDERS, 7, "new"), ("c", ORDERS, 8, "new")),
        window(2, ("u", ORDERS, 7, None), ("d", ORDERS, 8, None)),
    )
    redis_server.ask("HSET", "shop.orders:7", "dropped", "x")
    url = f"unix://{redis_server.folder}/socket"
    config = config_of(redis_server, "hashes", server.url, redis={"url": url})
    await Watched(config, sink_of(config)).until_scn(2)
    assert hash_of(redis_server, "shop.orders:7") == {"id": "7", "_scn": "2", "_seq": "0"}
    assert not redis_server.ask("EXISTS", "shop.orders:8")


async def test_a_hash_is_never_replaced_by_an_older_row(
    scripted: StartServer, redis_server: RedisServer
) -> None:
    server = await scripted(
        window(5, ("u", ORDERS, 1, "old"), ("d", ORDERS, 2, None), ("u", ORDERS, 3, "new"))
    )
    for number in (1, 2):
        redis_server.ask(
            "HSET", f"shop.orders:{number}", "state", "newer", "_scn", "10", "_seq", "0"
        )
    redis_server.ask("HSET", "shop.orders:3", "state", "older", "_scn", "4", "_seq", "9")
    config = config_of(redis_server, "hashes", server.url)
    await Watched(config, sink_of(config)).until_scn(5)
    states = [hash_of(redis_server, f"shop.orders:{number}")["state"] for number in (1, 2, 3)]
    assert states == ["newer", "newer", "new"]


async def test_a_truncate_empties_its_target_alone(
    scripted: StartServer, redis_server: RedisServer
) -> None:
    server = await scripted(
        window(1, *[("c", ORDERS, number, "s") for number in range(2500)]),
        window(2, ("t", ORDERS, 0, None), ("c", ORDERS, 1, "again")),
    )
    redis_server.ask("HSET", "shop.orders_old:1", "a", "b")
    config = config_of(redis_server, "hashes", server.url)
    await Watched(config, sink_of(config)).until_scn(2)
    found = {key.decode() for key in redis_server.ask("KEYS", "shop.*")}
    assert found == {"shop.orders:1", "shop.orders_old:1"}


async def test_entries_have_the_envelope_and_streams_are_cut(
    scripted: StartServer, redis_server: RedisServer
) -> None:
    server = await scripted(
        window(1, ("c", ORDERS, 7, "new")), window(2, ("d", ORDERS, 7, "new")),
    )  # fmt: skip
    config = config_of(redis_server, "streams", server.url, redis={"envelope": "debezium"})
    await Watched(config, sink_of(config)).until_scn(2)
    first, second = entries(redis_server, "shop.orders")
    assert (first["key"], json.loads(first["value"])["op"]) == ('{"id":7}', "c")
    assert (second["op"], json.loads(second["value"])["after"]) == ("d", None)
    server.append(*[orders(scn, *range(100)) for scn in range(3, 13)])
    settings = {"max_length": 200, "envelope": "flat"}
    config = config_of(redis_server, "streams", server.url, redis=settings)
    await Watched(config, sink_of(config)).until_scn(12)
    assert 200 <= redis_server.ask("XLEN", "shop.orders") < 500
    assert json.loads(entries(redis_server, "shop.orders")[-1]["value"])["__scn"] == 12


class Picky(RedisSink):
    """Does not take the rows of some keys."""

    refused = frozenset({1, 2})

    def write(self, batch: SinkBatch) -> None:
        if any(row.key["id"] in self.refused for row in batch.rows()):
            raise RowRefused("not this one")
        super().write(batch)


async def test_rows_that_were_set_aside_are_written_behind_a_failure_of_the_replay(
    scripted: StartServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(number, number) for number in (1, 2, 3)])
    settings = {"refused": "set-aside", "data_dir": tmp_path}
    config = config_of(redis_server, "streams", server.url, **settings)
    assert config.redis is not None
    await Watched(config, Picky(config.redis)).until_scn(3)
    sink = Picky(config.redis)
    sink.refused = frozenset({1})
    outcome = await SinkProcess(config, sink).replay()
    assert (outcome.delivered, outcome.failed) == (1, 1)
    assert [one["scn"] for one in entries(redis_server, "shop.orders")] == ["3", "2"]


def test_keys_are_unambiguous_and_values_are_text() -> None:
    keys = [["a", "b"], ["a\\", "b"], ["a:", "b"], ["a", ":b"], [None, "b"], ["\\N", "b"]]
    found = [hash_key("t", key) for key in keys]
    assert len({one if isinstance(one, bytes) else one.encode() for one in found}) == len(keys)
    assert hash_key("t", ["a:b"]) == "t:a:b"
    assert hash_key("t", [b"\xff"]) == b"t:\xff"
    assert hash_key("t", [None]) != hash_key("t", ["\\N"])
    assert keys_pattern("a[1]*") == "a\\[1\\]\\*:*"
    values: list[Any] = [True, 2**60, 1.5, b"\0", "x", dt.date(2026, 3, 1)]
    assert list(map(text_of, values)) == ["true", str(2**60), "1.5", b"\0", "x", "2026-03-01"]


async def test_targets_that_would_mix_rows_are_refused(
    scripted: StartServer, redis_server: RedisServer
) -> None:
    server = await scripted(window(1, ("c", ORDERS, 7, "new"), ("c", ITEMS, 7, "new")))

    async def run(*routes: tuple[str, str]) -> None:
        route = [{"source": source, "target": target} for source, target in routes]
        config = config_of(redis_server, "hashes", server.url, route=route)
        await Watched(config, sink_of(config)).until_scn(1)

    with pytest.raises(ConfigError, match=r"shop\.orders and shop\.items both go to rows"):
        await run(("*", "rows"))
    with pytest.raises(ConfigError, match="look the same"):
        await run(("shop.orders", "shop"), ("shop.items", "shop:items"))
    known = json.dumps({"source": "shop.orders", "key": ["sku"]})
    redis_server.ask("HSET", "databus:copy:checkpoint", "target:orders", known)
    with pytest.raises(SinkRefused, match=r"have the key \['sku'\].*has the key \['id'\] now"):
        await run(("shop.orders", "orders"))


async def test_a_cluster_needs_one_slot(
    scripted: StartServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    server = await scripted(window(1, ("c", ORDERS, 7, "new")))
    bus = ("--cluster-port", str(free_port()))
    cluster = RedisServer(tmp_path / "cluster", "--cluster-enabled", "yes", *bus)
    try:
        config = config_of(cluster, "hashes", server.url)
        with pytest.raises(SinkUnavailable, match="Hash slot not served"):
            opened(config)
        cluster.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await eventually(lambda: is_whole(cluster), 30, "the cluster has its slots")
        with pytest.raises(ConfigError, match="hash tag"):
            await Watched(config, sink_of(config)).until_scn(1)
        settings = {"checkpoint_key": "{shop}:{name}"}
        route = [{"source": "*", "target": "{{shop}}:{source}"}]
        config = config_of(cluster, "hashes", server.url, redis=settings, route=route)
        await Watched(config, sink_of(config)).until_scn(1)
        assert hash_of(cluster, "{shop}:shop.orders:7")["state"] == "new"
    finally:
        cluster.close()


def is_whole(server: RedisServer) -> bool:
    with server.client() as client:
        found: str = client.cluster("INFO")["cluster_state"]
        return found == "ok"


def test_a_server_that_is_away_and_a_url_of_another_kind_are_named() -> None:
    with pytest.raises(SinkUnavailable, match="connecting"):
        opened(sink_config("http://127.0.0.1:1", sql=None, redis={"url": "redis://127.0.0.1:1"}))
    with pytest.raises(ConfigError, match="redis://"):
        opened(sink_config("http://127.0.0.1:1", sql=None, redis={"url": "http://127.0.0.1:1"}))


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependency, match=r"databus-cdc\[sink-redis\]"):
        opened(sink_config("http://127.0.0.1:1", sql=None, redis={"url": "redis://127.0.0.1:1"}))
