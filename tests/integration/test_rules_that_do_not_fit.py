"""A rule for columns that does not fit a later table of a server: that table alone is suspended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_suspended_tables import dump, rows_of, warned_of
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def test_a_table_that_no_rule_fits_is_suspended_alone_until_it_is_dumped(
    mariadb_database: FreshDatabase, tmp_path: Path
) -> None:
    db, folder = mariadb_database, tmp_path / "shop"
    calm, people, part = (f"{db.name}.{table}" for table in ("calm", "people", "part"))
    for table in ("calm", "part"):
        db.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v VARCHAR(20))")
    rules = {"mask_columns": {"*.email": "***"}, "truncate_columns": {f"{part}.n": 2}}
    config = database_config("shop", db.url, f"{db.name}.*").model_copy(update=rules)
    count = 0

    async def others_continue() -> None:
        nonlocal count
        count += 1
        db.execute(f"INSERT INTO calm VALUES ({count}, 'x')")
        await eventually(lambda: (count,) in rows_of(folder, calm), 30, "the others continue")

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO part VALUES (1, 'one')")
        db.execute("CREATE TABLE people (email VARCHAR(20) PRIMARY KEY)")
        await others_continue()
        # The binlog contains the table before it has a row.
        await eventually(lambda: "mask_columns" in warned_of(fetcher, people), 30)
        db.execute("INSERT INTO people VALUES ('secret-1')")
        db.execute("ALTER TABLE part ADD COLUMN n INT")
        db.execute("INSERT INTO part VALUES (2, 'secret-2', 2)")
        await others_continue()
    assert set(rows_of(folder, part)) == {(1,)}
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("ALTER TABLE part DROP COLUMN n")
        db.execute("INSERT INTO part VALUES (3, 'secret-3')")
        await others_continue()
        assert set(rows_of(folder, part)) == {(1,)}
        written = b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())
        assert b"secret" not in written
        await dump(folder, part)
        db.execute("INSERT INTO part VALUES (4, 'four')")
        await others_continue()
        assert set(rows_of(folder, part)) == {(1,), (2,), (3,), (4,)}
        await eventually(lambda: warned_of(fetcher, people) and not warned_of(fetcher, part), 30)
