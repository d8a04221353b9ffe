"""A bootstrap server's log writer in the test's own event loop, beside a relay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.seeding import SEEDED
from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.common.config import BootstrapConfig
from tests.support.waiting import eventually


@contextlib.asynccontextmanager
async def written_log(data_dir: Path, relay_url: str) -> AsyncIterator[HotLog]:
    """The log of the database ``shop``, which is written meanwhile."""
    config = BootstrapConfig(data_dir=data_dir, relays=(relay_url,))
    logs, stop = OpenLogs(writes=True), asyncio.Event()
    with contextlib.closing(logs):
        task = asyncio.create_task(write_logs(config, logs, stop))
        yield logs.to_write(data_dir / "shop" / "log")
        stop.set()
        await task


def note_of(log: HotLog, name: str) -> dict[str, Any]:
    """A note of the log; empty while there is none."""
    return {} if log.is_new() else log.note(name) or {}


async def seeded(log: HotLog, source: str) -> None:
    """Return when all rows of a source have come."""
    await eventually(
        lambda: note_of(log, "seeding").get(source, {}).get("state") == SEEDED, 60, "seeded"
    )
