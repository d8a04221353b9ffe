"""A bootstrap server compares suspended tables and repairs them, so that no relay dumps them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log.table_repairs import NOTE
from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.bootstrap.verify.table_verifier import Verifier
from databus.common.config import BootstrapConfig, parse
from databus.relay.local_relay import LocalRelay
from tests.relay.dumps.test_resync import rows, words
from tests.support.bootstrap_log import note_of, seeded, written_log
from tests.support.capture import PACE, ring_state, upserted
from tests.support.config_text import relay_text
from tests.support.waiting import eventually, within

pytestmark = pytest.mark.timeout(300)


@contextlib.asynccontextmanager
async def relay_over(folder: Path) -> AsyncIterator[LocalRelay]:
    text = relay_text(
        f"sqlite:///{folder / 'shop.db'}", data_dir=folder / "relay", sync_every="50ms"
    )
    async with LocalRelay(parse(text), pace=PACE) as relay:
        yield relay


async def test_a_suspended_table_is_compared_and_only_what_differs_is_dumped(
    tmp_path: Path,
) -> None:
    shop = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    shop.executemany("INSERT INTO orders VALUES (?, ?)", [(n, f"item {n}") for n in range(500)])
    ring = tmp_path / "relay" / "shop"
    async with (
        relay_over(tmp_path) as relay,
        written_log(tmp_path / "bootstrap", relay.url) as log,
    ):
        await seeded(log, "main.orders")
        read_count = ring_state(ring).letters.count("r")
        assert read_count == 500
        # Rebuilt without triggers: one row is changed, one gone, one new.
        shop.executescript(
            "CREATE TABLE rebuilt (id INTEGER PRIMARY KEY, item TEXT);"
            "INSERT INTO rebuilt SELECT * FROM orders WHERE id <> 7;"
            "UPDATE rebuilt SET item = 'changed' WHERE id = 8;"
            "INSERT INTO rebuilt VALUES (1000, 'new');"
            "DROP TABLE orders; ALTER TABLE rebuilt RENAME TO orders;"
        )
        shop.execute("INSERT INTO orders VALUES (1001, 'later')")
        await eventually(lambda: len(words(ring)) == 3, 60, "followed again")
        assert [state for _, state in words(ring)] == ["suspended", "resynchronising", "followed"]
        held, letters = upserted(ring, "main.orders")
        assert held == rows(shop)
        assert "t" not in letters, "nothing was emptied"
        assert letters.count("r") - read_count <= 3, "only what differs is dumped"
        await eventually(lambda: not note_of(log, NOTE), 20, "the mark is gone")
        # Comparing costs nothing where the content is the same.
        shop.executescript(
            "CREATE TABLE rebuilt (id INTEGER PRIMARY KEY, item TEXT);"
            "INSERT INTO rebuilt SELECT * FROM orders;"
            "DROP TABLE orders; ALTER TABLE rebuilt RENAME TO orders;"
        )
        shop.execute("INSERT INTO orders VALUES (1002, 'later')")
        await eventually(lambda: len(words(ring)) == 6, 60, "followed again")
        held, after = upserted(ring, "main.orders")
        assert after.count("r") - letters.count("r") <= 1
        assert held == rows(shop)
    shop.close()


async def test_a_table_with_another_key_is_left_to_the_relay_though_the_copy_has_no_row(
    tmp_path: Path,
) -> None:
    shop = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    shop.execute("INSERT INTO orders VALUES (1, 'one')")
    ring = tmp_path / "relay" / "shop"
    async with (
        relay_over(tmp_path) as relay,
        written_log(tmp_path / "bootstrap", relay.url) as log,
    ):
        await seeded(log, "main.orders")
        shop.execute("DELETE FROM orders")
        shop.executescript(
            "CREATE TABLE rebuilt (id INT, item TEXT NOT NULL PRIMARY KEY);"
            "INSERT INTO rebuilt VALUES (1, 'one'), (1, 'two');"
            "DROP TABLE orders; ALTER TABLE rebuilt RENAME TO orders;"
        )
        await eventually(lambda: words(ring)[-1:] == [("main.orders", "followed")], 60)
        held, _ = upserted(ring, "main.orders")
        assert held.keys() == {("one",), ("two",)}
        await eventually(lambda: not note_of(log, NOTE), 20, "the mark is gone")
    shop.close()


async def test_a_server_that_ended_while_it_compared_a_table_resumes_with_its_own_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    shop.executemany("INSERT INTO orders VALUES (?, ?)", [(n, f"item {n}") for n in range(500)])
    ring = tmp_path / "relay" / "shop"
    comparing, scan = asyncio.Event(), Verifier._scan_source

    async def never(*_: Any) -> Any:
        comparing.set()
        await asyncio.Event().wait()

    async with relay_over(tmp_path) as relay:
        config = BootstrapConfig(data_dir=tmp_path / "bootstrap", relays=(relay.url,))
        logs = OpenLogs(writes=True)
        task = asyncio.create_task(write_logs(config, logs, asyncio.Event()))
        log = logs.to_write(tmp_path / "bootstrap" / "shop" / "log")
        await seeded(log, "main.orders")
        read_count = ring_state(ring).letters.count("r")
        monkeypatch.setattr(Verifier, "_scan_source", never)
        shop.executescript(
            "CREATE TABLE rebuilt (id INTEGER PRIMARY KEY, item TEXT);"
            "INSERT INTO rebuilt SELECT * FROM orders;"
            "DROP TABLE orders; ALTER TABLE rebuilt RENAME TO orders;"
        )
        async with within(60):
            await comparing.wait()
        assert words(ring)[-1] == ("main.orders", "resynchronising")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        monkeypatch.setattr(Verifier, "_scan_source", scan)
        stop = asyncio.Event()
        task = asyncio.create_task(write_logs(config, logs, stop))
        await eventually(lambda: words(ring)[-1:] == [("main.orders", "followed")], 60)
        letters = ring_state(ring).letters
        assert (letters.count("t"), letters.count("r")) == (0, read_count), "nothing was dumped"
        stop.set()
        await task
        logs.close()
    shop.close()
