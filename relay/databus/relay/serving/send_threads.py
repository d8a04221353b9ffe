"""Threads that write large parts of answers to sockets, so that several are sent at once.

A write of megabytes occupies a processor for as long as the copy takes, and the interpreter
releases its lock meanwhile: the event loop answers others, and each thread runs one copy at a
time.  The callers decide what is sent and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from databus.common.processes.completion import completed

MAX_THREADS = 4


class _Sending:
    """A transfer; ``step`` sends what there is room for and returns True at its end."""

    def __init__(self, fd: int, step: Callable[[], bool]) -> None:
        self.fd = fd
        self.step = step
        self.is_cancelled = False
        self.is_waiting = False
        self.is_finished = False
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()

    def finish(self, error: BaseException | None) -> None:
        """Notify the waiting task, from the thread."""
        self.is_finished = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            self._loop.call_soon_threadsafe(_settle, self.done, error)


class _SendThread:
    """One thread; transfers without room wait in its epoll, so that no reader delays another.

    Owner: ``SendThreads``; ``load`` is its count of this thread's transfers.
    """

    def __init__(self) -> None:
        self.load = 0
        self._inbox: deque[_Sending] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._wakeup, select.EPOLLIN)
        threading.Thread(target=self._run, name="databus-send", daemon=True).start()

    def put(self, sending: _Sending) -> None:
        """Start a transfer, or check it again."""
        self._inbox.append(sending)
        os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        waiting: dict[int, _Sending] = {}
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wakeup:
                    os.eventfd_read(fd)
                    while self._inbox:
                        self._advance(self._inbox.popleft(), waiting)
                elif fd in waiting:
                    self._advance(waiting[fd], waiting)

    def _advance(self, sending: _Sending, waiting: dict[int, _Sending]) -> None:
        if sending.is_finished:
            return
        error: BaseException | None = None
        try:
            is_done = sending.is_cancelled or sending.step()
            if not is_done and not sending.is_waiting:
                self._poll.register(sending.fd, select.EPOLLOUT)
                sending.is_waiting = True
                waiting[sending.fd] = sending
        except Exception as raised:
            is_done, error = True, raised
        if is_done and sending.is_waiting:
            sending.is_waiting = False
            del waiting[sending.fd]
            self._poll.unregister(sending.fd)
        if is_done:
            sending.finish(error)


class SendThreads:
    """As many threads as the process has processors, at most ``MAX_THREADS``, made when needed.

    Invariants:
        I1. When ``run`` returns or raises, no thread uses its descriptor or calls its ``step``.

    Owner: one worker's event loop.
    """

    def __init__(self) -> None:
        self._most = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads: list[_SendThread] = []

    async def run(self, fd: int, step: Callable[[], bool]) -> None:
        """Call ``step`` in a thread, whenever ``fd`` has room, until it returns True.

        Raises:
            Exception: what ``step`` raised.
        """
        sending, thread = _Sending(fd, step), self._least_busy()
        thread.load += 1
        try:
            thread.put(sending)
            await asyncio.shield(sending.done)
        except asyncio.CancelledError:
            sending.is_cancelled = True
            thread.put(sending)
            with contextlib.suppress(Exception):
                await completed(sending.done)
            raise
        finally:
            thread.load -= 1

    def _least_busy(self) -> _SendThread:
        idle = min(self._threads, key=lambda thread: thread.load, default=None)
        if idle is not None and (not idle.load or len(self._threads) == self._most):
            return idle
        thread = _SendThread()
        self._threads.append(thread)
        return thread


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
