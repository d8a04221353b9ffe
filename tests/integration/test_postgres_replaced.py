"""PostgreSQL: what happens to a table between the request to read all of it and the read.

The relay finds a table in the catalogue, waits for its writers and for the stream, and reads it by
its name.  In each test something happens to the table while the relay waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import SourceUnavailable
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.postgres import PostgresSource
from databus.relay.sources.postgres.protocol.replication_connection import ReplicationConnection
from databus.relay.sources.postgres.tables.open_writers import OpenWriters
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable
from databus.relay.sources.postgres.tables.publications import Renewal
from tests.support.capture import (
    capturing,
    database_config,
    is_settled,
    streaming,
    upserted,
)
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import opened_on
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SOURCE = "public.t"
TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, k int NOT NULL DEFAULT 1, v int)",
    "INSERT INTO t VALUES (1, 1, 10), (2, 1, 20)",
    "CREATE TABLE other (id int, k int NOT NULL DEFAULT 1, v int, PRIMARY KEY (id, k))",
    "INSERT INTO other VALUES (1, 1, 11), (9, 1, 90)",
)
NEW_KEY = "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, k)"
SWAP = "BEGIN; ALTER TABLE t RENAME TO _old; ALTER TABLE other RENAME TO t; COMMIT"
SWAP_BACK = "BEGIN; ALTER TABLE t RENAME TO other; ALTER TABLE _old RENAME TO t; COMMIT"


def execute_once_found(db: FreshDatabase, monkeypatch: pytest.MonkeyPatch, sql: str) -> None:
    """Execute a statement each time that the source has found a table by its name."""
    named = Catalogue.table_named

    async def found(catalogue: Catalogue, source: str) -> PostgresTable | None:
        table = await named(catalogue, source)
        db.execute(sql)
        return table

    monkeypatch.setattr(Catalogue, "table_named", found)


def config_of(database: FreshDatabase) -> DatabaseConfig:
    config = database_config("shop", database.url, "public.t", discover_every="100ms")
    return config.model_copy(update={"resync": "auto"})


class Looks:
    """Counts the looks at the catalogue that have ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        look = PostgresSource._publish

        async def counted(source: PostgresSource) -> None:
            await look(source)
            self.count += 1

        monkeypatch.setattr(PostgresSource, "_publish", counted)

    async def another(self) -> None:
        """Return after a whole look that begins from now on."""
        enough = self.count + 2  # One may be under way.
        await eventually(lambda: self.count >= enough, 60, "a look at the catalogue")


def at_first_wait(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]
) -> asyncio.Event:
    """What happens while the relay waits for the writers of t for the first time."""
    wait, has_happened = OpenWriters.wait, asyncio.Event()

    async def waited(writers: OpenWriters, table: PostgresTable, renewal: Renewal) -> None:
        await wait(writers, table, renewal)
        if table.source == SOURCE and not has_happened.is_set():
            has_happened.set()
            await happens()

    monkeypatch.setattr(OpenWriters, "wait", waited)
    return has_happened


def rows_of(database: FreshDatabase) -> dict[Any, dict[str, Any]]:
    return {
        (i, k): {"id": i, "k": k, "v": v} for i, k, v in database.execute("SELECT id, k, v FROM t")
    }


def copy_of(folder: Path) -> dict[Any, dict[str, Any]]:
    return upserted(folder, SOURCE)[0]


