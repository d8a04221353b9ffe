"""Distributed transactions: what is prepared shows only once it is committed, in commit order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pymysql
import pytest

from databus.cli.demo.private_servers import PostgresServer
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.gtid.mysql_lineage import MySqlResumeState
from tests.integration.test_statement_effects import suspensions
from tests.integration.test_suspended_tables import dump, in_database, rows_of
from tests.support.capture import (
    capturing,
    database_config,
    ring_state,
    stored_resume_state,
    streaming,
)
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, read_to_end, source_of
from tests.support.opened_source import open_source
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def database(database: FreshDatabase) -> FreshDatabase:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(2000))")
    return database


@pytest.fixture
async def source(database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    opened = await open_source(source_of(database))
    yield opened
    await opened.close()


def prepare(database: FreshDatabase, name: str, *statements: str) -> None:
    """A transaction that is prepared, and whose session is gone."""
    xid = f"'{database.name}-{name}','b',7"
    with database.session() as cursor:
        for statement in (f"XA START {xid}", *statements, f"XA END {xid}", f"XA PREPARE {xid}"):
            cursor.execute(statement)


def complete(database: FreshDatabase, word: str, name: str) -> None:
    database.execute(f"XA {word} '{database.name}-{name}','b',7")


async def test_prepared_rows_come_with_their_commit_and_never_after_a_rollback(
    database: FreshDatabase, source: MySqlSource
) -> None:
    start = await source.first_scn()
    prepare(database, "one", "INSERT INTO t VALUES (1, 'one'), (2, 'one')")
    prepare(database, "never", "INSERT INTO t VALUES (3, 'never')")
    database.execute("INSERT INTO t VALUES (4, 'between')")
    prepare(database, "empty", "SELECT 1")
    assert [e.key["id"] for e in (await read_to_end(source, start)).events()] == [4]
    prepare(database, "two", "UPDATE t SET v = 'two' WHERE id = 4")
    complete(database, "COMMIT", "two")
    complete(database, "ROLLBACK", "never")
    complete(database, "COMMIT", "one")
    with suppress(pymysql.err.OperationalError):  # MariaDB has rolled it back already
        complete(database, "COMMIT", "empty")
    with database.session() as cursor:
        for statement in ("START 'p'", "END 'p'", "COMMIT 'p' ONE PHASE"):
            if statement.startswith("END"):
                cursor.execute("INSERT INTO t VALUES (5, 'one phase')")
            cursor.execute(f"XA {statement}")
    streamed = await read_to_end(source, start)
    windows = [window for window in streamed.windows() if window[-1].event_count]
    assert [window[-1].event_count for window in windows] == [1, 1, 2, 1]
    assert [frame.seq for frame in windows[2]] == [0, 1, 2]
    assert len({frame.commit_us for frame in windows[2]}) == 1
    assert [(e.op.name, e.key["id"], (e.after or {})["v"]) for e in streamed.events()] == [
        ("INSERT", 4, "between"),
        ("UPDATE", 4, "two"),
        ("INSERT", 1, "one"),
        ("INSERT", 2, "one"),
        ("INSERT", 5, "one phase"),
    ]
    plain = await open_source(MySqlSource(source_config(database), use_kernels=False))
    assert bytes((await read_to_end(plain, start)).data) == bytes(streamed.data)
    await plain.close()
    for scn in {event.scn for event in streamed.events()}:
        source.restore(MySqlResumeState(scn, prepared=start + 1).encode(), None, scn)
        rest = await read_to_end(source, scn)
        assert [e.scn for e in rest.events()] == [e.scn for e in streamed.events() if e.scn > scn]


def source_config(database: FreshDatabase) -> Any:
    return mariadb_config(database.url, f"{database.name}.*")


async def test_a_large_prepared_transaction_waits_in_a_file_and_comes_in_parts(
    database: FreshDatabase, source: MySqlSource
) -> None:
    start = await source.first_scn()
    rows = [f"({number}, '{'x' * 1900}')" for number in range(8000)]
    prepare(
        database,
        "large",
        *(f"INSERT INTO t VALUES {','.join(rows[at : at + 1000])}" for at in range(0, 8000, 1000)),
    )
    before = await read_to_end(source, start)
    assert not before.events()
    complete(database, "COMMIT", "large")
    streamed = await read_to_end(source, start)
    assert streamed.windows()[-1][-1].event_count == 8000
    assert [e.key["id"] for e in streamed.events()] == list(range(8000))
    assert streamed.largest_batch_bytes < 4 << 20


@asynccontextmanager
async def relaying(database: FreshDatabase, folder: Path) -> AsyncIterator[Fetcher]:
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, folder) as fetcher:
        await streaming(fetcher)
        yield fetcher


async def test_a_relay_that_restarts_between_prepare_and_commit_reads_the_rows_again(
    database: FreshDatabase, tmp_path: Path
) -> None:
    folder = tmp_path / "shop"
    prepare(database, "before", "INSERT INTO t VALUES (1, 'before the relay')")

    async with relaying(database, tmp_path) as fetcher:
        database.execute("INSERT INTO t VALUES (2, 'plain')")
        await eventually(lambda: ring_state(folder).letters == "c", 60)
        assert fetcher.intake is not None
        start = fetcher.intake.complete
        prepare(database, "across", "INSERT INTO t VALUES (3, 'across')")
        prepare(database, "gone", "INSERT INTO t VALUES (4, 'gone')")
        database.execute("FLUSH BINARY LOGS")
        database.execute("INSERT INTO t VALUES (5, 'plain')")
        await eventually(lambda: ring_state(folder).letters == "cc", 60)
        await eventually(
            lambda: '"prepared": ' in stored_resume_state(fetcher).replace('d": null', ""), 60
        )
    async with relaying(database, tmp_path) as fetcher:
        complete(database, "COMMIT", "before")
        complete(database, "ROLLBACK", "gone")
        await eventually(lambda: ring_state(folder).letters == "ccc", 60)
    async with relaying(database, tmp_path) as fetcher:
        complete(database, "COMMIT", "across")
        await eventually(lambda: ring_state(folder).letters == "cccc", 60)
        await eventually(lambda: '"prepared": null' in stored_resume_state(fetcher), 60)
    state = ring_state(folder)
    rows = state.tables[f"{database.name}.t"]
    assert [(key[0], row["v"]) for key, row in rows.items()] == [
        (2, "plain"),
        (5, "plain"),
        (1, "before the relay"),
        (3, "across"),
    ]
    assert state.last > start


async def test_a_commit_whose_rows_are_gone_suspends_the_captured_tables(
    database: FreshDatabase, source: MySqlSource
) -> None:
    prepare(database, "lost", "INSERT INTO t VALUES (1, 'lost')")
    database.execute("FLUSH BINARY LOGS")
    start = await source.first_scn()
    complete(database, "COMMIT", "lost")
    database.execute("INSERT INTO t VALUES (2, 'later')")
    # Nothing is remembered, and nothing is prepared any more: its rows are not looked for.
    assert (await read_to_end(source, start)).events() == []
    ((name, suspension),) = source.suspended().items()
    assert name == f"{database.name}.t"
    assert "prepared before the binlog" in suspension.why


# -- PostgreSQL


@pytest.mark.postgres
async def test_prepared_transactions_of_postgresql_come_with_commit_prepared(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "relay" / "shop"
    options = ["max_prepared_transactions=10"]
    with PostgresServer(tmp_path / "server", options=options) as server:
        server.create_database("shop")
        server.execute("CREATE TABLE t (id INT PRIMARY KEY, v TEXT)", database="shop")
        config = database_config("shop", server.url("shop"), "public.*")
        database = FreshDatabase(server, "shop")

        def prepared(name: str, *statements: str) -> None:
            with server.connect("shop") as connection:
                for statement in ("BEGIN", *statements, f"PREPARE TRANSACTION '{name}'"):
                    connection.execute(statement)

        def letters() -> str:
            return ring_state(folder).letters

        async with capturing(config, tmp_path / "relay") as fetcher:
            await streaming(fetcher)
            prepared("never", "INSERT INTO t VALUES (1, 'never')")
            prepared(
                "copied",
                "INSERT INTO t SELECT i, 'many at one position' FROM generate_series(100, 3099) i",
                "SAVEPOINT s",
                "INSERT INTO t VALUES (2, 'rolled back')",
                "ROLLBACK TO SAVEPOINT s",
                "INSERT INTO t VALUES (3, 'after it')",
            )
            prepared("early", "INSERT INTO t VALUES (4, 'early')")
            database.execute("INSERT INTO t VALUES (5, 'plain')")
            await eventually(lambda: letters() == "c", 60)
            database.execute("COMMIT PREPARED 'early'")
            await eventually(lambda: letters() == "cc", 60)
        server.kill9()
        server.start()
        async with capturing(config, tmp_path / "relay") as fetcher:
            await streaming(fetcher)
            database.execute("ROLLBACK PREPARED 'never'")
            database.execute("COMMIT PREPARED 'copied'")
            await eventually(lambda: len(letters()) == 3003, 60)
        state = ring_state(folder)
        assert [count for _, _, count in state.windows] == [1, 1, 3001]
        assert all(txid.isdigit() for _, txid, _ in state.windows)
        assert list(state.tables["public.t"]) == [
            (5,),
            (4,),
            *((n,) for n in range(100, 3100)),
            (3,),
        ]


async def test_rows_that_were_prepared_while_their_table_was_suspended_are_not_lost(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """The table is read before the commit, which no dump shows then."""
    for table in ("calm", "fence"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v VARCHAR(2000))")
    name, folder = f"{database.name}.t", tmp_path / "shop"
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        with database.session() as cursor:
            cursor.execute("SET binlog_format = STATEMENT")
            cursor.execute("INSERT INTO t VALUES (1, 'one')")
        prepare(database, "hidden", "INSERT INTO t VALUES (2, 'two')")
        await eventually(lambda: name in suspensions(fetcher), 60, "it is suspended")
        await dump(folder, name)
        await eventually(lambda: name not in suspensions(fetcher), 60, "it is followed again")
        complete(database, "COMMIT", "hidden")
        database.execute("INSERT INTO fence VALUES (1, '')")
        fence = f"{database.name}.fence"
        await eventually(lambda: (1,) in rows_of(folder, fence), 60, "the fence has come")
        await eventually(lambda: name in suspensions(fetcher), 30, "the commit suspends it")
        assert set(suspensions(fetcher)) == {name}
        await dump(folder, name)
        assert rows_of(folder, name) == in_database(database, "t")
