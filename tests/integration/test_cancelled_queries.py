"""A query that no task waits for any more, while the server still works on it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import SourceUnavailable
from databus.relay.dumps.dump_records import DumpState, new_dump
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.configured_keys import NO_KEYS
from databus.relay.sources.contract import Chunk, ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.chunks import mysql_chunks
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings
from databus.relay.sources.postgres.chunks.chunk_session import ChunkSession, SessionLoop
from databus.relay.sources.postgres.protocol.postgres_settings import (
    read_settings as postgres_settings,
)
from databus.relay.sources.sqlite.sqlite_chunks import SqliteChunkReader
from tests.integration.test_suspended_tables import dump
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config
from tests.support.opened_source import open_source
from tests.support.waiting import eventually, eventually_sync

SLOW_S = 90
"""Far longer than anything here takes, and less than a test may."""
ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT max(n) FROM c"


@pytest.fixture(params=["mariadb", "mysql", "mysql_tls"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    kind = request.param.partition("_")[0]
    found: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    return found


@pytest.fixture
def url(request: pytest.FixtureRequest, database: FreshDatabase) -> str:
    encrypted = request.node.callspec.params["database"].endswith("_tls")
    return database.url + ("?ssl-mode=required" if encrypted else "")


def running_queries(database: FreshDatabase) -> list[tuple[object, ...]]:
    """The queries that the server runs for the test."""
    return database.execute(
        "SELECT ID FROM information_schema.PROCESSLIST "
        f"WHERE INFO LIKE '%SLEEP%{database.name}%' AND ID <> CONNECTION_ID()"
    )


def end(database: FreshDatabase) -> None:
    for (number,) in running_queries(database):
        database.execute(f"KILL {number}")
    eventually_sync(lambda: not running_queries(database))


def test_a_close_ends_the_wait_of_another_thread(database: FreshDatabase, url: str) -> None:
    connection = MySqlConnection(read_settings(mariadb_config(url, f"{database.name}.*")))
    ended: list[object] = []

    def ask() -> None:
        try:
            ended.append(connection.query(f"SELECT SLEEP({SLOW_S}) AS {database.name}"))
        except SourceUnavailable as error:
            ended.append(error)

    query_task = threading.Thread(target=ask)
    query_task.start()
    try:
        eventually_sync(lambda: running_queries(database))
        connection.close()
        query_task.join(SLOW_S)
        assert [type(outcome) for outcome in ended] == [SourceUnavailable]
        assert running_queries(database), (
            "neither the close nor the thread has waited for the answer"
        )
    finally:
        end(database)
        query_task.join()


async def test_a_chunk_that_is_given_up_ends_at_the_server(
    database: FreshDatabase, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It delays nothing here, and the server does not continue with a query that no client
    reads."""
    database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    database.execute("INSERT INTO t VALUES (1)")
    source = await open_source(MySqlSource(mariadb_config(url, f"{database.name}.*")))
    read_chunk = mysql_chunks.read_chunk

    def slow(connection: MySqlConnection, *rest: Any) -> Chunk:
        connection.query(f"SELECT SLEEP({SLOW_S}) AS {database.name}")
        return read_chunk(connection, *rest)

    try:
        monkeypatch.setattr(mysql_chunks, "read_chunk", slow)
        reading = asyncio.ensure_future(source.read_chunk(ChunkRequest(f"{database.name}.t", 10)))
        await eventually(lambda: asyncio.to_thread(running_queries, database))
        reading.cancel()
        await asyncio.wait([reading], timeout=SLOW_S / 3)
        assert reading.cancelled(), "it was waited for"
        monkeypatch.undo()
        chunk = await source.read_chunk(ChunkRequest(f"{database.name}.t", 10))
        assert len(chunk.rows) == 1

        async def ended() -> bool:
            return not await asyncio.to_thread(running_queries, database)

        await eventually(ended, SLOW_S / 9, "the query was ended at the server")
    finally:
        await asyncio.to_thread(end, database)
        await source.close()


