"""Dumps of real tables under control: keys, failures, changes of schema, watermark rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.config import Config, DatabaseConfig, RelayConfig, SourceUrl
from databus.common.frame import Op
from databus.common.schema import SchemaSet
from databus.relay.registry import RegistryReader
from databus.relay.relay import LocalRelay
from tests.support.fixtures import FreshDatabase
from tests.support.relay_process import ring_frames

ROWS = 60


@pytest.fixture(params=["mariadb", "postgres"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    fresh: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    fresh.execute("CREATE TABLE goods (id integer PRIMARY KEY, note varchar(40))")
    values = ", ".join(f"({number}, 'note {number}')" for number in range(ROWS))
    fresh.execute(f"INSERT INTO goods VALUES {values}")
    fresh.execute("CREATE TABLE marks (id integer PRIMARY KEY, token varchar(200) NOT NULL)")
    return fresh


class Dumps:
    """The dumps of a running relay, by HTTP."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path, schema: str) -> None:
        self.session = session
        self.folder = folder
        self.schema = schema

    async def start(self, **request: Any) -> dict[str, Any]:
        body = {"sources": [f"{self.schema}.goods"], **request}
        async with self.session.post("/v1/d/dumps", json=body) as answer:
            return dict(await answer.json())

    async def change(self, dump: dict[str, Any], **change: Any) -> dict[str, Any]:
        async with self.session.patch(f"/v1/d/dumps/{dump['id']}", json=change) as answer:
            return dict(await answer.json())

    async def until(self, dump: dict[str, Any], *states: str, chunks: int = 0) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while dump["state"] not in states or dump["chunks"] < chunks:
                await asyncio.sleep(0.02)
                async with self.session.get(f"/v1/d/dumps/{dump['id']}") as answer:
                    dump = dict(await answer.json())
        return dump

    def read_rows(self) -> list[dict[str, Any]]:
        """What went out of the dumps, as their schema has it."""
        registry = RegistryReader(self.folder / "d" / "schemas.jsonl")
        registry.refresh()
        schemas: SchemaSet = registry.schemas
        views = [view for view in ring_frames(self.folder / "d") if view.op == Op.READ]
        return [
            schemas.by_fingerprint(view.schema_fp).decode_row(view.after or b"") for view in views
        ]


@asynccontextmanager
async def running(database: FreshDatabase, folder: Path) -> AsyncIterator[Dumps]:
    schema = "public" if database.url.startswith("postgres") else database.name
    config = Config(
        relay=RelayConfig(listen="127.0.0.1:0", data_dir=folder),
        database=(DatabaseConfig(name="d", url=SourceUrl(database.url), sources=(f"{schema}.*",)),),
    )
    async with LocalRelay(config) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready(60)
        yield Dumps(session, folder, schema)


@pytest.mark.timeout(180)
async def test_a_failing_chunk_fails_its_dump_at_its_place_and_resuming_goes_on_there(
    database: FreshDatabase, tmp_path: Path
) -> None:
    async with running(database, tmp_path) as dumps:
        dump = await dumps.start(chunk_rows=10, delay_ms=3_600_000)
        await dumps.until(dump, "running", chunks=1)
        database.execute("ALTER TABLE goods RENAME TO away")
        await dumps.change(dump, delay_ms=0)
        dump = await dumps.until(dump, "failed")
        assert dump["error"]["failed_at"]["after"] == [9]
        assert dump["error"]["failed_at"]["source"] == f"{dumps.schema}.goods"
        database.execute("ALTER TABLE away RENAME TO goods")
        await dumps.change(dump, state="running", parallel=2)
        dump = await dumps.until(dump, "completed")
    assert (dump["rows"], dump["error"]) == (ROWS, None)
    assert [row["id"] for row in dumps.read_rows()] == list(range(ROWS))


@pytest.mark.timeout(180)
async def test_a_table_altered_in_the_middle_goes_on_with_its_new_columns(
    database: FreshDatabase, tmp_path: Path
) -> None:
    async with running(database, tmp_path) as dumps:
        dump = await dumps.start(chunk_rows=10, delay_ms=3_600_000)
        await dumps.until(dump, "running", chunks=1)
        database.execute("ALTER TABLE goods ADD COLUMN colour varchar(9) DEFAULT 'red'")
        database.execute("UPDATE goods SET colour = 'blue' WHERE id = 50")
        await dumps.change(dump, delay_ms=0)
        dump = await dumps.until(dump, "completed")
    rows = dumps.read_rows()
    assert all("colour" not in row for row in rows[:10])
    assert {row["id"] for row in rows} >= set(range(ROWS)) - {50}
    assert {row["colour"] for row in rows[10:] if row["id"] != 50} == {"red"}


@pytest.mark.timeout(180)
async def test_keys_without_a_row_are_named_and_progress_tells_what_is_left(
    database: FreshDatabase, tmp_path: Path
) -> None:
    async with running(database, tmp_path) as dumps:
        dump = await dumps.start(keys=[3, 400, 5, 500], chunk_rows=3)
        dump = await dumps.until(dump, "completed")
        assert dump["missing"] == [[400], [500]]
        assert [row["id"] for row in dumps.read_rows()] == [3, 5]
        whole = await dumps.until(await dumps.start(), "completed")
    assert whole["progress"]["rows_read"] == whole["progress"]["estimated_rows"] == ROWS
    assert whole["progress"]["tables_done"] == 1


@pytest.mark.timeout(180)
async def test_somebody_elses_watermark_fails_a_dump_that_writes_them(
    database: FreshDatabase, tmp_path: Path
) -> None:
    async with running(database, tmp_path) as dumps:
        marks = f"{dumps.schema}.marks"
        request = {"watermark_table": marks, "chunk_rows": 10}
        first = await dumps.until(await dumps.start(**request), "completed")
        assert first["rows"] == ROWS
        dump = await dumps.start(**request, delay_ms=3_600_000)
        await dumps.until(dump, "running", chunks=1)
        database.execute("UPDATE marks SET token = 'mine' WHERE id = 1")
        await dumps.change(dump, delay_ms=0)
        dump = await dumps.until(dump, "failed")
        assert "somebody else" in dump["error"]["detail"]
        await dumps.change(dump, state="running", delay_ms=0)
        dump = await dumps.until(dump, "completed")
        assert dump["rows"] == ROWS
        lost = await dumps.start(watermark_table=f"{dumps.schema}.nothing")
        lost = await dumps.until(lost, "failed")
        assert "CREATE TABLE" in lost["error"]["detail"]
