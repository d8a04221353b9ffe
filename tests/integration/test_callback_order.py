"""The order of callbacks (section 3.6 of the paper) on real databases, read by a real relay.

The shop's transactions go over several tables, update keys, delete and roll back.  Every
callback is recorded; the grammar checks the record, and what the windows held is compared
with what the source committed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.cli.demo.shop import Shop, differences
from databus.client import Consumer, DatabusClient
from databus.client.application.events import Event, Window
from databus.client.testing import Grammar, Mirror, Recorder
from databus.common.config import parse
from databus.relay.local_relay import LocalRelay
from tests.support.config_text import relay_text
from tests.support.system import server_shop, sqlite_shop
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.timeout(120)

TRANSACTIONS = 120


@dataclass(frozen=True)
class Source:
    """A shop, where a relay finds it, and the kind of its database."""

    shop: Shop
    url: str
    kind: str

    def run(self, *statements: str, commit: bool = True) -> None:
        """One transaction of our own."""
        with closing(self.shop.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute("BEGIN IMMEDIATE" if self.kind == "sqlite" else "BEGIN")
            for statement in statements:
                cursor.execute(statement)
            cursor.execute("COMMIT" if commit else "ROLLBACK")

    def name(self, table: str) -> str:
        return f"{self.shop.dialect.namespace}.{table}"


@pytest.fixture(params=["sqlite", "mariadb", "postgres"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "sqlite":
        return Source(*sqlite_shop(tmp_path / "shop.db"), request.param)
    database = request.getfixturevalue(f"{request.param}_database")
    return Source(*server_shop(request.param, database), request.param)


class Watcher(Recorder):
    """A recorder that also maintains a mirror and the id of each transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()
        self.txids: list[str | None] = []
        self.counts: list[int | None] = []

    def onDataEvent(self, event: Event) -> Any:
        self.mirror.onDataEvent(event)
        return super().onDataEvent(event)

    def onEndDataEventSequence(self, window: Window) -> Any:
        self.txids.append(window.txid)
        self.counts.append(window.event_count)
        return super().onEndDataEventSequence(window)

    @property
    def windows(self) -> list[list[Any]]:
        """The events of each window: (source, op, position, key)."""
        return Grammar(self.steps).windows()


@contextlib.asynccontextmanager
async def watching(source: Source, folder: Path, consumer: Consumer) -> AsyncIterator[LocalRelay]:
    """A relay over the source, and a client of it that begins where the relay began."""
    text = relay_text(
        source.url,
        source.name("*"),
        data_dir=folder / "relay",
        relay={"heartbeat": "50ms"},
        ring_bytes="16MiB",
    )
    config = parse(text)
    async with LocalRelay(config) as relay:
        await relay.ready()
        client = DatabusClient(
            database="shop",
            relays=[relay.url],
            consumer=consumer,
            start="oldest",
            checkpoint_every_s=0.0,
        )
        task = asyncio.create_task(client.serve())
        try:
            yield relay
        finally:
            client.stop()
            async with asyncio.timeout(20 * PATIENCE):
                await task


async def dump(relay: LocalRelay) -> None:
    """Have the rows that were there before the relay, so that the copy can be whole."""
    async with aiohttp.ClientSession(relay.url) as session:
        async with session.post("/v1/shop/dumps", json={"sources": ["*"]}) as answer:
            started = await answer.json()

        async def is_completed() -> bool:
            async with session.get(f"/v1/shop/dumps/{started['id']}") as answer:
                return bool((await answer.json())["state"] == "completed")

        await eventually(is_completed, 30.0, "the dump has ended")


async def until_equal(source: Source, watcher: Watcher) -> None:
    expected = await asyncio.to_thread(source.shop.rows)
    await eventually(
        lambda: not differences(expected, watcher.mirror.tables) and watcher.checkpoints,
        40.0,
        "the copy equals the source",
    )


def work(shop: Shop, transactions: int) -> list[str]:
    with shop.session() as step:
        return [step() for _ in range(transactions)]


async def test_the_trace_of_a_workload_obeys_the_grammar_and_the_copy_is_the_source(
    source: Source, tmp_path: Path
) -> None:
    watcher = Watcher()
    async with watching(source, tmp_path, watcher) as relay:
        await dump(relay)
        kinds = await asyncio.to_thread(work, source.shop, TRANSACTIONS)
        await until_equal(source, watcher)
    Grammar(watcher.steps).check()
    assert watcher.mirror.stale == []
    assert watcher.errors == []
    assert "onRollback" not in watcher.calls
    assert {"place_order", "cancel_order", "rename_key", "rolled_back"} <= set(kinds)
    assert {step.what[1] for step in watcher.steps if step.call == "onDataEvent"} >= set("cudr")


