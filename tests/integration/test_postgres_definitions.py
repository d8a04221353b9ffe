"""Definitions that give old rows other values: PostgreSQL logs no row of them.

The table is suspended by name and resynchronised, and its consumers end with the source's rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.common.table_state import CaptureState
from tests.storm.replica import Replica, Table, differences
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SOURCE = "public.t"


def config_of(database: FreshDatabase, **options: Any) -> DatabaseConfig:
    config = database_config("shop", database.url, "public.*", **options)
    return config.model_copy(update={"resync": "auto"})


def differing(database: FreshDatabase, replica: Replica, source: str = SOURCE) -> list[str]:
    """Where a consumer's copy of a table is not what the source has."""
    replica.read()
    with database.server.connect(database.name) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {source}")
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    held = replica.tables.get(source, Table())
    found, unsent = differences(names, ["id"], rows, held)
    return found + ["a value without an event"] * unsent


def is_followed(replica: Replica, source: str = SOURCE) -> bool:
    replica.read()
    return replica.state(source) is None


@pytest.mark.parametrize("when", ["at a look", "with the next row", "while the relay is down"])
async def test_a_column_with_a_default_reaches_the_rows_that_were_there(
    postgres_database: FreshDatabase, tmp_path: Path, when: str
) -> None:
    db = postgres_database
    # With the next row: no look at the catalogue comes to the test's help.
    every = "1h" if when == "with the next row" else "100ms"
    config = config_of(db, discover_every=every)
    db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
        replica = Replica(tmp_path / "shop")
        await eventually(lambda: not differing(db, replica), 30, "the rows have come")
        if when != "while the relay is down":
            db.execute("ALTER TABLE t ADD COLUMN d int DEFAULT 7")
            if when == "with the next row":
                db.execute("DELETE FROM t WHERE id = 1")
            await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
    if when == "while the relay is down":
        db.execute("ALTER TABLE t ADD COLUMN d int DEFAULT 7")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
        await eventually(lambda: is_followed(replica), 30, "followed again")
        assert differing(db, replica) == []
    (state,) = replica.suspensions
    assert state.source == SOURCE
    assert "its column d was added" in state.reason
    assert state.state is CaptureState.SUSPENDED
    assert not replica.faults
    replica.close()
