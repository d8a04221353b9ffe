"""One stream of a merge: its next window, and how far it has come without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from databus.client.client import DatabusClient
from databus.client.delivery.pulled_windows import AsyncPulledWindow, AsyncWindows
from databus.common.checkpoint import Checkpoint, Position
from databus.common.errors import DatabusError

_ASK_S = 0.5


class StreamCheckpoints:
    """The checkpoint of one stream, in memory: that of the merge is what is stored."""

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None

    def load(self) -> Checkpoint | None:
        """Where the stream begins."""
        return self.checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        """The stream has come so far."""
        self.checkpoint = checkpoint


class MergedStream:
    """Reads one window ahead.

    Invariants:
        I1. ``promised`` is about a time at which every window up to its position was taken.

    Owner: the task of the merge.
    """

    def __init__(
        self, name: str, client: DatabusClient, checkpoints: StreamCheckpoints, skew_us: int
    ) -> None:
        self.name = name
        self.client = client
        self._checkpoints = checkpoints
        self._skew_us = skew_us
        self._windows: AsyncWindows | None = None
        self._ready: AsyncPulledWindow | None = None
        self._fetching: asyncio.Task[AsyncPulledWindow] | None = None
        self._asking: asyncio.Task[tuple[Position, int] | None] | None = None
        self._answer: tuple[Position, int] | None = None
        self._asked_s = 0.0
        self.has_ended = False
        self.waiting_since_s: float | None = None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Where the stream resumes: behind the last window that was passed."""
        return self._checkpoints.checkpoint or self.client.origin

    @property
    def fetching(self) -> asyncio.Task[AsyncPulledWindow] | None:
        """The task that brings the next window."""
        return self._fetching

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Read from a checkpoint on."""
        self._checkpoints.checkpoint = checkpoint
        self._windows = self.client.awindows()
        self.fetch()

    def fetch(self) -> None:
        """Bring the next window."""
        assert self._windows is not None
        self._ready = self._windows.next_ready()
        if self._ready is None:
            self._fetching = asyncio.ensure_future(self._next(self._windows))

    async def _next(self, windows: AsyncWindows) -> AsyncPulledWindow:
        return await anext(windows)

    def take(self) -> AsyncPulledWindow | None:
        """The next window, once; None while there is none.

        Raises:
            DatabusError: the stream cannot be continued.
        """
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        fetching = self._fetching
        if fetching is None or not fetching.done():
            return None
        self._fetching = None
        try:
            return fetching.result()
        except StopAsyncIteration:
            self.has_ended = True  # ``stop``
            return None

    def promised(self) -> tuple[int, int]:
        """How far the stream has come while it has no window: a time and an scn."""
        position = self.client.status.position
        us = 0
        if self._answer is not None and position is not None and position >= self._answer[0]:
            us, self._answer = max(0, self._answer[1] - self._skew_us), None
        return us, position.scn if position is not None else 0

    def ask(self, on_answer: Callable[[], None]) -> None:
        """Ask the relay how far the database is resolved, at most twice a second."""
        if self._asking is not None and self._asking.done():
            asking, self._asking = self._asking, None
            if not asking.cancelled() and not isinstance(asking.exception(), DatabusError):
                self._answer = asking.result()
        now_s = time.monotonic()
        if self._asking is None and self._answer is None and now_s >= self._asked_s + _ASK_S:
            self._asked_s = now_s
            self._asking = asyncio.ensure_future(self.client.resolved())
            self._asking.add_done_callback(lambda _: on_answer())

    async def end(self) -> None:
        """Close the connections."""
        for task in (self._fetching, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()
        self._fetching = self._asking = self._answer = self._ready = None
        if self._windows is not None:
            await self._windows.aclose()
            self._windows = None