async def test_windows_are_the_transactions_of_the_source_neither_cut_nor_joined(
    source: Source, tmp_path: Path
) -> None:
    watcher = Watcher()
    async with watching(source, tmp_path, watcher):
        for number in range(20):
            lines = [
                f"INSERT INTO order_lines VALUES ({number}, {line}, 'SKU', 1)"
                for line in range(number % 4 + 1)
            ]
            order = f"INSERT INTO orders VALUES ({number}, 1, 'new', 1.50, '2012-10-14 00:00:00')"
            source.run(order, *lines, f"UPDATE stock SET on_hand = {number} WHERE sku = 'SKU-001'")
            if source.kind == "sqlite":
                # What SQLite is polled for at once is one window: let each be seen alone.
                await seen(watcher, number + 1)
        await seen(watcher, 20)
    Grammar(watcher.steps).check()
    windows = watcher.windows
    assert [len(events) for events in windows] == [number % 4 + 3 for number in range(20)]
    assert watcher.counts == [len(events) for events in windows]
    for number, events in enumerate(windows):
        assert events[0][:2] == (source.name("orders"), "c")
        assert events[0][3] == (number,)
        assert {one[3][0] for one in events if one[0] == source.name("order_lines")} == {number}
        assert events[-1][:2] == (source.name("stock"), "u")
        assert len({one[2].scn for one in events}) == 1
    assert len(set(watcher.txids)) == 20


async def test_transactions_of_many_sessions_at_once_stay_whole(
    source: Source, tmp_path: Path
) -> None:
    watcher = Watcher()

    def pair(number: int) -> None:
        source.run(
            f"INSERT INTO customers (id, name) VALUES ({1000 + number}, 'x')",
            f"INSERT INTO orders VALUES ({1000 + number}, 1, 'new', 1, '2012-10-14 00:00:00')",
        )

    async with watching(source, tmp_path, watcher):
        await asyncio.gather(*(asyncio.to_thread(pair, number) for number in range(24)))
        await eventually(lambda: len(watcher.positions) == 48, 30.0, "all 48 rows")
    Grammar(watcher.steps).check()
    for events in watcher.windows:
        customers = [one[3] for one in events if one[0] == source.name("customers")]
        orders = [one[3] for one in events if one[0] == source.name("orders")]
        assert customers == orders, "both rows of a transaction are in its window"
    if source.kind != "sqlite":
        assert len(watcher.windows) == 24


async def test_an_update_of_a_key_is_a_delete_and_an_insert_in_one_window(
    source: Source, tmp_path: Path
) -> None:
    watcher = Watcher()
    async with watching(source, tmp_path, watcher):
        source.run("UPDATE stock SET sku = 'RENAMED' WHERE sku = 'SKU-007'")
        await seen(watcher, 1)
    (events,) = watcher.windows
    assert [(one[1], one[3]) for one in events] == [("d", ("SKU-007",)), ("c", ("RENAMED",))]
    row = watcher.mirror.tables[source.name("stock")]["RENAMED",]
    assert row["on_hand"] == 1000


async def test_what_was_rolled_back_is_never_seen(source: Source, tmp_path: Path) -> None:
    watcher = Watcher()
    async with watching(source, tmp_path, watcher):
        source.run("INSERT INTO customers (id, name) VALUES (2000, 'gone')", commit=False)
        source.run(
            "INSERT INTO customers (id, name) VALUES (2001, 'stays')",
            "SAVEPOINT regret",
            "INSERT INTO customers (id, name) VALUES (2002, 'gone')",
            "UPDATE customers SET name = 'changed' WHERE id = 2001",
            "ROLLBACK TO SAVEPOINT regret",
            "INSERT INTO customers (id, name) VALUES (2003, 'stays')",
        )
        source.run("DELETE FROM customers WHERE id = 2003", commit=False)
        source.run("INSERT INTO customers (id, name) VALUES (2004, 'last')")
        await eventually(
            lambda: (2004,) in watcher.mirror.tables.get(source.name("customers"), {}), 30.0
        )
    Grammar(watcher.steps).check()
    flat = [(one[1], one[3]) for events in watcher.windows for one in events]
    assert flat == [("c", (2001,)), ("c", (2003,)), ("c", (2004,))]
    names = {
        key: row["name"] for key, row in watcher.mirror.tables[source.name("customers")].items()
    }
    assert names == {(2001,): "stays", (2003,): "stays", (2004,): "last"}


async def seen(watcher: Watcher, windows: int) -> None:
    """Return when so many windows have ended."""
    await eventually(lambda: len(watcher.txids) >= windows, 30.0, f"{windows} windows")
