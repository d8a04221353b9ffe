"""A fetcher over a scripted source, and what it has made of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp

from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView, Op
from databus.relay.capture.intake import Intake
from databus.relay.processes.fetcher import Fetcher, Pace
from databus.relay.ring.data_folder import SocketName, read_document
from databus.relay.ring.ring import Ring
from tests.support.capture import capturing
from tests.support.scripted_source import ITEMS, ScriptedDatabase
from tests.support.waiting import eventually

PACE = Pace(
    idle_window_s=0.1,
    status_s=0.02,
    source_status_s=0.05,
    backoff_first_s=0.01,
    backoff_most_s=0.05,
    failed_retry_s=0.1,
)
DATABASE = DatabaseConfig(
    name="shop", url=SourceUrl("generator://"), ring_bytes=256 << 10, sync_every=0.02
)


def running(
    database: ScriptedDatabase, folder: Path, **options: Any
) -> AbstractAsyncContextManager[Fetcher]:
    """A fetcher of the scripted database, at ``PACE``, until the block ends."""
    options = {"pace": PACE, "make_source": database.source, **options}
    return capturing(DATABASE, folder, **options)


def frames(folder: Path) -> list[FrameView]:
    """All that the ring holds."""
    with Ring.open_reader(folder / "shop") as reader:
        data, _ = reader.read(reader.snapshot().head, 1 << 30)
        return list(frame_format.iter_frames(bytes(data)))


def reached(fetcher: Fetcher, scn: int) -> Callable[[], bool]:
    """Whether the ring has come to ``scn``."""
    return lambda: fetcher.intake is not None and fetcher.intake.complete.scn >= scn


def opened(fetcher: Fetcher) -> Intake:
    """The intake, which is there once the ring is."""
    assert fetcher.intake is not None
    return fetcher.intake


async def status_in(folder: Path, state: str) -> dict[str, Any]:
    """What status.json says once it says this state, which is a moment after it is so."""
    found: dict[str, Any] = {}

    def says() -> bool:
        with contextlib.suppress(FileNotFoundError):
            found.update(json.loads(read_document(folder / "shop" / "status.json") or b"{}"))
        return found.get("state") == state

    await eventually(says)
    return found


async def ask(folder: Path, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """The status and the JSON of an answer of the fetcher's socket."""
    with SocketName(folder / "shop" / "fetcher.sock") as name:
        connector = aiohttp.UnixConnector(path=name.path)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.request(method, f"http://fetcher{path}", json=body) as answer:
                return answer.status, await answer.json(content_type=None)


async def ended(folder: Path, dump_id: str, *states: str) -> dict[str, Any]:
    """The dump, once it is in one of these states."""
    found: dict[str, Any] = {}

    async def look() -> bool:
        found.update((await ask(folder, "GET", f"/dumps/{dump_id}"))[1])
        return found["state"] in states

    await eventually(look, message=f"dump {dump_id} is one of {states}")
    return found


def replayed(folder: Path) -> dict[int, str]:
    """The table as a consumer has it that applied every frame in order."""
    rows: dict[int, str] = {}
    for view in frames(folder):
        if view.is_control:
            continue
        key = ITEMS.decode_key(view.key)["id"]
        if view.op == Op.DELETE:
            rows.pop(key, None)
        else:
            assert view.after is not None
            rows[key] = ITEMS.decode_row(view.after)["note"]
    return rows
