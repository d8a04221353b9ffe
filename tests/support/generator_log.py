"""A relay over the generator, and a log writer that follows it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.bootstrap.runs.manifest import Store
from databus.common.checkpoint import Position
from databus.common.config import BootstrapConfig, parse
from databus.relay.local_relay import LocalRelay
from tests.support.config_text import relay_text
from tests.support.waiting import eventually

WINDOW_EVENTS = 5


@contextlib.asynccontextmanager
async def relay_of(
    folder: Path, events: int, ring: str = "64MiB", port: int = 0
) -> AsyncIterator[LocalRelay]:
    url = (
        "generator://?events_per_second=max&payload_bytes=100&keys=200"
        f"&events_per_window={WINDOW_EVENTS}&events={events}&seed=3"
    )
    text = relay_text(url, name="gen", port=port, data_dir=folder / "relay", ring_bytes=ring)
    async with LocalRelay(parse(text)) as relay:
        yield relay


@contextlib.asynccontextmanager
async def writing(folder: Path, relay: str, **changes: Any) -> AsyncIterator[tuple[HotLog, Store]]:
    config = BootstrapConfig(
        data_dir=folder / "bootstrap", relays=(relay,), segment_every=3600.0, **changes
    )
    logs, stop = OpenLogs(writes=True), asyncio.Event()
    task = asyncio.create_task(write_logs(config, logs, stop))
    database = folder / "bootstrap" / "gen"
    try:
        yield logs.to_write(database / "log"), Store(database)
    finally:
        stop.set()
        await task
        logs.close()


async def relay_end(relay: LocalRelay, events: int) -> Position:
    """Where the relay's stream ends, once it has so many events, or more, and is idle."""
    seen: list[dict[str, int]] = []
    async with aiohttp.ClientSession() as session:

        async def stands_still() -> bool:
            async with session.get(f"{relay.url}/v1/gen/sources") as answer:
                found = await answer.json()
            seen.append(found.get("max") or {"scn": 0, "seq": 0})
            return seen[-1]["scn"] >= events // WINDOW_EVENTS and seen[-3:] == [seen[-1]] * 3

        await eventually(stands_still, 20.0, "the relay is idle", poll_s=0.1)
    return Position(**seen[-1])


def seeding_of(log: HotLog) -> dict[str, Any]:
    return dict(log.note("seeding") or {}) if not log.is_new() else {}
