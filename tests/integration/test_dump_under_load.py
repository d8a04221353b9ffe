"""Dumps of real databases while they are written: no older state after a newer one, ever."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.config import Config as DatabusConfig
from databus.common.config import DatabaseConfig, RelayConfig, SourceUrl
from databus.common.frame import Op
from databus.common.schema import SchemaSet
from databus.relay.registry import RegistryReader
from databus.relay.relay import LocalRelay
from tests.support.fixtures import FreshDatabase
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually

KEYS = 400
Execute = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture(params=["sqlite", "mariadb", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Execute]:
    """A URL and a way to run one committed statement."""
    if request.param == "sqlite":
        path = tmp_path / "load.db"

        def execute(statement: str) -> list[tuple[Any, ...]]:
            connection = sqlite3.connect(path, timeout=20)
            try:
                with connection:
                    return connection.execute(statement).fetchall()
            finally:
                connection.close()

        execute("PRAGMA journal_mode = wal")
        return f"sqlite:///{path}", execute
    fresh: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return fresh.url, fresh.execute


def write(execute: Execute, stop: threading.Event, seed: int, first: int) -> None:
    """Change rows of one residue class for ever; each change of a row has a higher version."""
    moves = random.Random(seed)
    version = 0
    while not stop.is_set():
        version += 1
        key = moves.randrange(KEYS // 2) * 2 + first
        if moves.random() < 0.2:
            execute(f"DELETE FROM load_items WHERE id = {key}")
        elif execute(f"SELECT 1 FROM load_items WHERE id = {key}"):
            execute(f"UPDATE load_items SET version = {version} WHERE id = {key}")
        else:
            execute(f"INSERT INTO load_items VALUES ({key}, {version})")


@pytest.mark.timeout(180)
async def test_dumps_beside_writers_end_with_the_source_and_never_go_back(
    database: tuple[str, Execute], tmp_path: Path
) -> None:
    url, execute = database
    execute("CREATE TABLE load_items (id integer PRIMARY KEY, version integer NOT NULL)")
    values = ", ".join(f"({key}, 0)" for key in range(KEYS))
    execute(f"INSERT INTO load_items VALUES {values}")
    execute("CREATE TABLE load_marks (id integer PRIMARY KEY, token varchar(200) NOT NULL)")
    config = DatabusConfig(
        relay=RelayConfig(listen="127.0.0.1:0", data_dir=tmp_path / "data"),
        database=(DatabaseConfig(name="load", url=SourceUrl(url), ring_bytes=32 << 20),),
    )
    stop = threading.Event()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    writers = [
        threading.Thread(target=write, args=(execute, stop, seed + number, number))
        for number in range(2)
    ]
    async with LocalRelay(config) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready()
        for writer in writers:
            writer.start()
        try:
            for request in requests(url):
                async with session.post("/v1/load/dumps", json=request) as answer:
                    dump = await answer.json()
                while dump.get("state") in ("queued", "running"):
                    await asyncio.sleep(0.05)
                    async with session.get(f"/v1/load/dumps/{dump['id']}") as answer:
                        dump = await answer.json()
                assert dump.get("state") == "completed", dump
                print(f"dump: {dump['tables']}, read again {dump['reread_chunks']}")
        finally:
            stop.set()
            for writer in writers:
                await asyncio.to_thread(writer.join)
        execute("INSERT INTO load_items VALUES (100000, 7)")
        final = dict(await asyncio.to_thread(execute, "SELECT id, version FROM load_items"))
        registry = RegistryReader(tmp_path / "data" / "load" / "schemas.jsonl")

        def arrived() -> bool:
            registry.refresh()
            return 100000 in replay(tmp_path / "data" / "load", registry.schemas)

        await eventually(arrived, 20, poll_s=0.2)
        assert replay(tmp_path / "data" / "load", registry.schemas) == final


def requests(url: str) -> list[dict[str, Any]]:
    """One chunk after another, several at a time, and with watermarks where they are written."""
    plain: dict[str, Any] = {"sources": ["*.load_items"], "chunk_rows": 40}
    if url.startswith("sqlite"):
        return [plain, plain | {"parallel": 3}]
    schema = "public" if url.startswith("postgres") else url.rpartition("/")[2].partition("?")[0]
    marked = plain | {"parallel": 2, "watermark_table": f"{schema}.load_marks"}
    return [plain, plain | {"parallel": 4}, marked]


def replay(folder: Path, schemas: SchemaSet) -> dict[int, int]:
    """The table after every frame of the ring; a version that goes back fails."""
    rows: dict[int, int] = {}
    newest: dict[int, int] = {}
    for view in ring_frames(folder):
        if view.is_control:
            continue
        schema = schemas.by_fingerprint(view.schema_fp)
        if schema.source.endswith(".load_marks"):
            continue
        key = schema.decode_key(view.key)["id"]
        if view.op == Op.DELETE:
            rows.pop(key, None)
            continue
        version = schema.decode_row(view.after or b"")["version"]
        assert version >= newest.get(key, -1), f"key {key} went back at {view.position}"
        rows[key] = newest[key] = version
    return rows
