"""The private servers and the tools of tests/support, on the real thing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import MariaDBServer, PostgresServer, PrivateServer, free_port
from databus.common.errors import MissingDependency, SourceUnavailable
from tests.support.faulty_proxy import Proxies
from tests.support.fixtures import FreshDatabase
from tests.support.mysql_server import MySQLServer
from tests.support.processes import wait_process_gone
from tests.support.server_templates import copied_data_folders
from tests.support.waiting import eventually, eventually_sync


@pytest.fixture(params=[MariaDBServer, PostgresServer])
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrivateServer]:
    with request.param(tmp_path / "its own folder") as server:
        yield server


def test_a_committed_row_survives_kill_9_and_restart_on_the_same_port(
    own_server: PrivateServer,
) -> None:
    port = own_server.port
    own_server.create_database("shop")
    own_server.execute("CREATE TABLE t (id INT PRIMARY KEY)", database="shop")
    own_server.execute("INSERT INTO t VALUES (%s)", [7], database="shop")
    own_server.kill9()
    assert not own_server.running
    own_server.start()
    assert own_server.port == port
    assert own_server.execute("SELECT id FROM t", database="shop") == [(7,)]


def test_mariadb_is_set_up_for_capture(mariadb: MariaDBServer) -> None:
    wanted = {
        "log_bin": "ON",
        "binlog_format": "ROW",
        "binlog_row_image": "FULL",
        "binlog_row_metadata": "FULL",
        "gtid_strict_mode": "ON",
        "gtid_domain_id": "1",
    }
    names = ",".join(f"'{name}'" for name in wanted)
    rows = mariadb.execute(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
    assert dict(rows) == wanted


def test_making_the_server_leaves_nothing_in_the_mariadb_binlog(tmp_path: Path) -> None:
    with MariaDBServer(tmp_path / "own", domain_id=9) as server:
        assert server.execute("SELECT @@gtid_binlog_pos") == [("",)]
        server.create_database("shop")
        assert server.execute("SELECT @@gtid_binlog_pos") == [("9-1-1",)]


def test_postgres_is_set_up_for_capture(postgres: PostgresServer) -> None:
    assert postgres.execute("SHOW wal_level") == [("logical",)]
    assert postgres.execute("SHOW server_encoding") == [("UTF8",)]


def test_a_postgres_database_with_a_replication_slot_can_be_dropped(
    postgres: PostgresServer,
) -> None:
    postgres.create_database("slotted")
    postgres.execute(
        "SELECT pg_create_logical_replication_slot('left_over', 'pgoutput')", database="slotted"
    )
    postgres.drop_database("slotted")
    assert postgres.execute("SELECT 1 FROM pg_database WHERE datname = 'slotted'") == []


def test_each_test_gets_an_empty_database_of_its_own(
    mariadb_database: FreshDatabase, postgres_database: FreshDatabase
) -> None:
    for database in (mariadb_database, postgres_database):
        database.execute("CREATE TABLE t (id INT PRIMARY KEY, name TEXT)")
        database.transaction("INSERT INTO t VALUES (1, 'é')", "INSERT INTO t VALUES (2, NULL)")
        assert database.execute("SELECT * FROM t ORDER BY id") == [(1, "é"), (2, None)]
        assert database.url.startswith(("mariadb://", "postgresql://"))


@pytest.mark.parametrize("product", [MariaDBServer, MySQLServer])
def test_a_second_server_of_a_program_is_a_copy_that_has_nothing_of_the_first(
    product: type[MariaDBServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue(product.product)  # skips where there is none
    ran: list[list[str]] = []
    run = PrivateServer._run

    def recorded(server: PrivateServer, command: list[str]) -> None:
        ran.append(command)
        run(server, command)

    monkeypatch.setattr(PrivateServer, "_run", recorded)
    with copied_data_folders(tmp_path / "templates"), product(tmp_path / "one") as first:
        first.create_database("shop")
        ran.clear()
        with product(tmp_path / "two") as second:
            assert ran == [], "no program created a data folder"
            assert second.execute("SHOW DATABASES LIKE 'shop'") == []
            if product is MySQLServer:
                (one,), (two,) = (s.execute("SELECT @@server_uuid")[0] for s in (first, second))
                assert one != two


def test_a_missing_binary_is_reported_with_its_debian_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MariaDBServer, "_folders", lambda self: [tmp_path])
    with pytest.raises(MissingDependency, match="apt-get install mariadb-server-core"):
        MariaDBServer(tmp_path / "own").start()


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = PostgresServer(tmp_path / "own", options=["no_such_setting=1"])
    try:
        with pytest.raises(SourceUnavailable, match="no_such_setting"):
            server.start()
    finally:
        server.remove()


def test_a_server_that_is_removed_leaves_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    with MariaDBServer(tmp_path / ("deep" * 25)) as server:
        ((socket_path,),) = server.execute("SELECT @@socket")
        assert Path(str(socket_path)).exists()
    assert not Path(str(socket_path)).exists()
    with PostgresServer(tmp_path / "own") as server:
        assert server.process is not None
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()
        shared = {line.split()[-1] for line in mapped if "/dev/shm/" in line}
        assert shared and all(Path(name).exists() for name in shared)
    assert not [name for name in shared if Path(name).exists()]
    assert not server.directory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes to another account")
def test_under_root_postgres_runs_as_its_own_account_outside_closed_folders(
    postgres: PostgresServer,
) -> None:
    assert postgres.account is not None
    assert postgres.process is not None
    assert Path(f"/proc/{postgres.process.pid}").stat().st_uid != 0


def test_a_server_dies_with_the_process_that_started_it_even_by_kill_9(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from databus.cli.demo.private_servers import MariaDBServer\n"
        "server = MariaDBServer(pathlib.Path(sys.argv[1])).start()\n"
        "print(server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "own")], stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == -9
    wait_process_gone(int(done.stdout), 10.0)


def test_waiting_fails_after_its_deadline_and_names_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.15 s: the moon \(last value: 0\)"):
        eventually_sync(lambda: 0, 0.05, "the moon")


async def test_waiting_returns_the_first_true_value_of_an_async_predicate() -> None:
    values = iter([0, 0, 5])

    async def next_value() -> int:
        return next(values)

    assert await eventually(next_value, 5.0, poll_s=0) == 5


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(1000):
        writer.write(block)
        await writer.drain()
    writer.close()


async def test_the_proxy_passes_stalls_and_cuts(faulty_proxy: Proxies) -> None:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as server:
        proxy = await faulty_proxy("127.0.0.1", server.sockets[0].getsockname()[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"

        proxy.stall()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(3), 0.1)
        proxy.resume()
        assert await reader.readexactly(3) == b"two"

        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()
        await eventually(lambda: proxy.open_count == 0, 5.0, "the proxy is empty")


async def test_the_proxy_cuts_after_so_many_bytes_of_an_answer(faulty_proxy: Proxies) -> None:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as server:
        proxy = await faulty_proxy("127.0.0.1", server.sockets[0].getsockname()[1])
        proxy.cut_after(4)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"abcdefgh")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(5)
        assert proxy.passed_bytes == 4
        writer.close()


def test_free_ports_are_free_and_differ() -> None:
    assert len({free_port() for _ in range(20)}) > 1
