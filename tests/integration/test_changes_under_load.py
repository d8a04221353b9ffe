"""Columns come, go, change their names and types while several writers never pause."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from databus.common.schema.source_schema import Kind
from tests.support.busy_writers import TABLE, Applied, BusyWriters, applied
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase, SetRowMetadata
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# The new column is between others of its type, where the product can do that: a row read
# with the definition of another time would have its values under other names.
CHANGES = {
    "mariadb": (
        # None of them gives a row that is there a value: those suspend the table.
        "ADD COLUMN d INT AFTER version",
        "DROP COLUMN b",
        "ADD COLUMN e VARCHAR(30) AFTER a, DROP COLUMN c",
        "MODIFY a BIGINT AFTER e",
    ),
    "postgres": (
        "ADD COLUMN d INT DEFAULT 7",
        "DROP COLUMN b",
        "RENAME COLUMN c TO e",
        "ALTER COLUMN a TYPE varchar(30)",
    ),
}
ANNOUNCED = [
    {"id", "version", "a", "b", "c", "d"},
    {"id", "version", "a", "c", "d"},
    {"id", "version", "a", "d", "e"},
    {"id", "version", "a", "d", "e"},
]


def migrate(row: dict[str, Any], kinds: dict[str, Kind], *, renames: bool) -> None:
    """What the changes do with a row that is there; a definition may be announced more than
    once."""
    if "d" in kinds:
        row.setdefault("d", 7 if renames else None)
    if "b" not in kinds:
        row.pop("b", None)
    if "e" in kinds and "c" in row:
        value = row.pop("c")
        row["e"] = value if renames else None
    if kinds["a"] is Kind.STRING:
        row["a"] = str(row["a"])
    assert row.keys() == kinds.keys()


@pytest.fixture(params=["mariadb FULL", "mysql FULL", "mysql MINIMAL", "postgres"])
def database(request: pytest.FixtureRequest, row_metadata: SetRowMetadata) -> FreshDatabase:
    """An empty database; MINIMAL, MySQL's default, is without the columns' names in the binlog."""
    product, _, metadata = request.param.partition(" ")
    found: FreshDatabase = request.getfixturevalue(f"{product}_database")
    if metadata == "MINIMAL":
        row_metadata(found.server, metadata)
    return found


async def test_columns_change_while_writers_never_pause_and_each_row_has_its_own_definition(
    database: FreshDatabase, tmp_path: Path
) -> None:
    is_postgres = database.server.product == "postgres"
    changes = CHANGES["postgres" if is_postgres else "mariadb"]
    config = database_config(
        "shop", database.url, "public.*" if is_postgres else f"{database.name}.*"
    )
    database.execute(TABLE)
    writers = BusyWriters(database.name)
    announced_names = (
        ANNOUNCED if is_postgres else ANNOUNCED[:3]
    )  # A wider integer is of the same kind.

    def state() -> Applied:
        moved = partial(migrate, renames=is_postgres)
        return applied(tmp_path / "shop", moved, defaults={"d": 7 if is_postgres else None})

    def has_come(count: int) -> bool:
        return len(state().names) == min(count, len(announced_names))

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        with writers.at_work(database.server):
            # Where the binlog names no columns, a definition is read with its first rows.
            await eventually(lambda: state().transactions, 30, "the first rows", poll_s=0.1)
            for count, change in enumerate(changes, 1):
                await asyncio.to_thread(writers.each_commits, 8)
                await asyncio.to_thread(database.execute, f"ALTER TABLE busy {change}")
                writers.read_columns_again()
                await asyncio.to_thread(writers.each_commits, 4)
                await eventually(partial(has_come, count), 30, change, poll_s=0.1)
            await asyncio.to_thread(writers.each_commits, 8)
        await eventually(lambda: state().transactions == writers.committed, 30, poll_s=0.1)
        assert not fetcher.status.reconnect_count
        # PostgreSQL's source suspends the table for a moment at each change.
        await eventually(lambda: not fetcher.status.source.get("stopped_tables"), 30)
    found = state()
    assert found.names == announced_names
    assert found.kinds["a"] is (Kind.STRING if is_postgres else Kind.INT)
    names = sorted(found.kinds)
    rows = database.execute(f"SELECT {', '.join(names)} FROM busy ORDER BY id")
    assert [dict(zip(names, row, strict=True)) for row in rows] == [
        found.rows[key] for key in sorted(found.rows)
    ]
    assert len(rows) > 30
    assert writers.surprises >= 2, "a column went and one got another name, while they wrote"
