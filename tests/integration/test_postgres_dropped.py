"""DROP TABLE has no event in PostgreSQL's stream: the relay finds it in the catalogue, and empties
every copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log.table_repairs import NOTE
from databus.common.config import DatabaseConfig, parse
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.postgres import PostgresSource
from databus.relay.sources.postgres.stream.slot_stream import SlotStream
from tests.storm.replica import RingReplica, Table, differences
from tests.support.bootstrap_log import note_of, seeded, written_log
from tests.support.capture import (
    PACE,
    capturing,
    database_config,
    is_settled,
    ring_state,
    streaming,
    upserted,
)
from tests.support.config_text import relay_text
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SOURCE = "shop.t"
ONE = "CREATE TABLE shop.t (id int PRIMARY KEY, v int)"
PARTED = (
    "CREATE TABLE shop.t (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE shop.t_0 PARTITION OF shop.t FOR VALUES FROM (0) TO (2)",
    "CREATE TABLE shop.t_1 PARTITION OF shop.t FOR VALUES FROM (2) TO (90)",
)
ROWS = "INSERT INTO shop.t VALUES (1, 10), (2, 20)"
LEAVING = {
    "dropped": ((ONE,), ("DROP TABLE shop.t",)),
    "dropped with its schema": ((ONE,), ("DROP SCHEMA shop CASCADE",)),
    "renamed": ((ONE,), ("ALTER TABLE shop.t RENAME TO _old",)),
    "moved": ((ONE,), ("ALTER TABLE shop.t SET SCHEMA public",)),
    "a view": ((ONE,), ("DROP TABLE shop.t", "CREATE VIEW shop.t AS SELECT 1 AS id WHERE false")),
    "unlogged": ((ONE,), ("DROP TABLE shop.t", "CREATE UNLOGGED TABLE shop.t (id int)")),
    "a partitioned root": (PARTED, ("DROP TABLE shop.t",)),
}


def config_of(database: FreshDatabase, **options: Any) -> DatabaseConfig:
    config = database_config("shop", database.url, "shop.*", discover_every="100ms", **options)
    return config.model_copy(update={"resync": "auto", "exclude_sources": ("shop._*",)})


def execute(database: FreshDatabase, *statements: str) -> None:
    for statement in statements:
        database.execute(statement)


def held(folder: Path, source: str = SOURCE) -> list[Any]:
    """The keys of a consumer's copy."""
    return sorted(ring_state(folder).tables.get(source, {}))


async def has_rows(folder: Path) -> None:
    await eventually(lambda: held(folder) == [(1,), (2,)], 30, "the rows have come")


@asynccontextmanager
async def followed(database: FreshDatabase, folder: Path) -> AsyncIterator[Fetcher]:
    """A relay that follows the table, whose rows a consumer has."""
    execute(database, "CREATE SCHEMA shop", ONE)
    async with capturing(config_of(database), folder) as fetcher:
        await streaming(fetcher)
        execute(database, ROWS)
        await has_rows(folder / "shop")
        yield fetcher


def emptied(folder: Path, source: str = SOURCE) -> int:
    return ring_state(folder).ops.count(("t", source))


@pytest.mark.parametrize("is_down", [False, True], ids=["while it runs", "while it is down"])
@pytest.mark.parametrize("how", LEAVING)
async def test_a_table_that_leaves_empties_its_copies(
    db: FreshDatabase, tmp_path: Path, how: str, is_down: bool
) -> None:
    folder = tmp_path / "shop"
    made, leaves = LEAVING[how]
    execute(db, "CREATE SCHEMA shop", "CREATE TABLE shop.other (id int PRIMARY KEY)", *made)
    async with capturing(config_of(db), tmp_path) as fetcher:
        await streaming(fetcher)
        execute(db, ROWS)
        await has_rows(folder)
        if not is_down:
            execute(db, *leaves)
            await eventually(lambda: emptied(folder) > 0, 30, "emptied")
            await eventually(lambda: is_settled(fetcher), 30, "settled")
    if is_down:
        execute(db, *leaves)
    async with capturing(config_of(db), tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: emptied(folder) > 0, 30, "emptied")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        if "SCHEMA shop" not in leaves[0]:
            db.execute("INSERT INTO shop.other VALUES (7)")
            await eventually(lambda: held(folder, "shop.other") == [(7,)], 30, "others continue")
    assert held(folder) == []
    # A fetcher that ends before its next resume state is stored empties them once more.
    assert emptied(folder) in ((1,) if is_down else (1, 2))
    replica = RingReplica(folder)
    replica.read()
    # PostgreSQL may show partitions gone before the root, within one query of ours.
    reasons = ["dropped or renamed"] + ["detached or dropped"] * (how == "a partitioned root")
    assert any(reason in replica.suspensions[0].reason for reason in reasons)
    assert replica.state(SOURCE) is None
    replica.close()


