"""The callbacks of a consumer over a merge: calls, checkpoints, and what follows a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from databus.client.application.consumer import Consumer, Result
from databus.client.application.options import Options
from databus.client.delivery.callback_results import BoundedCalls, CallbackFailed
from databus.client.merged.stream_merger import StreamMerger, TakenWindow
from databus.common.checkpoint import MergedCheckpoint
from databus.common.errors import CheckpointMoved, ConsumerFailed, DatabusError, UsageError
from databus.common.schema.source_schema import SourceSchema

log = logging.getLogger("databus.client")


class MergedDelivery:
    """Calls a consumer with the windows of a merge.

    Invariants:
        I1. The order of calls is that of ``Consumer``, with windows of several databases.
        I2. After a failure ``onRollback`` is called, and everything behind the last checkpoint that
            was stored comes again.

    Owner: one task.
    Raises: the error that ``onError`` received.
    """

    def __init__(
        self,
        consumer: Consumer,
        merging: Callable[[MergedCheckpoint | None], AbstractAsyncContextManager[StreamMerger]],
        options: Options,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._consumer = consumer
        self._merging = merging
        self._options = options
        self._is_stopping = is_stopping
        self._calls = BoundedCalls(options.callback_budget_s)
        self._failures = 0
        self._checkpoint: MergedCheckpoint | None = None

    async def run(self) -> None:
        """Deliver until ``stop``."""
        consumer = self._consumer
        try:
            await self._calls.make(consumer.onStartConsumption)
            is_again = False
            while not self._is_stopping():
                is_again = await self._attempt(is_again)
                if not is_again:
                    break
        except Exception as error:
            found = (
                error
                if isinstance(error, DatabusError)
                else ConsumerFailed(f"a callback failed: {error!r}")
            )
            await self._calls.make(consumer.onError, found)
            raise found from error
        finally:
            await self._calls.make(consumer.onStopConsumption)

    async def _attempt(self, is_again: bool) -> bool:
        """Deliver from the last checkpoint on; whether to begin there again."""
        async with self._merging(self._checkpoint) as merger:
            if is_again:
                await self._calls.make(self._consumer.onRollback, merger.stored)
            while (taken := await merger.next()) is not None:
                try:
                    await self._window(merger, taken)
                except (CheckpointMoved, UsageError):
                    raise
                except Exception as error:
                    await self._failed(error)
                    return True
        return False

    async def _failed(self, error: Exception) -> None:
        is_fatal = isinstance(error, CallbackFailed) and error.is_fatal
        self._failures += 1
        if is_fatal or self._failures > self._options.max_retries:
            raise ConsumerFailed(
                f"the consumer failed {self._failures} times without a checkpoint in between: "
                f"{error!r}"
            ) from error
        pause_s = min(self._options.retry_most_s, self._options.retry_s * 2 ** (self._failures - 1))
        log.warning("a callback failed; everything behind the checkpoint comes again: %r", error)
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s and not self._is_stopping():
            await asyncio.sleep(min(0.05, pause_s))

    async def _window(self, merger: StreamMerger, taken: TakenWindow) -> None:
        consumer, call = self._consumer, self._calls.make
        window = taken.pulled.window
        for state in taken.pulled.table_states:
            await call(consumer.onTableState, state.source, state)
        results = {await call(consumer.onStartDataEventSequence, window)}
        run: tuple[str, SourceSchema] | None = None
        async for event in taken.pulled:
            if run is None or event.source != run[0]:
                if run is not None:
                    results.add(await call(consumer.onEndSource, *run))
                run = event.source, event.schema
                results.add(await call(consumer.onStartSource, *run))
            results.add(await call(consumer.onDataEvent, event))
        if run is not None:
            results.add(await call(consumer.onEndSource, *run))
        await merger.passed()
        if taken.checkpoint is None:
            return  # ``stop`` came before the window's end
        results.add(await call(consumer.onEndDataEventSequence, window))
        if Result.SKIP_CHECKPOINT in results or not self._is_due(merger, results):
            return
        if await call(consumer.onCheckpoint, taken.checkpoint) is not Result.SKIP_CHECKPOINT:
            await merger.commit(taken)
            self._checkpoint, self._failures = taken.checkpoint, 0

    def _is_due(self, merger: StreamMerger, results: set[Result]) -> bool:
        return Result.CHECKPOINT in results or merger.is_due(
            self._options.checkpoint_every_windows, self._options.checkpoint_every_s
        )
