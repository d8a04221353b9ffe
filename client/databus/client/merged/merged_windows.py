"""The windows of a merge, and their iterators: with an event loop and without one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Self

from databus.client.application.events import Event, Mode, Window
from databus.client.delivery.loop_thread import ClosingIterator, LoopThread, Wait
from databus.client.merged.stream_merger import StreamMerger, TakenWindow
from databus.common.checkpoint import MergedCheckpoint
from databus.common.table_state import TableState

Merging = Callable[[], AbstractAsyncContextManager[StreamMerger]]


class MergeWindow:
    """What both kinds of windows of a merge have."""

    __slots__ = ("_merger", "_taken")

    def __init__(self, merger: StreamMerger, taken: TakenWindow) -> None:
        self._merger = merger
        self._taken = taken

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self._taken.stream

    @property
    def database(self) -> str:
        """The database."""
        return self._taken.pulled.database

    @property
    def scn(self) -> int:
        """The commit's number on the clock of its database."""
        return self._taken.pulled.scn

    @property
    def merged_us(self) -> int:
        """The merged time, in microseconds since 1970: it never falls from window to window."""
        return self._taken.key.us

    @property
    def is_late(self) -> bool:
        """Whether its stream was left behind: the windows of others before it may have been
        committed after it."""
        return self._taken.is_late

    @property
    def mode(self) -> Mode:
        """online, or bootstrap while a snapshot of its stream is read."""
        return self._taken.pulled.mode

    @property
    def txid(self) -> str | None:
        """The source's transaction id, once the window's end has been received."""
        return self._taken.pulled.txid

    @property
    def window(self) -> Window:
        """The window that callbacks get: commit time, number of events and so on."""
        return self._taken.pulled.window

    @property
    def table_states(self) -> tuple[TableState, ...]:
        """Tables of the stream whose state has changed since its window before."""
        return self._taken.pulled.table_states

    @property
    def checkpoint(self) -> MergedCheckpoint | None:
        """The checkpoint of all streams behind this window; None until the window is whole."""
        return self._taken.checkpoint

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stream} scn={self.scn} merged_us={self.merged_us}>"


class MergedWindow(MergeWindow):
    """One window from ``MergedClient.windows()``.

    Iterate over it for its events, once, or take the list ``events``, before the next window.
    ``commit`` stores the checkpoint of all streams behind this window and all before it.
    """

    __slots__ = ("_retained", "_wait")

    def __init__(self, merger: StreamMerger, taken: TakenWindow, wait: Wait) -> None:
        super().__init__(merger, taken)
        self._wait = wait
        self._retained: list[Event] | None = None

    @property
    def events(self) -> list[Event]:
        """All events, in memory."""
        if self._retained is None:
            self._retained = self._wait(self._taken.pulled.aevents())
        return self._retained

    def __iter__(self) -> Iterator[Event]:
        if self._retained is not None:
            yield from self._retained
            return
        events = aiter(self._taken.pulled)
        while (run := self._wait(_some(events))) != []:
            yield from run

    def commit(self) -> None:
        """Store the checkpoint behind this window."""
        self._wait(self._merger.commit(self._taken))


async def _some(events: AsyncIterator[Event]) -> list[Event]:
    """The next events, a few at once: a call of the other thread costs more than an event."""
    found = []
    async for event in events:
        found.append(event)
        if len(found) == 64:
            break
    return found


class AsyncMergedWindow(MergeWindow):
    """One window from ``MergedClient.awindows()``: as ``MergedWindow``, by ``async for``."""

    __slots__ = ()

    async def aevents(self) -> list[Event]:
        """All events, in memory."""
        return await self._taken.pulled.aevents()

    def __aiter__(self) -> AsyncIterator[Event]:
        return aiter(self._taken.pulled)

    async def acommit(self) -> None:
        """Store the checkpoint behind this window."""
        await self._merger.commit(self._taken)


class AsyncMergedWindows(AsyncIterator[AsyncMergedWindow]):
    """The windows of a merge, by ``async for``.

    The iteration ends at ``stop``, or when no stream has brought a window for ``idle_s``.  Its end,
    ``aclose`` and the end of an ``async with`` block close the connections.

    Owner: one task.
    Raises: DatabusError if a stream cannot be continued.
    """

    def __init__(self, merging: Merging, idle_s: float | None) -> None:
        self._context = merging()
        self._idle_s = idle_s
        self._merger: StreamMerger | None = None
        self._is_closed = False

    async def __anext__(self) -> AsyncMergedWindow:
        if self._is_closed:
            raise StopAsyncIteration
        try:
            if self._merger is None:
                self._merger = await self._context.__aenter__()
            taken = await self._merger.next(self._idle_s)
        except BaseException:
            await self.aclose()
            raise
        if taken is None:
            await self.aclose()
            raise StopAsyncIteration
        return AsyncMergedWindow(self._merger, taken)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the iteration, also one that waits in another task."""
        merger, self._merger, self._is_closed = self._merger, None, True
        if merger is not None:
            merger.is_stopping = True
            await self._context.__aexit__(None, None, None)


class MergedWindows(ClosingIterator[MergedWindow]):
    """The windows of a merge, for code without an event loop; streams are read by a thread.

    The iteration ends as that of ``AsyncMergedWindows``.

    Owner: one thread.
    Raises: DatabusError if a stream cannot be continued.
    """

    def __init__(self, merging: Merging, idle_s: float | None) -> None:
        super().__init__(_windows(merging, idle_s))


def _windows(merging: Merging, idle_s: float | None) -> Generator[MergedWindow, None, None]:
    with LoopThread() as thread, thread.entered(merging()) as merger:
        while (taken := thread.wait(merger.next(idle_s))) is not None:
            yield MergedWindow(merger, taken, thread.wait)
