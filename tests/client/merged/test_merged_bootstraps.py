"""Streams of a merge that begin with a bootstrap: their windows come first, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.client import AsyncMergedWindow, FileCheckpoints, MergedClient
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from tests.client.conftest import StartServer
from tests.client.scripted_server import ScriptedServer
from tests.client.shop import ORDERS, orders

ROW_COUNT = 5


def row_of(key: int, scn: int) -> bytes:
    """A row of a bootstrap, without the end of a window."""
    builder = WindowBuilder(scn, scn * 1_000_000)
    builder.event(
        Op.READ,
        ORDERS.source_id,
        ORDERS.fingerprint,
        ORDERS.encode_key([key]),
        after=ORDERS.encode_row({"id": key, "state": "s", "amount": None}),
    )
    return builder.take()


@pytest.mark.parametrize("every", [1, 2, 9], ids=lambda every: f"cut after {every}")
async def test_a_bootstrap_comes_first_and_resumes_at_its_checkpoints(
    scripted: StartServer, tmp_path: Path, every: int
) -> None:
    relay: ScriptedServer = await scripted(*(orders(n, n) for n in range(1, 9)))
    relay.evict_to(5)
    rows = [row_of(key, key) for key in range(1, ROW_COUNT + 1)]
    bootstrap = await scripted(bootstrap_rows=rows, bootstrap_target=Position(5, 1))
    bootstrap.bootstrap_every = every
    other = await scripted(*(orders(n, 100 + n) for n in range(1, 12)), database="other")
    found: list[tuple[str, str, int]] = []

    def client() -> MergedClient:
        return MergedClient(
            streams=[
                {"database": "shop", "relays": [relay.url], "bootstraps": [bootstrap.url]},
                {"database": "other", "relays": [other.url], "start": "oldest"},
            ],
            checkpoints=FileCheckpoints(tmp_path / "merged", sync=False),
            reconnect_s=0.01,
            skew_s=0.0,
        )

    async def take(window: AsyncMergedWindow) -> None:
        for event in await window.aevents():
            found.append((window.mode, window.database, event.key["id"]))
        await window.acommit()

    # Each run takes one window, and ends as by a kill with the next one in its hand.
    while ("online", "shop", 8) not in found:
        async with client().awindows() as windows:
            await take(await anext(windows))
            if ("online", "shop", 8) not in found:
                await anext(windows)
    modes = [mode for mode, _, _ in found]
    assert modes == sorted(modes)  # bootstrap, then online
    keys = [key for mode, _, key in found if mode == "bootstrap"]
    assert keys == list(range(1, ROW_COUNT + 1))
    online = [(name, key) for mode, name, key in found if mode == "online"]
    assert [key for name, key in online if name == "shop"] == [6, 7, 8]
    assert len(online) == len(set(online))
