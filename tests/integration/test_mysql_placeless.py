"""MySQL's GTIDs without a place in the clock, under tags and late, over starts of the relay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig
from databus.relay.fetcher import Fetcher
from databus.relay.sources.mysql.gtid_sets import largest, parse_gtid_set
from databus.relay.sources.mysql.lineage import decode_memo
from tests.support.capture import (
    capturing,
    database_config,
    failed_with,
    kept_memo,
    ring_state,
    streaming,
)
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)


def under_a_tag(database: FreshDatabase, *statements: str) -> None:
    """Run statements in a session whose transactions are numbered under a tag."""
    connection = database.server.connect(database.name)
    with connection.cursor() as cursor:
        cursor.execute("SET gtid_next = 'AUTOMATIC:tag'")
        for statement in statements:
            cursor.execute(statement)
        cursor.execute("SET gtid_next = 'AUTOMATIC'")
    connection.close()


def purged(database: FreshDatabase) -> bool:
    """Purge all files but the last; not those that somebody is reading still."""
    last = database.execute("SHOW BINARY LOG STATUS")[0][0]
    database.execute(f"PURGE BINARY LOGS TO '{last}'")
    return len(database.execute("SHOW BINARY LOGS")) == 1


@pytest.fixture
def database(mysql_database: FreshDatabase) -> FreshDatabase:
    """With a captured table that was changed, and altered, under a tag."""
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    under_a_tag(
        mysql_database,
        "INSERT INTO t VALUES (1, 1)",
        "SET binlog_transaction_compression = ON",
        "UPDATE t SET v = 2",
        "ALTER TABLE t ADD COLUMN w INT",
    )
    return mysql_database


@pytest.fixture
def config(database: FreshDatabase) -> DatabaseConfig:
    return database_config("shop", database.url, f"{database.name}.t")


async def has_rows(fetcher: Fetcher, count: int) -> None:
    folder = fetcher.folder.path
    await eventually(lambda: len(ring_state(folder).letters) == count, 30)


async def test_what_was_written_under_a_tag_before_the_first_start_stops_nothing(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    for number in (10, 11):  # a first start, and one that goes on
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            await asyncio.to_thread(database.execute, f"INSERT INTO t VALUES ({number}, 0, 0)")
            await has_rows(fetcher, number - 9)
            assert fetcher.status.reconnect_count == 0
    assert decode_memo(kept_memo(fetcher)).tagged


async def test_what_comes_under_a_tag_later_is_refused_also_while_the_relay_was_away(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: bool(kept_memo(fetcher)), 30)
    under_a_tag(database, "UPDATE t SET v = 3")
    try:
        async with capturing(config, tmp_path) as fetcher:
            message = await failed_with(fetcher, "unsupported_change")
            assert f"changes rows of {database.name}.t" in message
    finally:
        database.execute("FLUSH BINARY LOGS")
        await eventually(lambda: asyncio.to_thread(purged, database), 30)


# -- late numbers


def ahead(database: FreshDatabase, count: int, statement: str) -> int:
    """Run a statement under a number that leaves ``count`` before it free; returns the first."""
    server = database.execute("SELECT @@server_uuid")[0][0]
    executed = parse_gtid_set(str(database.execute("SELECT @@gtid_executed")[0][0]))
    first = largest(executed[str(server)]) + 1
    connection = database.server.connect(database.name)
    with connection.cursor() as cursor:
        cursor.execute(f"SET gtid_next = '{server}:{first + count}'")
        cursor.execute(statement)
        cursor.execute("SET gtid_next = 'AUTOMATIC'")
    connection.close()
    return first


@pytest.mark.parametrize("while_away", [False, True])
async def test_a_number_that_comes_late_is_refused_where_it_changes_what_is_captured(
    mysql_database: FreshDatabase, tmp_path: Path, while_away: bool
) -> None:
    database = mysql_database
    for name in ("t", "private"):
        database.execute(f"CREATE TABLE {name} (id INT PRIMARY KEY)")
    config = database_config("shop", database.url, f"{database.name}.t")

    async def late(fetcher: Fetcher, first: int) -> None:
        message = await failed_with(fetcher, "unsupported_change")
        assert f":{first + 1} changes rows of {database.name}.t; it comes after larger" in message

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        first = await asyncio.to_thread(ahead, database, 2, "INSERT INTO t VALUES (1)")
        await has_rows(fetcher, 1)
        database.execute("INSERT INTO private VALUES (1)")  # late, and nobody's
        await eventually(lambda: f":{first + 1}-{first + 1}" in kept_memo(fetcher), 30)
        if not while_away:
            database.execute("INSERT INTO t VALUES (2)")
            await late(fetcher, first)
    if while_away:
        database.execute("INSERT INTO t VALUES (2)")
    for _ in range(2):
        async with capturing(config, tmp_path) as fetcher:
            await late(fetcher, first)
    # Once it is purged the stream goes on.
    database.execute("FLUSH BINARY LOGS")
    database.execute("INSERT INTO t VALUES (3)")
    await eventually(lambda: asyncio.to_thread(purged, database), 30)
    async with capturing(config, tmp_path) as fetcher:
        await has_rows(fetcher, 2)
        rows = ring_state(fetcher.folder.path).tables[f"{database.name}.t"]
        assert list(rows) == [(1,), (3,)]
