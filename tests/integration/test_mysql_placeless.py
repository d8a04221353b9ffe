"""MySQL's GTIDs without a place in the clock, under tags and late, over starts of the relay."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.mysql.gtid.mysql_lineage import decode_resume_state
from databus.relay.sources.mysql.mysql_preflight import choose_numbering
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings
from tests.support.capture import (
    capturing,
    database_config,
    failed_with,
    ring_state,
    stored_resume_state,
    streaming,
)
from tests.support.fixtures import FreshDatabase
from tests.support.gtids import purge_all_but_last, run_ahead, run_under
from tests.support.mariadb_stream import mariadb_config
from tests.support.mysql_server import require
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)

UNDER_A_TAG = "AUTOMATIC:tag"


@pytest.fixture
def database(mysql_database: FreshDatabase) -> FreshDatabase:
    """With a captured table that was changed, and altered, under a tag."""
    require(mysql_database.server, "tags of GTIDs", 8, 3)
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    run_under(
        mysql_database,
        UNDER_A_TAG,
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
    assert decode_resume_state(stored_resume_state(fetcher)).tagged


async def test_what_comes_under_a_tag_later_is_refused_also_while_the_relay_was_away(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: bool(stored_resume_state(fetcher)), 30)
    run_under(database, UNDER_A_TAG, "UPDATE t SET v = 3")
    try:
        async with capturing(config, tmp_path) as fetcher:
            message = await failed_with(fetcher, "unsupported_change")
            assert f"changes rows of {database.name}.t" in message
    finally:
        database.execute("FLUSH BINARY LOGS")
        await eventually(lambda: asyncio.to_thread(purge_all_but_last, database), 30)


# -- late numbers


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
        first = await asyncio.to_thread(run_ahead, database, 2, "INSERT INTO t VALUES (1)")
        await has_rows(fetcher, 1)
        database.execute("INSERT INTO private VALUES (1)")  # late, and nobody's
        await eventually(lambda: f":{first + 1}-{first + 1}" in stored_resume_state(fetcher), 30)
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
    await eventually(lambda: asyncio.to_thread(purge_all_but_last, database), 30)
    async with capturing(config, tmp_path) as fetcher:
        await has_rows(fetcher, 2)
        rows = ring_state(fetcher.folder.path).tables[f"{database.name}.t"]
        assert list(rows) == [(1,), (3,)]


def test_a_first_start_beside_commits_in_any_order_takes_none_of_them_for_late(
    mysql_database: FreshDatabase,
) -> None:
    database = mysql_database
    database.execute("CREATE TABLE t (id INT PRIMARY KEY AUTO_INCREMENT, v INT)")
    settings = read_settings(mariadb_config(database.url, f"{database.name}.*"))
    connection = MySqlConnection(settings)
    by_uuid, _ = choose_numbering(connection, settings)
    ended = threading.Event()

    def write() -> None:
        connection = database.server.connect(database.name)
        with connection.cursor() as cursor:
            while not ended.is_set():
                cursor.execute("INSERT INTO t (v) VALUES (1)")
        connection.close()

    writers = [threading.Thread(target=write, daemon=True) for _ in range(8)]
    database.execute("SET GLOBAL binlog_order_commits = OFF")
    try:
        for writer in writers:
            writer.start()
        assert {by_uuid.beginning(connection).missed for _ in range(300)} == {""}
    finally:
        ended.set()
        for writer in writers:
            writer.join(20)
        database.execute("SET GLOBAL binlog_order_commits = ON")
        connection.close()
