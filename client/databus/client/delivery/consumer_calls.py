"""Calls the consumer: makes the calls that the dispatcher finds due, and reports their results."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from databus.client.application.consumer import Consumer, Result
from databus.client.application.events import Event
from databus.client.application.options import Options
from databus.client.checkpoints.checkpoint_stores import CheckpointStore
from databus.client.delivery.dispatcher import Call, Dispatcher, Due
from databus.client.delivery.key_workers import (
    KeyWorker,
    KeyWorkers,
    Stuck,
    TaskKeyWorker,
    ThreadKeyWorker,
)
from databus.client.pulling.pull_machine import Backoff
from databus.client.pulling.raw_windows import wait_for_either
from databus.client.pulling.replay_buffer import ReplayBuffer
from databus.client.tables.data_batch import BatchDecoding, DataBatch, RowsOfBlock
from databus.common.checkpoint import Checkpoint
from databus.common.errors import (
    CheckpointMoved,
    ConfigError,
    ConsumerFailed,
    DatabusError,
    InternalError,
    StoreError,
    UsageError,
)

log = logging.getLogger("databus.client")

_OF_WINDOWS = frozenset(
    (Call.START_SEQUENCE, Call.START_SOURCE, Call.END_SOURCE, Call.END_SEQUENCE)
)
_YIELD_S = 0.02
_MOST_IN_FLIGHT = 10_000
Pulling = asyncio.Task[None]


class CallbackFailed(Exception):
    """A callback returned ERROR or no result, or exceeded its budget."""

    def __init__(self, message: str, *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class _Stopped(Exception):
    """``stop`` was called while events were being delivered."""


class _NotStored(Exception):
    """The store refused a checkpoint."""

    def __init__(self, error: DatabusError) -> None:
        super().__init__(str(error))
        self.error = error


_HALTING = (_Stopped, _NotStored, Stuck)
"""Exceptions that end the delivery at once; every other one is a callback's and is retried."""


