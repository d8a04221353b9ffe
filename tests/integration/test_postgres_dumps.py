"""Dumps of several PostgreSQL tables of which one cannot be read, and of tables without a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_stopped_tables import dump, rows_of
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import config_of, opened
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_table_that_cannot_be_read_ends_no_dump_of_the_others(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    db, folder = postgres_database, tmp_path / "shop"
    for name in ("a_fine", "b_nan", "c_fine"):
        db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, n numeric(5, 2))")
        db.execute(f"INSERT INTO {name} VALUES (1, 1)")
    db.execute("INSERT INTO b_nan VALUES (2, 'NaN')")
    async with capturing(database_config("shop", db.url, "public.*"), tmp_path) as fetcher:
        await streaming(fetcher)
        await dump(folder, "public.*", ends="failed")
        (failed,) = fetcher.book
        assert failed.error is not None
        assert "public.b_nan.n" in failed.error["detail"]
        assert {t.source: t.done for t in failed.tables or ()} == {
            "public.a_fine": True, "public.b_nan": False, "public.c_fine": True,
        }  # fmt: skip
        for name in ("public.a_fine", "public.c_fine"):
            await eventually(lambda name=name: len(rows_of(folder, name)) == 1, 30)


async def test_chunks_of_a_table_without_a_key_do_not_shrink(
    postgres_database: FreshDatabase,
) -> None:
    db = postgres_database
    db.execute("CREATE TABLE heap (v int)")
    db.execute("CREATE TABLE keyed (id int PRIMARY KEY)")
    for name in ("heap", "keyed"):
        db.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    config = config_of(db).model_copy(update={"keys": {"public.heap": ("*",)}})
    async with opened(config) as source:
        assert (await source.table_size("public.heap")).is_scanned
        assert not (await source.table_size("public.keyed")).is_scanned
