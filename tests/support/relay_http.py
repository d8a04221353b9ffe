"""Questions to a relay's worker over HTTP, and how tests write down the frames of its answers."""

from __future__ import annotations

from typing import Any

import aiohttp

from databus.common.frame.frame_format import FrameSplitter, FrameView, Op, iter_frames
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.common.schema.source_schema import SourceSchema
from tests.support.live_relay import ORDERS, window

FRAMES = {"Accept": FRAMES_TYPE}
END, BEAT, INSERT = Op.END_OF_WINDOW, Op.HEARTBEAT, Op.INSERT


async def frames(http: aiohttp.ClientSession, url: str, **query: str | int) -> list[FrameView]:
    async with http.get(url, params=query, headers=FRAMES) as answer:
        assert answer.status == 200, await answer.text()
        return list(iter_frames(await answer.read()))


async def problem(
    http: aiohttp.ClientSession, method: str, url: str, **query: str | int
) -> tuple[int, dict[str, Any]]:
    async with http.request(method, url, params=query) as answer:
        assert answer.content_type == "application/problem+json"
        document = await answer.json(content_type=None)
        assert document["status"] == answer.status
        return answer.status, document


def ops_and_positions(found: list[FrameView]) -> list[tuple[int, int, int]]:
    return [(frame.op, frame.scn, frame.seq) for frame in found]


def insert(scn: int, schema: SourceSchema = ORDERS, number: int = 1) -> bytes:
    return window(scn, [(Op.INSERT, schema, number)])


class Follower:
    """The frames of an open answer, one after the other."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self._splitter = FrameSplitter()
        self._frames: list[FrameView] = []

    async def next(self) -> FrameView | None:
        """The next frame, None at the end of the answer."""
        while not self._frames:
            chunk = await self.answer.content.readany()
            if not chunk:
                return None
            self._frames = list(iter_frames(self._splitter.feed(chunk)))
        return self._frames.pop(0)

    async def next_but(self, op: Op) -> FrameView | None:
        """The next frame with another op."""
        while (frame := await self.next()) is not None and frame.op == op:
            continue
        return frame
