"""Windows out of a buffer, for the two iterators of ``pulled_windows``."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from databus.client.application.consumer import Result
from databus.client.application.events import Event, Mode, Window
from databus.client.checkpoints.checkpoint_stores import CheckpointStore
from databus.client.delivery.dispatcher import Call, Due
from databus.client.delivery.steering import Stream, store_anywhere
from databus.client.pulling.raw_windows import wait_for_either
from databus.common.checkpoint import Checkpoint
from databus.common.errors import InternalError, UsageError
from databus.common.table_state import TableState

_BATCH_EVENTS = 64  # More at once live long enough that Python's garbage collector costs twice.
_LOOK_AGAIN_S = 0.05
ENDED = (
    "the iteration has ended: the events of its last window that were not in memory cannot be "
    "read, and no window can be committed; commit a window within the loop"
)


class ReadWindow:
    """One window out of a reader; the two iterators give a subclass each.

    Invariants:
        I1. Its events can be iterated over once, and are then forgotten, however many they are.
            A list of them that was read is retained with the window.
    """

    __slots__ = ("_is_passed", "_loaded", "_reader", "_retained", "_window", "checkpoint",
                 "is_whole", "seek_count", "table_states")  # fmt: skip

    def __init__(
        self,
        reader: WindowReader[Any],
        window: Window,
        table_states: tuple[TableState, ...] = (),
    ) -> None:
        self._reader = reader
        self._window = window
        self.table_states = table_states
        """Tables whose state has changed since the window before."""
        self._loaded: list[Event] = []
        self._retained: list[Event] | None = None
        self._is_passed = False
        self.is_whole = False
        self.seek_count = 0
        self.checkpoint: Checkpoint | None = None

    @property
    def database(self) -> str:
        """The database."""
        return self._window.database

    @property
    def scn(self) -> int:
        """The commit's number on the source's clock."""
        return self._window.scn

    @property
    def mode(self) -> Mode:
        """online, or bootstrap while a snapshot is being read."""
        return self._window.mode

    @property
    def txid(self) -> str | None:
        """The source's transaction id, once the window's end has been received."""
        return self._window.txid

    @property
    def window(self) -> Window:
        """The window that callbacks get: commit time, number of events and so on."""
        return self._window

    def add(self, run: list[Event]) -> None:
        """The reader has loaded some events."""
        if self._loaded:
            self._loaded += run
        else:
            self._loaded = run

    def _pass(self) -> None:
        """The events are iterated over now.

        Raises:
            UsageError: they have been before.
        """
        if self._is_passed:
            raise UsageError(
                f"the events of window {self.scn} have been iterated over, and are not retained: "
                "a window may be larger than the memory. Take its list of events first, to read "
                "them more than once"
            )
        self._is_passed = True

    def _next_loaded(self) -> list[Event] | None:
        loaded, self._loaded = self._loaded, []
        return loaded or None


W = TypeVar("W", bound=ReadWindow)
NewWindow = Callable[["WindowReader[W]", Window, tuple[TableState, ...]], W]


@dataclass(kw_only=True, eq=False)
class WindowReader(Generic[W]):
    """Gives windows out of a buffer, many small ones at once.

    Invariants:
        I1. Windows come in order, and are loaded whole if the buffer has all of them.
        I2. A checkpoint is stored only by ``commit``, or for progress without events while no
            window is uncommitted, or for a seek.
        I3. After a seek no window from before it is returned, and its ``commit`` does nothing.

    Owner: one event loop.
    Raises: from ``batch`` and ``run_of``: the error with which pulling ended, after everything
        before it was returned.
    """

    stream: Stream
    store: CheckpointStore
    new_window: NewWindow[W]

    def __post_init__(self) -> None:
        self.dispatcher = self.stream.dispatcher
        self.buffer = self.stream.buffer
        self.steering = self.stream.steering
        self.buffer.never_replay()
        self._open: W | None = None
        self._last: W | None = None
        self._is_committed = True
        self._table_states: list[TableState] = []
        self._is_ended = False
        self._seek_count = 0

    @property
    def is_flowing(self) -> bool:
        """Whether an answer of a relay is open."""
        return self.stream.pull.stats.is_flowing

    def close(self) -> None:
        """The iteration has ended."""
        self._is_ended = True

    async def batch(self, idle_s: float | None = None) -> list[W]:
        """The next windows; empty after ``stop``, or if none came for ``idle_s`` while a relay's
        answer was open.

        All are whole, except perhaps the last.
        """
        steering = self.steering
        while not steering.is_stopping:
            while self._open is not None and not steering.is_stopping:
                await self._step(None)
            if not await self.is_undisturbed():
                await self._seek()
                continue
            found, is_idle = await self._collect(idle_s)
            if found or is_idle:
                return found
        return []

    async def is_undisturbed(self) -> bool:
        """Wait while there is a pause; then whether neither ``stop`` nor a seek was asked for."""
        await self.steering.unpaused(self.buffer.wake)
        return not self.steering.has_request

    async def _seek(self) -> None:
        """Continue at the target of ``seek``, if there is one; no window is open."""
        steering, count = self.steering, self.steering.seek_count
        if steering.target is None or steering.is_stopping:
            return
        checkpoint = await self.stream.seek()
        if checkpoint is None:
            return
        await store_anywhere(self.store, checkpoint)
        self._seek_count += 1
        self._last, self._is_committed = None, True
        steering.sought(count)

    async def _collect(self, idle_s: float | None) -> tuple[list[W], bool]:
        """Some windows; with none, whether none came for ``idle_s``."""
        found: list[W] = []
        idle_since_s = time.monotonic()
        loaded = 0
        while loaded < _BATCH_EVENTS and not self.steering.has_request:
            whole = self.dispatcher.open_whole(time.monotonic())
            if whole is not None:
                found.append(self._take_whole(whole))
                loaded += len(whole)
                continue
            before = self._opened()
            moved, events = await self._try_step()
            opened = self._opened()
            if opened is not None and opened is not before:
                found.append(opened)
                self._last, self._is_committed = opened, False
            if events is not None and found:
                found[-1].add(events)
                loaded += len(events)
            if moved:
                continue
            if not self.is_flowing:
                # Connecting, or in a bootstrap: that does not count as idle.
                idle_since_s = time.monotonic()
            if found:
                break
            if not await self._more(None if idle_s is None else idle_since_s + idle_s):
                return found, not self.steering.has_request
        return found, False

    async def run_of(self, window: W) -> list[Event] | None:
        """The next events of a window that is not whole yet; None at its end."""
        while self._open is window and not self.steering.is_stopping:
            events = await self._step(None)
            if events:
                return events
        return None

    async def commit(self, window: W) -> None:
        """Store the checkpoint after ``window``, skipping its remaining events."""
        if self._is_ended:
            raise InternalError(ENDED)
        if window.seek_count != self._seek_count:
            return  # the checkpoint is now that of a seek
        while self._open is window:
            if self.steering.is_stopping:
                return  # the application has not read all of it
            await self._step(None)
        if window.checkpoint is not None:
            await self._save(window.checkpoint)
        self._is_committed = self._is_committed or window is self._last

    def _opened(self) -> W | None:
        return self._open

    async def _step(self, deadline_s: float | None) -> list[Event] | None:
        while True:
            moved, events = await self._try_step()
            if moved:
                return events
            if not await self._more(deadline_s):
                return None

    async def _try_step(self) -> tuple[bool, list[Event] | None]:
        """One step if one is due: whether one was, and the events that it returned."""
        now_s = time.monotonic()
        dispatcher = self.dispatcher
        due = dispatcher.next(now_s)
        if due is None:
            return False, None
        # Whatever the cadence: the commit of a window needs its checkpoint.
        is_end = due.call is Call.END_SEQUENCE
        dispatcher.done(due, now_s, Result.CHECKPOINT if is_end else Result.SUCCESS)
        if due.call is Call.START_SEQUENCE:
            assert due.window is not None
            self._open = self._pulled(due.window)
        elif due.call is Call.TABLE_STATE:
            assert due.table_state is not None
            self._table_states.append(due.table_state)
        elif due.call is Call.EVENTS:
            return True, due.events()
        elif is_end:
            self._ended()
        elif due.call is Call.CHECKPOINT:
            assert due.mark is not None
            if self._is_committed and due.mark.checkpoint is not None:
                await self._save(due.mark.checkpoint)
        return True, None

    def _pulled(self, window: Window) -> W:
        states = tuple(self._table_states)
        self._table_states.clear()
        pulled = self.new_window(self, window, states)
        pulled.seek_count = self._seek_count
        return pulled

    def _take_whole(self, events: list[Event]) -> W:
        window = self._pulled(events[0].window)
        window.add(events)
        now_s = time.monotonic()
        due = self.dispatcher.close_whole(len(events), now_s, Result.CHECKPOINT)
        self._end(window, due, now_s)
        self._last, self._is_committed = window, False
        return window

    def _ended(self) -> None:
        window, self._open = self._open, None
        assert window is not None
        now_s = time.monotonic()
        self._end(window, self.dispatcher.next(now_s), now_s)

    def _end(self, window: W, due: Due | None, now_s: float) -> None:
        """All of the window was read; its checkpoint is due right after it."""
        window.is_whole = True
        if due is not None and due.call is Call.CHECKPOINT:
            assert due.mark is not None
            window.checkpoint = due.mark.checkpoint
            self.dispatcher.done(due, now_s)

    async def _more(self, deadline_s: float | None) -> bool:
        """Wait for frames; False when the time is over or after ``stop``."""
        if self.steering.is_stopping:
            return False
        pulling = self.stream.pull.pulling
        if self._is_ended or pulling.cancelled():
            raise InternalError(ENDED)
        self.stream.require_pulling()
        now_s = time.monotonic()
        if deadline_s is not None and now_s >= deadline_s:
            return False
        if deadline_s is not None and not self.is_flowing:
            deadline_s = now_s + _LOOK_AGAIN_S
        times = [deadline_s, self.dispatcher.checkpoint_due_s()]
        bounds = [at_s - now_s for at_s in times if at_s is not None]
        timeout_s = max(0.0, min(bounds)) if bounds else None
        await wait_for_either(self.buffer.wake, pulling, timeout_s)
        return not self.steering.is_stopping

    async def _save(self, checkpoint: Checkpoint) -> None:
        saving = self.store.save(checkpoint)
        if inspect.isawaitable(saving):
            await saving
