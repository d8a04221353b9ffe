"""Dumps of real tables under control: keys, failures, changes of schema, watermark rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.config import Config, DatabaseConfig, RelayConfig, SourceUrl
from databus.common.frame.frame_format import Op
from databus.common.schema.source_schema import SchemaSet
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.schema_registry import RegistryReader
from databus.relay.sources.contract import Chunk
from tests.support.fixtures import FreshDatabase
from tests.support.relay_process import ring_frames
from tests.support.waiting import PATIENCE, eventually

ROWS = 60


@pytest.fixture(params=["mariadb", "mysql", "postgres"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    fresh: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    fresh.execute("CREATE TABLE goods (id integer PRIMARY KEY, note varchar(40))")
    values = ", ".join(f"({number}, 'note {number}')" for number in range(ROWS))
    fresh.execute(f"INSERT INTO goods VALUES {values}")
    fresh.execute("CREATE TABLE marks (id integer PRIMARY KEY, token varchar(200) NOT NULL)")
    return fresh


def is_postgres(database: FreshDatabase) -> bool:
    return database.url.startswith("postgres")


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
        async with asyncio.timeout(60 * PATIENCE):
            while dump["state"] not in states or dump["chunks"] < chunks:
                await asyncio.sleep(0.02)
                async with self.session.get(f"/v1/d/dumps/{dump['id']}") as answer:
                    dump = dict(await answer.json())
        return dump

    async def metrics(self) -> dict[str, float]:
        """What the relay's page of metrics has of dumps, by name and labels."""
        async with self.session.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found = [line.removeprefix("databus_relay_").rsplit(" ", 1) for line in lines]
        return {name: float(value) for name, value in found if name.startswith("dump")}

    def read_rows(self) -> list[dict[str, Any]]:
        """What went out of the dumps."""
        return self.sent_rows(Op.READ)

    def has_sent(self, row: dict[str, Any]) -> bool:
        return row in self.sent_rows()

    def sent_rows(self, *ops: Op) -> list[dict[str, Any]]:
        """The rows in the ring, all or of these operations, as their schemas have them."""
        registry = RegistryReader(self.folder / "d" / "schemas.jsonl")
        registry.refresh()
        schemas: SchemaSet = registry.schemas
        views = [view for view in ring_frames(self.folder / "d") if not view.is_control]
        return [
            schemas.by_fingerprint(view.schema_fp).decode_row(view.after or b"")
            for view in views
            if view.after is not None and view.op in (ops or (view.op,))
        ]


@asynccontextmanager
async def running(database: FreshDatabase, folder: Path) -> AsyncIterator[Dumps]:
    schema = "public" if is_postgres(database) else database.name
    config = Config(
        relay=RelayConfig(listen="127.0.0.1:0", data_dir=folder),
        database=(DatabaseConfig(name="d", url=SourceUrl(database.url), sources=(f"{schema}.*",)),),
    )
    async with LocalRelay(config) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready(60)
        yield Dumps(session, folder, schema)


