"""The threads that read the store for clients, and how many clients they read for at once.

What is here does not read: ``answer_sender`` submits one step after the other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from databus.common.errors import TooManyRequests
from databus.common.http.http_connections import SPARE_DESCRIPTORS
from databus.common.processes.completion import completed

RETRY_S = 1.0
"""When a reader may try again: the end of another one cannot be foreseen."""

READER_DESCRIPTORS = 5
"""Of one reader: its connection and a duplicate of it, one file of the store, a copy of the hot
log, and the keys of its range."""

_T = TypeVar("_T")


class ReadPool:
    """Bounds what readers use of the process.

    Invariants:
        I1. There are at most ``most`` readers, and fewer where the descriptors are not enough.
        I2. At most ``threads`` steps run at once, and none in a thread that others of the process
            use, as the log writer does.
        I3. A step whose reader has gone does not begin.  One that runs reads one row group at most,
            or a slot's ``check`` ends it.

    Owner: one event loop.
    Raises: TooManyRequests, with the seconds after which it may be tried again.
    """

    def __init__(self, most: int, threads: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = max(1, min(most, (limit - SPARE_DESCRIPTORS) // READER_DESCRIPTORS))
        self.readers = 0
        self.refused = 0
        self._steps = ThreadPoolExecutor(threads, "databus-read")
        # Closing files and notes is short, and must not wait for a step of another reader.
        self._ends = ThreadPoolExecutor(1, "databus-read-end")

    @contextlib.contextmanager
    def reader(self) -> Iterator[None]:
        """Around everything that is done for one reader."""
        if self.readers >= self.most:
            self.refused += 1
            raise TooManyRequests(
                f"{self.readers} readers are served, the most that max_readers and the limit of "
                "open files allow",
                retry_after_s=RETRY_S,
            )
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1

    def submit(self, step: Callable[..., _T], *arguments: Any) -> concurrent.futures.Future[_T]:
        """Do a step as soon as a thread is free."""
        return self._steps.submit(step, *arguments)

    async def until_gone(
        self, gone: asyncio.Future[None], step: Callable[..., _T], *arguments: Any
    ) -> _T:
        """The result of a step.

        Raises:
            ConnectionError: the reader has gone; the step does not run any more.
        """
        submitted = self.submit(step, *arguments)
        running = asyncio.wrap_future(submitted)
        either: set[asyncio.Future[Any]] = {running, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            submitted.cancel()
            await completed(asyncio.wait({running}))
        if gone.done():
            if not running.cancelled():
                running.exception()  # of no more use
            raise ConnectionResetError("the reader has gone")
        return running.result()

    async def aside(self, work: Callable[[], None]) -> None:
        """Do something short, whatever the steps do; it is done when this returns or raises."""
        try:
            doing = self._ends.submit(work)
        except RuntimeError:
            # The server stops, and this reader, which took nothing more, is the last to end.
            work()
        else:
            await completed(asyncio.wrap_future(doing))

    def close(self) -> None:
        """End the threads; there is no reader any more."""
        self._steps.shutdown()
        self._ends.shutdown()