@dataclass(kw_only=True, eq=False)
class Delivery:
    """One consumer being served from one buffer.

    Invariants:
        I1. A checkpoint is stored only after ``onCheckpoint`` accepted it, and with parallel
            dispatch only after every event before it has been delivered.
        I2. After a failure ``onRollback`` is the next call.  With parallel dispatch
            ``onCheckpoint`` may come before it, for windows that were delivered whole.

    Owner: one task, that runs ``run``.
    Raises: from ``run``: the error that ``onError`` received.
    """

    consumer: Consumer
    store: CheckpointStore
    dispatcher: Dispatcher
    buffer: ReplayBuffer
    options: Options
    restream: Callable[[Checkpoint | None], Awaitable[Pulling]]
    rng: random.Random

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.options.retry_s, self.options.retry_most_s)
        self._budget_s = self.options.callback_budget_s
        self._key_workers = KeyWorkers((), self._budget_s, self.buffer.wake)
        self._deferred: deque[tuple[Due, set[asyncio.Future[None]]]] = deque()
        self._is_stopping = False
        self._yielded_s = 0.0
        self._left_out = frozenset(
            call
            for call in (*_OF_WINDOWS, Call.TABLE_STATE, Call.CHECKPOINT)
            if _is_left_out(self.consumer, call.value)
        )
        self._takes_whole = self.options.dispatch == "serial" and self._left_out >= _OF_WINDOWS
        self._batching: BatchDecoding | None = None
        if not _is_left_out(self.consumer, "onDataBatch"):
            if self.options.dispatch != "serial":
                raise ConfigError(
                    f"dispatch={self.options.dispatch!r} delivers single events to workers, and "
                    "this consumer has onDataBatch: use dispatch='serial'"
                )
            self._batching = BatchDecoding(self.dispatcher.decoding)
        self.rollback_count = 0
        self.checkpoint: Checkpoint | None = self.dispatcher.mark.checkpoint

    def stop(self) -> None:
        """Stop after the callback that is running; to be called on the loop."""
        self._is_stopping = True
        self.buffer.wake.set()

    async def run(self, pulling: Pulling) -> None:
        """Deliver until ``stop`` or until delivery cannot continue."""
        try:
            try:
                await self._begin()
                await self._deliver(pulling)
            except _Stopped:
                pass
            await self._end_in_order()
        except _NotStored as refusal:
            await self._report(refusal.error)
            raise refusal.error from refusal.error.__cause__
        except Stuck as stuck:
            error = ConsumerFailed(str(stuck))
            await self._report(error)
            raise error from None
        except DatabusError as error:
            await self._report(error)
            raise
        finally:
            self._key_workers.close()
            await self._quietly(self.consumer.onStopConsumption)

    async def _begin(self) -> None:
        try:
            await self._call(self.consumer.onStartConsumption)
        except Exception as error:
            raise ConsumerFailed(f"onStartConsumption failed: {error!r}") from error
        if self.options.dispatch != "serial":
            self._key_workers.use(
                [self._key_worker(number) for number in range(self.options.workers)]
            )

    def _key_worker(self, number: int) -> KeyWorker:
        def abandoned() -> bool:
            return self._key_workers.is_abandoned

        name = f"databus-{number}"
        function = self.consumer.onDataEvent
        if inspect.iscoroutinefunction(function):

            async def deliver_async(event: Event) -> None:
                await self._call(function, event)

            return TaskKeyWorker(deliver_async, abandoned, name)

        def deliver(event: Event) -> None:
            began_s = time.monotonic()
            answer = function(event)
            if answer is not None:
                _checked_result("onDataEvent", answer)
            self._check_budget("onDataEvent", began_s)

        return ThreadKeyWorker(deliver, abandoned, name)

    async def _deliver(self, pulling: Pulling) -> None:
        dispatcher = self.dispatcher
        while not self._is_stopping:
            if time.monotonic() - self._yielded_s > _YIELD_S:
                await self._yield()
                continue  # A stop that was requested has been noted meanwhile.
            if (
                self._deferred or self._key_workers.failure is not None
            ) and await self._settle_deferred():
                continue
            # No await from here to the call: otherwise an event could fail before a checkpoint.
            now_s = time.monotonic()
            if self._batching is not None and dispatcher.is_free(now_s):
                if await self._gather(pulling):
                    break
                if batches := dispatcher.open_batch(now_s, self.options.batch_rows):
                    await self._deliver_batches(self._batching, batches)
                    continue
            elif self._takes_whole and (events := dispatcher.open_whole(now_s)) is not None:
                await self._deliver_whole(events)
                continue
            due = dispatcher.next(now_s)
            if due is None:
                await self._wait(pulling)
            elif due.call is Call.ROLLBACK:
                await self._roll_back(due)
            elif due.call is Call.RESTREAM:
                assert due.mark is not None
                pulling = await self.restream(due.mark.checkpoint)
                dispatcher.restreamed(self.buffer.end)
            else:
                await self._attempt(due)

    async def _attempt(self, due: Due) -> None:
        """Make the calls that are due; a failure among them becomes a rollback."""
        try:
            if due.call is Call.EVENTS:
                result = await self._events(due)
            elif due.call is Call.CHECKPOINT:
                if self._key_workers.in_flight:
                    self._deferred.append((due, set(self._key_workers.in_flight)))
                    self.dispatcher.defer(due, time.monotonic())
                    return
                result = await self._take_checkpoint(due)
            elif due.call in self._left_out:
                result = Result.SUCCESS
            else:
                result = await self._announce(due)
        except _HALTING:
            raise
        except Exception as error:
            await self._failed(error)
            return
        self.dispatcher.done(due, time.monotonic(), result)

    async def _deliver_whole(self, events: list[Event] | None) -> None:
        """Deliver windows that have arrived whole, until something else is due."""
        dispatcher = self.dispatcher
        try:
            while events is not None:
                result = await self._deliver_run(events)
                due = dispatcher.close_whole(len(events), time.monotonic(), result)
                if due is not None:
                    result = await self._take_checkpoint(due)
                    dispatcher.done(due, time.monotonic(), result)
                if self._is_stopping:
                    return
                events = dispatcher.open_whole(time.monotonic())
        except _HALTING:
            raise
        except Exception as error:
            await self._failed(error)

    async def _gather(self, pulling: Pulling) -> bool:
        """Wait for more rows, if there are some and fewer than a batch may have.

        Returns whether ``stop`` was called meanwhile.
        """
        buffer, options = self.buffer, self.options
        until_s = time.monotonic() + options.batch_ms / 1000
        while (
            (left_s := until_s - time.monotonic()) > 0
            and 0 < buffer.waiting_rows() < options.batch_rows
            and buffer.held_bytes < options.buffer_bytes
            and not (self._is_stopping or pulling.done())
        ):
            buffer.wake.clear()
            await wait_for_either(buffer.wake, pulling, left_s)
        return self._is_stopping

    async def _deliver_batches(
        self, decoding: BatchDecoding, batches: list[tuple[str, list[RowsOfBlock]]]
    ) -> None:
        """Deliver the rows of whole windows, and take the checkpoint that is due after them."""
        strongest = Result.SUCCESS
        try:
            for source, parts in batches:
                batch = DataBatch(decoding, source, "online", parts)
                result = await self._call(self.consumer.onDataBatch, batch)
                strongest = strongest if result is Result.SUCCESS else result
            due = self.dispatcher.close_batch(time.monotonic(), strongest)
            if due is not None:
                result = await self._take_checkpoint(due)
                self.dispatcher.done(due, time.monotonic(), result)
        except _HALTING:
            raise
        except Exception as error:
            await self._failed(error)

    async def _failed(self, error: BaseException) -> None:
        """Wait for events in flight, store the checkpoint that is complete, and roll back."""
        await self._key_workers.abandon()
        ready: Due | None = None
        while self._deferred and all(map(_succeeded, self._deferred[0][1])):
            ready = self._deferred.popleft()[0]
        self._deferred.clear()
        if ready is not None:
            try:
                await self._take_deferred(ready)
            except _HALTING:
                raise
            except Exception as another:
                log.warning("no checkpoint before the rollback: %r", another)
        self.dispatcher.failed(error)

    async def _announce(self, due: Due) -> Result:
        consumer = self.consumer
        if due.call is Call.START_SEQUENCE:
            assert due.window is not None
            return await self._call(consumer.onStartDataEventSequence, due.window)
        if due.call is Call.END_SEQUENCE:
            assert due.window is not None
            return await self._call(consumer.onEndDataEventSequence, due.window)
        if due.call is Call.TABLE_STATE:
            assert due.table_state is not None
            await self._key_workers.drain()
            if self._key_workers.failure is not None:
                raise self._key_workers.failure
            return await self._call(consumer.onTableState, due.table_state.source, due.table_state)
        function = consumer.onStartSource if due.call is Call.START_SOURCE else consumer.onEndSource
        return await self._call(function, due.source, due.schema)

    async def _events(self, due: Due) -> Result:
        if self._batching is not None:
            assert due.block is not None
            parts = [(due.block, np.arange(due.start, due.stop))]
            batch = DataBatch(self._batching, due.source, self.dispatcher.mode, parts, due.window)
            return await self._call(self.consumer.onDataBatch, batch)
        events = due.events()
        if self.options.dispatch == "serial":
            return await self._deliver_run(events)
        key_workers = self._key_workers
        if any(event.op == "t" for event in events):
            # A truncate concerns every key: no other event may be in flight.
            await key_workers.drain()
            key_workers.submit_in_order(events)
            await key_workers.drain()
        else:
            key_workers.submit(events)
            if self.options.dispatch == "within_window":
                await key_workers.drain()
            else:
                await key_workers.wait_below(_MOST_IN_FLIGHT)
        if key_workers.failure is not None:
            raise key_workers.failure
        return Result.SUCCESS

    async def _deliver_run(self, events: list[Event]) -> Result:
        """Deliver events one after another, on the loop."""
        function, budget_s = self.consumer.onDataEvent, self._budget_s
        strongest = Result.SUCCESS
        now_s = time.monotonic
        began_s = now_s()
        try:
            for event in events:
                answer: Any = function(event)
                if answer is not None and answer is not Result.SUCCESS:
                    if inspect.isawaitable(answer):
                        answer = await self._in_budget("onDataEvent", answer)
                    result = _checked_result("onDataEvent", answer)
                    if result is not Result.SUCCESS:
                        strongest = result
                ended_s = now_s()
                if budget_s is not None and ended_s - began_s > budget_s:
                    self._check_budget("onDataEvent", began_s)
                began_s = ended_s
                if ended_s - self._yielded_s > _YIELD_S:
                    await self._yield()
                    if self._is_stopping:
                        raise _Stopped
                    began_s = now_s()
        except asyncio.CancelledError as error:
            _raise_as_failure("onDataEvent", error)
        return strongest

    async def _take_checkpoint(self, due: Due) -> Result:
        assert due.mark is not None
        checkpoint = due.mark.checkpoint
        assert checkpoint is not None
        if Call.CHECKPOINT not in self._left_out:
            try:
                result = await self._call(self.consumer.onCheckpoint, checkpoint)
            except (CheckpointMoved, UsageError) as error:  # to repeat the window would not help
                raise _NotStored(error) from error
            if result is Result.SKIP_CHECKPOINT:
                return result
        await self._save(checkpoint)
        return Result.SUCCESS

    async def _save(self, checkpoint: Checkpoint) -> None:
        try:
            saving = self.store.save(checkpoint)
            if inspect.isawaitable(saving):
                await saving
        except DatabusError as error:
            raise _NotStored(error) from error
        except Exception as error:
            refusal = StoreError(f"the checkpoint could not be stored: {error!r}")
            refusal.__cause__ = error
            raise _NotStored(refusal) from error
        self.checkpoint = checkpoint

    async def _settle_deferred(self) -> bool:
        """Take the checkpoints whose events have all been delivered, or handle a failure.

        False, without any await, if there was neither.
        """
        self._key_workers.check_budget()
        if self._key_workers.failure is not None:
            await self._failed(self._key_workers.failure)
            return True
        ready: Due | None = None
        while self._deferred and not self._deferred[0][1] & self._key_workers.in_flight.keys():
            ready = self._deferred.popleft()[0]
        if ready is None:
            return False
        try:
            await self._take_deferred(ready)
        except _HALTING:
            raise
        except Exception as error:
            await self._failed(error)
        return True

    async def _take_deferred(self, due: Due) -> None:
        result = await self._take_checkpoint(due)
        if result is not Result.SKIP_CHECKPOINT:
            assert due.mark is not None
            self.dispatcher.accept(due.mark)

    async def _roll_back(self, due: Due) -> None:
        assert due.mark is not None
        cause, attempt = due.cause, self.dispatcher.attempt
        if cause is None:
            # A server was lost within a window.  No callback failed, but the events in flight
            # must have ended before ``onRollback``.
            await self._key_workers.abandon()
            self._deferred.clear()
        if isinstance(cause, CallbackFailed) and cause.is_fatal:
            raise ConsumerFailed(str(cause)) from cause
        if cause is not None and attempt > self.options.max_retries:
            raise ConsumerFailed(
                f"a callback failed {attempt} times since the checkpoint "
                f"{_name(due.mark.checkpoint)} (max_retries={self.options.max_retries}); the "
                f"last time: {cause!r}"
            ) from cause
        self.rollback_count += 1
        log.warning("rolling back to %s: %r", _name(due.mark.checkpoint), cause)
        try:
            await self._call(self.consumer.onRollback, due.mark.checkpoint)
        except Exception as error:
            raise ConsumerFailed(f"onRollback failed: {error!r}") from error
        if cause is not None:
            await self._pause(self._backoff.delay_s(attempt, self.rng))
        self.dispatcher.done(due, time.monotonic())

    async def _pause(self, delay_s: float) -> None:
        until_s = time.monotonic() + delay_s
        while not self._is_stopping and (left_s := until_s - time.monotonic()) > 0:
            self.buffer.wake.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self.buffer.wake.wait()
            except TimeoutError:
                return

    async def _wait(self, pulling: Pulling) -> None:
        """Wait for frames, for a callback in flight, or for the time of a checkpoint."""
        if pulling.done():
            await self._key_workers.drain()
            if self._deferred or self._key_workers.failure is not None:
                await self._settle_deferred()
                return
            error = pulling.exception()
            if isinstance(error, DatabusError):
                raise error
            raise InternalError(f"the puller ended with {error!r}") from error
        due_s = self.dispatcher.checkpoint_due_s()
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        if self._key_workers.in_flight and self._budget_s is not None:
            timeout_s = self._budget_s if timeout_s is None else min(timeout_s, self._budget_s)
        await wait_for_either(self.buffer.wake, pulling, timeout_s)
        self._yielded_s = time.monotonic()
        self._key_workers.check_budget()

    async def _end_in_order(self) -> None:
        """Stopping: wait for events in flight and take the last checkpoint that is due."""
        await self._key_workers.drain()
        if self._key_workers.failure is not None:
            return
        if self._deferred:
            await self._settle_deferred()
        due = self.dispatcher.final_checkpoint()
        if due is not None:
            try:
                result = await self._take_checkpoint(due)
            except _HALTING:
                raise
            except Exception as error:
                # The same events come again at the next start.
                log.warning("the last checkpoint was not taken: %r", error)
                return
            self.dispatcher.done(due, time.monotonic(), result)

    async def _report(self, error: DatabusError) -> None:
        log.error("%s: %s (%s)", error.code, error.message, error.hint)
        await self._quietly(self.consumer.onError, error)

    async def _quietly(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            await self._call(function, *arguments)
        except Exception:
            log.exception("%s failed", function.__name__)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Result:
        began_s = time.monotonic()
        try:
            answer = function(*arguments)
            if answer is not None and inspect.isawaitable(answer):
                answer = await self._in_budget(function.__name__, answer)
        except asyncio.CancelledError as error:
            _raise_as_failure(function.__name__, error)
        result = _checked_result(function.__name__, answer)
        self._check_budget(function.__name__, began_s)
        return result

    async def _in_budget(self, name: str, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._budget_s) as bound:
                return await answer
        except TimeoutError:
            if not bound.expired():
                raise
            raise CallbackFailed(
                f"{name} was cancelled after {self._budget_s:g} s (callback_budget_s)"
            ) from None

    def _check_budget(self, name: str, began_s: float) -> None:
        took_s = time.monotonic() - began_s
        if self._budget_s is not None and took_s > self._budget_s:
            raise CallbackFailed(
                f"{name} took {took_s:.3f} s, callback_budget_s is {self._budget_s:g}"
            )

    async def _yield(self) -> None:
        """Let the puller and other tasks of the loop run."""
        await asyncio.sleep(0)
        self._yielded_s = time.monotonic()


def _is_left_out(consumer: Consumer, name: str) -> bool:
    """Whether a consumer does not override a callback."""
    return getattr(getattr(consumer, name), "__func__", None) is getattr(Consumer, name)


def _checked_result(name: str, answer: Any) -> Result:
    """The result that a callback returned, if it is not an error.

    Raises:
        CallbackFailed: it is ERROR, ERROR_FATAL or not a result.
    """
    if answer is None:
        return Result.SUCCESS
    if answer is Result.ERROR:
        raise CallbackFailed(f"{name} returned ERROR")
    if answer is Result.ERROR_FATAL:
        raise CallbackFailed(f"{name} returned ERROR_FATAL", is_fatal=True)
    if not isinstance(answer, Result):
        raise CallbackFailed(f"{name} returned {answer!r}, which is neither a Result nor None")
    return answer


def _raise_as_failure(name: str, error: asyncio.CancelledError) -> NoReturn:
    """Raise a callback's own CancelledError as its failure; unchanged if the task is cancelled."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    raise CallbackFailed(f"{name} raised {error!r}, but the client was not cancelled") from error


def _succeeded(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _name(checkpoint: Checkpoint | None) -> str:
    return "the start" if checkpoint is None else str(checkpoint.position)
