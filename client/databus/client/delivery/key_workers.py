"""Workers that call ``onDataEvent`` in parallel, each key always on the same one."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from databus.client.application.events import Event

Deliver = Callable[[Event], Any]
_Job = tuple[list[Event], "asyncio.Future[None]"]


class Stuck(Exception):
    """A callback on a thread has not returned within its budget; it cannot be interrupted."""


class Dropped(Exception):
    """Events were not delivered, because the queue is being abandoned."""


class KeyWorker(Protocol):
    """One worker: delivers lists of events one after another."""

    busy_since_s: float | None

    def submit(self, events: list[Event]) -> asyncio.Future[None]:
        """Deliver ``events`` after all that were submitted before."""

    def close(self) -> None:
        """End the worker, without waiting for a callback that hangs."""


class ThreadKeyWorker:
    """A worker thread for a plain callback.

    Owner: the event loop submits, the thread delivers.
    """

    def __init__(self, deliver: Deliver, abandoned: Callable[[], bool], name: str) -> None:
        self._deliver = deliver
        self._abandoned = abandoned
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.busy_since_s: float | None = None
        # A daemon, so that the process can end although a callback never returns.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, events: list[Event]) -> asyncio.Future[None]:
        """Deliver ``events`` after all that were submitted before."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._jobs.put((events, future))
        return future

    def close(self) -> None:
        """End the thread after its present job."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            events, future = job
            failure: BaseException | None = None
            try:
                for event in events:
                    if self._abandoned():
                        raise Dropped
                    self.busy_since_s = time.monotonic()
                    self._deliver(event)
            except BaseException as error:
                failure = error
            self.busy_since_s = None
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                self._loop.call_soon_threadsafe(_settle, future, failure)


class TaskKeyWorker:
    """A worker task for an ``async`` callback."""

    def __init__(
        self, deliver: Callable[[Event], Awaitable[None]], abandoned: Callable[[], bool], name: str
    ) -> None:
        self._deliver = deliver
        self._abandoned = abandoned
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self.busy_since_s: float | None = None
        self._task = asyncio.create_task(self._work(), name=name)

    def submit(self, events: list[Event]) -> asyncio.Future[None]:
        """Deliver ``events`` after all that were submitted before."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait((events, future))
        return future

    def close(self) -> None:
        """Cancel the task."""
        self._task.cancel()

    async def _work(self) -> None:
        while True:
            events, future = await self._jobs.get()
            failure: BaseException | None = None
            try:
                for event in events:
                    if self._abandoned():
                        raise Dropped
                    await self._deliver(event)
            except Exception as error:
                failure = error
            _settle(future, failure)


def _settle(future: asyncio.Future[None], failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(None)
    elif isinstance(failure, Dropped):
        future.cancel()
    elif isinstance(failure, StopIteration | asyncio.CancelledError):
        # A future refuses StopIteration, and awaiting it with CancelledError ends the awaiter.
        refusal = RuntimeError(f"the callback raised {failure!r}")
        refusal.__cause__ = failure
        future.set_exception(refusal)
    else:
        future.set_exception(failure)


class KeyWorkers:
    """All workers, and the events in flight on them.

    Invariants:
        I1. Events of one key are delivered in the order of submission, one at a time.
        I2. After ``drain`` nothing is in flight.

    Owner: one task.
    Raises: Stuck if a callback on a thread exceeds its budget without returning.
    """

    def __init__(
        self, key_workers: Sequence[KeyWorker], budget_s: float | None, wake: asyncio.Event
    ) -> None:
        self._key_workers = key_workers
        self._budget_s = budget_s
        self._wake = wake
        self._abandoned = False
        self.in_flight: dict[asyncio.Future[None], int] = {}
        self.in_flight_events = 0
        self.failure: BaseException | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the workers drop their queued events."""
        return self._abandoned

    def use(self, key_workers: Sequence[KeyWorker]) -> None:
        """Work with these workers."""
        self._key_workers = key_workers

    def submit(self, events: list[Event]) -> None:
        """Give each event to its key's worker."""
        key_workers = self._key_workers
        if len(key_workers) == 1:
            self._start(key_workers[0], events)
            return
        shares: list[list[Event]] = [[] for _ in key_workers]
        for event in events:
            shares[event.key_hash % len(key_workers)].append(event)
        for key_worker, share in zip(key_workers, shares, strict=True):
            if share:
                self._start(key_worker, share)

    def submit_in_order(self, events: list[Event]) -> None:
        """Give all events to one worker."""
        self._start(self._key_workers[0], events)

    async def wait_below(self, event_count: int) -> None:
        """Wait until fewer events are in flight, or one has failed."""
        while self.in_flight_events >= event_count and self.failure is None:
            await self._wait_some()

    async def drain(self) -> None:
        """Wait until nothing is in flight, or one has failed."""
        while self.in_flight and self.failure is None:
            await self._wait_some()

    async def abandon(self) -> BaseException | None:
        """Drop queued events, wait for running callbacks; returns the first failure.

        The futures of dropped events are cancelled.
        """
        self._abandoned = True
        while self.in_flight:
            await self._wait_some()
        self._abandoned = False
        failure, self.failure = self.failure, None
        return failure

    def check_budget(self) -> None:
        """Raise if a worker is stuck in a callback."""
        if self._budget_s is None:
            return
        now_s = time.monotonic()
        for key_worker in self._key_workers:
            since_s = key_worker.busy_since_s
            if since_s is not None and now_s - since_s > self._budget_s:
                raise Stuck(
                    f"onDataEvent has not returned for {now_s - since_s:.1f} s on a worker "
                    f"thread (callback_budget_s={self._budget_s:g}); it cannot be interrupted, "
                    "and a replay beside it would deliver its rows twice at once"
                )

    def close(self) -> None:
        """End the workers; queued events are dropped."""
        self._abandoned = True
        for key_worker in self._key_workers:
            key_worker.close()

    def _start(self, key_worker: KeyWorker, events: list[Event]) -> None:
        future = key_worker.submit(events)
        self.in_flight[future] = len(events)
        self.in_flight_events += len(events)
        future.add_done_callback(self._finished)

    def _finished(self, future: asyncio.Future[None]) -> None:
        self.in_flight_events -= self.in_flight.pop(future, 0)
        failure = None if future.cancelled() else future.exception()
        self.failure = self.failure or failure
        self._wake.set()

    async def _wait_some(self) -> None:
        await asyncio.wait(
            self.in_flight, timeout=self._budget_s, return_when=asyncio.FIRST_COMPLETED
        )
        # The callbacks of finished futures run in the loop's next iteration.
        await asyncio.sleep(0)
        self.check_budget()


def succeeded(future: asyncio.Future[None]) -> bool:
    """Whether all events of a future have been delivered."""
    return future.done() and not future.cancelled() and future.exception() is None
