"""A question that nobody waits for any more, to a server that still thinks about it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from databus.common.errors import SourceUnavailable
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.connection import Connection
from databus.relay.sources.mysql.settings import read_settings
from databus.relay.sources.source import ChunkRequest
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config
from tests.support.waiting import eventually, eventually_sync

SLOW_S = 30
"""Far longer than anything here takes, and less than a test may."""


@pytest.fixture(params=["mariadb", "mysql", "mysql_tls"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    kind = request.param.partition("_")[0]
    found: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    return found


@pytest.fixture
def url(request: pytest.FixtureRequest, database: FreshDatabase) -> str:
    encrypted = request.node.callspec.params["database"].endswith("_tls")
    return database.url + ("?ssl-mode=required" if encrypted else "")


def thinking(database: FreshDatabase) -> list[tuple[object, ...]]:
    """The queries that the server is busy with for us."""
    return database.execute(
        "SELECT ID FROM information_schema.PROCESSLIST "
        f"WHERE INFO LIKE '%SLEEP%{database.name}%' AND ID <> CONNECTION_ID()"
    )


def end(database: FreshDatabase) -> None:
    for (number,) in thinking(database):
        database.execute(f"KILL {number}")
    eventually_sync(lambda: not thinking(database))


def test_a_close_ends_the_wait_of_another_thread(database: FreshDatabase, url: str) -> None:
    connection = Connection(read_settings(mariadb_config(url, f"{database.name}.*")))
    ended: list[object] = []

    def ask() -> None:
        try:
            ended.append(connection.query(f"SELECT SLEEP({SLOW_S}) AS {database.name}"))
        except SourceUnavailable as error:
            ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        eventually_sync(lambda: thinking(database))
        connection.close()
        asking.join(SLOW_S)
        assert [type(outcome) for outcome in ended] == [SourceUnavailable]
        assert thinking(database), "neither the close nor the thread has waited for the answer"
    finally:
        end(database)
        asking.join()


async def test_a_chunk_that_is_given_up_holds_up_nothing(database: FreshDatabase, url: str) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    database.execute("INSERT INTO t VALUES (1)")
    source = MySqlSource(mariadb_config(url, f"{database.name}.*"))
    await source.open()
    slow = f"SLEEP({SLOW_S}) = 0 OR '{database.name}' = ''"
    request = ChunkRequest(f"{database.name}.t", 10, where=slow)
    try:
        reading = asyncio.ensure_future(source.read_chunk(request))
        await eventually(lambda: asyncio.to_thread(thinking, database))
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        assert await asyncio.to_thread(thinking, database), "it was waited for"
        chunk = await source.read_chunk(ChunkRequest(f"{database.name}.t", 10))
        assert len(chunk.rows) == 1
    finally:
        await asyncio.to_thread(end, database)
        await source.close()
