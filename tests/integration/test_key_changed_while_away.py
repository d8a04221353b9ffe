"""A table of MariaDB or MySQL that gets another key while the relay is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_suspended_tables import rows_of, session
from tests.support.capture import capturing, database_config, streaming, suspended
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_key_that_changed_while_the_relay_was_away_suspends_its_table(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, k INT NOT NULL)")
    source = f"{database.name}.t"
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO t VALUES (1, 1), (2, 1)")
        await eventually(lambda: len(rows_of(tmp_path / "shop", source)) == 2, 60, "its rows")
    session(database, "ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (id, k)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO t VALUES (3, 1)")
        await eventually(lambda: source in suspended(fetcher), 5, "suspended")
        assert "its key was (id) and is (id, k)" in suspended(fetcher)[source]
