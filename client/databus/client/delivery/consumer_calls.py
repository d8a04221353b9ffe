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
from typing import Any, TypeVar

import numpy as np

from databus.client.application.consumer import Consumer, Result
from databus.client.application.events import Event
from databus.client.application.options import Options
from databus.client.checkpoints.checkpoint_stores import CheckpointStore
from databus.client.deadletters.held_events import HeldEvents
from databus.client.delivery.batch_gathering import gather
from databus.client.delivery.callback_results import (
    BoundedCalls,
    CallbackFailed,
    NotStored,
    checked_result,
    is_left_out,
    raise_as_failure,
)
from databus.client.delivery.dispatcher import Call, Due
from databus.client.delivery.key_workers import (
    KeyWorker,
    KeyWorkers,
    Stuck,
    TaskKeyWorker,
    ThreadKeyWorker,
    succeeded,
)
from databus.client.delivery.steering import Stream, store_anywhere
from databus.client.pulling.pull_machine import Backoff
from databus.client.pulling.raw_windows import wait_for_either
from databus.client.tables.data_batch import BatchDecoding, DataBatch, RowsOfBlock
from databus.common.checkpoint import Checkpoint
from databus.common.errors import (
    CheckpointMoved,
    ConfigError,
    ConsumerFailed,
    DatabusError,
    StoreError,
    UsageError,
)

log = logging.getLogger("databus.client")

_OF_WINDOWS = frozenset(
    (Call.START_SEQUENCE, Call.START_SOURCE, Call.END_SOURCE, Call.END_SEQUENCE)
)
_YIELD_S = 0.02
_MOST_IN_FLIGHT = 10_000
T = TypeVar("T")
Save = Callable[[CheckpointStore, Checkpoint], Awaitable[None]]


class _Stopped(Exception):
    """``stop`` was called while events were being delivered."""


