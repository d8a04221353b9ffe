"""A table that a session of MariaDB or MySQL has locked holds up its own dump alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.relay.sources.mysql.chunks import mysql_chunks
from tests.integration.test_stopped_tables import dump, in_database, rows_of
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase

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