@pytest.mark.timeout(180)
async def test_a_failing_chunk_fails_its_dump_at_its_key_and_the_dump_resumes_there(
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


def alterations(database: FreshDatabase) -> list[tuple[str, dict[str, Any]]]:
    """One statement after the other, and what a row has after it beside id and note."""
    typed = "ALTER COLUMN price TYPE" if is_postgres(database) else "MODIFY price"
    return [
        ("ALTER TABLE goods ADD COLUMN price integer DEFAULT 7", {"price": 7}),
        (f"ALTER TABLE goods {typed} varchar(20)", {"price": "7"}),
        ("ALTER TABLE goods RENAME COLUMN price TO cost", {"cost": "7"}),
        ("ALTER TABLE goods DROP COLUMN cost", {}),
    ]


@pytest.mark.timeout(180)
async def test_a_table_altered_between_chunks_continues_with_its_new_columns(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Each chunk has the columns that the table has when it is read, and their types."""
    changes = alterations(database)
    async with running(database, tmp_path) as dumps:
        dump = await dumps.start(chunk_rows=10, delay_ms=3_600_000)
        for number, (statement, _) in enumerate(changes, 1):
            dump = await dumps.until(dump, "running", chunks=number)
            database.execute(statement)
            database.execute(f"UPDATE goods SET note = 'after {number}' WHERE id = 59")
            await dumps.change(dump, state="paused")
            # It resumes with one chunk at once, and pauses before the next.
            await dumps.change(dump, state="running")
        await dumps.until(dump, "running", chunks=5)
        await dumps.change(dump, delay_ms=0)
        dump = await dumps.until(dump, "completed")
        assert dump["chunks"] in (6, 7)
    more: list[dict[str, Any]] = [{}, *(columns for _, columns in changes), {}]
    wanted = [{"id": n, "note": f"note {n}", **more[n // 10]} for n in range(ROWS - 1)]
    assert [row for row in dumps.read_rows() if row["id"] != 59] == wanted


@pytest.mark.timeout(180)
async def test_a_table_altered_while_a_chunk_is_on_its_way_has_that_chunk_read_again(
    database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is outdated as soon as the stream has brought a row with other columns."""
    shaped = Fetcher.shaped
    was_read, may_go = asyncio.Event(), asyncio.Event()

    async def held(fetcher: Fetcher, chunk: Chunk) -> Chunk:
        was_read.set()
        await may_go.wait()
        return await shaped(fetcher, chunk)

    monkeypatch.setattr(Fetcher, "shaped", held)
    async with running(database, tmp_path) as dumps:
        for number, (statement, more) in enumerate(alterations(database)):
            was_read.clear()
            may_go.clear()
            dump = await dumps.start(chunk_rows=ROWS + 1)
            await was_read.wait()
            database.execute(statement)
            database.execute(f"UPDATE goods SET note = 'after {number}' WHERE id = {number}")
            changed = {"id": number, "note": f"after {number}", **more}
            await eventually(partial(dumps.has_sent, changed))
            may_go.set()
            dump = await dumps.until(dump, "completed", "failed")
            assert (dump["state"], dump["rows"]) == ("completed", ROWS)
            assert dump["reread_chunks"] == 1
            sent = dumps.read_rows()[-ROWS:]
            assert [row["id"] for row in sent] == list(range(ROWS))
            assert all(row.keys() == changed.keys() for row in sent)
            assert sent[number] == changed


@pytest.mark.timeout(180)
async def test_keys_without_a_row_are_named_and_a_condition_chooses_rows(
    database: FreshDatabase, tmp_path: Path
) -> None:
    async with running(database, tmp_path) as dumps:
        dump = await dumps.start(keys=[3, 400, 5, 500], chunk_rows=3)
        dump = await dumps.until(dump, "completed")
        assert dump["missing"] == [[400], [500]]
        assert [row["id"] for row in dumps.read_rows()] == [3, 5]
        some: dict[str, Any] = {"where": "id < 9 OR note = 'note 50'", "chunk_rows": 4}
        for parallel in (1, 3):
            dump = await dumps.until(await dumps.start(**some, parallel=parallel), "completed")
            assert dump["progress"]["estimated_rows"] == dump["rows"] == 10
            assert [row["id"] for row in dumps.read_rows()[-10:]] == [*range(9), 50]
        wrong = await dumps.until(await dumps.start(where="no_such_column = 1"), "failed")
        assert "no_such_column" in wrong["error"]["detail"]
        whole = await dumps.until(await dumps.start(), "completed")
    assert whole["progress"]["rows_read"] == whole["progress"]["estimated_rows"] == ROWS
    assert whole["progress"]["tables_done"] == 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_progress_shows_the_speed_of_a_dump_and_the_remaining_rows(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute("ANALYZE goods")
    async with running(database, tmp_path) as dumps:
        dump = await dumps.start(chunk_rows=10, delay_ms=3_600_000)
        dump = await dumps.until(dump, "running", chunks=1)
        progress = dump["progress"]
        assert (progress["rows_read"], progress["estimated_rows"]) == (10, ROWS)
        left_s = (ROWS - 10) / progress["rows_per_s"]
        assert progress["eta_s"] == pytest.approx(left_s, rel=0.1, abs=0.1)
        wanted = {
            'dumps{database="d",state="active"}': 1,
            'dump_chunks_total{database="d"}': 1,
            'dump_sent_rows_total{database="d"}': 10,
            'dump_rows{database="d"}': 10,
            'dump_estimated_rows{database="d"}': ROWS,
            'dump_rows_per_second{database="d"}': progress["rows_per_s"],
            'dump_eta_seconds{database="d"}': progress["eta_s"],
        }

        async def is_reported() -> bool:
            return wanted.items() <= (await dumps.metrics()).items()

        await eventually(is_reported)
        await dumps.change(dump, delay_ms=0)
        whole = await dumps.until(dump, "completed")
        wanted = {
            'dumps{database="d",state="active"}': 0,
            'dump_chunks_total{database="d"}': whole["chunks"],
            'dump_sent_rows_total{database="d"}': ROWS,
        }
        await eventually(is_reported)
        assert 'dump_eta_seconds{database="d"}' not in await dumps.metrics()
    assert whole["progress"]["rows_read"] == ROWS
    assert not whole["progress"]["eta_s"]


@pytest.mark.timeout(180)
async def test_a_watermark_of_another_writer_fails_a_dump_that_writes_them(
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
        assert "another program" in dump["error"]["detail"]
        await dumps.change(dump, state="running", delay_ms=0)
        dump = await dumps.until(dump, "completed")
        assert dump["rows"] == ROWS
        lost = await dumps.start(watermark_table=f"{dumps.schema}.nothing")
        lost = await dumps.until(lost, "failed")
        assert "CREATE TABLE" in lost["error"]["detail"]
