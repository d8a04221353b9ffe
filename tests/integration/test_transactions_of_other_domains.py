"""MariaDB's groups of other domains and MySQL's of other servers that change captured tables."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import Op
from databus.common.schema.source_schema import SourceSchema
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.schema_registry import RegistryReader
from databus.relay.sources.mysql.gtid.mysql_lineage import decode_resume_state
from tests.integration.test_suspended_tables import dump, rows_of, session
from tests.support.capture import (
    capturing,
    database_config,
    stored_resume_state,
    streaming,
    suspended,
)
from tests.support.fixtures import FreshDatabase
from tests.support.gtids import make_tables, run_elsewhere
from tests.support.mysql_server import MySQLServer
from tests.support.own_servers import mariadb, mysql  # noqa: F401  fixtures
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def is_mariadb(database: FreshDatabase) -> bool:
    return not isinstance(database.server, MySQLServer)


class Shop:
    """Tables, a relay's settings for two of them, and a fence that shows how far it has come."""

    def __init__(self, database: FreshDatabase, tmp_path: Path, **settings: Any) -> None:
        self.database, self.tmp_path = database, tmp_path
        self.table, self.fence = f"{database.name}.t", f"{database.name}.fence"
        make_tables(database)
        database.execute("CREATE TABLE private (id INT PRIMARY KEY)")
        self.config: DatabaseConfig = database_config(
            "shop", database.url, self.table, self.fence, **settings
        )
        self.folder = tmp_path / "shop"
        self._fences = 0

    async def passed(self) -> None:
        """Return once the stream is behind everything that was committed before."""
        self._fences += 1
        number = self._fences
        await asyncio.to_thread(self.database.execute, f"INSERT INTO fence VALUES ({number})")
        await eventually(lambda: (number,) in rows_of(self.folder, self.fence), 60, "the fence")

    async def status_of(self, fetcher: Fetcher) -> None:
        await eventually(lambda: bool(fetcher.status.source), 60, "its status")


CHANGES = {
    "rows": ["INSERT INTO t VALUES (2, REPEAT('b', 300000), NULL), (3, 'c', NULL)"],
    "update": ["UPDATE t SET v = 'e'"],
    "truncate": ["TRUNCATE t"],
    "a statement": ["SET binlog_format = STATEMENT", "UPDATE through_view SET v = 'f'"],
    "a cascade": ["DELETE FROM parent"],
    "an exchange": ["RENAME TABLE t TO gone, spare TO t"],
}


@pytest.mark.parametrize("while_away", [False, True])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_captured_table_that_another_lineage_changes_is_suspended_alone_and_comes_back(
    database: FreshDatabase, tmp_path: Path, change: str, while_away: bool
) -> None:
    shop = Shop(database, tmp_path)
    async with capturing(shop.config, tmp_path) as fetcher:
        await streaming(fetcher)
        await shop.passed()
        if not while_away:
            await asyncio.to_thread(run_elsewhere, database, *CHANGES[change])
            await shop.passed()
    if while_away:
        run_elsewhere(database, *CHANGES[change])
    async with capturing(shop.config, tmp_path) as fetcher:
        await shop.passed()
        await eventually(lambda: shop.table in suspended(fetcher), 60, "suspended")
        assert suspended(fetcher).keys() == {shop.table}
        why = suspended(fetcher)[shop.table]
        assert "GTID 9-" in why if is_mariadb(database) else "option uuids" in why
        await dump(shop.folder, shop.table)
        await eventually(lambda: not suspended(fetcher), 60, "followed")
        await shop.passed()
        values = await asyncio.to_thread(database.execute, "SELECT id, v FROM t ORDER BY id")
        brought = rows_of(shop.folder, shop.table)
        assert [(number, brought[number,]["v"]) for number, _ in values] == [*map(tuple, values)]
        assert len(brought) == len(values)
    # What has been read suspends nothing again.
    async with capturing(shop.config, tmp_path) as fetcher:
        await shop.passed()
        await shop.status_of(fetcher)
        assert suspended(fetcher) == {}


