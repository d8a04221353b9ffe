"""A database moves to another server: what continues without loss, and what is named."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import MariaDBServer, PostgresServer, PrivateServer
from databus.common.config import DatabaseConfig
from tests.support import mariadb_replicas
from tests.support.busy_writers import TABLE as BUSY
from tests.support.busy_writers import BusyWriters, applied, busy_rows, left_behind
from tests.support.capture import (
    capturing,
    database_config,
    failed_with,
    ring_state,
    stored_resume_state,
    streaming,
)
from tests.support.faulty_proxy import FaultyProxy, Proxies
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_replicas import follow, local, primary_and_replica
from tests.support.postgres_standby import (
    caught_up,
    insert,
    inspect_log,
    primary_and_standby,
    promote,
)
from tests.support.relay_process import ring_position
from tests.support.replica_writer import Writer, rows_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

TABLE = "CREATE TABLE orders (id INT PRIMARY KEY, v INT)"


def several(
    *servers: MariaDBServer, proxy: FaultyProxy | None = None, **options: Any
) -> DatabaseConfig:
    """A configuration that names these servers, in this order; ``proxy`` is before the first."""
    ports = [proxy.port if proxy else servers[0].port, *(server.port for server in servers[1:])]
    return database_config("shop", url_of(servers[0], ports), "shop.*", **options)


def url_of(server: PrivateServer, ports: list[int]) -> str:
    """The URL of the server's database, with a host for each of the ports."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return server.url("shop").replace(f"127.0.0.1:{server.port}", hosts)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[MariaDBServer, MariaDBServer]]:
    with primary_and_replica(tmp_path) as found:
        found[0].execute(TABLE, database="shop")
        yield found


