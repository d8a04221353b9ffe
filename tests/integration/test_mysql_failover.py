"""MySQL: a database moves to another server, and both have transactions of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import MissingDependency
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.gtid import gtid_sets
from tests.support import mysql_replicas
from tests.support.busy_writers import TABLE as BUSY
from tests.support.busy_writers import BusyWriters, busy_rows, left_behind
from tests.support.capture import (
    capturing,
    database_config,
    failed_with,
    ring_state,
    stored_resume_state,
    streaming,
)
from tests.support.mysql_replicas import caught_up, follow, local, own_uuid, primary_and_replica
from tests.support.mysql_server import MySQLServer, mysql_launcher
from tests.support.opened_source import opened_scn
from tests.support.replica_writer import Writer, rows_of
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]


def several(servers: tuple[MySQLServer, ...], uuids: str) -> DatabaseConfig:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    url = servers[0].url("shop").replace(f"127.0.0.1:{servers[0].port}", hosts)
    return database_config("shop", url, "shop.*", uuids=uuids)


def resume_scn(fetcher: Fetcher) -> int:
    """Up to where the resume state on disk reaches; 0 while there is none."""
    resume_state = stored_resume_state(fetcher)
    return int(json.loads(resume_state)["scn"]) if resume_state else 0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[MySQLServer, MySQLServer]]:
    try:
        mysql_launcher()
    except MissingDependency as error:
        pytest.skip(error.message)
    with primary_and_replica(tmp_path) as found:
        found[0].execute("CREATE TABLE orders (id INT PRIMARY KEY, v INT)", database="shop")
        yield found


async def test_a_promoted_replica_with_transactions_of_its_own_continues_where_its_primary_ended(
    servers: tuple[MySQLServer, MySQLServer], tmp_path: Path
) -> None:
    primary, replica = servers
    folder = tmp_path / "relay" / "shop"
    writer = Writer(local)
    uuids = [own_uuid(primary), own_uuid(replica)]
    config = several((primary, replica), ",".join(uuids))

    def work() -> None:
        writer.write(primary, 100)
        for number in range(3):
            local(replica, f"INSERT INTO local.notes (v) VALUES ({number})")
        writer.write(primary, 50)
        caught_up(replica, primary)
        primary.kill9()
        mysql_replicas.promote(replica)
        local(replica, "INSERT INTO local.notes (v) VALUES (7)")
        writer.write(replica, 150)

    def equal() -> bool:
        return ring_state(folder).tables.get("shop.orders") == rows_of(replica)

    async with capturing(config, tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(work)
        await eventually(equal, 90, "the ring's state is the promoted server's")
        assert fetcher.status.reconnect_count
        await eventually(lambda: resume_scn(fetcher) >= ring_state(folder).windows[-1][0], 60)
    state = ring_state(folder)
    assert [count for _, _, count in state.windows] == [2] * 300
    assert [txid.partition(":")[0] for _, txid, _ in state.windows] == [
        *[uuids[0]] * 150,
        *[uuids[1]] * 150,
    ]
    scns = [scn for scn, _, _ in state.windows]
    assert scns == sorted(set(scns))
    # The old primary comes back first as what it was and lags behind: it is passed over.
    primary.start()
    async with capturing(config, tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(writer.write, replica, 5)
        await eventually(equal, 90, "the stream continues with the server that has our position")
    # Then it is a replica of the other, and as good a server to read from.
    follow(primary, replica)
    await asyncio.to_thread(caught_up, primary, replica)
    async with capturing(several((primary,), ",".join(uuids)), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(writer.write, replica, 5)
        await eventually(equal, 90, "the old primary's binlog has the same history")
        assert gtid_sets.generation_of(ring_state(folder).windows[-1][0]) == 1
        await eventually(lambda: resume_scn(fetcher) >= ring_state(folder).windows[-1][0], 60)
    # It writes again, though another has taken over: it has no scn in the clock, and is never
    # silent.
    primary.execute("STOP REPLICA")
    await asyncio.to_thread(writer.write, primary, 1)
    before = ring_state(folder)
    async with capturing(several((primary,), ",".join(uuids)), tmp_path / "relay") as fetcher:
        message = await failed_with(fetcher, "source_position_lost")
    assert "order in which the servers have written" in message
    assert ring_state(folder) == before


async def test_a_replica_promoted_without_what_we_have_read_is_refused_by_name(
    servers: tuple[MySQLServer, MySQLServer], tmp_path: Path
) -> None:
    primary, replica = servers
    folder = tmp_path / "relay" / "shop"
    primary.execute(BUSY, database="shop")
    writers = BusyWriters("shop")
    uuids = f"{own_uuid(primary)},{own_uuid(replica)}"
    async with capturing(several((primary,), uuids), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        writers.start(primary)
        newest = await left_behind(writers, primary, replica, "STOP REPLICA IO_THREAD", folder)
        await eventually(lambda: stored_resume_state(fetcher), 60)
    before = ring_state(folder)
    await asyncio.to_thread(mysql_replicas.promote, replica)
    with writers.at_work(replica):
        await asyncio.to_thread(writers.each_commits, 10)
        async with capturing(several((replica,), uuids), tmp_path / "relay") as fetcher:
            message = await failed_with(fetcher, "source_position_lost")
    assert "has only reached" in message
    assert "promoted without the last transactions" in message
    assert newest not in {row["version"] for row in busy_rows(replica, "shop").values()}
    assert ring_state(folder) == before, "nothing of the new primary's follows what it has lost"


async def test_a_replica_with_transactions_of_its_own_is_read_and_dumped_like_its_primary(
    servers: tuple[MySQLServer, MySQLServer], tmp_path: Path
) -> None:
    primary, replica = servers
    writer = Writer(local)
    await asyncio.to_thread(writer.write, primary, 40)
    await asyncio.to_thread(caught_up, replica, primary)
    local(replica, "INSERT INTO local.notes (v) VALUES (7)")
    uuids = f"{own_uuid(primary)},{own_uuid(replica)}"
    source = MySqlSource(several((replica,), uuids))
    start = await opened_scn(source)
    stream = source.stream(start)
    try:
        assert gtid_sets.generation_of(start) == 0
        local(replica, "INSERT INTO local.notes (v) VALUES (8)")
        await asyncio.to_thread(writer.write, primary, 1)
        resolved = start
        async with asyncio.timeout(60 * PATIENCE):
            while resolved < start + 1:
                resolved = (await anext(stream)).resolved
        assert resolved == start + 1
        chunk = await source.read_chunk(ChunkRequest("shop.orders", 1000))
        assert (len(chunk.rows), chunk.snapshot.high) == (41, start + 1)
        # Promoted, and nothing captured has changed: the clock is the new server's all the same.
        await asyncio.to_thread(mysql_replicas.promote, replica)
        chunk = await source.read_chunk(ChunkRequest("shop.orders", 1000))
        high = chunk.snapshot.high
        assert gtid_sets.generation_of(high) == 1
        async with asyncio.timeout(60 * PATIENCE):
            while resolved < high:
                resolved = (await anext(stream)).resolved
        assert resolved == high
    finally:
        await stream.aclose()
        await source.close()
