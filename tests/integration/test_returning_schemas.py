"""A table that returns to an earlier shape: ADD, DROP, ADD again, with rows in between.

The schema of a moment is the one that the stream names there, not the one that was new last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.reading.stored_database import OpenLogs, StoredDatabase
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.verify.table_copy import HttpPeer, LocalCopy
from databus.bootstrap.verify.table_verifier import Verifier
from databus.client import Consumer, DatabusClient
from databus.client.application.events import Event
from databus.common.config import BootstrapConfig, parse
from databus.relay.local_relay import LocalRelay
from databus.relay.ring.schema_registry import RegistryReader
from tests.relay.dumps.test_resync import words
from tests.storm.replica import RingReplica
from tests.support.capture import PACE, upserted
from tests.support.config_text import relay_text
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


STEPS = (
    "INSERT INTO t (id) VALUES (1)",
    "ALTER TABLE t ADD COLUMN c INT",
    "INSERT INTO t (id, c) VALUES (2, 20)",
    "ALTER TABLE t DROP COLUMN c",
    "INSERT INTO t (id) VALUES (3)",
    "ALTER TABLE t ADD COLUMN c INT",
    "INSERT INTO t (id, c) VALUES (4, 40)",
    "UPDATE t SET c = 10 WHERE id = 1",
)
WITHOUT = ("ALTER TABLE t DROP COLUMN c", "INSERT INTO t (id) VALUES (5)")


class Values(Consumer):
    """What each event's value was when it was delivered."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any] | None] = []

    def onDataEvent(self, event: Event) -> None:
        self.seen.append(event.value)


def has_seen(consumer: Values, rows: int) -> bool:
    return len(consumer.seen) >= rows


def with_c(values: list[dict[str, Any] | None]) -> dict[int, Any]:
    return {value["id"]: value.get("c") for value in values if value is not None}


