"""The consumer that drives a sink: it gathers rows into batches and commits at checkpoints."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from databus.client.application.consumer import Answer, Consumer, Result
from databus.client.application.events import Window
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.sinks.refused_rows import RefusedRows
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import SinkBatch
from databus.client.tables.data_batch import DataBatch
from databus.common.checkpoint import Checkpoint
from databus.common.errors import (
    CheckpointMoved,
    ConfigError,
    ConsumerFailed,
    DatabusError,
    MissingDependency,
    RowRefused,
    SinkRefused,
    StoreError,
)
from databus.common.table_state import TableState

log = logging.getLogger("databus.sink")
FATAL = (SinkRefused, ConfigError, MissingDependency, CheckpointMoved, ConsumerFailed, StoreError)
"""Errors that a retry does not repair."""


@dataclass(slots=True)
class SinkCounts:
    """What a sink has done since it was started."""

    rows: int = 0
    """Rows written, repetitions included."""
    batches: int = 0
    """Batches written."""
    commits: int = 0
    """Commits."""
    rollbacks: int = 0
    """Rollbacks after a failure."""
    write_s: float = 0.0
    """Time in ``write``, in seconds."""
    commit_s: float = 0.0
    """Time in ``commit``, in seconds."""
    last_error: str = ""
    """The last error of the sink; empty if there was none."""


class SinkThread:
    """Calls a sink: awaits its async methods, runs its plain ones on one thread.

    Owner: one event loop.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "databus-sink")

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a method of a sink."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._pool, method, *arguments)
        return await found if inspect.isawaitable(found) else found

    def close(self) -> None:
        """End the thread after the call that it makes."""
        self._pool.shutdown(wait=False)


class SinkConsumer(Consumer):
    """Turns the deliveries of a client into the calls of a ``Sink``.

    Invariants:
        I1. Rows are written in commit order: between windows of which several came at once only at
            a checkpoint, and inside a window that comes in parts at any time.
        I2. ``commit`` is called only at a checkpoint, after all rows before it were written.
        I3. After a failure nothing is pending, and ``rollback`` succeeds before any other call.

    Owner: the client that serves it.  ``fatal`` has the error that a retry does not repair.
    """

    def __init__(
        self,
        sink: Sink,
        context: SinkContext,
        *,
        batch_rows: int,
        refused: RefusedRows | None = None,
    ) -> None:
        self.sink = sink
        self.counts = SinkCounts()
        self.fatal: DatabusError | None = None
        self._context = context
        self._batch_rows = batch_rows
        self._refused = refused
        self._thread = SinkThread()
        self._pending: list[DataBatch] = []
        self._pending_rows = 0
        self._in_sequence = False
        self._must_roll_back = False

    async def open(self) -> Checkpoint | None:
        """Open the sink; its stored checkpoint."""
        found: Checkpoint | None = await self._thread.call(self.sink.open, self._context)
        if self._refused is not None:
            await self._refused.load()
        return found

    async def take_letter(self, letter: DeadLetter, checkpoint: Checkpoint) -> None:
        """Write a row that was set aside, and commit it with the stored checkpoint."""
        await self._write(SinkBatch([letter.batch()], self._context.routes))
        await self._thread.call(self.sink.commit, checkpoint)

    async def close(self) -> None:
        """Close the sink, its thread, and the dead letters."""
        try:
            await self._thread.call(self.sink.close)
        finally:
            self._thread.close()
            if self._refused is not None:
                self._refused.close()

    def onStartDataEventSequence(self, window: Window) -> Answer:
        """A window begins that comes in parts."""
        self._in_sequence = True
        return None

    def onEndDataEventSequence(self, window: Window) -> Answer:
        """It ends."""
        self._in_sequence = False
        return Result.CHECKPOINT if self._is_full else None

    async def onDataBatch(self, batch: DataBatch) -> Result | None:
        """Gather the rows; write them if they are many."""
        self._pending.append(batch)
        self._pending_rows += len(batch)
        if not self._is_full:
            return None
        if not self._in_sequence:
            return Result.CHECKPOINT
        return await self._guarded(self._flush)

    async def onTableState(self, source: str, state: TableState) -> Result | None:
        """Pass the state on, after the rows before it."""

        async def passed() -> None:
            await self._flush()
            await self._thread.call(self.sink.table_state, state)

        return await self._guarded(passed)

    async def onCheckpoint(self, checkpoint: Checkpoint) -> Result | None:
        """Write what is pending, and commit."""

        async def committed() -> None:
            await self._flush()
            if self._refused is not None:
                await self._refused.before_commit(checkpoint.position)
            began_s = time.monotonic()
            await self._commit(checkpoint)
            self.counts.commits += 1
            self.counts.commit_s += time.monotonic() - began_s

        return await self._guarded(committed)

    async def onRollback(self, checkpoint: Checkpoint | None) -> Result | None:
        """Discard what is pending and what the sink has not committed."""
        self._pending.clear()
        self._pending_rows = 0
        self._in_sequence = False
        if self._refused is not None:
            self._refused.rolled_back()
        self.counts.rollbacks += 1
        self._must_roll_back = True
        try:
            return await self._guarded(_nothing)
        except Exception as error:
            # The target may still be away: the next call rolls back first.
            log.warning("the sink cannot roll back yet: %r", error)
            return None

    @property
    def _is_full(self) -> bool:
        return self._pending_rows >= self._batch_rows

    async def _flush(self) -> None:
        if not self._pending:
            return
        batch = SinkBatch(self._pending, self._context.routes)
        self._pending, self._pending_rows = [], 0
        if self._refused is None:
            await self._write(batch)
        else:
            await self._refused.write(batch, self._write, self._roll_back)

    async def _write(self, batch: SinkBatch) -> None:
        began_s = time.monotonic()
        await self._thread.call(self.sink.write, batch)
        self.counts.rows += len(batch)
        self.counts.batches += 1
        self.counts.write_s += time.monotonic() - began_s

    async def _commit(self, checkpoint: Checkpoint) -> None:
        if self._refused is None:
            await self._thread.call(self.sink.commit, checkpoint)
            return
        try:
            await self._thread.call(self.sink.commit, checkpoint)
        except RowRefused as error:
            raise SinkRefused(f"{error} (at the commit, so the row is not known)") from error
        self._refused.committed()

    async def _roll_back(self) -> None:
        await self._thread.call(self.sink.rollback)

    async def _guarded(self, step: Callable[[], Any]) -> Result | None:
        """Make the calls; an error that a retry does not repair stops the client."""
        try:
            if self._must_roll_back:
                await self._roll_back()
                self._must_roll_back = False
            await step()
        except Exception as error:
            self.counts.last_error = str(error)
            if self._refused is not None and isinstance(error, RowRefused):
                raise  # The rows come again, and those that are refused are set aside.
            if not isinstance(error, FATAL):
                raise
            self.fatal = error
            return Result.ERROR_FATAL
        return None


async def _nothing() -> None:
    return None
