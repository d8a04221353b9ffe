"""Binlogs without column names: the relay infers them; a table whose names are uncertain is
suspended."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import Op
from databus.relay.processes.fetcher import Fetcher
from tests.integration.test_suspended_tables import dump, in_database, rows_of, session, warned_of
from tests.support.capture import capturing, database_config, stored_resume_state, streaming
from tests.support.fixtures import FreshDatabase, SetRowMetadata
from tests.support.mariadb_stream import (
    Streamed,
    mariadb_config,
    opened,
    opened_on,
    read_to_end,
    source_of,
)
from tests.support.opened_source import open_source
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS = 36


@pytest.fixture(
    params=["mariadb NO_LOG", "mariadb MINIMAL", "mysql MINIMAL"], ids=lambda p: p.replace(" ", "-")
)
def database(request: pytest.FixtureRequest, row_metadata: SetRowMetadata) -> FreshDatabase:
    """An empty database on a server whose binlog does not name columns."""
    kind, value = request.param.split()
    found: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    row_metadata(found.server, value)
    return found


@pytest.fixture
def config(database: FreshDatabase) -> DatabaseConfig:
    return database_config("shop", database.url, f"{database.name}.*")


def selected(database: FreshDatabase, table: str) -> list[dict[str, object]]:
    columns = [
        str(name)
        for (name,) in database.execute(
            "SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s "
            "AND TABLE_NAME = %s ORDER BY ORDINAL_POSITION",
            database.name,
            table,
        )
    ]
    rows = database.execute(f"SELECT * FROM {table} ORDER BY 1")
    return [dict(zip(columns, row, strict=True)) for row in rows]


async def holds_what_the_source_has(fetcher: Fetcher, database: FreshDatabase, table: str) -> None:
    folder, source = fetcher.folder.path, f"{database.name}.{table}"

    def equal() -> bool:
        held = rows_of(folder, source)
        # A row that was not written since a column was added comes without it.
        last = [row for _, row in sorted(held.items())]
        return [{k: v for k, v in row.items() if v is not None} for row in last] == [
            {k: v for k, v in row.items() if v is not None} for row in selected(database, table)
        ]

    await eventually(equal, 30, f"{source} is equal")


async def test_tables_altered_under_load_are_equal_and_every_row_has_its_own_schema(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE a (id INT PRIMARY KEY, n INT UNSIGNED, e ENUM('x','y'))")
    database.execute("CREATE TABLE b (id INT PRIMARY KEY, v INT)")
    changes = [
        "ALTER TABLE a ADD COLUMN w VARCHAR(20) CHARACTER SET latin1",
        "ALTER TABLE a DROP COLUMN n, ADD COLUMN m INT UNSIGNED AFTER id",
        "ALTER TABLE a MODIFY e ENUM('x','y','z')",
        "ALTER TABLE a DROP COLUMN w, ADD COLUMN d DECIMAL(8,2) FIRST",
        "ALTER TABLE a MODIFY d DECIMAL(8,2) AFTER e",
    ]
    dice = random.Random(1)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for number in range(ROUNDS):
            for table in ("a", "b"):
                database.execute(f"INSERT INTO {table} (id) VALUES ({number})")
                old = dice.randrange(number + 1)
                database.execute(f"UPDATE {table} SET id = id + 1000 WHERE id = {old}")
            if number % 6 == 5 and changes:
                # Rows between two changes of a table are certain once the relay has read them.
                scn = await read_up_to_now(database)
                await has_read(fetcher, scn)
                database.execute(changes.pop(0))
        assert not changes
        for table in ("a", "b"):
            database.execute(f"UPDATE {table} SET id = id + 2000")  # Each row in its last form.
            await holds_what_the_source_has(fetcher, database, table)
        assert not any("is suspended" in text for text in fetcher.status.source["warnings"])


async def has_read(fetcher: Fetcher, scn: int) -> None:
    intake = fetcher.intake
    assert intake is not None
    await eventually(lambda: intake.complete.scn >= scn, 60, f"read up to {scn}")


async def read_up_to_now(database: FreshDatabase) -> int:
    async with opened(mariadb_config(database.url, f"{database.name}.*")) as source:
        return await source.first_scn()


async def test_what_was_written_before_and_after_a_change_is_read_after_an_absence(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT, w INT)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO t VALUES (1, 1, 10)")
        await holds_what_the_source_has(fetcher, database, "t")
        assert '"name\\": \\"v\\"' in stored_resume_state(fetcher), "on disk before the rows were"
    database.execute("INSERT INTO t VALUES (2, 2, 20)")
    # Of the same types: only the resume state distinguishes v from the other.
    database.execute("ALTER TABLE t MODIFY v INT AFTER w")
    database.execute("INSERT INTO t VALUES (3, 30, 3)")
    database.server.execute("FLUSH BINARY LOGS")
    database.execute("INSERT INTO t VALUES (4, 40, 4)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await holds_what_the_source_has(fetcher, database, "t")
        assert {row["w"] for row in selected(database, "t")} == {10, 20, 30, 40}
        assert not warned_of(fetcher, f"{database.name}.t")


async def test_tables_that_change_names_are_suspended_until_they_are_read_as_what_they_are(
    database: FreshDatabase,
) -> None:
    for table, column in (("a", "x"), ("b", "y")):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, {column} INT)")
    async with opened_on(database) as (source, start):
        database.execute("RENAME TABLE a TO c, b TO a, c TO b")
        database.execute("INSERT INTO a VALUES (0, 0)")
        assert not (await read_to_end(source, start)).events()
        assert set((await source.status())["stopped_tables"]) == {
            f"{database.name}.{table}" for table in ("a", "b")
        }
        start = await source.first_scn()
        database.execute("INSERT INTO a VALUES (1, 2)")
        database.execute("INSERT INTO b VALUES (3, 4)")
        again = await open_source(source_of(database))
        events = (await read_to_end(again, start)).events()
        await again.close()
    assert [(e.source, e.after) for e in events] == [
        (f"{database.name}.a", {"id": 1, "y": 2}),
        (f"{database.name}.b", {"id": 3, "x": 4}),
    ]


async def test_rows_between_two_unread_changes_stop_their_table_alone_until_a_dump(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    for table in ("calm", "restless"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    folder, restless = tmp_path / "shop", f"{database.name}.restless"
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for table in ("calm", "restless"):
            database.execute(f"INSERT INTO {table} VALUES (1, 1)")
            await holds_what_the_source_has(fetcher, database, table)
    database.execute("ALTER TABLE restless ADD COLUMN w INT FIRST, ADD COLUMN u INT")
    database.execute("INSERT INTO restless (id, v, w) VALUES (2, 2, 3)")
    database.execute("INSERT INTO calm VALUES (2, 2)")
    database.execute("ALTER TABLE restless DROP COLUMN w, DROP COLUMN u")
    database.execute("INSERT INTO restless VALUES (3, 3)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await holds_what_the_source_has(fetcher, database, "calm")
        await eventually(lambda: bool(warned_of(fetcher, restless)), 60)
        assert "does not name the columns" in warned_of(fetcher, restless)
        assert "ALTER TABLE restless DROP COLUMN w" in warned_of(fetcher, restless)
        assert not warned_of(fetcher, f"{database.name}.calm")
        assert list(rows_of(folder, restless)) == [(1,)], "nothing is guessed"
        await dump(folder, restless)
        database.execute("UPDATE restless SET v = v + 1")
        await eventually(lambda: rows_of(folder, restless) == in_database(database, "restless"), 60)
        await eventually(lambda: not warned_of(fetcher, restless), 60)


async def test_a_change_right_after_the_rows_leaves_them_uncertain_and_later_ones_not(
    database: FreshDatabase,
) -> None:
    """Without anything stored, the catalogue holds from the last change on."""
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    database.execute("CREATE TABLE `un-named` (id INT PRIMARY KEY, v INT)")
    async with opened_on(database) as (source, start):
        database.execute("INSERT INTO t VALUES (1, 1)")
        database.execute("INSERT INTO `un-named` VALUES (1, 1)")
        database.execute("ALTER TABLE `un-named` RENAME COLUMN v TO w")
        streamed = await read_to_end(source, start)
        assert [event.source for event in streamed.events()] == [f"{database.name}.t"]
        (warning,) = (await source.status())["warnings"]
        assert warning.startswith(f"{database.name}.un-named is suspended")
        later = await source.first_scn()
        database.execute("INSERT INTO t VALUES (2, 2)")
        assert [e.after for e in (await read_to_end(source, later)).events()] == [{"id": 2, "v": 2}]


async def test_a_truncated_table_is_none_that_is_another_and_a_dropped_schemas_tables_are_gone(
    database: FreshDatabase,
) -> None:
    other = f"{database.name}_other"
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    database.server.create_database(other)
    database.execute(f"CREATE TABLE {other}.t (id INT PRIMARY KEY, v INT)")
    async with opened_on(database, sources=(f"{database.name}*.*",)) as (source, start):
        database.execute(f"INSERT INTO {other}.t VALUES (1, 1)")
        database.execute("INSERT INTO t VALUES (1, 1)")
        database.execute("TRUNCATE t")
        database.execute("INSERT INTO t VALUES (2, 2)")
        streamed = await read_to_end(source, start)
        here, there = f"{database.name}.t", f"{other}.t"
        assert operations(streamed) == [
            (Op.INSERT, there),
            (Op.INSERT, here),
            (Op.TRUNCATE, here),
            (Op.INSERT, here),
        ]
        start = await source.first_scn()
        database.execute("INSERT INTO t VALUES (3, 3)")
        database.execute(f"INSERT INTO {other}.t VALUES (3, 3)")
        database.server.drop_database(other)
        assert operations(await read_to_end(source, start)) == [(Op.INSERT, here)]
        (warning,) = (await source.status())["warnings"]
        assert warning.startswith(f"{there} is suspended")
        assert "DROP DATABASE" in warning.upper()


def operations(streamed: Streamed) -> list[tuple[Op, str]]:
    return [
        (Op(view.op), streamed.schemas.by_fingerprint(view.schema_fp).source)
        for view in streamed.frames()
        if view.op == Op.TRUNCATE or not view.is_control
    ]


async def test_a_change_in_another_domain_counts(
    mariadb_database: FreshDatabase, row_metadata: SetRowMetadata, tmp_path: Path
) -> None:
    database = mariadb_database
    row_metadata(database.server, "NO_LOG")
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT, w INT)")
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO t VALUES (1, 1, 10)")
        await holds_what_the_source_has(fetcher, database, "t")
        session(database, "SET gtid_domain_id = 9", "ALTER TABLE t MODIFY v INT AFTER w")
        database.execute("INSERT INTO t VALUES (2, 20, 2)")
        await holds_what_the_source_has(fetcher, database, "t")
        assert json.loads(stored_resume_state(fetcher))["tracked"]
    database.execute("INSERT INTO t VALUES (3, 30, 3)")
    session(database, "SET gtid_domain_id = 9", "ALTER TABLE t MODIFY w INT AFTER v")
    database.execute("INSERT INTO t VALUES (4, 4, 40)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await holds_what_the_source_has(fetcher, database, "t")
        assert {row["w"] for row in selected(database, "t")} == {10, 20, 30, 40}