async def test_a_column_that_another_lineage_adds_with_a_value_comes_by_resynchronisation(
    database: FreshDatabase, tmp_path: Path
) -> None:
    shop = Shop(database, tmp_path)
    config = shop.config.model_copy(update={"resync": "auto"})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(database.execute, "UPDATE t SET v = 'b'")
        await shop.passed()
        alter = "ALTER TABLE t ADD COLUMN w INT DEFAULT 7"
        await asyncio.to_thread(run_elsewhere, database, alter)
        wanted = {(1,): {"id": 1, "v": "b", "p": 1, "w": 7}}
        await eventually(lambda: rows_of(shop.folder, shop.table) == wanted, 60, "its value")


async def test_what_another_lineage_changes_beside_captured_tables_suspends_nothing(
    database: FreshDatabase, tmp_path: Path
) -> None:
    shop, other = Shop(database, tmp_path), f"{database.name}_other"
    database.server.create_database(other)
    database.execute(f"CREATE TABLE {other}.t (id INT PRIMARY KEY)")
    harmless = [
        "INSERT INTO private VALUES (1)",
        f"INSERT INTO {other}.t VALUES (1), (2)",
        "ALTER TABLE private ADD COLUMN w INT",
        "CREATE TABLE new_one (id INT PRIMARY KEY)",
        f"CREATE USER {database.name}",
        f"GRANT SELECT ON *.* TO {database.name}",
        "SET binlog_format = STATEMENT",
        "UPDATE private SET w = 3",
        "TRUNCATE private",
        f"DROP USER {database.name}",
        f"ALTER TABLE {other}.t ADD COLUMN w INT",
        f"TRUNCATE {other}.t",
    ]
    async with capturing(shop.config, tmp_path) as fetcher:
        await streaming(fetcher)
        for _ in range(2):  # also table maps that the kernel has seen
            await asyncio.to_thread(run_elsewhere, database, *harmless[:2])
            await asyncio.to_thread(database.execute, f"DELETE FROM {other}.t")
            await asyncio.to_thread(database.execute, "DELETE FROM private")
        await asyncio.to_thread(run_elsewhere, database, *harmless)
        await asyncio.to_thread(database.execute, "UPDATE t SET v = 'still followed'")
        await shop.passed()
        await shop.status_of(fetcher)
        assert suspended(fetcher) == {}
        assert rows_of(shop.folder, shop.table)[1,]["v"] == "still followed"


async def test_xa_of_another_lineage_suspends_its_tables_when_it_is_committed(
    database: FreshDatabase, tmp_path: Path
) -> None:
    shop = Shop(database, tmp_path)
    xid = f"'{database.name}'"
    prepare = [f"XA START {xid}", "INSERT INTO t VALUES (5, 'x', NULL)", f"XA END {xid}"]

    def prepared() -> None:
        # The GTID is that of the whole transaction.
        with database.session() as cursor:
            cursor.execute(
                "SET gtid_domain_id = 9"
                if is_mariadb(database)
                else f"SET gtid_next = '{uuid.uuid4()}:1'"
            )
            for statement in (*prepare, f"XA PREPARE {xid}"):
                cursor.execute(statement)

    async with capturing(shop.config, tmp_path) as fetcher:
        await streaming(fetcher)
        await shop.passed()
        await asyncio.to_thread(prepared)
        await shop.passed()
        await shop.status_of(fetcher)
        assert suspended(fetcher) == {}
    async with capturing(shop.config, tmp_path) as fetcher:  # Read again, while it is prepared.
        await shop.passed()
        await asyncio.to_thread(run_elsewhere, database, f"XA COMMIT {xid}")
        await eventually(lambda: shop.table in suspended(fetcher), 60, "suspended")
        await dump(shop.folder, shop.table)
        await eventually(lambda: not suspended(fetcher), 60, "followed")
        assert rows_of(shop.folder, shop.table)[5,]["v"] == "x"
    assert decode_resume_state(stored_resume_state(fetcher)).prepared is None


