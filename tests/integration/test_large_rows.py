"""A row that the ring cannot hold suspends its table alone, on every kind of source."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.relay.processes.fetcher import Fetcher
from tests.integration.test_suspended_tables import dump
from tests.support.capture import (
    capturing,
    database_config,
    stored_resume_state,
    streaming,
    upserted,
)
from tests.support.relay_process import table_states
from tests.support.upstream import Upstream
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RING = "1MiB"
LIMIT = 1 << 18
LARGE, SMALL = "x" * (LIMIT + 1000), "s"
LARGER_RING = {"ring_bytes": "4MiB"}


class WideTables(Upstream):
    """Of a database the tables ``calm`` and ``wide`` (id, body, note)."""

    def put(self, table: str, key: int, body: str) -> None:
        self.execute(f"INSERT INTO {table} VALUES ({key}, '{body}', 'n')")

    def rows(self, table: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        found = self.execute(f"SELECT id, body, note FROM {table}")
        return {(key,): {"id": key, "body": body, "note": note} for key, body, note in found}


@pytest.fixture
def tables(upstream: Upstream) -> WideTables:
    body = "LONGTEXT" if upstream.kind in ("mariadb", "mysql") else "TEXT"
    for table in ("calm", "wide"):
        upstream.execute(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, body {body}, note VARCHAR(9))"
        )
    return WideTables(upstream.kind, upstream.url, upstream.namespace, upstream.execute)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The relay's folder of the database."""
    return tmp_path / "data" / "shop"


@contextlib.asynccontextmanager
async def captured(tables: WideTables, folder: Path) -> AsyncIterator[Fetcher]:
    """A fetcher that is streaming the tables."""
    async with capturing(settings(tables), folder.parent) as fetcher:
        await streaming(fetcher)
        yield fetcher


@contextlib.asynccontextmanager
async def suspended_by_a_row(tables: WideTables, folder: Path) -> AsyncIterator[Fetcher]:
    """A fetcher that has suspended ``wide``: its row 1 is small, and row 2 is too large."""
    async with captured(tables, folder) as fetcher:
        tables.put("wide", 1, SMALL)
        tables.put("wide", 2, LARGE)
        wide = tables.table("wide")
        await eventually(lambda: is_suspended(fetcher, wide), 60, "suspended")
        yield fetcher


def settings(tables: WideTables, **changed: Any) -> DatabaseConfig:
    config = database_config("shop", tables.url, f"{tables.namespace}.*")
    values = {"ring_bytes": RING, "resync": "auto"} | changed
    return DatabaseConfig.model_validate(config.model_dump() | values)


def is_suspended(fetcher: Fetcher, source: str) -> bool:
    """Whether this table and no other is not followed."""
    return [(r.source, str(r.state)) for r in fetcher.tables.book] == [(source, "suspended")]


async def calm_continues(tables: WideTables, folder: Path, key: int) -> None:
    """A row of the other table comes."""
    tables.put("calm", key, "calm")
    calm = tables.table("calm")
    await eventually(lambda: (key,) in upserted(folder, calm)[0], 60, "the other table continues")


async def test_a_row_that_is_too_large_suspends_its_table_until_it_is_smaller(
    tables: WideTables, folder: Path
) -> None:
    wide = tables.table("wide")
    async with suspended_by_a_row(tables, folder) as fetcher:
        await calm_continues(tables, folder, 1)
        tables.put("wide", 3, SMALL)
        await calm_continues(tables, folder, 2)
        (record,) = fetcher.tables.document()
        assert "its row with the key [2] takes a frame of 263," in record["reason"]
        assert "at most 262,144 bytes, a quarter of ring_bytes = 1,048,576" in record["reason"]
        assert 'Set ring_bytes = "2MiB" or more, leave the large column out' in record["cure"]
        assert not record["is_free"] and not fetcher.book.next_active()
        assert set(upserted(folder, wide)[0]) == {(1,)}
        assert wide in stored_resume_state(fetcher)
    async with captured(tables, folder) as fetcher:
        await calm_continues(tables, folder, 3)
        assert is_suspended(fetcher, wide), "still, and no dump of it was tried"
        assert not list(fetcher.book) and "[2]" in fetcher.tables.document()[0]["reason"]
        tables.execute(f"UPDATE wide SET body = '{SMALL}' WHERE id = 2")
        await eventually(lambda: not fetcher.tables.document(), 60, "followed again")
        tables.put("wide", 4, SMALL)
        await calm_continues(tables, folder, 4)
        assert upserted(folder, wide)[0] == tables.rows("wide")
        assert len(list(fetcher.book)) == 1
    assert [str(state.state) for state in table_states(folder)] == [
        "suspended", "resynchronising", "followed",
    ]  # fmt: skip