async def test_an_abandoned_query_ends_at_postgresql(
    postgres_database: FreshDatabase,
) -> None:
    """A connection alone that is closed leaves it running."""
    running = (
        "SELECT pid FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' "
        "AND datname = current_database() AND state = 'active'"
    )
    config = DatabaseConfig(name="d", url=SourceUrl(postgres_database.url))
    loop, session = SessionLoop(), ChunkSession(postgres_settings(config))
    await loop.run(session.begin("SELECT 1"))
    try:
        query_task = asyncio.ensure_future(loop.run(session.query(f"SELECT pg_sleep({SLOW_S})")))
        await eventually(lambda: asyncio.to_thread(postgres_database.execute, running))
        query_task.cancel()
        loop.drop(session)

        async def ended() -> bool:
            return not await asyncio.to_thread(postgres_database.execute, running)

        await eventually(ended, SLOW_S / 9, "the query was ended at the server")
    finally:
        loop.close()


async def test_a_chunk_of_an_sqlite_file_is_interrupted(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        db.execute("INSERT INTO t VALUES (1)")
        db.commit()
    began, outcomes = threading.Event(), list[BaseException]()
    reader = SqliteChunkReader(str(tmp_path / "db"), NO_KEYS)
    connection = reader._db

    def ask() -> None:
        began.set()
        try:
            connection.execute(ENDLESS)
        except sqlite3.OperationalError as error:
            outcomes.append(error)

    query_task = threading.Thread(target=ask, daemon=True)
    query_task.start()
    began.wait(SLOW_S)

    def interrupted() -> bool:
        reader.interrupt()
        return bool(outcomes)

    await eventually(interrupted)
    query_task.join(SLOW_S)
    assert "interrupted" in str(outcomes[0])
    reader.close()


@pytest.mark.parametrize("question", ["largest_key", "read_chunk"])
async def test_a_dump_that_is_cancelled_ends_the_query_that_it_waits_for(
    database: FreshDatabase,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    question: str,
) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    database.execute("INSERT INTO t VALUES (1)")
    ask = getattr(mysql_chunks, question)

    def slow(connection: MySqlConnection, *rest: Any) -> Any:
        connection.query(f"SELECT SLEEP({SLOW_S}) AS {database.name}")
        return ask(connection, *rest)

    async with capturing(database_config("shop", url, f"{database.name}.*"), tmp_path) as fetcher:
        await streaming(fetcher)
        monkeypatch.setattr(mysql_chunks, question, slow)
        try:
            await cancelled_while(fetcher, lambda: asyncio.to_thread(running_queries, database))

            async def ended() -> bool:
                return not await asyncio.to_thread(running_queries, database)

            await eventually(ended, SLOW_S / 9, "the query was ended at the server")
        finally:
            await asyncio.to_thread(end, database)
        monkeypatch.undo()
        await dump(tmp_path / "shop", f"{database.name}.t")


@pytest.mark.parametrize("question", ["largest_key", "read"])
async def test_a_dump_of_an_sqlite_file_that_is_cancelled_ends_its_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        db.execute("INSERT INTO t VALUES (1)")
        db.commit()
    began, outcomes = threading.Event(), list[BaseException]()

    def endless(reader: SqliteChunkReader, *_: Any) -> None:
        began.set()
        try:
            reader._db.execute(ENDLESS)
        except sqlite3.OperationalError as error:
            outcomes.append(error)
            raise

    async with capturing(
        database_config("shop", f"sqlite:///{tmp_path / 'db'}", "main.*"), tmp_path
    ) as fetcher:
        await streaming(fetcher)
        monkeypatch.setattr(SqliteChunkReader, question, endless)
        await cancelled_while(fetcher, began.is_set)
        await eventually(lambda: bool(outcomes), SLOW_S / 9, "it was interrupted")
        assert "interrupted" in str(outcomes[0])
        monkeypatch.undo()
        await dump(tmp_path / "shop", "main.t")


async def cancelled_while(fetcher: Fetcher, is_asking: Callable[[], Any]) -> None:
    """Start a dump of everything, and cancel it while that is true."""
    await fetcher.start_dump(new_dump({"sources": ["*"]}))
    (running,) = fetcher.book
    await eventually(is_asking)
    running.state = DumpState.CANCELLED
    await fetcher.dumps_changed()
