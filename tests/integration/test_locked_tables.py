"""A table that a session has locked, or written and not committed, holds up its own dump alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.relay.sources.mysql.chunks import mysql_chunks
from databus.relay.sources.postgres.tables import postgres_catalogue
from tests.integration.test_stopped_tables import dump, in_database, rows_of
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_dump_reads_the_other_tables_while_a_session_has_locked_one(
    database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql_chunks, "LOCK_WAIT_S", 1)
    for table in ("a_locked", "open"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
        database.execute(f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
    folder = tmp_path / "shop"
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        connection = database.server.connect(database.name)
        try:
            await asyncio.to_thread(connection.query, "LOCK TABLES a_locked WRITE")
            await dump(folder, f"{database.name}.*", ends="failed")
        finally:
            connection.close()
        assert rows_of(folder, f"{database.name}.a_locked") == {}
        assert rows_of(folder, f"{database.name}.open") == in_database(database, "open")
        (failed,) = fetcher.book
        assert failed.error is not None
        assert "a_locked was locked by another session for 1 s" in str(failed.error["detail"])
        await dump(folder, f"{database.name}.*")
        expected = in_database(database, "a_locked")
        assert rows_of(folder, f"{database.name}.a_locked") == expected


async def test_suspended_tables_come_back_beside_one_that_a_transaction_has_written(
    postgres_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL: what it wrote while the publication did not give it has no events."""
    monkeypatch.setattr(postgres_catalogue, "WRITERS_WAIT_S", 1)
    db, folder = postgres_database, tmp_path / "shop"
    for table in ("a_written", "other"):
        db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
    config = database_config("shop", db.url, "public.*", discover_every="100ms")
    config = config.model_copy(update={"resync": "auto"})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        ((publication,),) = db.execute("SELECT pubname FROM pg_publication")

        def suspended() -> set[str]:
            return {str(record["source"]) for record in fetcher.tables.document()}

        with db.server.connect(db.name) as connection:
            connection.execute("BEGIN; INSERT INTO a_written VALUES (1, 10)")
            db.execute(f"ALTER PUBLICATION {publication} SET (publish = 'insert')")
            db.execute("INSERT INTO other VALUES (1, 10)")
            await eventually(lambda: len(suspended()) == 2, 30, "the publication is partial")
            db.execute(
                f"ALTER PUBLICATION {publication} SET (publish = 'insert,update,delete,truncate')"
            )
            await eventually(lambda: suspended() == {"public.a_written"}, 60, "the other")
            await eventually(
                lambda: (
                    "transactions that have been open for 1 s" in str(fetcher.tables.document())
                ),
                60,
                "the reason",
            )
            connection.execute("COMMIT")
        await eventually(lambda: not suspended(), 60, "both")
    assert rows_of(folder, "public.a_written") == {(1,): {"id": 1, "v": 10}}
    assert rows_of(folder, "public.other") == {(1,): {"id": 1, "v": 10}}
