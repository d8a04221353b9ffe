"""Takes windows out of all streams, in the order of the merge."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from databus.client.checkpoints.checkpoint_stores import CheckpointStore
from databus.client.delivery.pulled_windows import AsyncPulledWindow
from databus.client.merged.merge_order import MergeKey, MergeOrder
from databus.client.merged.merged_stream import MergedStream
from databus.common.checkpoint import (
    MERGED_CLOCK,
    Checkpoint,
    MergedCheckpoint,
    Position,
    StreamMark,
)
from databus.common.errors import BadCheckpoint

log = logging.getLogger("databus.client")

OnStall = Literal["wait", "leave"]
_LOOK_S = 0.05


@dataclass(eq=False)
class TakenWindow:
    """A window in its place; ``checkpoint`` is that of the merge after it, once it is whole."""

    stream: str
    key: MergeKey
    pulled: AsyncPulledWindow
    is_late: bool
    checkpoint: MergedCheckpoint | None = None


class StreamMerger:
    """One run over the streams, from a checkpoint to ``stop``.

    Invariants:
        I1. A stream is read one window ahead, and no further than its client's buffer.
        I2. The checkpoint of a window covers all windows before it and none after it.
        I3. A checkpoint is stored only by ``commit``, or for progress without windows while no
            window is uncommitted.

    Owner: one event loop; ``is_paused`` and ``is_stopping`` may be set from anywhere.
    Raises: the error of a stream that cannot be continued; BadCheckpoint.
    """

    def __init__(
        self,
        streams: Sequence[MergedStream],
        store: CheckpointStore,
        *,
        stall_s: float,
        on_stall: OnStall,
        idle_checkpoint_s: float,
    ) -> None:
        self.streams = {one.name: one for one in streams}
        self.store = store
        self.order = MergeOrder({one.name: one.client.database for one in streams})
        self.window_count = 0
        self.stored: MergedCheckpoint | None = None
        self.is_paused = self.is_stopping = False
        self._database = "+".join(sorted({one.client.database for one in streams}))
        self._stall_s, self._on_stall = stall_s, on_stall
        self._idle_checkpoint_s = idle_checkpoint_s
        self._taken: dict[str, AsyncPulledWindow] = {}
        self._current: TakenWindow | None = None
        self._last: TakenWindow | None = None
        self._is_committed = True
        self._stored_s, self._stored_count = time.monotonic(), 0
        self._changed = asyncio.Event()
        self._named: set[str] = set()

    async def begin(self, resume: MergedCheckpoint | None = None) -> None:
        """Begin all streams at a checkpoint, without one at the stored one."""
        found: Checkpoint | None = resume
        if found is None:
            loading = self.store.load()
            found = await loading if inspect.isawaitable(loading) else loading
        if found is not None and not isinstance(found, MergedCheckpoint):
            raise BadCheckpoint(
                f"the stored checkpoint is of database {found.database}, not of a merge: use one "
                "store for each client"
            )
        marks = {one.name: one for one in found.streams} if found is not None else {}
        if unknown := sorted(marks.keys() - self.streams.keys()):
            raise BadCheckpoint(
                f"the stored checkpoint has the streams {', '.join(unknown)}, which this merge has "
                "not: name the streams as before, or begin with an empty store"
            )
        if found is not None:
            self.stored = found
            self.order.last = MergeKey(found.position.scn, "", 0, "")
        for name, stream in self.streams.items():
            mark = marks.get(name)
            checkpoint = mark.checkpoint if mark is not None else None
            if mark is not None:
                scn = checkpoint.position.scn if checkpoint is not None else 0
                self.order.begin(name, mark.us, scn)
            stream.begin(checkpoint)

    async def end(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(stream.end() for stream in self.streams.values()))

    @property
    def stalled(self) -> list[str]:
        """The streams that have held back the others for ``stall_s``."""
        return sorted(name for name in self.streams if self._is_stalled(name))

    def _is_stalled(self, name: str) -> bool:
        since_s = self.streams[name].waiting_since_s
        is_slow = since_s is not None and time.monotonic() - since_s >= self._stall_s
        return is_slow or self.order.is_left(name)

    async def next(self, idle_s: float | None = None) -> TakenWindow | None:
        """The next window; None after ``stop``, or if none came for ``idle_s``."""
        await self.passed()
        idle_since_s = time.monotonic()
        while not self.is_stopping:
            self._take_heads()
            found = None
            if not self.is_paused and (found := self.order.pop()) is None:
                self._take_promises()
                found = self.order.pop()
            if found is not None:
                return self._given(*found)
            self._look_at_stalls()
            await self._save_progress()
            flows = all(one.client.status.is_flowing for one in self.streams.values())
            if not flows or self.is_paused:
                idle_since_s = time.monotonic()
            elif idle_s is not None and time.monotonic() - idle_since_s >= idle_s:
                return None
            if any(one.has_ended for one in self.streams.values()):
                return None
            await self._wait()
        return None

    async def passed(self) -> None:
        """Finish the window that was given last: what was not read of it is skipped."""
        current, self._current = self._current, None
        if current is None:
            return
        await current.pulled.acommit()
        if not current.pulled.is_whole:
            return  # ``stop`` came before its end
        current.checkpoint = self.checkpoint()
        self.streams[current.stream].fetch()

    async def commit(self, window: TakenWindow) -> None:
        """Store the checkpoint behind a window."""
        if window is self._current:
            await self.passed()
        if window.checkpoint is not None:
            await self.save(window.checkpoint)
            self._is_committed = self._is_committed or window is self._last

    def is_due(self, windows: int, seconds: float) -> bool:
        """Whether so many windows and so much time have passed since the last checkpoint."""
        count = self.window_count - self._stored_count
        return count >= windows and time.monotonic() - self._stored_s >= seconds

    async def save(self, checkpoint: MergedCheckpoint) -> None:
        """Store a checkpoint."""
        saving = self.store.save(checkpoint)
        if inspect.isawaitable(saving):
            await saving
        self.stored, self._stored_s = checkpoint, time.monotonic()
        self._stored_count = self.window_count

    def checkpoint(self) -> MergedCheckpoint:
        """The place behind the last window that was passed."""
        marks = tuple(
            StreamMark(name, self.order.us(name), stream.checkpoint)
            for name, stream in self.streams.items()
        )
        return MergedCheckpoint(self._database, MERGED_CLOCK, Position(self.order.last.us), marks)

    def _given(self, name: str, key: MergeKey, is_late: bool) -> TakenWindow:
        window = TakenWindow(name, key, self._taken.pop(name), is_late)
        self._current = self._last = window
        self._is_committed = False
        self.window_count += 1
        for stream in self.streams.values():
            stream.waiting_since_s = None
        return window

    def _take_heads(self) -> None:
        for name, stream in self.streams.items():
            window = stream.take()
            if window is not None:
                is_online = window.mode == "online"
                self.order.offer(name, window.window.commit_us if is_online else 0, window.scn)
                self._taken[name] = window

    def _take_promises(self) -> None:
        for name, stream in self.streams.items():
            if name not in self._taken and stream.fetching is not None:
                self.order.promise(name, *stream.promised())

    def _look_at_stalls(self) -> None:
        held_by = self.order.held_by()
        now_s = time.monotonic()
        for name, stream in self.streams.items():
            if name not in self._taken:
                stream.ask(self._changed.set)
            if name not in held_by or not self._taken:
                stream.waiting_since_s = None
            elif stream.waiting_since_s is None:
                stream.waiting_since_s = now_s
            if not self._is_stalled(name):
                self._named.discard(name)
                continue
            if name in self._named:
                continue
            self._named.add(name)
            leaves = self._on_stall == "leave"
            log.warning(
                "merge of %s: stream %s has held back the others for %.0f s (%s); %s",
                self._database, name, self._stall_s,
                stream.client.status.last_error or "it is not resolved",
                "it is left behind" if leaves else "they wait",
            )  # fmt: skip
            if leaves:
                self.order.leave(name)
                self._changed.set()

    async def _save_progress(self) -> None:
        if not self._is_committed or self._taken or self._last is None:
            return
        if time.monotonic() - self._stored_s >= self._idle_checkpoint_s:
            await self.save(self.checkpoint())

    async def _wait(self) -> None:
        tasks = [s.fetching for s in self.streams.values() if s.fetching is not None]
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait(
                {*tasks, changed}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()
        self._changed.clear()
