"""How many of MySQL's tables may be read at once, and which sessions may have to wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from databus.relay.dumps.dump_records import MAX_PARALLEL
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql import mysql_source as source_module
from tests.support.mariadb_stream import mariadb_config
from tests.support.waiting import PATIENCE, eventually


async def test_chunks_that_wait_for_a_lock_hold_up_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        source_module, "MySqlConnection", lambda settings: SimpleNamespace(is_open=False)
    )
    # Of its few threads one is left here, for what syncs the ring.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    source = MySqlSource(mariadb_config("mariadb://u@127.0.0.1/shop", "shop.*"))
    unlocked = threading.Event()
    waiting: list[object] = []

    def wait(connection: object) -> bool:
        waiting.append(connection)
        return unlocked.wait(60 * PATIENCE)

    reads = [asyncio.create_task(source._read(wait)) for _ in range(MAX_PARALLEL)]
    try:
        await eventually(lambda: len(waiting) == MAX_PARALLEL)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "synced"), 10 * PATIENCE)
    finally:
        unlocked.set()
    assert all(await asyncio.gather(*reads))
