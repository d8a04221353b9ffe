"""The iterator form of consumption: the application takes windows, and commits them when done.

With an event loop and without one: a window and an iterator each, so that a type checker finds a
call of the other kind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Self, TypeAlias

from databus.client.application.events import Event, Window
from databus.client.delivery.loop_thread import ClosingIterator, LoopThread, Wait
from databus.client.delivery.window_reader import NewWindow, ReadWindow, W, WindowReader
from databus.common.table_state import TableState

Reading: TypeAlias = AbstractAsyncContextManager[WindowReader[W]]


class PulledWindow(ReadWindow):
    """One window from ``windows()``.

    Iterate over it for its events, once: a window too large for the buffer is read from the
    network meanwhile.  ``events`` is the list of all of them, in memory, as often as you like.
    Taking the next window skips what is left of this one.

    ``commit`` stores the checkpoint after the window: the next start begins after it.  To commit a
    window commits all windows before it.  If ``stop`` comes before a window's end, the window has
    no more events and commits nothing: the next start begins before it.

    After the iteration has ended, a window's events in memory can still be read.  Reading further
    events, or a ``commit``, is an InternalError then.
    """

    __slots__ = ("_wait",)

    def __init__(
        self,
        wait: Wait,
        reader: WindowReader[PulledWindow],
        window: Window,
        table_states: tuple[TableState, ...],
    ) -> None:
        super().__init__(reader, window, table_states)
        self._wait = wait

    @property
    def events(self) -> list[Event]:
        """All events, in memory."""
        if self._retained is None:
            self._pass()
            self._retained = list(self._events())
        return self._retained

    def __iter__(self) -> Iterator[Event]:
        if self._retained is not None:
            return iter(self._retained)
        self._pass()
        return self._events()

    def commit(self) -> None:
        """Store the checkpoint after this window."""
        self._wait(self._reader.commit(self))

    def _events(self) -> Iterator[Event]:
        while (run := self._next_loaded()) is not None or (
            not self.is_whole and (run := self._wait(self._reader.run_of(self))) is not None
        ):
            yield from run


class AsyncPulledWindow(ReadWindow):
    """One window from ``awindows()``: as ``PulledWindow``, by ``async for`` and ``await``."""

    __slots__ = ()

    async def aevents(self) -> list[Event]:
        """All events, in memory; as often as you like."""
        if self._retained is None:
            self._pass()
            self._retained = [event async for event in self._events()]
        return self._retained

    def __aiter__(self) -> AsyncIterator[Event]:
        if self._retained is None:
            self._pass()
        return self._events()

    async def acommit(self) -> None:
        """Store the checkpoint after this window."""
        await self._reader.commit(self)

    async def _events(self) -> AsyncIterator[Event]:
        if self._retained is not None:
            for event in self._retained:
                yield event
            return
        while (run := self._next_loaded()) is not None or (
            run := await self._reader.run_of(self)
        ) is not None:
            for event in run:
                yield event


class Windows(ClosingIterator[PulledWindow]):
    """The windows of a client, for code without an event loop.

    Frames are pulled by a thread in the background.  The iteration ends at ``stop``, or when a
    relay has sent nothing for ``idle_s``.  Its end, ``close``, the end of a ``with`` block, and the
    loss of the last reference close the connections.

    Owner: one thread.
    Raises: DatabusError if the stream cannot be continued.
    """

    def __init__(
        self,
        reading: Callable[[NewWindow[PulledWindow]], Reading[PulledWindow]],
        idle_s: float | None,
    ) -> None:
        super().__init__(_windows(reading, idle_s))


def _windows(
    reading: Callable[[NewWindow[PulledWindow]], Reading[PulledWindow]], idle_s: float | None
) -> Generator[PulledWindow, None, None]:
    with (
        LoopThread() as thread,
        thread.entered(reading(partial(PulledWindow, thread.wait))) as reader,
    ):
        while batch := thread.wait(reader.batch(idle_s)):
            for window in batch:
                if reader.steering.has_request and not thread.wait(reader.is_undisturbed()):
                    break
                yield window


class AsyncWindows(AsyncIterator[AsyncPulledWindow]):
    """The windows of a client, by ``async for``.

    The iteration ends at ``stop``, or when a relay has sent nothing for ``idle_s``.  Its end,
    ``aclose``, the end of an ``async with`` block, the loss of the last reference, and the end of
    ``asyncio.run`` close the connections.

    Invariants:
        I1. One task holds the connections and closes them, so that a loop that was left by
            ``break`` or ``return`` ends in order.

    Owner: one event loop.
    Raises: DatabusError if the stream cannot be continued.
    """

    def __init__(
        self,
        reading: Reading[AsyncPulledWindow],
        idle_s: float | None,
    ) -> None:
        self._reading = reading
        self._idle_s = idle_s
        self._ready: deque[AsyncPulledWindow] = deque()
        self._closing = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self._reader: WindowReader[AsyncPulledWindow] | None = None

    async def __anext__(self) -> AsyncPulledWindow:
        try:
            reader = self._reader or await self._open()
            if self._ready and reader.steering.has_request and not await reader.is_undisturbed():
                self._ready.clear()
            if not self._ready:
                self._ready.extend(await reader.batch(self._idle_s))
        except BaseException:
            await self.aclose()
            raise
        if not self._ready:
            await self.aclose()
            raise StopAsyncIteration
        return self._ready.popleft()

    def next_ready(self) -> AsyncPulledWindow | None:
        """The next window if it has been loaded, together with the one before; else None."""
        is_disturbed = self._reader is None or self._reader.steering.has_request
        return self._ready.popleft() if self._ready and not is_disturbed else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        holding = self._holding
        if holding is not None and not holding.done():
            loop = holding.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._closing.set)

    async def aclose(self) -> None:
        """End the iteration; the connections are closed when this returns."""
        self._ready.clear()
        self._closing.set()
        if self._holding is not None:
            await asyncio.wait({self._holding})

    async def _open(self) -> WindowReader[AsyncPulledWindow]:
        if self._closing.is_set():
            raise StopAsyncIteration
        opened: asyncio.Future[WindowReader[AsyncPulledWindow]] = asyncio.Future()
        self._holding = asyncio.create_task(
            _hold(self._reading, opened, self._closing), name="databus-windows"
        )
        await asyncio.wait({opened})
        self._reader = opened.result()
        return self._reader


async def _hold(
    reading: Reading[AsyncPulledWindow],
    opened: asyncio.Future[WindowReader[AsyncPulledWindow]],
    closing: asyncio.Event,
) -> None:
    try:
        async with reading as reader:
            opened.set_result(reader)
            await closing.wait()
    except Exception as error:
        if opened.done():
            raise
        opened.set_exception(error)
    finally:
        opened.cancel()
