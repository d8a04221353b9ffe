"""A commit wakes waiting tasks across processes, without a timer.

There is one eventfd for each pair of an HTTP worker and a database.  The supervisor makes
them and gives each to both sides, so that it outlives a restart of either.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable


def make_wakeup() -> int:
    """A new eventfd, non-blocking, not inherited unless it is passed on."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class WakeupSender:
    """The fetcher's side: wakes every worker of one database.

    Owner: the fetcher's task, which closes the descriptors.
    """

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds = tuple(fds)

    def wake(self) -> None:
        """Something new is in the ring; it has been published before this call."""
        for fd in self._fds:
            # A full counter belongs to a worker that is being restarted: it needs no more wake-ups.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(fd, 1)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


class WakeupReceiver:
    """The worker's side: wakes every task that waits for one database.

    Invariants:
        I1. A wake-up that comes after ``wait`` was called ends that wait.  So a task that looks
            into the ring and then waits, with no ``await`` in between, misses nothing.
        I2. Any number of wake-ups before a task runs again count as one.

    Owner: one event loop, in which it was made; it closes the descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[bool], None] = {}
        self._loop.add_reader(fd, self._on_readable)

    def fileno(self) -> int:
        """The descriptor that it listens to; -1 when it is closed."""
        return self._fd

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._wake_all()

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for woken in waiting:
            _settle(woken, True)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next wake-up; False when ``timeout_s`` has passed without one.

        Thousands of tasks wait at once, some of them thousands of times a second: ``asyncio.wait``
        would make a future and a timer for each, at several times the cost.
        """
        woken: asyncio.Future[bool] = self._loop.create_future()
        self._waiting[woken] = None
        timer = None
        if timeout_s is not None:
            timer = self._loop.call_later(timeout_s, _settle, woken, False)
        try:
            return await woken
        finally:
            self._waiting.pop(woken, None)
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Stop listening and wake all waiting tasks."""
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._wake_all()


def _settle(woken: asyncio.Future[bool], is_woken: bool) -> None:
    if not woken.done():
        woken.set_result(is_woken)
