"""A server that ends without shutting down: tables whose engine does not recover are suspended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capture import capturing, database_config, streaming, suspended_in, upserted
from tests.support.fixtures import FreshDatabase
from tests.support.own_servers import mariadb, mysql
from tests.support.waiting import eventually

__all__ = ["mariadb", "mysql"]

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(240)]


async def test_tables_without_recovery_are_suspended_after_a_crash_and_not_after_a_shutdown(
    database: FreshDatabase, tmp_path: Path
) -> None:
    db, folder = database, tmp_path / "shop"
    for table, engine in (("a", "InnoDB"), ("b", "MyISAM"), ("c", "MEMORY")):
        db.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY) ENGINE = {engine}")
    config = database_config("shop", db.url, f"{db.name}.*").model_copy(update={"resync": "auto"})
    source = f"{db.name}.b"

    def rows(table: str) -> set[int]:
        return {row["id"] for row in upserted(folder, f"{db.name}.{table}")[0].values()}

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO b VALUES (1)")
        await eventually(lambda: rows("b") == {1}, 60, "followed")
        db.server.restart()
        db.execute("INSERT INTO a VALUES (1)")
        await eventually(lambda: rows("a") == {1}, 60, "after a shutdown")
        assert suspended_in(fetcher) == {}
        db.execute("FLUSH BINARY LOGS")
        db.execute("INSERT INTO b VALUES (2)")
        await eventually(lambda: rows("b") == {1, 2}, 60, "in the next file")
        assert suspended_in(fetcher) == {}
        db.server.kill9()
        db.server.restart()
        db.execute("INSERT INTO a VALUES (2)")
        await eventually(lambda: rows("a") == {1, 2}, 60, "after the crash")
        assert suspended_in(fetcher).keys() == {source}
        assert "the server ended without shutting down" in suspended_in(fetcher)[source]
        assert f"ALTER TABLE {source} ENGINE = InnoDB" in suspended_in(fetcher)[source]
        db.execute("ALTER TABLE b ENGINE = InnoDB")
        await eventually(lambda: not suspended_in(fetcher), 60, "resynchronised")
        db.execute("INSERT INTO b VALUES (3)")
        await eventually(lambda: rows("b") == {1, 2, 3}, 60, "followed again")
