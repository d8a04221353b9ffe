"""A transaction that is several times as large as the ring, with the fetcher killed inside it.

What the database sends is let through only as fast as the reader takes it: otherwise a slow
machine would test whether a reader can fall off the ring.  ``benchmarks/capture_huge_transaction``
measures the same with five million rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from databus.client import DatabusClient
from databus.client.pulling.raw_windows import RawWindows
from databus.common.checkpoint import Position
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from tests.support.config_text import relay_text
from tests.support.fixtures import FreshDatabase
from tests.support.metered_proxy import MeteredProxy
from tests.support.processes import wait_process_gone
from tests.support.relay_process import RelayProcess

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 200_000
WARM_UP_ROWS = 20_000
"""Enough to fill every buffer once."""
AHEAD_ROWS = 15_000
GRANT_BYTES = 64 << 10
"""How far the ring may be ahead of the reader when the database may send that much more: all in
all less than the ring holds."""
RING_BYTES = 6 << 20
GROWTH_BYTES = 10 << 20
"""What a process may grow by while 18 MB of frames pass through it."""
# Ids and values of one width, so that all rows take the same number of bytes.
FIRST_ID = 1_000_000
INSERTS = {
    "mariadb": "INSERT INTO many SELECT seq, seq + 1000000 FROM seq_{first}_to_{last}",
    "postgres": "INSERT INTO many SELECT n, n + 1000000 FROM generate_series({first}, {last}) n",
}


class Reader:
    """Takes the stream in parts, and checks that no frame is missing, doubled or moved.

    Invariants:
        I1. ``position`` is that of the last frame taken; it lies inside a window while
            ``is_inside``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.position: Position | None = None
        self.is_inside = False
        self.windows: list[int] = []
        self.rows = 0
        self.keys: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []

    def take(self, part: RawWindows) -> None:
        columns = frame_format.scan(part.data)
        for scn, seq, op in zip(columns.scn, columns.seq, columns.op, strict=True):
            position = Position(int(scn), int(seq))
            if op < frame_format.FIRST_CONTROL_OP:
                follows = self.position is not None and self.position.scn == position.scn
                expected = self.position.seq + 1 if follows and self.position else 0
                assert position.seq == expected, (self.position, position)
                self.rows += 1
                self.is_inside = True
            elif op == Op.END_OF_WINDOW:
                self.windows.append(self.rows)
                self.is_inside = False
            self.position = position
        self.keys.append(columns.key_hash[columns.op < frame_format.FIRST_CONTROL_OP])

    async def parts(self) -> AsyncIterator[None]:
        """One step a part, from where the last call was left on."""
        client = DatabusClient(database="huge", relays=[self._url], start="oldest")
        parts = client.raw_windows(self.position, part_bytes=256 << 10)
        async with contextlib.aclosing(parts):
            async for part in parts:
                if part.data:
                    self.take(part)
                yield


def anonymous_bytes(process: psutil.Process) -> int:
    """Memory that is the process's own: the ring is a file's, and shared."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


class Memory:
    """The largest growth of the relay's processes over what they had when first seen."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._looks = 0
        self.growth_bytes = 0

    def look(self, relay: RelayProcess) -> None:
        self._looks += 1
        if self._looks % 16 == 1:
            self._look(relay)

    def _look(self, relay: RelayProcess) -> None:
        fetcher = relay.state("huge")["fetcher"]
        for process in psutil.Process(relay.process.pid).children():
            with contextlib.suppress(OSError, psutil.Error, AssertionError):
                is_up = fetcher["pid"] == process.pid and fetcher["state"] == "streaming"
                if "databus.relay.processes.fetcher" in process.cmdline() and not is_up:
                    continue  # It loads its code still.
                now = anonymous_bytes(process)
                first = self._first.setdefault(process.pid, now)
                self.growth_bytes = max(self.growth_bytes, now - first)


