"""RESET MASTER of MariaDB, RESET BINARY LOGS AND GTIDS of MySQL: named, and no progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig
from databus.relay.processes.fetcher import Fetcher
from tests.support.capture import (
    RingState,
    capturing,
    database_config,
    failed_with,
    ring_state,
    streaming,
)
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually


def reset(database: FreshDatabase) -> None:
    is_mysql = database.url.startswith("mysql")
    database.execute("RESET BINARY LOGS AND GTIDS" if is_mysql else "RESET MASTER")


@pytest.fixture
def config(database: FreshDatabase) -> DatabaseConfig:
    """Of a new table, after a reset: what comes after another one can be more, or less."""
    reset(database)
    database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    return database_config("shop", database.url, f"{database.name}.*")


def insert_later(database: FreshDatabase, count: int) -> None:
    """So many transactions of a later time: MariaDB's binlog has their times in whole seconds."""
    for number in range(count):
        database.transaction(
            "SET timestamp = UNIX_TIMESTAMP() + 60", f"INSERT INTO t VALUES ({10 + number})"
        )


async def captured(database: FreshDatabase, folder: Path, numbers: range) -> RingState:
    """The ring's state once it has the rows that are inserted here, a transaction each."""
    for number in numbers:
        database.execute(f"INSERT INTO t VALUES ({number})")
    table = f"{database.name}.t"
    await eventually(lambda: (numbers[-1],) in ring_state(folder).tables.get(table, {}), 60)
    return ring_state(folder)


def failure_of(fetcher: Fetcher) -> str:
    """What the fetcher reports of its failure, at each attempt again."""
    return fetcher.status.error.message if fetcher.status.error else ""


@pytest.mark.parametrize("count", [1, 9], ids=["less", "more"])
async def test_a_reset_under_a_running_stream_is_named_whatever_is_written_after_it(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path, count: int
) -> None:
    """At the end of a file that is gone the server sends heartbeats, and no error."""
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        before = await captured(database, tmp_path / "shop", range(4))
        reset(database)
        insert_later(database, count)
        await failed_with(fetcher, "source_position_lost")
        # Where more was written, MySQL itself has an error first: what it reads is gone.
        await eventually(lambda: "was reset" in failure_of(fetcher))
    assert ring_state(tmp_path / "shop") == before


async def test_a_reset_while_no_relay_runs_is_named_though_the_numbers_have_passed_ours(
    database: FreshDatabase, config: DatabaseConfig, tmp_path: Path
) -> None:
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        before = await captured(database, tmp_path / "shop", range(4))
    reset(database)
    insert_later(database, 9)
    async with capturing(config, tmp_path) as fetcher:
        message = await failed_with(fetcher, "source_position_lost")
    assert "this server's history is not the one that the relay has read" in message
    assert ring_state(tmp_path / "shop") == before