async def test_another_table_that_takes_its_name_before_it_is_read_is_followed(
    shop: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks = tmp_path / "shop", Looks(monkeypatch)

    async def happens() -> None:
        shop.execute(SWAP)
        await looks.another()

    async with capturing(config_of(shop), tmp_path) as fetcher:
        await streaming(fetcher)
        has_happened = at_first_wait(monkeypatch, happens)
        shop.execute(NEW_KEY)
        await eventually(has_happened.is_set, 60, "swapped")
        await eventually(lambda: is_settled(fetcher), 60, "settled")
        shop.execute("UPDATE t SET v = 12 WHERE id = 1; INSERT INTO t VALUES (3, 1, 30)")
        await eventually(lambda: copy_of(folder) == rows_of(shop), 30, "equal")


async def test_what_is_written_while_the_publication_lacks_it_is_not_lost(
    shop: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is altered while a resynchronisation waits for the writers of before."""
    folder, looks = tmp_path / "shop", Looks(monkeypatch)
    with shop.server.connect(shop.name) as writer:

        async def happens() -> None:
            ((publication,),) = shop.execute("SELECT pubname FROM pg_publication")
            shop.execute(f"ALTER PUBLICATION {publication} DROP TABLE t")
            writer.execute("BEGIN; INSERT INTO t VALUES (7, 1, 70)")
            shop.execute(f"ALTER PUBLICATION {publication} ADD TABLE t")
            await looks.another()

        async with capturing(config_of(shop), tmp_path) as fetcher:
            await streaming(fetcher)
            has_happened = at_first_wait(monkeypatch, happens)
            shop.execute(NEW_KEY)
            await eventually(has_happened.is_set, 60, "altered")

            def waits() -> bool:
                return "still open" in str(fetcher.tables.document())

            await eventually(lambda: waits() or is_settled(fetcher), 60, "read, or the writer")
            writer.execute("COMMIT")
            await eventually(lambda: is_settled(fetcher), 60, "settled")
            shop.execute("INSERT INTO t VALUES (8, 1, 80)")
            await eventually(lambda: (8, 1) in copy_of(folder), 30, "followed")
            assert copy_of(folder) == rows_of(shop)


async def test_rows_that_a_late_stream_has_under_the_key_before_do_not_come_after_its_truncate(
    shop: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks = tmp_path / "shop", Looks(monkeypatch)
    is_late, waits = asyncio.Event(), asyncio.Event()
    receive = ReplicationConnection.receive

    async def received(
        connection: ReplicationConnection, timeout_s: float, **options: Any
    ) -> memoryview | None:
        if not is_late.is_set():
            return await receive(connection, timeout_s, **options)
        waits.set()
        await asyncio.sleep(0.01)
        return None

    monkeypatch.setattr(ReplicationConnection, "receive", received)
    async with capturing(config_of(shop), tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO t VALUES (3, 1, 30)")
        await eventually(lambda: (3,) in copy_of(folder), 30, "followed")
        is_late.set()
        await eventually(waits.is_set, 30, "the stream is late")
        shop.execute("INSERT INTO t VALUES (4, 1, 40), (5, 1, 50)")
        has_happened = at_first_wait(monkeypatch, looks.another)
        shop.execute(NEW_KEY)
        shop.execute("DELETE FROM t WHERE id = 4")
        await eventually(has_happened.is_set, 30, "it is about to be read")
        await looks.another()
        is_late.clear()
        await eventually(lambda: is_settled(fetcher), 60, "settled")
        shop.execute("INSERT INTO t VALUES (8, 1, 80)")
        await eventually(lambda: (8, 1) in copy_of(folder), 30, "followed")
        assert copy_of(folder) == rows_of(shop)


async def test_rows_of_another_table_that_has_its_name_for_a_while_do_not_come(
    db: FreshDatabase,
) -> None:
    async with opened_on(db, *TABLES, sources=(SOURCE,), discover_every=3600) as (source, _):
        whole = ChunkRequest(SOURCE, 10)
        db.execute(SWAP)
        for read in (source.read_chunk(whole), source.largest_key(SOURCE)):
            with pytest.raises(SourceUnavailable, match="another table"):
                await read
        db.execute(SWAP_BACK)
        assert await source.largest_key(SOURCE) == [2]
        assert len((await source.read_chunk(whole)).rows) == 2


@pytest.mark.parametrize("renames", [SWAP, "ALTER TABLE t RENAME TO _old"], ids=["swap", "away"])
async def test_a_table_that_is_renamed_under_a_read_gives_no_rows(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch, renames: str
) -> None:
    async with opened_on(db, *TABLES, sources=(SOURCE,), discover_every=3600) as (source, _):
        execute_once_found(db, monkeypatch, renames)
        with pytest.raises(SourceUnavailable, match="renamed"):
            await source.read_chunk(ChunkRequest(SOURCE, 10))


async def test_the_largest_key_is_of_the_same_table(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_on(db, *TABLES, sources=(SOURCE,), discover_every=3600) as (source, _):
        execute_once_found(db, monkeypatch, SWAP)
        with pytest.raises(SourceUnavailable, match="renamed"):
            await source.largest_key(SOURCE)


async def test_a_partition_that_left_while_the_relay_connected_again_suspends_its_root(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    """Only the stream has shown it, and the disk is slow to take what the stream has shown."""
    db, folder = postgres_database, tmp_path / "shop"
    db.execute("CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    config = database_config(
        "shop", db.url, "public.*", discover_every="1h", slot="replaced"
    ).model_copy(update={"resync": "auto", "sync_every": 3600.0})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("CREATE TABLE part PARTITION OF root FOR VALUES FROM (0) TO (10)")
        db.execute("INSERT INTO root VALUES (1), (2)")
        await eventually(lambda: len(upserted(folder, "public.root")[0]) == 2, 30, "its rows")
        connected = fetcher.status.reconnect_count
        db.execute("ALTER TABLE root DETACH PARTITION part")
        db.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
            "WHERE slot_name = 'replaced'"
        )
        await eventually(lambda: fetcher.status.reconnect_count > connected, 30, "connected again")
        await eventually(lambda: not upserted(folder, "public.root")[0], 60, "it was emptied")