@pytest.mark.parametrize("kind", ["mariadb", "postgres"])
async def test_it_passes_through_a_small_ring_in_flat_memory_and_survives_a_kill_inside(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    database.execute("CREATE TABLE many (id BIGINT PRIMARY KEY, v INT)")

    def insert(first: int, count: int) -> str:
        start = FIRST_ID + first
        return INSERTS[kind].format(first=start, last=start + count - 1)

    proxy = MeteredProxy("127.0.0.1", database.server.port)
    async with proxy:
        config = tmp_path / "relay.toml"
        url = database.url.replace(f":{database.server.port}/", f":{proxy.port}/")
        schema = "public" if kind == "postgres" else database.name
        config.write_text(
            relay_text(url, f"{schema}.*", name="huge", data_dir="data", ring_bytes=RING_BYTES)
        )
        relay = await asyncio.to_thread(RelayProcess, config)
        try:
            await asyncio.to_thread(relay.ready)
            await check(relay, proxy, database, insert)
        finally:
            await asyncio.to_thread(relay.end)


async def check(
    relay: RelayProcess,
    proxy: MeteredProxy,
    database: FreshDatabase,
    insert: Callable[[int, int], str],
) -> None:
    reader, memory = Reader(relay.url), Memory()
    await asyncio.to_thread(database.execute, insert(0, WARM_UP_ROWS))
    async for _ in reader.parts():
        if reader.windows and reader.windows[-1] == WARM_UP_ROWS:
            break
    proxy.close_off()

    async def give_way() -> None:
        """Grant some more whenever the ring is not far ahead of the reader."""
        while True:
            if proxy.is_spent:
                newest = (await asyncio.to_thread(relay.state, "huge"))["max"]
                at = reader.position
                same = at is not None and at.scn == newest["scn"]
                ahead = newest["seq"] - at.seq if at is not None and same else newest["seq"]
                if ahead < AHEAD_ROWS or reader.windows[-1] == WARM_UP_ROWS + ROWS:
                    proxy.grant(GRANT_BYTES)
            await asyncio.sleep(0.002)

    async def read_until(rows: int) -> None:
        async for _ in reader.parts():
            await asyncio.to_thread(memory.look, relay)
            if reader.rows >= rows:
                return

    granting = asyncio.create_task(give_way())
    try:
        await pass_through(relay, reader, database, insert, read_until)
    finally:
        granting.cancel()
        proxy.grant(1 << 40)
    ring_state = relay.state("huge")
    assert ring_state["prev"]["seq"] > ROWS // 2, "its beginning left the ring before its end came"
    print(f"{memory.growth_bytes >> 10} KiB more")
    assert memory.growth_bytes < GROWTH_BYTES, f"{memory.growth_bytes} bytes"


async def pass_through(
    relay: RelayProcess,
    reader: Reader,
    database: FreshDatabase,
    insert: Callable[[int, int], str],
    read_until: Callable[[int], Awaitable[None]],
) -> None:
    """Read the large window, with the fetcher killed inside of it."""
    writing = asyncio.create_task(asyncio.to_thread(database.execute, insert(WARM_UP_ROWS, ROWS)))
    await read_until(WARM_UP_ROWS + ROWS // 3)
    assert reader.is_inside
    # The ring has no more of this window's beginning: what is behind is known by position alone.
    fetcher = await asyncio.to_thread(relay.fetcher)
    fetcher.kill()
    await asyncio.to_thread(wait_process_gone, fetcher.pid)
    await read_until(WARM_UP_ROWS + 2 * ROWS // 3)
    # A reader that ended in the middle of the window resumes there.
    assert reader.is_inside and reader.position is not None and reader.position.seq > ROWS // 2
    again = await asyncio.to_thread(relay.fetcher)
    assert again.pid != fetcher.pid
    await read_until(WARM_UP_ROWS + ROWS)
    await writing

    async for _ in reader.parts():
        if not reader.is_inside:
            break
    assert reader.windows[-2:] == [WARM_UP_ROWS, WARM_UP_ROWS + ROWS]
    assert len(np.unique(np.concatenate(reader.keys))) == WARM_UP_ROWS + ROWS