_HALTING = (_Stopped, NotStored, Stuck)
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
    options: Options
    stream: Stream
    rng: random.Random
    held: HeldEvents | None = None

    def __post_init__(self) -> None:
        self.dispatcher = self.stream.dispatcher
        self.buffer = self.stream.buffer
        self.steering = self.stream.steering
        self._backoff = Backoff(self.options.retry_s, self.options.retry_most_s)
        self._budget_s = self.options.callback_budget_s
        self._calls = BoundedCalls(self._budget_s)
        self._key_workers = KeyWorkers((), self._budget_s, self.buffer.wake)
        self._deferred: deque[tuple[Due, set[asyncio.Future[None]]]] = deque()
        self._yielded_s = 0.0
        self._left_out = frozenset(
            call
            for call in (*_OF_WINDOWS, Call.TABLE_STATE, Call.CHECKPOINT)
            if is_left_out(self.consumer, call.value)
        )
        self._takes_whole = self.options.dispatch == "serial" and self._left_out >= _OF_WINDOWS
        self._batching: BatchDecoding | None = None
        if not is_left_out(self.consumer, "onDataBatch"):
            if self.options.dispatch != "serial":
                raise ConfigError(
                    f"dispatch={self.options.dispatch!r} delivers single events to workers, and "
                    "this consumer has onDataBatch: use dispatch='serial'"
                )
            if self.held is not None:
                raise ConfigError(
                    "dead letters are single events, and this consumer has onDataBatch: use "
                    "onDataEvent, or give no dead_letters"
                )
            self._batching = BatchDecoding(self.dispatcher.decoding)
        self.rollback_count = 0
        self.checkpoint: Checkpoint | None = self.dispatcher.mark.checkpoint

    def hurry(self) -> None:
        """Look at the steering after the callback that is running; from any thread."""
        self._yielded_s = float("-inf")

    async def run(self) -> None:
        """Deliver until ``stop`` or until delivery cannot continue."""
        try:
            try:
                await self._begin()
                await self._deliver()
            except _Stopped:
                pass
            await self._end_in_order()
        except NotStored as refusal:
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
            await self._calls.make(self.consumer.onStartConsumption)
        except Exception as error:
            raise ConsumerFailed(f"onStartConsumption failed: {error!r}") from error
        if self.held is not None:
            await self.held.load()
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
                try:
                    await self._calls.make(function, event)
                except Exception as error:
                    self._note(error, event)
                    raise

            return TaskKeyWorker(deliver_async, abandoned, name)

        def deliver(event: Event) -> None:
            began_s = time.monotonic()
            try:
                answer = function(event)
                if answer is not None:
                    checked_result("onDataEvent", answer)
                self._calls.check_budget("onDataEvent", began_s)
            except Exception as error:
                self._note(error, event)
                raise

        return ThreadKeyWorker(deliver, abandoned, name)

    async def _deliver(self) -> None:
        dispatcher, steering = self.dispatcher, self.steering
        while not steering.is_stopping:
            if steering.is_paused or time.monotonic() - self._yielded_s > _YIELD_S:
                await self._yield()
                continue  # A stop that was requested has been noted meanwhile.
            if (
                self._deferred or self._key_workers.failure is not None
            ) and await self._settle_deferred():
                continue
            if steering.target is not None and not dispatcher.in_window:
                await self._seek()
                continue
            # No await from here to the call: otherwise an event could fail before a checkpoint.
            now_s = time.monotonic()
            if self._batching is not None and (dispatcher.in_window or dispatcher.is_free(now_s)):
                pulling = self.stream.pull.pulling
                if await gather(self.buffer, dispatcher, steering, pulling, self.options):
                    continue
                if batches := dispatcher.open_batch(now_s, self.options.batch_rows):
                    await self._deliver_batches(self._batching, batches)
                    continue
            elif self._takes_whole and (events := dispatcher.open_whole(now_s)) is not None:
                await self._deliver_whole(events)
                continue
            due = dispatcher.next(now_s)
            if due is None:
                await self._wait()
            elif due.call is Call.ROLLBACK:
                await self._roll_back(due)
            elif due.call is Call.RESTREAM:
                assert due.mark is not None
                await self.stream.restart(due.mark.checkpoint)
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
                if self.steering.has_request:
                    return
                events = dispatcher.open_whole(time.monotonic())
        except _HALTING:
            raise
        except Exception as error:
            await self._failed(error)

    async def _deliver_batches(
        self, decoding: BatchDecoding, batches: list[tuple[str, list[RowsOfBlock]]]
    ) -> None:
        """Deliver the rows of whole windows, and take the checkpoint that is due after them."""
        strongest = Result.SUCCESS
        try:
            for source, parts in batches:
                batch = DataBatch(decoding, source, "online", parts)
                result = await self._calls.make(self.consumer.onDataBatch, batch)
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
        while self._deferred and all(map(succeeded, self._deferred[0][1])):
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
        if self.held is not None:
            self.held.failed(error, self.dispatcher.attempt)

    def _note(self, error: Exception, event: Event) -> None:
        if self.held is not None:
            self.held.note(error, event)

    async def _announce(self, due: Due) -> Result:
        consumer = self.consumer
        if due.call is Call.START_SEQUENCE:
            assert due.window is not None
            return await self._calls.make(consumer.onStartDataEventSequence, due.window)
        if due.call is Call.END_SEQUENCE:
            assert due.window is not None
            return await self._calls.make(consumer.onEndDataEventSequence, due.window)
        if due.call is Call.TABLE_STATE:
            assert due.table_state is not None
            await self._key_workers.drain()
            if self._key_workers.failure is not None:
                raise self._key_workers.failure
            return await self._calls.make(
                consumer.onTableState, due.table_state.source, due.table_state
            )
        function = consumer.onStartSource if due.call is Call.START_SOURCE else consumer.onEndSource
        return await self._calls.make(function, due.source, due.schema)

    async def _events(self, due: Due) -> Result:
        if self._batching is not None:
            assert due.block is not None
            self.dispatcher.extend(due, self.options.batch_rows)
            pieces = [(due.block, due.start, due.stop), *due.more]
            parts = [(block, np.arange(start, stop)) for block, start, stop in pieces]
            batch = DataBatch(self._batching, due.source, self.dispatcher.mode, parts, due.window)
            return await self._calls.make(self.consumer.onDataBatch, batch)
        events = due.events()
        if self.options.dispatch == "serial":
            return await self._deliver_run(events)
        if self.held is not None:
            events = await self._stored(self.held.screen(events))
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
        if self.held is not None:
            events = await self._stored(self.held.screen(events))
        function, budget_s = self.consumer.onDataEvent, self._budget_s
        strongest, now_s = Result.SUCCESS, time.monotonic
        began_s = now_s()
        try:
            try:
                for event in events:
                    answer: Any = function(event)
                    if answer is not None and answer is not Result.SUCCESS:
                        if inspect.isawaitable(answer):
                            answer = await self._calls.in_budget("onDataEvent", answer)
                        result = checked_result("onDataEvent", answer)
                        if result is not Result.SUCCESS:
                            strongest = result
                    ended_s = now_s()
                    if budget_s is not None and ended_s - began_s > budget_s:
                        self._calls.check_budget("onDataEvent", began_s)
                    began_s = ended_s
                    if ended_s - self._yielded_s > _YIELD_S:
                        await self._yield()
                        if self.steering.is_stopping:
                            raise _Stopped
                        began_s = now_s()
            except asyncio.CancelledError as error:
                raise_as_failure("onDataEvent", error)
        except _HALTING:
            raise
        except Exception as error:
            self._note(error, event)
            raise
        return strongest

    async def _stored(self, storing: Awaitable[T]) -> T:
        try:
            return await storing
        except DatabusError as error:
            raise NotStored(error) from error

    async def _take_checkpoint(self, due: Due) -> Result:
        assert due.mark is not None
        checkpoint = due.mark.checkpoint
        assert checkpoint is not None
        if self.held is not None:
            await self._stored(self.held.before_checkpoint(checkpoint.position))
        if Call.CHECKPOINT not in self._left_out:
            try:
                result = await self._calls.make(self.consumer.onCheckpoint, checkpoint)
            except (CheckpointMoved, UsageError) as error:  # to repeat the window would not help
                raise NotStored(error) from error
            if result is Result.SKIP_CHECKPOINT:
                return result
        await self._save(checkpoint)
        return Result.SUCCESS

    async def _save(self, checkpoint: Checkpoint, save: Save | None = None) -> None:
        try:
            if save is not None:
                await save(self.store, checkpoint)
            else:
                saving = self.store.save(checkpoint)
                if inspect.isawaitable(saving):
                    await saving
        except DatabusError as error:
            raise NotStored(error) from error
        except Exception as error:
            refusal = StoreError(f"the checkpoint could not be stored: {error!r}")
            refusal.__cause__ = error
            raise NotStored(refusal) from error
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
            # A server was lost within a window: events in flight end before ``onRollback``.
            await self._key_workers.abandon()
            self._deferred.clear()
        if isinstance(cause, CallbackFailed) and cause.is_fatal:
            raise ConsumerFailed(str(cause)) from cause
        may_bury = self.held is not None and self.held.has_culprit
        if cause is not None and attempt > self.options.max_retries and not may_bury:
            raise ConsumerFailed(
                f"a callback failed {attempt} times since the checkpoint "
                f"{_name(due.mark.checkpoint)} (max_retries={self.options.max_retries}); the "
                f"last time: {cause!r}"
            ) from cause
        log.warning("rolling back to %s: %r", _name(due.mark.checkpoint), cause)
        await self._announce_rollback(due.mark.checkpoint)
        if cause is not None:
            # After onRollback, which ends the transaction that the event has failed in.
            if self.held is not None and await self._stored(
                self.held.bury(cause, self.options.max_retries)
            ):
                self.dispatcher.attempt = attempt = 1
            await self._pause(self._backoff.delay_s(attempt, self.rng))
        self.dispatcher.done(due, time.monotonic())

    async def _pause(self, delay_s: float) -> None:
        until_s = time.monotonic() + delay_s
        steering = self.steering
        while (
            not (steering.is_stopping or steering.target)
            and (left_s := until_s - time.monotonic()) > 0
        ):
            self.buffer.wake.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self.buffer.wake.wait()
            except TimeoutError:
                return

    async def _seek(self) -> None:
        """Continue at the target of ``seek``; no window is open.

        What was delivered is made durable first, or else rolled back.  The target is stored
        before ``onRollback`` announces it, so that a kill at any moment loses nothing.
        """
        await self._key_workers.drain()
        if self._key_workers.failure is not None:
            await self._failed(self._key_workers.failure)
        await self._end_in_order()
        if not self.dispatcher.is_at_mark:
            await self._announce_rollback(self.dispatcher.mark.checkpoint)
        count = self.steering.seek_count
        checkpoint = await self.stream.seek()
        if checkpoint is None:
            return
        await self._save(checkpoint, store_anywhere)
        log.warning("continuing after %s, as seek() requested", _name(checkpoint))
        await self._announce_rollback(checkpoint)
        self.steering.sought(count)

    async def _announce_rollback(self, checkpoint: Checkpoint | None) -> None:
        self.rollback_count += 1
        try:
            await self._calls.make(self.consumer.onRollback, checkpoint)
        except Exception as error:
            raise ConsumerFailed(f"onRollback failed: {error!r}") from error
        if self.held is not None:
            self.held.rolled_back()

    async def _wait(self) -> None:
        """Wait for frames, a callback in flight, or the time of a checkpoint."""
        pulling = self.stream.pull.pulling
        if pulling.done():
            await self._key_workers.drain()
            if self._deferred or self._key_workers.failure is not None:
                await self._settle_deferred()
                return
            self.stream.require_pulling()
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
            await self._calls.make(function, *arguments)
        except Exception:
            log.exception("%s failed", function.__name__)

    async def _yield(self) -> None:
        """Let the puller and other tasks of the loop run; wait while there is a pause."""
        await asyncio.sleep(0)
        await self.steering.unpaused(self.buffer.wake)
        self._yielded_s = time.monotonic()


def _name(checkpoint: Checkpoint | None) -> str:
    return "the start" if checkpoint is None else str(checkpoint.position)