@pytest.mark.parametrize("cure", ["a larger ring", "without the column", "deleted", "truncated"])
async def test_what_the_cure_names_ends_the_suspension(
    tables: WideTables, folder: Path, cure: str
) -> None:
    wide = tables.table("wide")
    async with suspended_by_a_row(tables, folder) as fetcher:
        if cure in ("deleted", "truncated"):
            is_sqlite = tables.url.startswith("sqlite")
            where = "WHERE id = 2" if cure == "deleted" else ""
            verb = "TRUNCATE TABLE" if cure == "truncated" and not is_sqlite else "DELETE FROM"
            tables.execute(f"{verb} wide {where}")
            await eventually(lambda: not fetcher.tables.document(), 60, "followed again")
            await calm_continues(tables, folder, 1)
            assert upserted(folder, wide)[0] == tables.rows("wide")
            return
    changed = LARGER_RING if cure == "a larger ring" else {"exclude_columns": ["*.wide.body"]}
    async with capturing(settings(tables, **changed), folder.parent) as fetcher:
        await eventually(lambda: not fetcher.tables.document(), 60, "followed again")
        await calm_continues(tables, folder, 1)
        rows = upserted(folder, wide)[0]
        assert set(rows) == {(1,), (2,)}
        assert "body" in rows[2,] or cure == "without the column"


async def test_a_resync_that_comes_too_early_empties_nothing_and_no_dump_repeats(
    tables: WideTables, folder: Path
) -> None:
    wide = tables.table("wide")
    async with suspended_by_a_row(tables, folder) as fetcher:
        fetcher.tables.confirm(wide)
        await eventually(lambda: fetcher.tables.document()[0]["tries"] == 1, 60, "tried")
        await calm_continues(tables, folder, 1)
        assert (
            "the last attempt to resynchronise it failed" in fetcher.tables.document()[0]["reason"]
        )
        await calm_continues(tables, folder, 2)
        assert len(list(fetcher.book)) == 1, "one dump, by the operator's word"
        assert set(upserted(folder, wide)[0]) == {(1,)}


async def test_a_dump_that_meets_a_row_which_was_never_streamed_fails_by_its_name_and_key(
    tables: WideTables, folder: Path
) -> None:
    wide = tables.table("wide")
    tables.put("wide", 1, SMALL)
    tables.put("wide", 7, LARGE)
    async with captured(tables, folder) as fetcher:
        await dump(folder, wide, ends="failed")
        (failed,) = fetcher.book
        assert f"{wide}: its row with the key [7] takes" in str(failed.error)
        await calm_continues(tables, folder, 1)
        tables.put("wide", 8, SMALL)
        await calm_continues(tables, folder, 2)
        assert (8,) in upserted(folder, wide)[0], "what the stream gives of the table still comes"


async def test_a_large_transaction_of_small_rows_stays_whole(
    tables: WideTables, folder: Path
) -> None:
    wide = tables.table("wide")
    async with captured(tables, folder) as fetcher:
        body = "y" * 20_000
        tables.execute(
            "INSERT INTO wide VALUES " + ", ".join(f"({key}, '{body}', 'n')" for key in range(40))
        )
        await calm_continues(tables, folder, 1)
        assert upserted(folder, wide)[0] == tables.rows("wide")
        assert not fetcher.tables.document()


async def test_the_generator_whose_every_row_is_too_large_suspends_its_table(
    tmp_path: Path,
) -> None:
    url = f"generator://?events_per_second=50&payload_bytes={LIMIT}&events_per_window=1"
    config = DatabaseConfig.model_validate(
        {"name": "gen", "url": url, "ring_bytes": RING, "sync_every": 0.05}
    )
    async with capturing(config, tmp_path / "data") as fetcher:
        await streaming(fetcher)
        await eventually(lambda: is_suspended(fetcher, "gen.events"), 60, "suspended")
        assert fetcher.status.state == "streaming"