async def test_a_table_that_is_renamed_to_another_captured_name_is_there_under_it_alone(
    db: FreshDatabase, tmp_path: Path
) -> None:
    folder = tmp_path / "shop"
    async with followed(db, tmp_path) as fetcher:
        execute(db, "ALTER TABLE shop.t RENAME TO u", "INSERT INTO shop.u VALUES (3, 30)")
        await eventually(lambda: held(folder) == [] and emptied(folder) > 0, 30, "t is empty")
        wanted = [(1,), (2,), (3,)]
        await eventually(lambda: sorted(upserted(folder, "shop.u")[0]) == wanted, 30, "u is whole")
        await eventually(lambda: is_settled(fetcher), 30, "settled")


@pytest.mark.parametrize("same", [False, True], ids=["another table", "the same table"])
async def test_a_table_that_comes_back_is_whole(
    db: FreshDatabase, tmp_path: Path, same: bool
) -> None:
    folder = tmp_path / "shop"
    execute(db, "CREATE SCHEMA shop", ONE)
    wanted = [1, 2, 3] if same else [5]

    def keys() -> list[int]:
        return sorted(key for (key,) in upserted(folder, SOURCE)[0])

    async with capturing(config_of(db), tmp_path) as fetcher:
        await streaming(fetcher)
        replica = RingReplica(folder)
        execute(db, ROWS)
        await eventually(lambda: keys() == [1, 2], 30)
        execute(db, "ALTER TABLE shop.t RENAME TO _old")
        await eventually(lambda: emptied(folder) > 0, 30, "emptied")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
    execute(db, "INSERT INTO shop._old VALUES (3, 30)")
    if same:
        execute(db, "ALTER TABLE shop._old RENAME TO t")
    else:
        execute(db, "DROP TABLE shop._old", ONE, "INSERT INTO shop.t VALUES (5, 50)")
    async with capturing(config_of(db), tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: keys() == wanted, 30, "it is whole")
        db.execute("INSERT INTO shop.t VALUES (9, 90)")
        await eventually(lambda: 9 in keys(), 30, "followed")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        replica.read()
        rows = [{"id": i, "v": v} for i, v in db.execute("SELECT id, v FROM shop.t")]
        copy = replica.tables.get(SOURCE, Table())
        assert differences(["id", "v"], ["id"], rows, copy) == []
        # Again, with the stream running: the table that is there now leaves as well.
        execute(db, "DROP TABLE shop.t")
        await eventually(lambda: keys() == [], 30, "emptied again")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
    replica.close()


