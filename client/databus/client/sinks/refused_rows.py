"""Rows that the target refuses are set aside, so that the sink continues with the others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from databus.client.deadletters.dead_letter_stores import DeadLetterStore
from databus.client.deadletters.held_events import HeldEvents
from databus.client.sinks.sink_batch import SinkBatch
from databus.common.checkpoint import Position
from databus.common.errors import RowRefused

log = logging.getLogger("databus.sink")
Write = Callable[[SinkBatch], Awaitable[None]]
Undo = Callable[[], Awaitable[None]]


class RefusedRows:
    """Finds the rows of a refused batch that the target does not take, and stores them.

    A batch that is refused comes again after the rollback.  Until the next commit its rows are
    then written one at a time, and each one that is refused becomes a dead letter.

    Invariants:
        I1. A letter is durable before its row is left out, and before a checkpoint covers it.
        I2. Behind a letter no row of its key is written: those become letters, too.

    Owner: one ``SinkConsumer``.
    Raises: StoreError; ConsumerFailed when there are more letters than ``most``.
    """

    def __init__(self, store: DeadLetterStore, most: int) -> None:
        self.store = store
        self._held = HeldEvents(store, most)
        self._one_by_one = False

    async def load(self) -> None:
        """Read the store."""
        await self._held.load()

    def close(self) -> None:
        """Unlock the store."""
        close = getattr(self.store, "close", None)
        if close is not None:
            close()

    async def write(self, batch: SinkBatch, write: Write, undo: Undo) -> None:
        """Write the rows that may be written.

        Raises:
            RowRefused: at least one row is refused.  Everything since the last commit has to come
                again, without those that are letters by then.
        """
        batch = await self._screened(batch)
        if not self._one_by_one:
            try:
                await write(batch)
            except RowRefused:
                self._one_by_one = True
                raise
            return
        refusal: RowRefused | None = None
        for event in batch.events():
            try:
                await write(batch.only({event.position}))
            except RowRefused as error:
                refusal = error
                await self._held.set_aside(event, error)
                # The target takes the next rows only without the failed transaction.
                await undo()
        if refusal is not None:
            raise refusal

    async def before_commit(self, position: Position) -> None:
        """A checkpoint will cover everything up to ``position``."""
        await self._held.before_checkpoint(position)

    def committed(self) -> None:
        """The rows were committed."""
        self._one_by_one = False

    def rolled_back(self) -> None:
        """Everything since the last commit comes again."""
        self._held.rolled_back()

    async def _screened(self, batch: SinkBatch) -> SinkBatch:
        if not self._held.has_letters:
            return batch
        events = list(batch.events())
        passed = await self._held.screen(events)
        if len(passed) == len(events):
            return batch
        return batch.only({event.position for event in passed})
