"""One relay for each SQLite file: the log is pruned for one reader."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from databus.common.errors import SourcePositionLost, SourceUnavailable
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from tests.support.opened_source import opened_scn
from tests.support.sqlite_source import config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    return path


async def test_a_second_relay_of_one_file_is_refused_by_name_until_the_first_has_ended(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "other name.db").symlink_to(path)
    first, second = SqliteSource(config(path)), SqliteSource(config(tmp_path / "other name.db"))
    await first.open()
    with pytest.raises(SourceUnavailable, match=r"another relay captures it.*relay\+http://"):
        await second.open()
    assert await second.preflight() == [], "looking is allowed"
    await first.close()
    await second.open()
    await second.close()


async def test_a_log_that_another_process_has_pruned_is_a_lost_position(path: Path) -> None:
    source = SqliteSource(config(path))
    begun = await opened_scn(source)
    stream = source.stream(begun)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("INSERT INTO t VALUES (1, 'a')")
        async for batch in stream:
            if batch.data:
                break
        # As a relay does that has read further: of two rows the first is gone.
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO t VALUES (2, 'b')")
        db.execute("INSERT INTO t VALUES (3, 'c')")
        (last,) = db.execute("SELECT max(id) FROM databus_log").fetchone()
        db.execute("DELETE FROM databus_log WHERE id < ?", (last,))
        db.execute("INSERT OR REPLACE INTO databus_meta VALUES ('pruned', ?)", (last - 1,))
        db.execute("COMMIT")
        with pytest.raises(SourcePositionLost, match=f"reaches from {last - 1} to {last}"):
            async for _ in stream:
                pass
    await stream.aclose()
    await source.close()