async def test_rows_that_the_stream_still_has_of_a_dropped_table_do_not_come_after_its_end(
    db: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shop"
    execute(db, "CREATE SCHEMA shop", ONE, "CREATE TABLE shop.other (id int PRIMARY KEY)")
    async with capturing(config_of(db), tmp_path) as fetcher:
        await streaming(fetcher)
        execute(db, ROWS)
        await has_rows(folder)
    execute(db, "INSERT INTO shop.t VALUES (3, 30)", "DROP TABLE shop.t")
    execute(db, "INSERT INTO shop.other VALUES (7)")
    start_now = SlotStream._start

    async def start_late(stream: SlotStream, after_scn: int) -> None:
        # The end of t is published, and the stream still is before its last row.
        await eventually(lambda: stream._suspended.has_requests, 60, "it is given up")
        await start_now(stream, after_scn)

    monkeypatch.setattr(SlotStream, "_start", start_late)
    async with capturing(config_of(db), tmp_path) as fetcher:
        await eventually(lambda: held(folder, "shop.other") == [(7,)], 60, "it has come")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
    assert emptied(folder) == 1
    assert held(folder) == []


async def test_with_manual_resynchronisation_it_stays_suspended_until_it_is_confirmed(
    db: FreshDatabase, tmp_path: Path
) -> None:
    folder = tmp_path / "shop"
    config = config_of(db).model_copy(update={"resync": "manual"})
    execute(db, "CREATE SCHEMA shop", ONE)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        execute(db, ROWS)
        await has_rows(folder)
        execute(db, "DROP TABLE shop.t")
        await eventually(lambda: SOURCE in (fetcher.suspended() or {}), 30, "suspended")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        (record,) = fetcher.tables.document()
        assert record["state"] == "suspended" and "dropped" in record["reason"]
        assert not record["is_free"]
        assert emptied(folder) == 0
        fetcher.tables.confirm(SOURCE)
        await eventually(lambda: is_settled(fetcher), 30, "settled")
    assert emptied(folder) == 1 and held(folder) == []


async def test_a_kill_before_it_is_forgotten_empties_it_again(
    db: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shop"
    execute(db, "CREATE SCHEMA shop", ONE)

    async def never(source: PostgresSource, name: str) -> None:
        await asyncio.Event().wait()

    async with capturing(config_of(db), tmp_path) as fetcher:
        await streaming(fetcher)
        execute(db, ROWS)
        await has_rows(folder)
        with monkeypatch.context() as patched:
            patched.setattr(PostgresSource, "confirm_drop", never)
            execute(db, "DROP TABLE shop.t")
            await eventually(lambda: emptied(folder) == 1, 30, "emptied")
            fetcher.stop()
    async with capturing(config_of(db), tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: is_settled(fetcher), 30, "settled")
    assert emptied(folder) == 2 and held(folder) == []


async def test_a_bootstrap_servers_copy_of_a_dropped_table_is_emptied(
    db: FreshDatabase, tmp_path: Path
) -> None:
    folder = tmp_path / "relay" / "shop"
    execute(db, "CREATE SCHEMA shop", ONE, ROWS)
    text = relay_text(
        db.url,
        "shop.*",
        data_dir=tmp_path / "relay",
        sync_every="50ms",
        options={"discover_every": "100ms"},
    )
    config = parse(text)
    async with (
        LocalRelay(config, pace=PACE) as relay,
        written_log(tmp_path / "bootstrap", relay.url) as log,
    ):
        await seeded(log, SOURCE)
        execute(db, "DROP TABLE shop.t")
        await eventually(lambda: emptied(folder) > 0, 60, "emptied")
        await eventually(lambda: not note_of(log, NOTE), 60, "the mark is gone")
        assert emptied(folder) == 1
        end = ring_state(folder).last
        await eventually(lambda: log.state().last >= end, 60, "the log has it")


async def test_a_table_without_a_column_is_suspended_until_it_has_a_key(
    db: FreshDatabase, tmp_path: Path
) -> None:
    """The server has its rows still, and nothing that identifies them."""
    folder = tmp_path / "shop"
    async with followed(db, tmp_path) as fetcher:
        execute(db, "ALTER TABLE shop.t DROP COLUMN v", "ALTER TABLE shop.t DROP COLUMN id")
        await eventually(lambda: SOURCE in (fetcher.suspended() or {}), 30, "named")
        suspension = (fetcher.suspended() or {})[SOURCE]
        assert "no column" in suspension.why
        assert "PRIMARY KEY" in suspension.waits_for
        execute(db, "ALTER TABLE shop.t ADD COLUMN id serial PRIMARY KEY")
        await eventually(lambda: is_settled(fetcher), 60, "resynchronised")
        execute(db, "INSERT INTO shop.t VALUES (7)")
        await eventually(lambda: held(folder) == [(1,), (2,), (7,)], 30, "followed again")
