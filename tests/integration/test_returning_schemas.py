"""A table that returns to an earlier shape: ADD, DROP, ADD again, with rows in between.

The schema of a moment is the one that the stream names there, not the one that was new last.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.client import Consumer, DatabusClient
from databus.client.events import Event
from databus.common.config import parse
from databus.relay.relay import LocalRelay
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
[relay]
listen = "127.0.0.1:0"
data_dir = "relay"
[[database]]
name = "shop"
url = "{url}"
sources = ["{namespace}.*"]
ring_bytes = "4MiB"
"""

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
    text = CONFIG.format(url=database.url, namespace=namespace)
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
