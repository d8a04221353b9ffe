"""Chains of relays for tests: one configuration a relay, and the bytes that they serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from databus.common.checkpoint import Position
from databus.common.config import Config, parse
from databus.common.errors import from_problem
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameSplitter, FrameView, Op
from databus.relay.processes.fetcher import Pace
from tests.support.config_text import section

QUICK = Pace(
    idle_window_s=0.1,
    status_s=0.05,
    source_status_s=0.1,
    backoff_first_s=0.02,
    backoff_most_s=0.2,
    failed_retry_s=0.2,
)
FRAMES = {"Accept": "application/vnd.databus.frames"}


def databases_text(
    data_dir: Path,
    databases: Mapping[str, str],
    *,
    listen: str = "127.0.0.1:0",
    ring_bytes: int = 8 << 20,
    sources: tuple[str, ...] = ("*",),
    options: Mapping[str, str | int | bool] | None = None,
) -> str:
    """The TOML of a relay with these databases, each a name and a URL."""
    relay = {"listen": listen, "data_dir": data_dir, "heartbeat": "50ms"}
    each = {"ring_bytes": ring_bytes, "sync_every": "20ms", "sources": sources}
    return section("[relay]", relay) + "".join(
        section("[[database]]", {"name": name, "url": url, **each, "options": options or {}})
        for name, url in databases.items()
    )


def relay_config(data_dir: Path, databases: Mapping[str, str], **options: Any) -> Config:
    """``databases_text``, parsed."""
    return parse(databases_text(data_dir, databases, **options))


def parent_url(*urls: str, database: str = "shop") -> str:
    """The source URL of a child of the relays at ``urls``."""
    return f"relay+http://{','.join(url.removeprefix('http://') for url in urls)}/{database}"


@dataclass(frozen=True)
class Served:
    """An answer to a poll from the oldest event on: the announced range and the frames."""

    clock: str
    prev: str
    newest: str
    frames: tuple[FrameView, ...]

    @property
    def positions(self) -> list[Position]:
        return [view.position for view in self.frames]

    def bytes_by_position(self) -> dict[Position, bytes]:
        """Each frame's bytes."""
        return {view.position: bytes(view.bytes) for view in self.frames}


async def poll(url: str, database: str = "shop", **query: str) -> Served:
    """Everything that a relay serves now, without heartbeats; each frame's CRC is checked."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            f"{url}/v1/{database}/stream", params=query or {"start": "oldest"}, headers=FRAMES
        ) as answer,
    ):
        body = await answer.read()
        if answer.status != 200:
            raise from_problem(await answer.json(content_type=None))
        splitter = FrameSplitter()
        views = tuple(
            view
            for view in frame_format.iter_frames(splitter.feed(body))
            if view.op != Op.HEARTBEAT
        )
        assert not splitter.pending_bytes
        return Served(
            answer.headers["Databus-Clock"],
            answer.headers["Databus-Prev"],
            answer.headers["Databus-Max"],
            views,
        )


async def get_json(url: str, path: str) -> dict[str, Any]:
    """The JSON document at a path."""
    async with aiohttp.ClientSession() as session, session.get(url + path) as answer:
        document: dict[str, Any] = await answer.json(content_type=None)
        return document
