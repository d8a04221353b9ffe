"""Rows that come under another name of their table, between two looks at the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from tests.support.capture import (
    capturing,
    database_config,
    is_settled,
    streaming,
    upserted_of_each,
)
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PUBLICATIONS = {
    "of tables": "",
    "of all tables": "FOR ALL TABLES WITH (publish_via_partition_root = true)",
    "of schemas": "FOR TABLES IN SCHEMA {schemas} WITH (publish_via_partition_root = true)",
}
SCHEMAS_SINCE = 15_00_00
TABLES = (
    "CREATE SCHEMA shop",
    "CREATE SCHEMA aside",
    "CREATE TABLE shop.t (id int PRIMARY KEY, v int)",
    "CREATE TABLE shop.n (id int PRIMARY KEY, v int)",
    "CREATE TABLE shop.parted (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE shop._part PARTITION OF shop.parted FOR VALUES FROM (0) TO (90)",
)
AWAY = {
    "renamed": (
        "ALTER TABLE shop.t RENAME TO _old",
        "INSERT INTO shop._old VALUES (3, 30)",
        "ALTER TABLE shop._old RENAME TO t",
    ),
    "renamed to a captured name": (
        "ALTER TABLE shop.t RENAME TO u",
        "UPDATE shop.u SET v = 11 WHERE id = 1",
        "ALTER TABLE shop.u RENAME TO t",
    ),
    "moved": (
        "ALTER TABLE shop.t SET SCHEMA aside",
        "DELETE FROM aside.t WHERE id = 2",
        "ALTER TABLE aside.t SET SCHEMA shop",
    ),
    "moved with its schema": (
        "ALTER SCHEMA shop RENAME TO gone",
        "INSERT INTO gone.t VALUES (3, 30)",
        "ALTER SCHEMA gone RENAME TO shop",
    ),
    "emptied under another name": (
        "ALTER TABLE shop.t RENAME TO _old",
        "TRUNCATE shop._old",
        "ALTER TABLE shop._old RENAME TO t",
    ),
    "another table in its place": (
        "ALTER TABLE shop.t RENAME TO _old; ALTER TABLE shop.n RENAME TO t",
        "INSERT INTO shop.t VALUES (4, 40); INSERT INTO shop._old VALUES (5, 50)",
        "ALTER TABLE shop.t RENAME TO n; ALTER TABLE shop._old RENAME TO t",
    ),
    "a partitioned root": (
        "ALTER TABLE shop.parted RENAME TO _old",
        "INSERT INTO shop._old VALUES (3, 30)",
        "ALTER TABLE shop._old RENAME TO parted",
    ),
    "a partitioned root moved": (
        "ALTER TABLE shop.parted SET SCHEMA aside; ALTER TABLE shop._part SET SCHEMA aside",
        "INSERT INTO aside.parted VALUES (3, 30)",
        "ALTER TABLE aside.parted SET SCHEMA shop; ALTER TABLE aside._part SET SCHEMA shop",
    ),
}


def config_of(database: FreshDatabase, **options: Any) -> DatabaseConfig:
    config = database_config("shop", database.url, "shop.*", **options)
    return config.model_copy(
        update={
            "sources": ("shop.*", "shop_*.*"),
            "resync": "auto",
            "exclude_sources": ("shop._*", "shop_*._*"),
        }
    )


def of_kind(
    database: FreshDatabase, publication: str, schemas: Iterable[str] = ("shop",)
) -> dict[str, str]:
    """The options for a publication of this kind; it is made unless the relay makes it."""
    made = PUBLICATIONS[publication].format(schemas=", ".join(schemas))
    if not made:
        return {}
    if "SCHEMA" in made and int(database.execute("SHOW server_version_num")[0][0]) < SCHEMAS_SINCE:
        pytest.skip("FOR TABLES IN SCHEMA is of PostgreSQL 15 and later")
    database.execute(f"CREATE PUBLICATION given {made}")
    return {"publication": "given"}


def copy_of(folder: Path, source: str) -> dict[int, int]:
    return copies_of(folder, (source,))[source]


def copies_of(folder: Path, sources: Iterable[str]) -> dict[str, dict[int, int]]:
    return {
        source: {key: row["v"] for (key,), row in rows.items()}
        for source, (rows, _) in upserted_of_each(folder, sources).items()
    }


def rows_of(database: FreshDatabase, source: str) -> dict[int, int]:
    return dict(database.execute(f"SELECT id, v FROM {source}"))


def in_schemas_of(how: str, statement: str) -> str:
    """The statement with schemas that only this way of renaming uses."""
    return re.sub(r"\b(shop|aside|gone)\b", rf"\1_{how.replace(' ', '_')}", statement)


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "in one transaction"])
@pytest.mark.parametrize("publication", PUBLICATIONS)
async def test_rows_written_while_a_table_has_another_name_are_not_lost(
    postgres_database: FreshDatabase, tmp_path: Path, publication: str, at_once: bool
) -> None:
    """All ways of ``AWAY`` at once, each in schemas of its own."""
    db, folder = postgres_database, tmp_path / "shop"
    for how in AWAY:
        db.execute(in_schemas_of(how, "; ".join(TABLES)))
    schemas = [in_schemas_of(how, "shop") for how in AWAY]
    sources = [f"{schema}.{table}" for schema in schemas for table in ("t", "n", "parted")]
    options = of_kind(db, publication, schemas)

    def copies() -> dict[str, dict[int, int]]:
        return copies_of(folder, sources)

    def stored() -> dict[str, dict[int, int]]:
        return {source: rows_of(db, source) for source in sources}

    async with capturing(config_of(db, discover_every="1s", **options), tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("; ".join(f"INSERT INTO {source} VALUES (1, 10), (2, 20)" for source in sources))
        await eventually(
            lambda: all(copy == {1: 10, 2: 20} for copy in copies().values()), 30, "followed"
        )
        for how, statements in AWAY.items():
            for statement in ["; ".join(statements)] if at_once else statements:
                db.execute(in_schemas_of(how, statement))
        wanted = stored()
        await eventually(lambda: copies() == wanted, 60, "equal")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        db.execute("; ".join(f"INSERT INTO {source} VALUES (9, 90)" for source in sources))
        wanted = stored()
        await eventually(lambda: copies() == wanted, 30, "on")
        assert copies_of(folder, [f"{schema}.u" for schema in schemas]) == {
            f"{schema}.u": {} for schema in schemas
        }


@pytest.mark.parametrize("publication", PUBLICATIONS)
async def test_a_table_that_was_there_between_two_looks_alone_leaves_no_rows(
    shop: FreshDatabase, tmp_path: Path, publication: str
) -> None:
    folder = tmp_path / "shop"
    options = of_kind(shop, publication)
    async with capturing(config_of(shop, discover_every="1s", **options), tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute(
            "CREATE TABLE shop.brief (id int PRIMARY KEY, v int); INSERT INTO shop.t VALUES (1, 1);"
            "INSERT INTO shop.brief VALUES (1, 10)"
        )
        shop.execute("DROP TABLE shop.brief; INSERT INTO shop.t VALUES (2, 2)")
        await eventually(lambda: copy_of(folder, "shop.t") == {1: 1, 2: 2}, 30, "the rest comes")
        await eventually(lambda: copy_of(folder, "shop.brief") == {}, 30, "it leaves nothing")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        assert copy_of(folder, "shop.brief") == {}


async def test_a_table_that_is_made_again_is_followed_after_its_dump(
    shop: FreshDatabase, tmp_path: Path
) -> None:
    """The server describes it once, before the relay has found it."""
    folder = tmp_path / "shop"
    options = of_kind(shop, "of all tables")
    async with capturing(config_of(shop, discover_every="1s", **options), tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO shop.t VALUES (1, 10)")
        await eventually(lambda: copy_of(folder, "shop.t") == {1: 10}, 30, "followed")
        shop.execute("DROP TABLE shop.t; CREATE TABLE shop.t (id int PRIMARY KEY, v int)")
        shop.execute("INSERT INTO shop.t VALUES (5, 50)")
        await eventually(lambda: copy_of(folder, "shop.t") == {5: 50}, 30, "dumped")
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        shop.execute("INSERT INTO shop.t VALUES (6, 60)")
        await eventually(lambda: copy_of(folder, "shop.t") == {5: 50, 6: 60}, 30, "followed")


PARTED = {
    "dropped": (
        "CREATE TABLE shop._more PARTITION OF shop.parted FOR VALUES FROM (100) TO (200)",
        "INSERT INTO shop.parted VALUES (101, 1), (3, 3)",
        "DROP TABLE shop._more",
    ),
    "detached": (
        "CREATE TABLE shop._more PARTITION OF shop.parted FOR VALUES FROM (100) TO (200)",
        "INSERT INTO shop.parted VALUES (101, 1), (3, 3)",
        "ALTER TABLE shop.parted DETACH PARTITION shop._more",
    ),
    "attached and detached": (
        "ALTER TABLE shop.parted ATTACH PARTITION shop.n FOR VALUES FROM (100) TO (200)",
        "INSERT INTO shop.parted VALUES (101, 1), (3, 3)",
        "ALTER TABLE shop.parted DETACH PARTITION shop.n",
    ),
}


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "in one transaction"])
@pytest.mark.parametrize("how", PARTED)
async def test_rows_go_with_a_partition_that_was_there_between_two_looks_alone(
    shop: FreshDatabase, tmp_path: Path, how: str, at_once: bool
) -> None:
    folder = tmp_path / "shop"
    sources = ("shop.parted", "shop.n")
    async with capturing(config_of(shop, discover_every="1s"), tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO shop.parted VALUES (1, 10)")
        await eventually(lambda: copy_of(folder, "shop.parted") == {1: 10}, 30, "followed")
        for statement in ["; ".join(PARTED[how])] if at_once else PARTED[how]:
            shop.execute(statement)
        wanted = {source: rows_of(shop, source) for source in sources}
        assert 101 not in wanted["shop.parted"]
        await eventually(
            lambda: copy_of(folder, "shop.parted").keys() >= {3}, 30, "what came with it"
        )
        await eventually(
            lambda: {source: copy_of(folder, source) for source in sources} == wanted, 30, "equal"
        )
        await eventually(lambda: is_settled(fetcher), 30, "settled")
        assert {source: copy_of(folder, source) for source in sources} == wanted


@pytest.mark.parametrize("publication", PUBLICATIONS)
@pytest.mark.parametrize("is_attached", [False, True], ids=["detached", "attached"])
async def test_later_rows_of_a_partition_come_under_the_name_that_it_has_now(
    postgres_database: FreshDatabase, tmp_path: Path, publication: str, is_attached: bool
) -> None:
    """PostgreSQL 13 sends them under the earlier name until the relay connects again."""
    db, folder = postgres_database, tmp_path / "shop"
    db.execute(
        "CREATE SCHEMA shop; CREATE TABLE shop.root (id int PRIMARY KEY, v int) "
        "PARTITION BY RANGE (id); "
        "CREATE TABLE shop.rest PARTITION OF shop.root FOR VALUES FROM (100) TO (200)"
    )
    part, attach = "CREATE TABLE shop.part", "FOR VALUES FROM (0) TO (100)"
    db.execute(
        f"{part} (id int PRIMARY KEY, v int)"
        if is_attached
        else f"{part} PARTITION OF shop.root {attach}"
    )
    options = of_kind(db, publication)
    # A captured table that has become a partition is suspended as long as it is one.
    sources = ("shop.root",) if is_attached else ("shop.root", "shop.part")

    def stored() -> dict[str, dict[int, int]]:
        return {source: rows_of(db, source) for source in sources}

    async with capturing(config_of(db, discover_every="200ms", **options), tmp_path) as fetcher:

        def suspended() -> set[str]:
            return {str(record["source"]) for record in fetcher.tables.document()}

        await streaming(fetcher)
        db.execute("INSERT INTO shop.part VALUES (1, 10), (2, 20)")
        db.execute("INSERT INTO shop.root VALUES (101, 10)")
        name = "shop.part" if is_attached else "shop.root"
        await eventually(lambda: copy_of(folder, name).get(2) == 20, 30, "followed")
        how = (
            f"ATTACH PARTITION shop.part {attach}" if is_attached else "DETACH PARTITION shop.part"
        )
        db.execute(f"ALTER TABLE shop.root {how}")
        for value in (11, 12, 13):
            await eventually(lambda: copies_of(folder, sources) == stored(), 30, "equal")
            await eventually(lambda: not suspended() & {*sources}, 30, "followed")
            db.execute(f"UPDATE shop.part SET v = {value} WHERE id = 1")
            db.execute(f"INSERT INTO shop.root VALUES ({100 + value}, {value})")
            await eventually(
                lambda v=value: copy_of(folder, "shop.root").get(100 + v) == v, 30, "the other part"
            )
        await eventually(lambda: copies_of(folder, sources) == stored(), 30, "equal")
