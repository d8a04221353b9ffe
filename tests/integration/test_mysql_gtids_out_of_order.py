"""MySQL's GTIDs without an scn, under tags and late, over starts of the relay."""

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
from tests.integration.test_suspended_tables import dump, rows_of
from tests.support.capture import (
    capturing,
    database_config,
    ring_state,
    stored_resume_state,
    streaming,
    suspended,
)
from tests.support.fixtures import FreshDatabase
from tests.support.gtids import make_tables, run_ahead, run_under
from tests.support.mariadb_stream import mariadb_config
from tests.support.mysql_server import require
from tests.support.own_servers import mysql  # noqa: F401  fixtures
from tests.support.waiting import PATIENCE, eventually

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


async def test_tagged_gtids_from_before_the_first_start_suspend_nothing(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    for number in (10, 11):  # a first start, and a restart
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            await asyncio.to_thread(database.execute, f"INSERT INTO t VALUES ({number}, 0, 0)")
            await has_rows(fetcher, number - 9)
            assert fetcher.status.reconnect_count == 0
    assert decode_resume_state(stored_resume_state(fetcher)).tagged


CHANGES = {
    "rows": ["INSERT INTO t VALUES (2, REPEAT('b', 3000000), NULL), (3, 'c', NULL)"],
    "compressed": ["SET binlog_transaction_compression = ON", "UPDATE t SET v = 'e'"],
    "truncate": ["TRUNCATE t"],
    "statement": ["SET binlog_format = STATEMENT", "UPDATE through_view SET v = 'f'"],
    "cascade": ["DELETE FROM parent"],
    "renamed": ["RENAME TABLE t TO gone, spare TO t"],
}
HARMLESS = (
    "ALTER TABLE private ADD COLUMN w INT",
    "CREATE TABLE new_one (id INT PRIMARY KEY)",
    "CREATE USER {user}",
    "GRANT SELECT ON *.* TO {user}",
    "INSERT INTO private (id) VALUES (3)",
    "SET binlog_format = STATEMENT",
    "UPDATE private SET w = 3",
    "TRUNCATE private",
    "DROP USER {user}",
    # The same name in another schema.
    "ALTER TABLE {other}.t ADD COLUMN w INT",
    "TRUNCATE {other}.t",
)


@pytest.mark.parametrize("while_away", [False, True])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_captured_table_that_is_changed_under_a_tag_is_suspended_alone(
    mysql_database: FreshDatabase, tmp_path: Path, change: str, while_away: bool
) -> None:
    database, name = mysql_database, mysql_database.name
    require(database.server, "tags of GTIDs", 8, 3)
    make_tables(database)
    config = database_config("shop", database.url, f"{name}.t", f"{name}.fence")
    folder = tmp_path / "shop"

    async def passed(number: int) -> None:
        await asyncio.to_thread(database.execute, f"INSERT INTO fence VALUES ({number})")
        await eventually(lambda: (number,) in rows_of(folder, f"{name}.fence"), 60, "the fence")

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await passed(1)
        if not while_away:
            await asyncio.to_thread(run_under, database, UNDER_A_TAG, *CHANGES[change])
    if while_away:
        run_under(database, UNDER_A_TAG, *CHANGES[change])
    async with capturing(config, tmp_path) as fetcher:
        await passed(2)
        await eventually(lambda: f"{name}.t" in suspended(fetcher), 60, "suspended")
        assert suspended(fetcher).keys() == {f"{name}.t"}
        assert "a tagged GTID has no scn" in suspended(fetcher)[f"{name}.t"]
        await dump(folder, f"{name}.t")
        await eventually(lambda: not suspended(fetcher), 60, "followed")
        await passed(3)
        values = await asyncio.to_thread(database.execute, "SELECT id, v FROM t ORDER BY id")
        brought = rows_of(folder, f"{name}.t")
        assert [(number, brought[number,]["v"]) for number, _ in values] == [*map(tuple, values)]
    # The server sends the group again only while it is not known to have been read.
    async with capturing(config, tmp_path) as fetcher:
        await passed(4)
        await eventually(lambda: bool(fetcher.status.source), 60, "its status")
        assert suspended(fetcher) == {}


async def test_a_column_that_is_added_with_a_value_under_a_tag_comes_by_resynchronisation(
    mysql_database: FreshDatabase, tmp_path: Path
) -> None:
    database, source = mysql_database, f"{mysql_database.name}.t"
    require(database.server, "tags of GTIDs", 8, 3)
    database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    config = database_config("shop", database.url, source)
    config = config.model_copy(update={"resync": "auto"})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO t VALUES (1)")
        await has_rows(fetcher, 1)
        alter = "ALTER TABLE t ADD COLUMN w INT DEFAULT 7"
        await asyncio.to_thread(run_under, database, UNDER_A_TAG, alter)
        wanted = {(1,): {"id": 1, "w": 7}}
        await eventually(lambda: rows_of(fetcher.folder.path, source) == wanted, 60, "its value")


async def test_changes_of_other_tables_under_a_tag_or_out_of_order_suspend_nothing(
    mysql_database: FreshDatabase, tmp_path: Path
) -> None:
    database, name = mysql_database, mysql_database.name
    require(database.server, "tags of GTIDs", 8, 3)
    other = f"{name}_other"
    database.server.create_database(other)
    for table in ("t", "private", f"{other}.t"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY)")
    names = {"user": name, "other": other}
    config = database_config("shop", database.url, f"{name}.t")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        statements = [statement.format(**names) for statement in HARMLESS]
        await asyncio.to_thread(run_under, database, UNDER_A_TAG, *statements)
        await asyncio.to_thread(run_ahead, database, 2, "INSERT INTO t VALUES (1)")
        database.execute(f"INSERT INTO {other}.t VALUES (1, 1)")  # late
        database.execute("ALTER TABLE private ADD COLUMN u INT")  # late
        database.execute("INSERT INTO t VALUES (2)")
        await has_rows(fetcher, 2)
        await eventually(lambda: fetcher.status.source.get("stream", {}).get("scn", 0) > 0, 30)
        assert suspended(fetcher) == {}


# -- late numbers


@pytest.mark.parametrize("while_away", [False, True])
async def test_a_number_that_comes_out_of_order_suspends_the_captured_table_that_it_changes(
    mysql_database: FreshDatabase, tmp_path: Path, while_away: bool
) -> None:
    database, name = mysql_database, mysql_database.name
    for table in ("t", "calm", "private"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY)")
    config = database_config("shop", database.url, f"{name}.t", f"{name}.calm")

    async def late(fetcher: Fetcher, first: int) -> None:
        await eventually(lambda: f"{name}.t" in suspended(fetcher), 60, "suspended")
        assert suspended(fetcher).keys() == {f"{name}.t"}
        message = suspended(fetcher)[f"{name}.t"]
        assert f":{first + 1} changes rows of {name}.t; it comes after larger" in message

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        first = await asyncio.to_thread(run_ahead, database, 2, "INSERT INTO t VALUES (1)")
        await has_rows(fetcher, 1)
        database.execute("INSERT INTO private VALUES (1)")  # late, and not captured
        await eventually(lambda: f":{first + 1}-{first + 1}" in stored_resume_state(fetcher), 30)
        if not while_away:
            database.execute("INSERT INTO t VALUES (2)")
            await late(fetcher, first)
    if while_away:
        database.execute("INSERT INTO t VALUES (2)")
    for number in (1, 2):
        async with capturing(config, tmp_path) as fetcher:
            await late(fetcher, first)
            database.execute(f"INSERT INTO calm VALUES ({number})")
            await has_rows(fetcher, 1 + number)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        folder = fetcher.folder.path
        await dump(folder, f"{name}.t")
        await eventually(lambda: set(rows_of(folder, f"{name}.t")) == {(1,), (2,)}, 30)
        await eventually(lambda: not suspended(fetcher), 30, "followed")


def test_a_first_start_beside_commits_in_any_order_takes_none_of_them_for_out_of_order(
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
            writer.join(20 * PATIENCE)
        database.execute("SET GLOBAL binlog_order_commits = ON")
        connection.close()
