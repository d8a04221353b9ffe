"""Delivers dead letters again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from databus.client.application.consumer import Consumer
from databus.client.application.options import Options
from databus.client.checkpoints.checkpoint_stores import CheckpointStore
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.deadletters.dead_letter_stores import DeadLetterStore
from databus.client.deadletters.held_events import settled
from databus.client.delivery.callback_results import BoundedCalls
from databus.common.checkpoint import Checkpoint


@dataclass(slots=True)
class Replayed:
    """What a replay has done."""

    delivered: int = 0
    """Letters that the consumer has taken; they are removed."""
    failed: int = 0
    """Letters that have failed again."""
    behind: int = 0
    """Letters that were not delivered, because one of their key before them has failed."""


@dataclass(kw_only=True, slots=True)
class DeadLetterReplay:
    """Calls a consumer with its dead letters, in the order of the stream.

    Invariants:
        I1. A letter is removed only after the consumer has taken it and ``onCheckpoint`` has
            returned.  A kill in between delivers it again.
        I2. No letter is delivered while one of its key before it is left; a truncate counts as
            every key of its source.
        I3. The stored checkpoint stays where it is: ``onCheckpoint`` gets it again.

    Owner: one task.
    """

    consumer: Consumer
    letters: DeadLetterStore
    store: CheckpointStore
    checkpoint: Checkpoint | None
    options: Options

    async def run(self) -> Replayed:
        """Deliver all letters once."""
        outcome = Replayed()
        calls = BoundedCalls(self.options.callback_budget_s)
        left: set[tuple[str, bytes]] = set()
        found = sorted(await settled(self.letters.all()), key=lambda one: one.position)
        await calls.make(self.consumer.onStartConsumption)
        try:
            for letter in found:
                key = (letter.source, letter.key_bytes)
                if _is_behind(letter, key, left):
                    left.add(key)
                    outcome.behind += 1
                    continue
                try:
                    await self.deliver(calls, letter)
                except Exception as error:
                    await calls.make(self.consumer.onRollback, self.checkpoint)
                    left.add(key)
                    outcome.failed += 1
                    count = letter.attempt_count + 1
                    again = replace(letter, error=repr(error), attempt_count=count)
                    await settled(self.letters.put([again]))
                else:
                    await settled(self.letters.remove([letter]))
                    outcome.delivered += 1
        finally:
            with contextlib.suppress(Exception):
                await calls.make(self.consumer.onStopConsumption)
        return outcome

    async def deliver(self, calls: BoundedCalls, letter: DeadLetter) -> None:
        """Call the consumer with one letter, and commit it."""
        consumer, event = self.consumer, letter.event(self.options)
        schema = event.window.decoding.reader_of(event.source)
        await calls.make(consumer.onStartDataEventSequence, event.window)
        await calls.make(consumer.onStartSource, event.source, schema)
        await calls.make(consumer.onDataEvent, event)
        await calls.make(consumer.onEndSource, event.source, schema)
        await calls.make(consumer.onEndDataEventSequence, event.window)
        if self.checkpoint is not None:
            await calls.make(consumer.onCheckpoint, self.checkpoint)
            await settled(self.store.save(self.checkpoint))


def _is_behind(letter: DeadLetter, key: tuple[str, bytes], left: set[tuple[str, bytes]]) -> bool:
    if letter.op == "t":
        return any(source == letter.source for source, _ in left)
    return key in left or (letter.source, b"") in left
