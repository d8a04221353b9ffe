"""The frames between the puller and the dispatcher, held until a checkpoint covers them."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from databus.client.application.frame_blocks import Block
from databus.common.frame.header_layout import END_OF_WINDOW, FIRST_CONTROL_OP
from databus.common.table_state import TableState


class ReplayBuffer:
    """Blocks in the order of arrival, with a cursor that can go back.

    Frames are counted from the first that ever arrived: ``first`` and ``end`` bound the held
    ones, ``cursor`` is the next one to dispatch.  Those before ``given`` are dispatched, or
    passed to a running callback; the puller may cut them meanwhile.

    Invariants:
        I1. first <= end, and all frames between are held; first <= cursor unless frames were
            cut away below it.
        I2. ``held_bytes`` exceeds ``budget_bytes`` by one block at most.
        I3. Dispatched frames are dropped, oldest block first, only when a checkpoint covers
            them or new frames need their room.

    Owner: the puller puts and cuts, the dispatcher does the rest; both on one event loop.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._blocks: deque[Block] = deque()
        self._at = 0
        self.cursor = 0
        self.given = 0
        self.first = 0
        self.end = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self.wake = asyncio.Event()
        """Set when ``here`` may return something that it did not return before."""
        self._room = asyncio.Event()
        self.reported: Sequence[TableState] | None = None
        """The last report of tables that are not followed; the dispatcher takes it."""
        self._replays = True
        self.is_cut = False
        """Frames that were dispatched come again: the dispatcher must roll back."""

    @property
    def replays(self) -> bool:
        """Whether a window is replayed from its start when another server takes over."""
        return self._replays

    def never_replay(self) -> None:
        """Continue incomplete windows in the middle instead."""
        self._replays = False

    def report(self, states: Sequence[TableState]) -> None:
        """A server has reported the tables that are not followed."""
        self.reported = states
        self.wake.set()

    async def put(self, block: Block) -> None:
        """Append a block, waiting until there is room."""
        while self.held_bytes >= self._budget_bytes and not self._drop_oldest():
            self._room.clear()
            await self._room.wait()
        self._blocks.append(block)
        self.end = block.first + block.count
        self.held_bytes += block.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.wake.set()

    def cut(self, frame_count: int) -> None:
        """Discard all frames from number ``frame_count`` on; they come again."""
        while self._blocks and self._blocks[-1].first >= frame_count:
            self._drop(self._blocks.pop())
        if self._blocks and self._blocks[-1].first + self._blocks[-1].count > frame_count:
            last = self._blocks.pop()
            self._drop(last)
            data = last.data[: last.offsets[frame_count - last.first]]
            head = Block(data, first=last.first, bootstrap=last.bootstrap)
            self._blocks.append(head)
            self.held_bytes += head.size_bytes
        self.end = frame_count
        self.is_cut = self.is_cut or self.given > frame_count
        self.first = min(self.first, frame_count)
        self._at = min(self._at, len(self._blocks))
        self._room.set()
        self.wake.set()

    def here(self) -> tuple[Block, int] | None:
        """The next frame to dispatch, as its block and index; None if it has not arrived."""
        while self._at < len(self._blocks):
            block = self._blocks[self._at]
            index = self.cursor - block.first
            if index < block.count:
                return block, index
            self._at += 1
            self._room.set()
        if not self.is_cut:
            self.wake.clear()
        return None

    def ahead(self) -> Iterator[tuple[Block, int]]:
        """The blocks with frames to dispatch, each with the index of the first such frame."""
        here = self.here()
        if here is not None:
            yield here
            for block in itertools.islice(self._blocks, self._at + 1, None):
                yield block, 0

    def waiting_rows(self) -> int:
        """How many rows have arrived that are not dispatched."""
        return sum([block.row_count(index) for block, index in self.ahead()])

    def lag(self) -> tuple[int, int | None]:
        """How many windows have arrived that are not dispatched, and the commit time of the first
        frame among them.  To be called from any thread."""
        window_count, oldest_us, is_open = 0, None, False
        for block in list(self._blocks):
            index = max(0, self.cursor - block.first)
            if index < block.count:
                ops = block.op_column[index:]
                window_count += int((ops == END_OF_WINDOW).sum())
                is_open = bool(ops[-1] < FIRST_CONTROL_OP)
                if oldest_us is None:
                    oldest_us = int(block.single_frame(index).commit_us)
        return window_count + is_open, oldest_us

    def give(self, count: int) -> None:
        """The next ``count`` frames are being dispatched, which ``advance`` will end."""
        self.given = max(self.given, self.cursor + count)

    def advance(self, count: int) -> None:
        """Move the cursor over ``count`` frames."""
        self.cursor += count
        self.given = max(self.given, self.cursor)

    def release(self, frame_count: int) -> None:
        """A checkpoint covers all frames before number ``frame_count``."""
        while self._blocks and self._blocks[0].first + self._blocks[0].count <= frame_count:
            if self._at == 0:
                break
            self._drop_oldest()
        self._room.set()

    def rewind(self, frame_count: int) -> bool:
        """Move the cursor back to frame ``frame_count``; False if that is no longer held."""
        if not self.first <= frame_count <= self.end:
            return False
        self.cursor = self.given = frame_count
        self._at = 0
        self.is_cut = False
        return True

    def clear(self) -> None:
        """Discard everything; the next frame has the number after the last."""
        self._blocks.clear()
        self.held_bytes = 0
        self._at = 0
        self.first = self.cursor = self.given = self.end = max(self.end, self.cursor)
        self.is_cut = False
        self._room.set()

    def _drop_oldest(self) -> bool:
        """Drop the oldest block if all of it was dispatched."""
        if self._at == 0 or not self._blocks:
            return False
        block = self._blocks.popleft()
        self._drop(block)
        self._at -= 1
        self.first = block.first + block.count
        return True

    def _drop(self, block: Block) -> None:
        self.held_bytes -= block.size_bytes
