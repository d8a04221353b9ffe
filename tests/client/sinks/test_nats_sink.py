"""The NATS sink with a real server: each change once in the stream, in commit order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import nats
import pytest

from databus.client.sinks import SinkBatch, SinkContext, SinkProcess, SinkRoutes, TroubledSink
from databus.client.sinks.nats.nats_sink import NatsSink
from databus.client.sinks.nats.nats_subjects import default_subject, is_taken, subject_of_target
from databus.client.sinks.nats.stream_writer import Message, StreamWriter
from databus.client.sinks.sink_kinds import sink_of
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position
from databus.common.errors import (
    CheckpointMoved,
    MissingDependency,
    RowRefused,
    SinkRefused,
    SinkUnavailable,
)
from databus.common.sink_config import SinkConfig
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.scripted_server import Fault
from tests.client.shop import ORDERS, orders, window
from tests.client.sinks.sink_runs import Watched, sink_config
from tests.client.sinks.test_every_sink import expected_changes
from tests.support.key_value_servers import NatsServer
from tests.support.key_value_servers import nats_server as nats_server  # a fixture
from tests.support.waiting import eventually
from tests.support.warm_process import warm_process

pytestmark = [pytest.mark.processes]
_numbers = itertools.count(1)
Changes = list[tuple[int, int, str, str]]


def config_of(server: NatsServer, name: str, *relays: str, **settings: Any) -> SinkConfig:
    """The stream, its subjects and the checkpoint have the name of the test."""
    section = {"servers": [server.url], "prefix": name} | settings.pop("nats", {})
    return sink_config(*relays, name=name, sql=None, nats=section, **settings)


def fresh_name() -> str:
    return f"n{next(_numbers)}"


async def messages_in(server: NatsServer, stream: str) -> list[Any]:
    """All messages of a stream."""
    connection = await nats.connect(server.url)
    try:
        jetstream = connection.jetstream()
        with contextlib.suppress(nats.js.errors.NotFoundError):
            state = (await jetstream.stream_info(stream)).state
            return [
                await jetstream.get_msg(stream, number)
                for number in range(max(1, state.first_seq), state.last_seq + 1)
            ]
        return []
    finally:
        await connection.close()


async def changes_in(server: NatsServer, name: str) -> Changes:
    found = []
    for one in await messages_in(server, name):
        headers = one.headers
        source = one.subject.removeprefix(f"{name}.")
        found.append((int(headers["scn"]), int(headers["seq"]), source, headers["op"]))
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_failure_at_any_call_loses_nothing(
    scripted: StartServer, nats_server: NatsServer, after: bool
) -> None:
    server = await scripted(*workload(11, 6)[0])
    for fails_at in range(40):
        config = config_of(nats_server, fresh_name(), server.url, batch_rows=4)
        sink = TroubledSink(sink_of(config), fails_at, after=after)
        await Watched(config, sink, buffer_bytes=400).until_scn(6)
        sink.check()
        assert await changes_in(nats_server, config.name) == expected_changes(11, 6)
        if sink.call_count <= fails_at:
            break
    assert 6 <= fails_at < 39


async def test_each_change_comes_once_and_in_order_under_random_trouble(
    scripted: StartServer, nats_server: NatsServer
) -> None:
    rng = random.Random(3)
    made = workload(3, 60)[0]
    server = await scripted(*made)
    server.faults = [Fault(cut_after_bytes=rng.randrange(1, sum(map(len, made)))) for _ in range(4)]
    config = config_of(nats_server, fresh_name(), server.url, batch_rows=10)
    sink = sink_of(config)
    assert isinstance(sink, NatsSink)
    write, cuts = sink.write, 0

    async def troubled(batch: Any) -> None:
        nonlocal cuts
        await write(batch)
        if rng.random() < 0.2:
            cuts += 1
            sink._connection._transport.close()

    sink.write = troubled  # type: ignore[method-assign]  # trouble beside it
    process = Watched(config, sink)
    await process.until_scn(60)
    assert cuts
    assert process.consumer.counts.rollbacks >= cuts
    assert await changes_in(nats_server, config.name) == expected_changes(3, 60)


@pytest.mark.faults
@pytest.mark.slow
async def test_kill_9_of_sink_and_server_leaves_each_change_once(
    scripted: StartServer, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    kills, every = 6, 20
    made = workload(seed, every * (kills + 1))[0]
    server = await scripted()
    target = NatsServer(tmp_path / "nats")
    config = config_of(target, "copy", server.url, batch_rows=choice.choice([10, 1000]))
    settings = config.model_dump(mode="json", exclude_none=True) | {"relays": [server.url]}
    settings["nats"] |= {"servers": [target.url]}
    try:
        async with warm_process("tests.client.sinks.forked_sinks") as forked:
            for number in range(kills):
                server.append(*made[number * every : (number + 1) * every])
                before = len(await messages_in(target, "copy"))
                pid = await forked.start(settings)
                if number % 2:
                    await eventually(lambda before=before: has_more(target, before), 30, "messages")
                    target.kill9()
                    target.start()
                await asyncio.sleep(choice.uniform(0, 0.05))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                assert await forked.exit_code() == -signal.SIGKILL
                found = await changes_in(target, "copy")
                assert found == expected_changes(seed, len(made))[: len(found)]
        server.append(*made[kills * every :])
        await Watched(config, sink_of(config)).until_scn(len(made))
        assert await changes_in(target, "copy") == expected_changes(seed, len(made))
    finally:
        target.close()


async def has_more(server: NatsServer, count: int) -> bool:
    return len(await messages_in(server, "copy")) > count


async def opened(config: SinkConfig) -> tuple[NatsSink, Checkpoint | None]:
    sink = sink_of(config)
    assert isinstance(sink, NatsSink)
    context = SinkContext(name=config.name, database="shop", routes=SinkRoutes("shop"))
    try:
        return sink, await sink.open(context)
    except BaseException:
        await sink.close()
        raise


def at(scn: int) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", "mariadb:0:shop", Position(scn, 0))


def message(config: SinkConfig, number: int) -> Message:
    headers = {"Nats-Msg-Id": f"shop:{number}:0", "scn": str(number), "seq": "0"}
    return Message(f"{config.name}.rows", b"row", headers | {"sink": config.name, "op": "c"})


async def test_a_second_process_takes_over_and_the_first_one_cannot_write(
    nats_server: NatsServer,
) -> None:
    config = config_of(nats_server, fresh_name())
    first, found = await opened(config)
    assert found is None
    assert first._writer is not None
    await first._writer.publish(message(config, 1))
    await first.commit(at(1))
    second, found = await opened(config)
    assert found == at(1)
    assert second._writer is not None
    await second._writer.publish(message(config, 2))
    await second.commit(at(2))
    await first._writer.publish(message(config, 3))
    with pytest.raises(SinkUnavailable, match="wrong last sequence"):
        await first.commit(at(3))
    await first.rollback()
    with pytest.raises(CheckpointMoved, match="was taken over by"):
        await first.commit(at(3))
    await first.close()
    await second.commit(at(4))
    third, found = await opened(config)
    assert found == at(4)
    with pytest.raises(CheckpointMoved, match="another process"):
        await second.commit(at(5))
    await second.close()
    await third.close()
    assert [one.headers["scn"] for one in await messages_in(nats_server, config.name)] == ["1", "2"]


async def test_messages_that_the_server_remembers_are_not_there_twice(
    nats_server: NatsServer,
) -> None:
    config = config_of(nats_server, fresh_name())
    sink, _ = await opened(config)
    assert isinstance(sink._writer, StreamWriter)
    for number in (1, 2, 3, 2, 4, 1, 5):
        await sink._writer.publish(message(config, number))
    await sink.commit(at(5))
    assert sink._writer.last == 5
    await sink.close()
    found = [one.headers["scn"] for one in await messages_in(nats_server, config.name)]
    assert found == ["1", "2", "3", "4", "5"]


async def test_a_stream_that_lost_messages_or_has_others_is_refused(
    nats_server: NatsServer,
) -> None:
    config = config_of(nats_server, fresh_name())
    sink, _ = await opened(config)
    assert sink._writer is not None
    await sink._writer.publish(message(config, 1))
    await sink.commit(at(1))
    jetstream = sink._connection.jetstream()
    await jetstream.publish(f"{config.name}.rows", b"not of the sink")
    with pytest.raises(SinkRefused, match="from another publisher"):
        await opened(config)
    await jetstream.delete_stream(config.name)
    with pytest.raises(SinkRefused, match="ends at message 0, and the checkpoint covers message 1"):
        await opened(config)
    await sink.close()


async def test_messages_have_subject_headers_and_envelope(
    scripted: StartServer, nats_server: NatsServer
) -> None:
    server = await scripted(window(1, ("c", ORDERS, 7, "new")), window(2, ("d", ORDERS, 7, "new")))
    config = config_of(nats_server, fresh_name(), server.url, nats={"envelope": "debezium"})
    await Watched(config, sink_of(config)).until_scn(2)
    first, second = await messages_in(nats_server, config.name)
    assert first.subject == f"{config.name}.shop.orders"
    assert {name: first.headers[name] for name in ("Nats-Msg-Id", "scn", "seq", "op", "key")} == {
        "Nats-Msg-Id": "shop:1:0", "scn": "1", "seq": "0", "op": "c", "key": '{"id":7}',
    }  # fmt: skip
    assert json.loads(first.data)["after"]["state"] == "new"
    assert json.loads(second.data)["after"] is None


async def test_what_cannot_be_written_stops_the_sink_with_the_reason(
    scripted: StartServer, nats_server: NatsServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1))
    name = fresh_name()

    async def run(nats_section: dict[str, Any], **settings: Any) -> None:
        config = config_of(nats_server, name, server.url, nats=nats_section, **settings)
        await Watched(config, sink_of(config)).until_scn(1)

    with pytest.raises(SinkRefused, match=f"there is no stream {name}"):
        await run({"create": False})
    with pytest.raises(SinkRefused, match=r"and not elsewhere\.shop\.orders; add it"):
        await run({}, route=[{"source": "*", "target": "elsewhere.{source}"}])
    with pytest.raises(SinkRefused, match="subjects overlap"):
        await run({"stream": f"{name}-other"})
    text = "x" * (2 << 20)
    server.append(window(2, ("c", ORDERS, 1, text)))
    config = config_of(nats_server, name, server.url)
    with pytest.raises(RowRefused, match="raise max_payload"):
        await Watched(config, sink_of(config)).until_scn(2)
    server.append(orders(3, 2))
    settings = {"refused": "set-aside", "data_dir": tmp_path}
    config = config_of(nats_server, name, server.url, **settings)
    await Watched(config, sink_of(config)).until_scn(3)
    assert [one[0] for one in await changes_in(nats_server, name)] == [1, 3]


class Picky(NatsSink):
    """Does not take the rows of some keys."""

    refused = frozenset({1, 2})

    async def write(self, batch: SinkBatch) -> None:
        if any(row.key["id"] in self.refused for row in batch.rows()):
            raise RowRefused("not this one")
        await super().write(batch)


async def test_a_replay_writes_older_rows_and_leaves_what_was_not_committed_as_it_is(
    scripted: StartServer, nats_server: NatsServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(number, number) for number in (1, 2, 3)])
    settings = {"refused": "set-aside", "data_dir": tmp_path}
    config = config_of(nats_server, fresh_name(), server.url, **settings)
    assert config.nats is not None
    await Watched(config, Picky(config.nats)).until_scn(3)
    killed, _ = await opened(config)
    assert killed._writer is not None
    lone = message(config, 4)
    lone.headers["Nats-Msg-Id"] = "unknown"  # as after the duplicate window
    await killed._writer.publish(lone)
    await killed._writer.settle()
    await killed.close()
    sink = Picky(config.nats)
    sink.refused = frozenset({1})
    outcome = await SinkProcess(config, sink).replay()
    assert (outcome.delivered, outcome.failed) == (1, 1)
    server.append(orders(4, 4), orders(5, 5))
    await Watched(config, sink_of(config)).until_scn(5)
    found = [one.headers["scn"] for one in await messages_in(nats_server, config.name)]
    assert found == ["3", "4", "2", "5"]


def test_subjects_have_what_the_server_takes() -> None:
    assert default_subject("cdc", "shop.my table.v1") == "cdc.shop.my%20table%2Ev1"
    assert default_subject("cdc", "shop.*>%") == "cdc.shop.%2A%3E%25"
    assert subject_of_target("a.b c") == "a.b%20c"
    with pytest.raises(SinkRefused, match="a token is empty"):
        subject_of_target("a..b")
    taken = [is_taken("a.b.c", [one]) for one in ("a.>", "a.*.c", "a.b.c", ">", "a.*", "a.b.c.>")]
    assert taken == [True, True, True, True, False, False]


async def test_the_next_server_is_used_if_one_is_away(nats_server: NatsServer) -> None:
    servers = ["nats://127.0.0.1:1", nats_server.url]
    config = config_of(nats_server, fresh_name(), nats={"servers": servers})
    sink, _ = await opened(config)
    await sink.close()
    config = config_of(nats_server, fresh_name(), nats={"servers": servers[:1]})
    with pytest.raises(SinkUnavailable, match="connecting"):
        await opened(config)


async def test_without_the_driver_the_extra_is_named(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(MissingDependency, match=r"databus-cdc\[sink-nats\]"):
        await opened(config_of(nats_server, fresh_name()))
