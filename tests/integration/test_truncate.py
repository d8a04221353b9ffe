"""TRUNCATE on its whole way: source, ring, NDJSON, callback; log, segments, snapshot."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.client import DatabusClient
from databus.client.application.consumer import Result
from databus.client.application.events import Event
from databus.client.testing import Mirror
from databus.common.config import parse
from databus.relay.local_relay import LocalRelay
from tests.support.config_text import relay_text
from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes
from tests.support.system import relay_and_bootstrap
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def make_tables(database: FreshDatabase) -> None:
    for name in ("a", "b"):
        database.execute(f"CREATE TABLE {name} (id INT PRIMARY KEY, v INT)")


def change(database: FreshDatabase) -> None:
    """Two rows survive in ``a``, all three in ``b``."""
    database.transaction(*(f"INSERT INTO {t} VALUES (1, 1), (2, 1), (3, 1)" for t in "ab"))
    database.execute("TRUNCATE TABLE a")
    database.transaction("INSERT INTO a VALUES (2, 2), (4, 2)", "UPDATE b SET v = 2 WHERE id = 1")


class Counting(Mirror):
    """A mirror that counts the operations that it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def onDataEvent(self, event: Event) -> Result | None:
        self.ops[event.op] += 1
        if event.op == "t":
            assert event.key == {}
            assert event.value is None
        return super().onDataEvent(event)


@asynccontextmanager
async def mirrored(relay: str, **options: Any) -> AsyncIterator[Counting]:
    mirror = Counting()
    client = DatabusClient(database="shop", relays=[relay], consumer=mirror, **options)
    running = asyncio.create_task(client.serve())
    try:
        yield mirror
    finally:
        client.stop()
        await running


def expected(namespace: str) -> dict[str, Any]:
    def rows(*pairs: tuple[int, int]) -> dict[tuple[int], dict[str, int]]:
        return {(number,): {"id": number, "v": v} for number, v in pairs}

    return {
        f"{namespace}.a": rows((2, 2), (4, 2)),
        f"{namespace}.b": rows((1, 2), (2, 1), (3, 1)),
    }


@pytest.mark.parametrize(
    ("product", "dispatch"),
    [
        ("mariadb", "serial"),
        ("mysql", "serial"),
        ("postgres", "serial"),
        ("postgres", "across_windows"),
    ],
)
async def test_truncate_reaches_the_callback_and_empties_the_mirror(
    product: str, dispatch: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    make_tables(database)
    namespace = "public" if product == "postgres" else database.name
    text = relay_text(database.url, f"{namespace}.*", ring_bytes="4MiB")
    async with LocalRelay(parse(text, folder=tmp_path)) as relay:
        await relay.ready(120)
        change(database)
        async with mirrored(relay.url, start="oldest", dispatch=dispatch) as mirror:
            await eventually(lambda: not mirror.differences(expected(namespace)), 90)
            assert mirror.ops == {"c": 8, "t": 1, "u": 1}
            assert mirror.stale == []
        headers = {"Accept": "application/x-ndjson"}
        async with (
            aiohttp.ClientSession(relay.url) as session,
            session.get("/v1/shop/stream?start=oldest", headers=headers) as answer,
        ):
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    (line,) = [line for line in lines if line.get("op") == "t"]
    assert line["source"] == f"{namespace}.a"
    assert not line["key"]
    assert line["before"] is None
    assert line["after"] is None
    assert line["txid"]


@pytest.mark.spark
async def test_truncated_rows_are_in_no_snapshot_and_in_no_copy_made_from_one(
    postgres_database: FreshDatabase, processes: Processes, tmp_path: Path
) -> None:
    database = postgres_database
    make_tables(database)
    relay_url, url = relay_and_bootstrap(
        tmp_path, processes, database.url, "public.*",
        segment_every="1s", apply_every="1s", spark_master="local[1]",
    )  # fmt: skip

    def fetched(path: str) -> Any:
        with urllib.request.urlopen(url + path, timeout=20 * PATIENCE) as answer:
            return json.load(answer)

    def seeded() -> bool:
        try:
            (found,) = fetched("/v1/status")["databases"]
        except (OSError, ValueError):
            return False
        return bool(found.get("state") == "seeded")

    await eventually(lambda: asyncio.to_thread(seeded), 120, poll_s=0.2)
    change(database)
    (ends,) = database.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
    database.execute("INSERT INTO b VALUES (9, 9)")

    def has_snapshot() -> bool:
        (found,) = fetched("/v1/status")["databases"]
        return int((found.get("snapshot") or {}).get("scn", 0)) >= int(str(ends[0]))

    await eventually(lambda: asyncio.to_thread(has_snapshot), 150, "a snapshot", poll_s=0.2)
    wanted = expected("public")
    wanted["public.b"][(9,)] = {"id": 9, "v": 9}
    async with mirrored(relay_url, bootstraps=[url], start="bootstrap") as mirror:
        await eventually(lambda: not mirror.differences(wanted), 90)
        assert mirror.stale == []
        # Row by row from the snapshot: what was truncated is not even shown.
        assert mirror.ops.total() == 6
        assert "t" not in mirror.ops