async def test_what_another_lineage_changed_before_the_first_start_suspends_nothing(
    database: FreshDatabase, tmp_path: Path
) -> None:
    shop = Shop(database, tmp_path)
    run_elsewhere(database, "UPDATE t SET v = 'early'", "ALTER TABLE t ADD COLUMN w INT")
    for _ in range(2):  # a first start, and a restart
        async with capturing(shop.config, tmp_path) as fetcher:
            await streaming(fetcher)
            await shop.passed()
            await shop.status_of(fetcher)
            assert suspended(fetcher) == {}


async def test_a_resume_state_of_an_earlier_version_takes_older_groups_for_read(
    database: FreshDatabase, tmp_path: Path
) -> None:
    shop = Shop(database, tmp_path)
    async with capturing(shop.config, tmp_path) as fetcher:
        await streaming(fetcher)
        await shop.passed()
    stored = decode_resume_state(stored_resume_state(fetcher))
    assert stored.foreign is not None
    text = stored.encode()
    assert decode_resume_state(text.replace('"foreign"', '"other"')).foreign is None


async def test_purged_groups_of_another_server_suspend_every_captured_table(
    mysql_database: FreshDatabase, tmp_path: Path
) -> None:
    shop = Shop(mysql_database, tmp_path)
    server = str(uuid.uuid4())

    def write(number: int) -> None:
        session(
            mysql_database,
            f"SET gtid_next = '{server}:{number}'",
            f"INSERT INTO private VALUES ({number})",
            "SET gtid_next = 'AUTOMATIC'",
        )

    async with capturing(shop.config, tmp_path) as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(write, 1)
        await shop.passed()
        await eventually(lambda: f"{server}:1-1" in stored_resume_state(fetcher), 30)
    await asyncio.to_thread(write, 2)
    for _ in range(2):
        mysql_database.execute("FLUSH BINARY LOGS")
    files = mysql_database.execute("SHOW BINARY LOGS")
    mysql_database.execute(f"PURGE BINARY LOGS TO '{files[-1][0]}'")
    async with capturing(shop.config, tmp_path) as fetcher:
        await eventually(lambda: len(suspended(fetcher)) == 2, 60, "suspended")
        assert f"purged GTIDs {server}:2-2" in suspended(fetcher)[shop.table]


def definition(folder: Path, source: str) -> list[str]:
    """The columns for a reader that registers now and reads the ring from its oldest frame."""
    reader = RegistryReader(folder / "schemas.jsonl")
    reader.refresh()
    for view in ring_frames(folder):
        if view.op == Op.SCHEMA_CHANGE:
            schema = SourceSchema.from_json(json.loads(bytes(view.after or b"")))
            reader.schemas.announce(schema)
    found = reader.schemas.latest(source)
    assert found is not None
    return [column.name for column in found.columns]


@pytest.mark.parametrize("first", ["a row", "a dump"])
async def test_a_definition_that_another_lineage_made_reaches_readers_of_older_frames(
    database: FreshDatabase, tmp_path: Path, first: str
) -> None:
    shop = Shop(database, tmp_path)

    async def execute(statement: str) -> None:
        await asyncio.to_thread(database.execute, statement)
        await shop.passed()

    async def comes(columns: list[str]) -> None:
        async def is_there() -> bool:
            return definition(shop.folder, shop.table) == columns

        await eventually(is_there, 60, f"the definition {columns}")

    async with capturing(shop.config, tmp_path) as fetcher:
        await streaming(fetcher)
        await execute("ALTER TABLE t ADD COLUMN w INT")
        await asyncio.to_thread(run_elsewhere, database, "ALTER TABLE t ADD COLUMN x INT")
        await shop.passed()
        if first == "a row":
            await execute("INSERT INTO t (id, x) VALUES (2, 5)")
        else:
            await dump(shop.folder, shop.table)
        await comes(["id", "v", "p", "w", "x"])
        await execute("ALTER TABLE t DROP COLUMN x")
        await comes(["id", "v", "p", "w"])
