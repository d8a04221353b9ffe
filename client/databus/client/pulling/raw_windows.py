"""Whole windows as bytes, for consumers that store frames undecoded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from databus.client.application.frame_blocks import Block
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op
from databus.common.table_state import TableState


@dataclass(frozen=True, slots=True)
class RawWindows:
    """Frames back to back, in stream order, as they came: rows, schema changes, window ends.

    ``position`` is that of the last frame, or of a heartbeat if only the clock moved (then
    ``data`` is empty).  ``complete``: ``data`` ends with a window.  Windows that are larger than
    ``part_bytes`` come in parts, and only the last part is complete.  ``window_count`` is how
    many windows end in ``data``, and ``window_end`` where the last of them ends.
    """

    data: bytes
    position: Position
    complete: bool
    window_count: int = 0
    window_end: Position | None = None


class RawSink:
    """Combines blocks into whole windows.

    Invariants:
        I1. Every frame that was put comes out once, in order, except heartbeats.
        I2. The sink holds ``buffer_bytes`` and one block at most.

    Owner: the puller puts, one task takes; both on one event loop.
    """

    def __init__(self, buffer_bytes: int, part_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._part_bytes = part_bytes
        self._pieces: list[memoryview] = []
        self._piece_bytes = 0
        self._ready: deque[RawWindows] = deque()
        self._ready_bytes = 0
        self._room = asyncio.Event()
        self.arrived = asyncio.Event()

    @property
    def replays(self) -> bool:
        """Frames are stored as they come, so an incomplete window continues in the middle."""
        return False

    def report(self, states: Sequence[TableState]) -> None:
        """Nothing: the frames have the states."""

    def cut(self, frame_count: int) -> None:
        """Never called, because nothing is replayed."""
        raise AssertionError(f"a raw reader cannot discard frames (cut at {frame_count})")

    async def put(self, block: Block) -> None:
        """Take a block of frames."""
        while self._ready_bytes >= self._buffer_bytes:
            self._room.clear()
            await self._room.wait()
        self._split(block)

    def pop(self) -> RawWindows | None:
        """The next windows, or None."""
        if not self._ready:
            self.arrived.clear()
            return None
        part = self._ready.popleft()
        self._ready_bytes -= len(part.data)
        self._room.set()
        return part

    def _split(self, block: Block) -> None:
        heartbeats = list(block.all_of(Op.HEARTBEAT))
        start = 0
        for stop in [*heartbeats, block.count]:
            if stop > start:
                self._add(block, start, stop)
            if stop < block.count and not self._pieces:
                self._give(RawWindows(b"", block.position(stop), complete=True))
            start = stop + 1

    def _add(self, block: Block, start: int, stop: int) -> None:
        ends = [index for index in block.all_of(Op.END_OF_WINDOW) if start <= index < stop]
        after_end = ends[-1] + 1 if ends else start
        if ends:
            self._piece(block, start, after_end)
            self._flush(
                block.position(ends[-1]),
                complete=True,
                window_count=len(ends),
                window_end=block.position(ends[-1]),
            )
        if after_end < stop:
            self._piece(block, after_end, stop)
            if self._piece_bytes >= self._part_bytes:
                self._flush(block.position(stop - 1), complete=False)

    def _piece(self, block: Block, start: int, stop: int) -> None:
        end = block.offsets[stop] if stop < block.count else block.size_bytes
        piece = block.data[block.offsets[start] : end]
        self._pieces.append(piece)
        self._piece_bytes += len(piece)

    def _flush(
        self,
        position: Position,
        *,
        complete: bool,
        window_count: int = 0,
        window_end: Position | None = None,
    ) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._piece_bytes = 0
        self._give(RawWindows(data, position, complete, window_count, window_end))

    def _give(self, part: RawWindows) -> None:
        self._ready.append(part)
        self._ready_bytes += len(part.data)
        self.arrived.set()


async def read_raw(sink: RawSink, pulling: asyncio.Task[None]) -> AsyncIterator[RawWindows]:
    """What comes out of ``sink`` until ``pulling`` ends; its error is raised here.

    Everything that came before the error is handed out first.
    """
    while True:
        while part := sink.pop():
            yield part
        if pulling.done():
            pulling.result()
            return
        await wait_for_either(sink.arrived, pulling)


async def wait_for_either(
    event: asyncio.Event, task: asyncio.Task[None], timeout_s: float | None = None
) -> None:
    """Return when ``event`` is set, ``task`` is done, or the time is over."""
    if event.is_set() or task.done():
        return
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting, task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
