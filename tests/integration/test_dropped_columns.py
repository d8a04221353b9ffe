"""Columns that are dropped and there again when the relay reads the first statement.

The catalogue has the last definition then, and the one in between is never announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import parse
from databus.relay.local_relay import LocalRelay
from databus.relay.sources.contract import Batch
from tests.integration.test_inferred_column_names import selected
from tests.relay.dumps.test_resync import words
from tests.support.capture import PACE, upserted
from tests.support.config_text import relay_text
from tests.support.fixtures import FreshDatabase, SetRowMetadata
from tests.support.mariadb_stream import read_to_end, source_of
from tests.support.opened_source import open_source
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEW_KEY = "ADD id INT NOT NULL AUTO_INCREMENT PRIMARY KEY FIRST"
RETURNING = {
    "apart": ("DROP c", "ADD c INT"),
    "in_capitals": ("DROP COLUMN `C`", "ADD COLUMN c INT"),
    "with_another": ("DROP COLUMN IF EXISTS c", "ADD d INT", "DROP d, ADD c INT"),
    "at_once": ("DROP c, ADD c INT",),
    "renamed": ("RENAME COLUMN c TO b", "ADD c INT", "DROP b"),
    "changed": ("CHANGE c b INT", "ADD c INT", "DROP b"),
    "other_key_at_once": (f"DROP PRIMARY KEY, DROP id, {NEW_KEY}",),
    "other_key": ("DROP PRIMARY KEY, DROP id", NEW_KEY),
}
ORDINARY = {
    "one_less": ("DROP c",),
    "two_more": ("ADD d INT", "ADD e INT"),
    "another": ("DROP c", "ADD d INT"),
    "indexed": ("ADD INDEX c (c)", "DROP INDEX c", "ADD INDEX c (c)"),
}
ROWS = "(7, 70), (8, 80), (9, NULL)"


@pytest.fixture(
    params=["mariadb FULL", "mysql FULL", "mariadb NO_LOG", "mysql MINIMAL"],
    ids=lambda param: param.replace(" ", "-"),
)
def database(request: pytest.FixtureRequest, row_metadata: SetRowMetadata) -> FreshDatabase:
    """An empty database on a server whose binlog names columns, or does not."""
    kind, value = request.param.split()
    found: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    row_metadata(found.server, value)
    return found


def alter(database: FreshDatabase, table: str, *clauses: str) -> None:
    is_mysql = "mysql" in type(database.server).__name__.lower()
    for clause in clauses:
        text = clause.replace("IF EXISTS ", "") if is_mysql else clause
        database.execute(f"ALTER TABLE {table} {text}")


async def test_a_column_that_is_there_again_when_its_drop_is_read_shows_no_old_values(
    database: FreshDatabase, tmp_path: Path
) -> None:
    tables, ring = RETURNING | ORDINARY, tmp_path / "relay" / "shop"
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id INT NOT NULL PRIMARY KEY, c INT)")
    text = relay_text(database.url, f"{database.name}.*", ring_bytes="4MiB")
    config = parse(text, folder=tmp_path)

    def held(table: str) -> list[dict[str, Any]]:
        rows, _ = upserted(ring, f"{database.name}.{table}")
        return [row for _, row in sorted(rows.items())]

    def equal() -> bool:
        assert [name for name in tables if not_null(held(name)) != stored[name]] == []
        return True

    async with LocalRelay(config, pace=PACE) as relay:
        await relay.ready(120)
        for table in tables:
            database.execute(f"INSERT INTO {table} VALUES {ROWS}")
        stored = {table: not_null(selected(database, table)) for table in tables}
        await eventually(equal, 60, "the stream gives what the source has")
    for table, clauses in tables.items():
        alter(database, table, *clauses)
    stored = {table: not_null(selected(database, table)) for table in RETURNING}
    tables = RETURNING
    async with LocalRelay(config, pace=PACE) as relay:
        await relay.ready(120)
        await eventually(equal, 60, "the stream gives what the source has")
        suspended = {source for source, state in words(ring) if state != "followed"}
        assert suspended == {f"{database.name}.{table}" for table in RETURNING}


def not_null(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row that was not written since a column was added comes without it."""
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


async def until_a_dropped_column_is_stored(stream: AsyncIterator[Batch]) -> str:
    """The first resume state that has one, as it is on disk."""
    async for batch in stream:
        text = (
            batch.resume_state.encode()
            if batch.resume_state is not None and batch.persist_first
            else ""
        )
        if '"dropped": {"' in text:
            return text
    raise AssertionError("the stream ended by itself")


@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "by another stream"])
async def test_a_dropped_column_is_remembered_until_a_definition_is_certain(
    restarts: bool, database: FreshDatabase
) -> None:
    source = await open_source(source_of(database))
    # The history of the server has statements of other tests, which may have changed any table.
    start = await source.first_scn()
    database.execute("CREATE TABLE t (id INT NOT NULL PRIMARY KEY, c INT)")
    database.execute(f"INSERT INTO t VALUES {ROWS}")
    before = await read_to_end(source, start)
    alter(database, "t", "DROP c", "ADD d INT")
    source.restore(before.resume_state, None, before.resolved)
    stream = source.stream(before.resolved)
    async with asyncio.timeout(60 * PATIENCE):
        resume_state = await until_a_dropped_column_is_stored(stream)
    # The stream is between DROP c and ADD d, which is not certain either from now on.
    alter(database, "t", "ADD c INT")
    if restarts:
        await stream.aclose()
        source = await open_source(source_of(database))
        source.restore(resume_state, None, before.resolved)
        stream = source.stream(before.resolved)
    async with asyncio.timeout(60 * PATIENCE):
        async for batch in stream:
            text = batch.resume_state.encode() if batch.resume_state is not None else ""
            if "has the column c again" in text:
                break
    await stream.aclose()
    assert '"dropped": {}' in text
