"""A real MariaDB and a real PostgreSQL as one stream: causes come before their effects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from databus.client import FileCheckpoints, MergedClient, MergeStream
from databus.relay.local_relay import LocalRelay
from tests.support.capture import streaming
from tests.support.chain import QUICK, relay_config
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TABLE = "CREATE TABLE transfers (id INT PRIMARY KEY, amount INT)"


class Bank:
    """Money leaves MariaDB, and arrives in PostgreSQL after that commit."""

    def __init__(self, mariadb: FreshDatabase, postgres: FreshDatabase) -> None:
        self.left, self.right = mariadb, postgres
        self.count = 0
        for database in (mariadb, postgres):
            database.execute(TABLE)

    def transfer(self, count: int) -> None:
        for number in range(self.count, self.count + count):
            for database in (self.left, self.right):
                database.execute(f"INSERT INTO transfers VALUES ({number}, 1)")
        self.count += count

    @property
    def urls(self) -> dict[str, str]:
        return {"left": self.left.url, "right": self.right.url}

    def sources(self) -> tuple[str, ...]:
        return (f"{self.left.name}.*", "public.*")


@pytest.fixture
def bank(mariadb_database: FreshDatabase, postgres_database: FreshDatabase) -> Bank:
    return Bank(mariadb_database, postgres_database)


def streams(url: str) -> list[MergeStream]:
    return [{"database": name, "relays": [url]} for name in ("left", "right")]


async def test_an_effect_never_comes_before_its_cause(bank: Bank, tmp_path: Path) -> None:
    config = relay_config(tmp_path / "data", bank.urls, sources=bank.sources())
    async with LocalRelay(config, pace=QUICK) as relay:
        for fetcher in relay.fetchers.values():
            await streaming(fetcher)
        await asyncio.to_thread(bank.transfer, 30)
        left: set[int] = set()
        right: set[int] = set()
        times: list[int] = []

        async def read(until: int) -> None:
            client = MergedClient(
                streams=streams(relay.url),
                checkpoints=FileCheckpoints(tmp_path / "merged", sync=False),
                start="oldest",
                skew_s=1.5,
            )
            async with client.awindows() as windows:
                async for window in windows:
                    times.append(window.merged_us)
                    for event in await window.aevents():
                        held = left if window.database == "left" else right
                        assert event.key["id"] not in held, "an event came twice"
                        held.add(event.key["id"])
                    assert right <= left, "money arrived that had not left"
                    await window.acommit()
                    if len(right) >= until:
                        return

        # Nothing is written any more: each database is passed because the other is resolved.
        await asyncio.wait_for(read(30), 60)
        await asyncio.to_thread(bank.transfer, 20)
        await asyncio.wait_for(read(50), 60)
    assert left == right == set(range(50))
    assert times == sorted(times)


@pytest.mark.faults
async def test_each_event_takes_effect_once_over_kills(bank: Bank, tmp_path: Path) -> None:
    config = relay_config(tmp_path / "data", bank.urls, sources=bank.sources())
    path = tmp_path / "journal.db"
    choose = random.Random(7)
    async with LocalRelay(config, pace=QUICK) as relay:
        for fetcher in relay.fetchers.values():
            await streaming(fetcher)

        def start() -> subprocess.Popen[bytes]:
            arguments = [str(path), json.dumps(streams(relay.url))]
            return subprocess.Popen(
                [sys.executable, "-m", "tests.support.merge_process", *arguments]
            )

        def applied() -> list[Any]:
            with contextlib.closing(sqlite3.connect(path)) as connection:
                with contextlib.suppress(sqlite3.OperationalError):  # It has no table yet.
                    return connection.execute(
                        "SELECT database, id FROM applied ORDER BY n"
                    ).fetchall()
            return []

        async def reached(count: int) -> None:
            await eventually(lambda: len(applied()) >= count, 90)

        for _ in range(4):
            process = start()
            before = len(applied())
            writing = asyncio.ensure_future(asyncio.to_thread(bank.transfer, 40))
            enough = before + choose.randint(1, 60)
            await reached(enough)
            process.kill()
            process.wait()
            await writing
        process = start()
        await reached(2 * bank.count)
        process.terminate()
        process.wait()
    found = applied()
    assert len(found) == len(set(found)) == 2 * bank.count
    seen: set[int] = set()
    for database, number in found:
        assert database == "left" or number in seen, f"transfer {number} arrived before it left"
        seen.add(number)