async def test_a_promoted_replica_continues_where_its_killed_primary_ended(
    servers: tuple[MariaDBServer, MariaDBServer],
    tmp_path: Path,
    faulty_proxy: Proxies,
) -> None:
    primary, replica = servers
    folder = tmp_path / "relay" / "shop"
    writer, promoted = Writer(local), threading.Event()

    def work() -> None:
        writer.write(primary, 150)
        primary.kill9()
        for number in range(3):
            local(replica, f"INSERT INTO local.notes (v) VALUES ({number})")
        mariadb_replicas.promote(replica)
        promoted.set()
        writer.write(replica, 150)

    def equal() -> bool:
        return ring_state(folder).tables.get("shop.orders") == rows_of(replica)

    config = several(primary, replica)
    async with capturing(config, tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        working = asyncio.create_task(asyncio.to_thread(work))
        await working
        await eventually(equal, 90, "the ring's state is the promoted server's")
        assert fetcher.status.reconnect_count
    state = ring_state(folder)
    assert [count for _, _, count in state.windows] == [2] * 300
    assert {txid.rsplit("-", 1)[0] for _, txid, _ in state.windows} == {"1-1", "1-2"}
    scns = [scn for scn, _, _ in state.windows]
    assert scns == sorted(set(scns))
    # The old primary comes back, first in the list, and does not have what was written since.
    primary.start()
    primary.execute("SET GLOBAL rpl_semi_sync_master_enabled = OFF")
    async with capturing(config, tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        writer.write(replica, 5)
        await eventually(equal, 90, "the stream continues with the server that has our position")
        follow(primary, replica)
        writer.write(replica, 5)
        await eventually(lambda: rows_of(primary) == rows_of(replica), 90, "it has caught up")
    # It is a replica of the other now, and as good a server to read from.
    async with capturing(several(primary), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        writer.write(replica, 5)
        await eventually(equal, 90, "the old primary's binlog is the same history")
    assert len(ring_state(folder).windows) == 315
    await the_writers_never_pause_until_the_kill(
        replica, primary, tmp_path / "relay", await faulty_proxy("127.0.0.1", replica.port)
    )
    assert rows_of(primary) == ring_state(folder).tables["shop.orders"]


async def the_writers_never_pause_until_the_kill(
    primary: MariaDBServer, replica: MariaDBServer, data_dir: Path, proxy: FaultyProxy
) -> None:
    """The relay is behind the replica, and its stream is cut wherever a stalled network had it."""
    folder, writers = data_dir / "shop", BusyWriters("shop")
    primary.execute(BUSY, database="shop")
    config = several(primary, replica, proxy=proxy)

    async with capturing(config, data_dir) as fetcher:
        await streaming(fetcher)
        writers.start(primary)
        await asyncio.to_thread(writers.each_commits, 10)
        await eventually(lambda: applied(folder).transactions, 60)
        proxy.stall()
        before_move = set(applied(folder).transactions)
        await asyncio.to_thread(writers.each_commits, 10)
        await eventually(lambda: replica_position(replica) > ring_position(folder).scn, 60)
        await asyncio.to_thread(writers.kill, primary)
        proxy.cut()
        local(replica, "INSERT INTO local.notes (v) VALUES (7)")
        await asyncio.to_thread(mariadb_replicas.promote, replica)
        with writers.at_work(replica):
            await asyncio.to_thread(writers.each_commits, 10)
        position = replica_position(replica)
        await eventually(lambda: ring_position(folder).scn == position, 90)
        assert fetcher.status.reconnect_count
    found = applied(folder)
    assert found.rows == busy_rows(replica, "shop")
    # The clock counts the captured transactions alone: none of the new primary's is left out.
    assert found.scns == list(range(found.scns[0], position + 1))
    assert found.transactions.keys() <= writers.committed.keys() | writers.unsure.keys()
    assert len(before_move) < len(found.transactions)


def replica_position(server: MariaDBServer) -> int:
    """Up to where the server has the captured transactions."""
    state = str(server.execute("SELECT @@global.gtid_binlog_pos")[0][0])
    gtids = [gtid.split("-") for gtid in state.split(",")]
    return next(int(number) for domain, _, number in gtids if domain == "1")


async def test_a_replica_promoted_without_what_we_have_read_is_refused_by_name(
    servers: tuple[MariaDBServer, MariaDBServer], tmp_path: Path
) -> None:
    primary, replica = servers
    folder = tmp_path / "relay" / "shop"
    primary.execute(BUSY, database="shop")
    writers = BusyWriters("shop")
    async with capturing(several(primary), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        # Before they write: a commit that waits for the replica just then may wait for ever.
        primary.execute("SET GLOBAL rpl_semi_sync_master_enabled = OFF")
        writers.start(primary)
        newest = await left_behind(writers, primary, replica, "STOP SLAVE IO_THREAD", folder)
        await eventually(lambda: stored_resume_state(fetcher), 60)
    before = ring_state(folder)
    await asyncio.to_thread(mariadb_replicas.promote, replica)
    async with capturing(several(primary, replica), tmp_path / "relay") as fetcher:
        message = await failed_with(fetcher, "source_unavailable")
        assert "only reached" in message
        with writers.at_work(replica):
            message = await failed_with(fetcher, "source_position_lost")
            await asyncio.to_thread(writers.each_commits, 1)
    assert "history is not the one that the relay has read" in message
    assert "server_id 1" in message
    assert "server_id 2" in message
    assert newest not in {row["version"] for row in busy_rows(replica, "shop").values()}
    assert ring_state(folder) == before, "nothing of the new primary's follows what it has lost"


@pytest.mark.parametrize("product", ["mariadb", "mysql"])
async def test_a_server_that_was_reset_is_refused_even_after_it_passed_our_position(
    product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    database.execute(TABLE)
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO orders VALUES (1, 1)")
        await eventually(lambda: ring_state(tmp_path / "shop").letters == "c", 60)
        assert fetcher.intake is not None
        reached = fetcher.intake.complete.scn
        await eventually(lambda: f'"scn": {reached}' in stored_resume_state(fetcher), 60)
    reset = "RESET MASTER" if product == "mariadb" else "RESET BINARY LOGS AND GTIDS"
    database.execute(reset)
    # Of another second: MariaDB's binlog has no finer times, and the server is the same.
    await eventually(lambda: database.execute("SELECT SLEEP(1)") == [(0,)], 60)
    # The server is shared: by now its numbers may be in the thousands.
    with contextlib.closing(database.server.connect(database.name)) as connection:
        cursor = connection.cursor()
        for number in range(2, reached + 4):
            cursor.execute(f"INSERT INTO orders VALUES ({number}, 1)")
    async with capturing(config, tmp_path) as fetcher:
        message = await failed_with(fetcher, "source_position_lost")
    assert "It was reset, is another server" in message
    assert ring_state(tmp_path / "shop").letters == "c"


# -- PostgreSQL


def postgres_config(*servers: PostgresServer, **options: Any) -> DatabaseConfig:
    url = url_of(servers[0], [server.port for server in servers])
    return database_config("shop", url, "public.*", **options)


@pytest.fixture
def standby_pair(tmp_path: Path) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    with primary_and_standby(tmp_path) as found:
        found[0].execute(TABLE, database="shop")
        yield found


@pytest.mark.postgres
async def test_a_standby_promoted_before_its_first_write_is_continued_with(
    standby_pair: tuple[PostgresServer, PostgresServer], tmp_path: Path
) -> None:
    primary, standby = standby_pair
    inspect_log(primary)
    folder = tmp_path / "relay" / "shop"

    def count() -> int:
        return len(ring_state(folder).windows)

    async with capturing(postgres_config(primary, standby), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        clock = fetcher.intake and fetcher.intake.ring.clock
        await asyncio.to_thread(insert, primary, 0, 20)
        await eventually(lambda: count() == 20, 90)
        await asyncio.to_thread(caught_up, primary, standby)
        primary.kill9()
        # A standby has no slots to read from: it is not taken for the primary.
        await eventually(lambda: "is a standby" in str(fetcher.status.error), 90)
        await asyncio.to_thread(promote, standby)
        await eventually(
            lambda: bool(standby.execute("SELECT 1 FROM pg_replication_slots WHERE active")), 90
        )
        await asyncio.to_thread(insert, standby, 20, 20)
        await eventually(lambda: count() == 40, 90)
        assert fetcher.intake is not None
        assert fetcher.intake.ring.clock == clock
        await eventually(lambda: '"timeline": 2' in stored_resume_state(fetcher), 60)
    state = ring_state(folder)
    assert sorted(key[0] for key in state.tables["public.orders"]) == list(range(40))
    # Another restart, with our position on the new timeline.
    async with capturing(postgres_config(primary, standby), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(insert, standby, 40, 1)
        await eventually(lambda: count() == 41, 90)


@pytest.mark.postgres
async def test_a_standby_promoted_without_what_we_have_read_is_refused_by_name(
    standby_pair: tuple[PostgresServer, PostgresServer], tmp_path: Path
) -> None:
    primary, standby = standby_pair
    folder = tmp_path / "relay" / "shop"
    async with capturing(postgres_config(primary), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(insert, primary, 0, 5)
        await asyncio.to_thread(caught_up, primary, standby)
        standby.stop()
        await asyncio.to_thread(insert, primary, 5, 5)
        await eventually(lambda: len(ring_state(folder).windows) == 10, 90)
        await eventually(lambda: stored_resume_state(fetcher), 60)
    before = ring_state(folder)
    primary.kill9()
    standby.start()
    await asyncio.to_thread(promote, standby)
    # What would hide it: a slot that begins before our position, in another history.
    await asyncio.to_thread(
        standby.execute,
        "SELECT pg_create_logical_replication_slot('databus_shop', 'pgoutput')",
        database="shop",
    )
    await asyncio.to_thread(insert, standby, 5, 60)
    async with capturing(postgres_config(primary, standby), tmp_path / "relay") as fetcher:
        message = await failed_with(fetcher, "source_position_lost")
    assert "history is not the one that the relay has read" in message
    assert "timeline 1" in message
    assert ring_state(folder) == before


@pytest.mark.postgres
async def test_a_dropped_slot_is_recreated_only_if_nothing_was_committed_meanwhile(
    tmp_path: Path,
) -> None:
    with PostgresServer(tmp_path / "server", options=["autovacuum=off"]) as server:
        server.create_database("shop")
        inspect_log(server)
        server.execute(TABLE, database="shop")
        config, folder = postgres_config(server), tmp_path / "relay" / "shop"
        for step in range(2):
            async with capturing(config, tmp_path / "relay") as fetcher:
                await streaming(fetcher)
                await asyncio.to_thread(insert, server, step, 1)
                await eventually(lambda last=step: len(ring_state(folder).windows) > last, 90)
            await eventually(
                lambda: server.execute("SELECT active FROM pg_replication_slots") == [(False,)], 60
            )
            server.execute("SELECT pg_drop_replication_slot('databus_shop')")
        await asyncio.to_thread(insert, server, 2, 3)
        async with capturing(config, tmp_path / "relay") as fetcher:
            message = await failed_with(fetcher, "source_position_lost")
        assert "3 commits are missed" in message
        assert server.execute("SELECT count(*) FROM pg_replication_slots") == [(0,)]
