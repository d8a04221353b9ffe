"""A table that a session has locked, or written and not committed, holds up its own dump alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.common.errors import UnsupportedChange
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql.chunks import mysql_chunks
from databus.relay.sources.postgres.chunks import postgres_chunks
from databus.relay.sources.postgres.stream import slot_stream
from tests.integration.test_suspended_tables import dump, in_database, rows_of
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


async def test_a_probe_does_not_wait_long_for_a_locked_table(
    database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql_chunks, "LOCK_WAIT_S", 3600)
    monkeypatch.setattr(mysql_chunks, "PROBE_WAIT_S", 1)
    database.execute("CREATE TABLE a_locked (id INT PRIMARY KEY, v INT)")
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        source, _ = await fetcher.connected()
        connection = database.server.connect(database.name)
        try:
            await asyncio.to_thread(connection.query, "LOCK TABLES a_locked WRITE")
            with pytest.raises(UnsupportedChange, match="locked by another session for 1 s"):
                await source.read_chunk(
                    ChunkRequest(f"{database.name}.a_locked", 10, is_probe=True)
                )
        finally:
            connection.close()


async def test_a_dump_reads_the_other_tables_while_a_transaction_has_locked_one(
    postgres_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_chunks, "LOCK_WAIT_S", 1.0)
    db, folder = postgres_database, tmp_path / "shop"
    for table in ("a_locked", "open"):
        db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
        db.execute(f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
    config = database_config("shop", db.url, "public.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        with db.server.connect(db.name) as connection:
            connection.execute("BEGIN; LOCK TABLE a_locked")
            await dump(folder, "public.*", ends="failed")
            (process,) = connection.execute("SELECT pg_backend_pid()").fetchone()
            connection.execute("COMMIT")
        assert rows_of(folder, "public.a_locked") == {}
        assert rows_of(folder, "public.open") == {(1,): {"id": 1, "v": 1}, (2,): {"id": 2, "v": 2}}
        (failed,) = fetcher.book
        assert failed.error is not None
        (unread,) = failed.error["unread"].items()
        assert unread[0] == "public.a_locked"
        assert f"public.a_locked is locked by server process {process} of" in unread[1]
        assert not fetcher.tables.document()
        await dump(folder, "public.*")
        assert len(rows_of(folder, "public.a_locked")) == 2


async def test_suspended_tables_come_back_beside_those_that_a_transaction_has_written(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    """PostgreSQL: what it wrote while the publication did not give it has no events."""
    db, folder = postgres_database, tmp_path / "shop"
    written = [f"public.a_written{number}" for number in range(8)]
    for table in (*written, "other"):
        db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
    config = database_config("shop", db.url, "public.*", discover_every="100ms")
    config = config.model_copy(update={"resync": "auto"})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for table in written:
            db.execute(f"INSERT INTO {table} VALUES (9, 90)")
        await eventually(lambda: len(rows_of(folder, written[-1])) == 1, 30, "the rows")
        ((publication,),) = db.execute("SELECT pubname FROM pg_publication")

        def suspended() -> set[str]:
            return {str(record["source"]) for record in fetcher.tables.document()}

        with db.server.connect(db.name) as connection:
            connection.execute("BEGIN")
            for table in written:
                connection.execute(f"INSERT INTO {table} VALUES (1, 10)")
            (process,) = connection.execute("SELECT pg_backend_pid()").fetchone()
            db.execute(f"ALTER PUBLICATION {publication} SET (publish = 'insert')")
            db.execute("INSERT INTO other VALUES (1, 10)")
            await eventually(lambda: len(suspended()) == 9, 30, "the publication is partial")
            db.execute(
                f"ALTER PUBLICATION {publication} SET (publish = 'insert,update,delete,truncate')"
            )
            await eventually(lambda: suspended() == set(written), 60, "the other")
            names = [f"{table} waits for transactions" for table in written]
            await eventually(
                lambda: all(name in str(fetcher.tables.document()) for name in names),
                60,
                "the reasons",
            )
            assert f"still open: server process {process} of" in str(fetcher.tables.document())
            for table in written:  # No copy is emptied before its table can be read.
                assert rows_of(folder, table) == {(9,): {"id": 9, "v": 90}}
            connection.execute("COMMIT")
        await eventually(lambda: not suspended(), 60, "all")
    for table in written:
        assert rows_of(folder, table) == {(1,): {"id": 1, "v": 10}, (9,): {"id": 9, "v": 90}}
    assert rows_of(folder, "public.other") == {(1,): {"id": 1, "v": 10}}


async def test_many_suspended_tables_come_back_while_nothing_is_written(
    postgres_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for the quiet stream to look for requests."""
    monkeypatch.setattr(slot_stream, "_QUIET_S", 3600.0)
    monkeypatch.setattr(slot_stream, "_REQUEST_REPLY_AFTER_S", 3600.0)
    db, folder = postgres_database, tmp_path / "shop"
    for number in range(12):
        db.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY, v int)")
        db.execute(f"INSERT INTO t{number} VALUES (1, 10)")
    config = database_config("shop", db.url, "public.*", discover_every="100ms")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        ((publication,),) = db.execute("SELECT pubname FROM pg_publication")
        db.execute(f"ALTER PUBLICATION {publication} SET (publish = 'insert')")
        db.execute(
            f"ALTER PUBLICATION {publication} SET (publish = 'insert,update,delete,truncate')"
        )
        db.execute("INSERT INTO t0 VALUES (2, 20)")
        await eventually(lambda: len(fetcher.tables.document()) == 12, 60, "the suspensions")
        await dump(folder, "public.*")
        await eventually(lambda: not fetcher.tables.document(), 60, "all")
    assert len(rows_of(folder, "public.t0")) == 2
    assert len(rows_of(folder, "public.t11")) == 1
