"""Rows in another file than at the last look at the catalogue: what may have changed them."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.relay.processes.fetcher import Fetcher
from tests.integration.test_postgres_renamed import (
    PUBLICATIONS,
    config_of,
    copy_of,
    is_settled,
    of_kind,
    rows_of,
)
from tests.storm.replica import RingReplica
from tests.support.capture import capturing, stored_resume_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TABLES = (
    "CREATE SCHEMA shop",
    "CREATE TABLE shop.bare (id int PRIMARY KEY, v int)",
    "CREATE TABLE shop.toasted (id int PRIMARY KEY, v int, x text)",
    "CREATE TABLE shop.parted (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE shop._p0 PARTITION OF shop.parted FOR VALUES FROM (0) TO (50)",
    "CREATE TABLE shop._p1 PARTITION OF shop.parted FOR VALUES FROM (50) TO (90)",
)
SOURCES = ("shop.bare", "shop.toasted", "shop.parted")
UNLOGGED = (
    "ALTER TABLE {t} SET UNLOGGED",
    "INSERT INTO {t} VALUES (3, 30); DELETE FROM {t} WHERE id = 2; UPDATE {t} SET v = 11",
    "ALTER TABLE {t} SET LOGGED",
)
LEAVES = "ALTER TABLE shop._p0 SET {how}; ALTER TABLE shop._p1 SET {how}"
SILENT = {
    "unlogged": UNLOGGED,
    "unlogged and emptied": (UNLOGGED[0], "DELETE FROM {t}", UNLOGGED[2]),
    "unlogged and written on": (*UNLOGGED, "INSERT INTO {t} VALUES (5, 50)"),
    "unlogged and packed": (*UNLOGGED, "VACUUM FULL {t}"),
    "unlogged and granted": (*UNLOGGED, "GRANT SELECT ON {t} TO PUBLIC"),
    "emptied and unlogged": ("TRUNCATE {t}; INSERT INTO {t} VALUES (1, 1), (2, 2)", *UNLOGGED),
    "unlogged with a new column": ("ALTER TABLE {t} ADD d int DEFAULT 7", *UNLOGGED),
}
OF_ONE_TRANSACTION = {
    "filled": (*UNLOGGED[:1], "INSERT INTO {t} VALUES (3, 30)", UNLOGGED[2]),
    "filled and written on": (*UNLOGGED, "INSERT INTO {t} VALUES (5, 50)"),
    "filled before": ("INSERT INTO {t} VALUES (2, 1)", *UNLOGGED),
    "emptied": ("INSERT INTO {t} VALUES (2, 1)", UNLOGGED[0], "DELETE FROM {t}", UNLOGGED[2]),
    "granted": (*UNLOGGED, "GRANT SELECT ON {t} TO PUBLIC"),
    "granted after a savepoint": (
        "SAVEPOINT a", *UNLOGGED, "RELEASE a", "GRANT SELECT ON {t} TO PUBLIC",
    ),
    "truncated in a savepoint": ("SAVEPOINT a", "TRUNCATE {t}", "RELEASE a", *UNLOGGED),
    "committed and updated": (*UNLOGGED, "COMMIT", "UPDATE {t} SET v = v + 1"),
    "committed and packed": (*UNLOGGED, "COMMIT", "VACUUM FULL {t}"),
    "committed and indexed": (*UNLOGGED, "COMMIT", "REINDEX TABLE {t}"),
    "committed, and an ALTER rolled back": (
        *UNLOGGED, "COMMIT", "BEGIN", "ALTER TABLE {t} SET (fillfactor = 50)", "ROLLBACK",
    ),
}  # fmt: skip
"""What follows a TRUNCATE."""
OF_PARTITIONS = {
    "truncated and unlogged in one transaction": (
        "BEGIN; TRUNCATE shop.parted;"
        + LEAVES.format(how="UNLOGGED")
        + "; INSERT INTO shop.parted VALUES (3, 30), (70, 70);"
        + LEAVES.format(how="LOGGED")
        + "; COMMIT",
    ),
    "unlogged": (
        LEAVES.format(how="UNLOGGED"),
        "INSERT INTO shop.parted VALUES (3, 30); DELETE FROM shop.parted WHERE id = 2",
        LEAVES.format(how="LOGGED"),
    ),
    "emptied by name": ("TRUNCATE shop._p0, shop._p1",),
    "emptied by name after the root": (
        "TRUNCATE shop.parted",
        "INSERT INTO shop.parted VALUES (1, 1), (2, 2)",
        "TRUNCATE shop._p0, shop._p1",
    ),
}
FOLLOWED = {
    "packed": ("VACUUM FULL {t}",),
    "ordered": ("CLUSTER {t} USING {name}_pkey",),
    "packed twice": ("VACUUM FULL {t}", "UPDATE {t} SET v = 12 WHERE id = 1", "VACUUM FULL {t}"),
    "emptied": ("TRUNCATE {t}",),
    "emptied and filled": ("TRUNCATE {t}; INSERT INTO {t} VALUES (1, 1), (5, 5)",),
    "emptied late in a transaction": (
        "CREATE TABLE shop._of_{name} (); TRUNCATE {t}; INSERT INTO {t} VALUES (1, 1), (5, 5); "
        "GRANT SELECT ON {t} TO PUBLIC",
    ),
    "emptied with others": (
        "CREATE TABLE shop._of_{name} (id int PRIMARY KEY); TRUNCATE shop._of_{name}, {t}",
    ),
}


async def filled(db: FreshDatabase, folder: Path) -> None:
    for source in SOURCES:
        db.execute(f"INSERT INTO {source} VALUES (1, 10), (2, 20), (60, 60)")
    await eventually(lambda: equal(db, folder, dict.fromkeys(SOURCES, True)), 30, "followed")


def equal(db: FreshDatabase, folder: Path, sources: dict[str, bool]) -> bool:
    return all(copy_of(folder, source) == rows_of(db, source) for source in sources)


async def looked(db: FreshDatabase, fetcher: Fetcher, new: str) -> None:
    """Return when a look at the catalogue has found a new table."""
    db.execute(f"CREATE TABLE shop.{new} (id int PRIMARY KEY, v int)")
    await eventually(lambda: f'"shop.{new}"' in stored_resume_state(fetcher), 30, "a look")


@pytest.mark.parametrize("publication", [name for name, made in PUBLICATIONS.items() if made])
@pytest.mark.parametrize("how", SILENT)
async def test_what_is_written_to_a_table_while_it_is_unlogged_is_not_lost(
    shop: FreshDatabase, tmp_path: Path, how: str, publication: str
) -> None:
    """Between two looks: none finds the table unlogged."""
    folder = tmp_path / "shop"
    options = of_kind(shop, publication)
    tables = ("shop.bare", "shop.toasted")
    async with capturing(config_of(shop, discover_every="2s", **options), tmp_path) as fetcher:
        await streaming(fetcher)
        await filled(shop, folder)
        replica = RingReplica(folder)
        for table in tables:
            for statement in SILENT[how]:
                shop.execute(statement.format(t=table))
        await eventually(
            lambda: bool(replica.read()) or {s.source for s in replica.suspensions} >= {*tables},
            30, "both are named",
        )  # fmt: skip
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        await eventually(lambda: equal(shop, folder, dict.fromkeys(SOURCES, True)), 30, "equal")
        shop.execute(
            "INSERT INTO shop.bare VALUES (9, 90); INSERT INTO shop.toasted VALUES (9, 90)"
        )
        await eventually(lambda: equal(shop, folder, dict.fromkeys(SOURCES, True)), 30, "followed")
        replica.close()


async def test_a_truncate_does_not_explain_what_its_transaction_writes_to_an_unlogged_table(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    """Each way with tables of its own, all between two looks."""
    db, folder = postgres_database, tmp_path / "shop"
    ways: dict[str, tuple[str, ...]] = {}
    for number, way in enumerate(OF_ONE_TRANSACTION.values()):
        ways |= {f"shop.{kind}_{number}": way for kind in ("bare", "toasted")}
    db.execute("CREATE SCHEMA shop")
    for table in ways:
        large = ", x text" if "toasted" in table else ""
        db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int{large})")
    followed = dict.fromkeys(ways, True)
    config = config_of(db, discover_every="5s", **of_kind(db, "of all tables"))
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for table in ways:
            db.execute(f"INSERT INTO {table} VALUES (1, 10), (2, 20)")
        await eventually(lambda: equal(db, folder, followed), 30, "followed")
        await looked(db, fetcher, "seen")
        for table, way in ways.items():
            connection = db.server.connect(db.name)
            cursor = connection.cursor()
            for statement in ("BEGIN", "TRUNCATE {t}", *way, "COMMIT"):
                cursor.execute(statement.format(t=table))
            connection.close()
        replica = RingReplica(folder)
        await eventually(
            lambda: bool(replica.read()) or {s.source for s in replica.suspensions} >= {*ways},
            60, "all are named",
        )  # fmt: skip
        replica.close()
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        await eventually(lambda: equal(db, folder, followed), 30, "equal")


@pytest.mark.parametrize("how", OF_PARTITIONS)
async def test_what_happens_to_all_partitions_at_once_is_not_taken_for_a_truncate_of_the_root(
    shop: FreshDatabase, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "shop"
    async with capturing(config_of(shop, discover_every="2s"), tmp_path) as fetcher:
        await streaming(fetcher)
        await filled(shop, folder)
        for statement in OF_PARTITIONS[how]:
            shop.execute(statement)
        await eventually(lambda: equal(shop, folder, dict.fromkeys(SOURCES, True)), 30, "equal")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        assert equal(shop, folder, dict.fromkeys(SOURCES, True))


@pytest.mark.parametrize("is_down", [False, True], ids=["", "while the relay is down"])
@pytest.mark.parametrize("how", FOLLOWED)
async def test_rows_that_only_moved_or_went_with_an_event_suspend_no_table(
    shop: FreshDatabase, tmp_path: Path, how: str, is_down: bool
) -> None:
    folder = tmp_path / "shop"
    options = of_kind(shop, "of all tables")
    config = config_of(shop, discover_every="500ms", **options)

    def act() -> None:
        for source in SOURCES[: 2 if how == "ordered" else 3]:
            for statement in FOLLOWED[how]:
                shop.execute(statement.format(t=source, name=source.removeprefix("shop.")))

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await filled(shop, folder)
        await looked(shop, fetcher, "seen")
        if not is_down:
            act()
    if is_down:
        act()
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for name in ("first", "second", "third"):
            await looked(shop, fetcher, name)
        await eventually(lambda: equal(shop, folder, dict.fromkeys(SOURCES, True)), 30, "equal")
    replica = RingReplica(folder)
    replica.read()
    assert [state.source for state in replica.suspensions if state.source in SOURCES] == []
    replica.close()