@pytest.mark.parametrize("product", ["mariadb", "mysql", "postgres"])
async def test_values_come_in_the_shape_that_the_stream_names(
    product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    namespace = "public" if product == "postgres" else database.name
    execute = database.execute
    execute("CREATE TABLE t (id INT NOT NULL PRIMARY KEY)")
    text = relay_text(database.url, f"{namespace}.*", ring_bytes="4MiB")
    async with LocalRelay(parse(text, folder=tmp_path)) as relay:
        await relay.ready(120)
        consumer = Values()
        client = DatabusClient(
            database="shop", relays=[relay.url], consumer=consumer, start="oldest"
        )
        running = asyncio.create_task(client.serve())
        for count, statement in enumerate(STEPS):
            await asyncio.to_thread(execute, statement)
            rows = sum(not step.startswith("ALTER") for step in STEPS[: count + 1])
            await eventually(partial(has_seen, consumer, rows), 60, statement)
        assert with_c(consumer.seen) == {1: 10, 2: 20, 3: None, 4: 40}
        for statement in WITHOUT:
            await asyncio.to_thread(execute, statement)
        await eventually(lambda: len(consumer.seen) > len(STEPS) - 3, 60, "the last row")
        assert consumer.seen[-1] == {"id": 5}
        client.stop()
        await running
        # A reader that begins now sees each row as it was at its time.
        late = Values()
        client = DatabusClient(database="shop", relays=[relay.url], consumer=late, start="oldest")
        running = asyncio.create_task(client.serve())
        await eventually(lambda: len(late.seen) == len(consumer.seen), 60, "all events again")
        client.stop()
        await running
        assert with_c(late.seen) == {1: 10, 2: 20, 3: None, 4: 40, 5: None}
        assert "c" not in (late.seen[-1] or {})
        async with aiohttp.ClientSession(relay.url) as session:
            async with session.get("/v1/shop/sources") as answer:
                (source,) = (await answer.json())["sources"]
            async with session.get("/v1/shop/register") as answer:
                schemas = (await answer.json())["schemas"]
            headers = {"Accept": "application/x-ndjson"}
            path = "/v1/shop/stream?start=oldest&where=c+%3D+40"
            async with session.get(path, headers=headers) as answer:
                lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    assert len(schemas) == 2
    assert source["fingerprint"] == schemas[-1]["fingerprint"]
    assert [column["name"] for column in schemas[-1]["schema"]["columns"]] == ["id"]
    assert [line["after"]["id"] for line in lines if line.get("op") == "c"] == [4]


OLD = ("INSERT INTO t (id, c) VALUES (1, 10), (2, 20)", "INSERT INTO t (id, c) VALUES (3, NULL)")
DROPPED = ("ALTER TABLE t DROP COLUMN c", "INSERT INTO t (id) VALUES (4)")
AGAIN = ("ALTER TABLE t ADD COLUMN c INT", "INSERT INTO t (id, c) VALUES (5, 50)")


@pytest.mark.parametrize("product", ["mariadb", "mysql", "postgres", "sqlite"])
async def test_a_column_that_is_dropped_and_added_again_shows_no_old_values(
    product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with copied(product, request, tmp_path) as verify:
        source, ring = await changed(product, request, tmp_path, OLD, DROPPED, AGAIN)
        rows, letters = upserted(ring, source)
        assert {key: row.get("c") for (key,), row in rows.items()} == {
            1: None, 2: None, 3: None, 4: None, 5: 50,
        }  # fmt: skip
        assert "t" not in letters, "no row came or went"
        assert await verify(source) == 5


AGAIN_WITH_10 = (
    "ALTER TABLE t ADD COLUMN c INT DEFAULT 10",
    "INSERT INTO t (id, c) VALUES (5, 50)",
)


@pytest.mark.parametrize("product", ["mariadb", "mysql", "postgres", "sqlite"])
async def test_a_value_that_comes_back_with_its_column_is_sent_to_readers_that_dropped_it(
    product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The copy has the value of row 1 from before, so the comparison alone finds it equal."""
    async with copied(product, request, tmp_path) as verify:
        source, ring = await changed(product, request, tmp_path, OLD, DROPPED, AGAIN_WITH_10)
        replica = RingReplica(ring)
        replica.read()
        rows = replica.tables[source].rows
        replica.close()
        assert {key: held.values.get("c") for (key,), held in rows.items()} == {
            1: 10, 2: 10, 3: 10, 4: 10, 5: 50,
        }  # fmt: skip
        assert await verify(source) == 5


@contextlib.asynccontextmanager
async def copied(
    product: str, request: pytest.FixtureRequest, folder: Path
) -> AsyncIterator[Callable[[str], Awaitable[int]]]:
    """A table t, a relay and a bootstrap's log that has it.

    Yields a function that compares a table with the copy, which must be equal, and returns the
    number of its rows.
    """
    url, namespace, execute = opened(product, request, folder)
    execute("CREATE TABLE t (id INT NOT NULL PRIMARY KEY, c INT)")
    source = f"{namespace}.t"
    async with contextlib.AsyncExitStack() as ending:
        config = parse(relay_text(url, f"{namespace}.*", ring_bytes="4MiB"), folder=folder)
        relay = await ending.enter_async_context(LocalRelay(config, pace=PACE))
        await relay.ready(120)
        settings = BootstrapConfig(
            data_dir=folder / "bootstrap", relays=(relay.url,), databases=("shop",)
        )
        logs = OpenLogs(writes=True)
        writing = asyncio.create_task(write_logs(settings, logs, asyncio.Event()))
        ending.push_async_callback(ended, writing, logs)
        log = logs.to_write(folder / "bootstrap" / "shop" / "log")

        def seeded() -> bool:
            seeding = {} if log.is_new() else log.note("seeding") or {}
            return bool(seeding.get(source, {}).get("state") == "seeded")

        async def verify(source: str) -> int:
            store = Store(folder / "bootstrap" / "shop")
            copy = LocalCopy(StoredDatabase("shop", folder / "bootstrap" / "shop", logs, store))
            async with HttpPeer(relay.url, "shop") as peer:
                report = await Verifier(peer, copy).verify(source)
            assert report.is_equal, report.to_json()
            return report.rows

        await eventually(seeded, 60, "the copy is seeded")
        yield verify


async def changed(
    product: str, request: pytest.FixtureRequest, folder: Path, *steps: Sequence[str]
) -> tuple[str, Path]:
    """Run statements, each step once the stream names the columns of the one before; wait until
    the table was suspended and is followed again.  Returns the source and the ring's folder."""
    _, namespace, execute = opened(product, request, folder)
    source, ring = f"{namespace}.t", folder / "relay" / "shop"

    def names(count: int) -> bool:
        reader = RegistryReader(ring / "schemas.jsonl")
        reader.refresh()
        latest = reader.schemas.latest(source)
        return latest is not None and len(latest.columns) == count

    for statements, columns in zip(steps, (2, 1, 2), strict=True):
        for statement in statements:
            await asyncio.to_thread(execute, statement)
        await eventually(partial(names, columns), 60, statements[0])

    def followed() -> bool:
        states = [state for table, state in words(ring) if table == source]
        return "suspended" in states and states[-1] == "followed"

    await eventually(followed, 60, "it was suspended and is followed again", poll_s=0.2)
    return source, ring


def opened(
    product: str, request: pytest.FixtureRequest, folder: Path
) -> tuple[str, str, Callable[[str], object]]:
    """A database's URL, the schema of its tables, and a function that runs a statement."""
    if product == "sqlite":
        path = folder / "shop.db"

        def execute(statement: str) -> None:
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute(statement)

        execute("PRAGMA journal_mode = WAL")
        return f"sqlite:///{path}", "main", execute
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    namespace = "public" if product == "postgres" else database.name
    return database.url, namespace, database.execute


async def ended(writing: asyncio.Task[None], logs: OpenLogs) -> None:
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    logs.close()
