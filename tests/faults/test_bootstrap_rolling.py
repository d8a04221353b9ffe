"""Every server of a cluster is restarted, one after the other, while readers are inside a file."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from databus.client import Consumer, DatabusClient
from databus.client.application.events import Event
from databus.common.checkpoint import BootstrapCheckpoint, Checkpoint
from tests.support.bootstrap_cluster import BootstrapCluster
from tests.support.config_text import relay_text
from tests.support.processes import Processes
from tests.support.s3_server import S3Server
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

ROWS = 12_000
ROW_BYTES = 2_000
NAMES = "abc"
READERS = 4
STOPS = [500 + number * ROWS // len(NAMES) for number in range(len(NAMES))]
"""Where in the table readers wait for the next restart."""


class Reader(Consumer):
    """Reads the whole table, and waits in the middle of it for each restart.

    ``longest_s`` is the longest time that it waited for a row by itself.
    """

    def __init__(self, restarts: list[asyncio.Event]) -> None:
        self.ids: list[int] = []
        self.servers: set[str] = set()
        self.server: Callable[[], str] = str
        self.inside: set[str] = set()
        self.rollbacks = 0
        self.waits_at = -1
        self.longest_s = 0.0
        self.is_done = asyncio.Event()
        self._restarts = restarts
        self._last_s: float | None = None

    def is_waiting(self, number: int) -> bool:
        """Whether it waits for this restart."""
        return self.waits_at == number

    async def onDataEvent(self, event: Event) -> None:
        assert event.value is not None
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - (self._last_s or now_s))
        self.ids.append(event.value["id"])
        self.servers.add(self.server())
        if len(self.ids) in STOPS:
            self.waits_at = STOPS.index(len(self.ids))
            await self._restarts[self.waits_at].wait()
        self._last_s = time.monotonic()
        if len(self.ids) == ROWS:
            self.is_done.set()

    async def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        if isinstance(checkpoint, BootstrapCheckpoint) and checkpoint.row:
            self.inside.add(checkpoint.run)

    async def onRollback(self, checkpoint: Checkpoint | None) -> None:
        self.rollbacks += 1


def _server_of(client: DatabusClient) -> str:
    return client.status.server


def _table(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE pages (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")
        text = "x" * (ROW_BYTES - 10)
        rows = ((number, f"{number:10d}{text}") for number in range(ROWS))
        db.executemany("INSERT INTO pages VALUES (?, ?)", rows)


@pytest.mark.parametrize("kind", ["s3", "folder"])
async def test_no_reader_loses_or_repeats_a_row_or_backs_off_in_a_rolling_restart(
    kind: str, tmp_path: Path, processes: Processes, s3: S3Server, free_port: Callable[[], int]
) -> None:
    _table(tmp_path / "pages.db")
    relay_url = f"http://127.0.0.1:{(port := free_port())}"
    config = tmp_path / "relay.toml"
    config.write_text(relay_text(f"sqlite:///{tmp_path}/pages.db", port=port, ring_bytes="8MiB"))
    processes.start("relay", "-c", config, name="relay").wait_ready(f"{relay_url}/readyz")
    cluster = BootstrapCluster(
        tmp_path, processes, [relay_url], NAMES, s3 if kind == "s3" else None
    )
    cluster.start(*NAMES)
    await asyncio.to_thread(cluster.wait_ready, *NAMES)
    store = cluster.store()
    await eventually(lambda: (b := store.read().base) and b.rows == ROWS, 60, "a base has all rows")

    restarts = [asyncio.Event() for _ in NAMES]
    readers = [Reader(restarts) for _ in range(READERS)]
    urls = list(cluster.urls.values())
    clients = [
        DatabusClient(
            database="shop",
            relays=[relay_url],
            bootstraps=[*urls[number % 3 :], *urls[: number % 3]],
            consumer=reader,
            buffer_bytes=64 << 10,
            reconnect_s=3600.0,
            reconnect_most_s=3600.0,
        )
        for number, reader in enumerate(readers)
    ]
    tasks = [asyncio.create_task(client.serve()) for client in clients]
    for reader, client in zip(readers, clients, strict=True):
        reader.server = partial(_server_of, client)
    try:
        for number, name in enumerate(NAMES):
            for reader in readers:
                await eventually(partial(reader.is_waiting, number), 60, "it is in the middle")
            assert await asyncio.to_thread(cluster.servers[name].stop) == 0
            restarts[number].set()
            cluster.start(name)
            await asyncio.to_thread(cluster.wait_ready, name)
        for reader in readers:
            async with asyncio.timeout(60 * PATIENCE):
                await reader.is_done.wait()
    finally:
        for client in clients:
            client.stop()
        await asyncio.gather(*tasks)
    print(f"the longest wait of a reader: {max(one.longest_s for one in readers):.2f} s")
    for reader in readers:
        assert reader.rollbacks == 0
        assert sorted(reader.ids) == list(range(ROWS)), "each row, once"
        assert reader.inside, "it continued inside a file"
    # One whose answer had been sent up to the end may have found its server back again.
    assert any(len(reader.servers) > 1 for reader in readers)
