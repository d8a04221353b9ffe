"""Dumps of real databases while they are written: no older state after a newer one, ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pymysql
import pytest

from databus.common.checkpoint import Position
from databus.common.config import Config as DatabusConfig
from databus.common.config import DatabaseConfig, RelayConfig, SourceUrl
from databus.common.frame.frame_format import Op
from databus.common.schema.source_schema import SchemaSet
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.schema_registry import RegistryReader
from tests.support.fixtures import FreshDatabase
from tests.support.relay_process import ring_frames
from tests.support.waiting import PATIENCE, eventually

KEYS = 400
LONGEST_DUMP_S = 30.0
BEFORE_THE_STREAM = Position(0, 0)
DEADLOCK = 1213  # InnoDB may find one where two transactions insert into the same gap


@dataclass(frozen=True)
class Database:
    """A database under load: connections that commit by themselves outside BEGIN ... COMMIT."""

    url: str
    connect: Callable[[], Any]

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run one committed statement."""
        connection = self.connect()
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()


@pytest.fixture(params=["sqlite", "mariadb", "mysql", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty database of each product."""
    if request.param == "sqlite":
        path = tmp_path / "load.db"
        opened = Database(
            f"sqlite:///{path}", partial(sqlite3.connect, path, timeout=20, isolation_level=None)
        )
        opened.execute("PRAGMA journal_mode = wal")
        return opened
    fresh: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return Database(fresh.url, partial(fresh.server.connect, fresh.name))


def write(database: Database, stop: threading.Event, seed: int, first: int) -> None:
    """Change rows of one residue class for ever, some in each transaction.

    Each change of a row has a higher version; a row may change twice in a transaction.
    """
    moves = random.Random(seed)
    version = 0
    alive = set(range(first, KEYS, 2))
    with contextlib.closing(database.connect()) as connection:
        cursor = connection.cursor()
        while not stop.is_set():
            after, statements = set(alive), ["BEGIN"]
            for _ in range(moves.randint(1, 4)):
                version += 1
                key = moves.randrange(KEYS // 2) * 2 + first
                if key not in after:
                    statements.append(f"INSERT INTO load_items VALUES ({key}, {version})")
                elif moves.random() < 0.2:
                    statements.append(f"DELETE FROM load_items WHERE id = {key}")
                else:
                    statements.append(f"UPDATE load_items SET version = {version} WHERE id = {key}")
                after = after - {key} if statements[-1].startswith("DELETE") else after | {key}
            try:
                for statement in [*statements, "COMMIT"]:
                    cursor.execute(statement)
            except pymysql.err.OperationalError as error:
                assert error.args[0] == DEADLOCK, statements  # and all of it is undone
            else:
                alive = after


@pytest.mark.timeout(180)
async def test_dumps_beside_writers_end_with_the_source_and_never_go_back(
    database: Database, tmp_path: Path
) -> None:
    url, execute = database.url, database.execute
    execute("CREATE TABLE load_items (id integer PRIMARY KEY, version integer NOT NULL)")
    values = ", ".join(f"({key}, 0)" for key in range(KEYS))
    execute(f"INSERT INTO load_items VALUES {values}")
    execute("CREATE TABLE load_marks (id integer PRIMARY KEY, token varchar(200) NOT NULL)")
    config = DatabusConfig(
        relay=RelayConfig(listen="127.0.0.1:0", data_dir=tmp_path / "data"),
        database=(
            DatabaseConfig(
                name="load", url=SourceUrl(url), sources=("*.load_*",), ring_bytes=32 << 20
            ),
        ),
    )
    stop = threading.Event()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    writers = [
        threading.Thread(target=write, args=(database, stop, seed + number, number))
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
                last_s = time.monotonic() + LONGEST_DUMP_S * PATIENCE
                while dump.get("state") in ("queued", "running") and time.monotonic() < last_s:
                    await asyncio.sleep(0.05)
                    async with session.get(f"/v1/load/dumps/{dump['id']}") as answer:
                        dump = await answer.json()
                if dump.get("state") != "completed":
                    pytest.fail(picture(dump, relay.fetchers["load"]), pytrace=False)
                print(f"dump: {dump['tables']}, read again {dump['reread_chunks']}")
        finally:
            stop.set()
            for writer in writers:
                await asyncio.to_thread(writer.join)
        execute("INSERT INTO load_items VALUES (100000, 7)")
        final = dict(await asyncio.to_thread(execute, "SELECT id, version FROM load_items"))
        folder = tmp_path / "data" / "load"
        registry = RegistryReader(folder / "schemas.jsonl")

        def arrived() -> bool:
            """The last change of all is in the ring, and its schema in the registry before it."""
            rows = [view for view in ring_frames(folder) if not view.is_control]
            registry.refresh()
            schema = registry.schemas.by_fingerprint(rows[-1].schema_fp)
            return schema.decode_key(rows[-1].key) == {"id": 100000}

        await eventually(arrived, 20, poll_s=0.2)
        assert replay(folder, registry.schemas) == final


def picture(dump: dict[str, Any], fetcher: Fetcher) -> str:
    """The state of a dump and of the stream, where the dump has not ended."""
    facts = fetcher.status_document()
    of_stream = ("state", "error", "reconnects", "batches", "source_scn", "last", "in_window")
    return json.dumps(
        {
            "dump": {name: value for name, value in dump.items() if value},
            "stream": {name: facts.get(name) for name in of_stream},
            "source": facts["source"],
        },
        indent=1,
    )


def requests(url: str) -> list[dict[str, Any]]:
    """One chunk after another, several at a time, and with watermarks where they are written."""
    plain: dict[str, Any] = {"sources": ["*.load_items"], "chunk_rows": 40}
    if url.startswith("sqlite"):
        return [plain, plain | {"parallel": 3}]
    schema = "public" if url.startswith("postgres") else url.rpartition("/")[2].partition("?")[0]
    marked = plain | {"parallel": 2, "watermark_table": f"{schema}.load_marks"}
    return [plain, plain | {"parallel": 4}, marked]


def replay(folder: Path, schemas: SchemaSet) -> dict[int, int]:
    """The table after every frame of the ring; a state that goes back fails.

    A state is identified by the position of the change that made it, and a deletion is one too: the
    last version of a row that has been deleted is older than its deletion.
    """
    rows: dict[int, int] = {}
    made_at: dict[tuple[int, int], Position] = {}
    newest: dict[int, Position] = {}
    for view in ring_frames(folder):
        if view.is_control:
            continue
        schema = schemas.by_fingerprint(view.schema_fp)
        if schema.source.endswith(".load_marks"):
            continue
        key, position = schema.decode_key(view.key)["id"], view.position
        if view.op == Op.DELETE:
            rows.pop(key, None)
            newest[key] = position
            continue
        version = schema.decode_row(view.after or b"")["version"]
        if view.op != Op.READ:
            made_at[key, version] = position
        elif version:
            # A chunk goes out only after the stream has passed all that it shows.
            assert (key, version) in made_at, f"key {key} came too early at {position}"
            position = made_at[key, version]
        else:
            position = BEFORE_THE_STREAM
        assert position >= newest.get(key, BEFORE_THE_STREAM), (
            f"key {key} went back: {view.position}"
        )
        rows[key], newest[key] = version, position
    return rows
