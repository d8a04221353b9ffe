"""A window that a server leaves out: the client notices by itself, and reads it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from databus.client import DatabusClient, FileCheckpoints, Position
from databus.common.frame.frame_format import HEADER, Op, iter_frames
from databus.relay.ring.ring import Ring
from tests.client.conftest import StartServer
from tests.client.shop import orders
from tests.support.read_windows import aup_to
from tests.support.windows import read_from


def chained(folder: Path, count: int) -> list[bytes]:
    """Windows as a relay's ring has them: each end states the one before."""
    with Ring.create(folder, 1 << 18) as writer, Ring.open_reader(folder) as reader:
        after = writer.last
        for scn in range(1, count + 1):
            after = writer.append(orders(scn, scn), after)
        data = read_from(reader, reader.snapshot().prev)
    windows: list[bytes] = [b""]
    for view in iter_frames(data):
        windows[-1] += bytes(view.bytes)
        if view.op == Op.END_OF_WINDOW:
            windows.append(b"")
    return windows[:-1]


async def read(store: FileCheckpoints | None, *urls: str, **settings: Any) -> tuple[list[int], str]:
    """The orders' ids, and the last error of pulling."""
    client = DatabusClient(
        database="shop", relays=list(urls), checkpoints=store, start="oldest",
        reconnect_s=0.001, seed=1, **settings,
    )  # fmt: skip
    found = []
    async for window in aup_to(9, client):
        found += [int((event.value or {})["id"]) async for event in window]
        await window.acommit()
    return found, client.status.last_error


async def test_a_hole_is_named_and_read_from_another_server(
    scripted: StartServer, tmp_path: Path
) -> None:
    windows = chained(tmp_path / "ring", 9)
    assert all(HEADER.unpack_from(window)[0] for window in windows)
    torn = await scripted(*windows[:3], *windows[6:])
    whole = await scripted(*windows)
    store = FileCheckpoints(tmp_path / "checkpoint")
    found, error = await read(store, torn.url, whole.url)
    assert found == list(range(1, 10))
    assert "window_missing" in error


async def test_no_checkpoint_is_stored_behind_a_hole(scripted: StartServer, tmp_path: Path) -> None:
    windows = chained(tmp_path / "ring", 9)
    torn = await scripted(*windows[:3], *windows[6:])
    store = FileCheckpoints(tmp_path / "checkpoint")
    seen = []
    client = DatabusClient(
        database="shop", relays=[torn.url], checkpoints=store, start="oldest",
        reconnect_s=0.001, seed=1, max_pull_failures=3,
    )  # fmt: skip
    error = None
    try:
        async for window in client.awindows():
            seen.append(window.scn)
            await window.acommit()
    except Exception as raised:
        error = raised
    assert getattr(error, "code", None) == "window_missing", error
    stored = store.load()
    assert seen == [1, 2, 3] and stored is not None
    assert stored.position == Position(3, 1)
    # A reader that begins behind the hole, or is given some of the tables, has nothing to miss.
    assert await read(None, torn.url, sources=["shop.*"]) == ([1, 2, 3, 7, 8, 9], "")
