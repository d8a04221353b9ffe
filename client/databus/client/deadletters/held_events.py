"""Which events go to the dead letters, and which are held back behind one."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from databus.client.application.events import Event
from databus.client.deadletters.dead_letter import BEHIND, DeadLetter
from databus.client.deadletters.dead_letter_stores import DeadLetterStore
from databus.common.checkpoint import Position
from databus.common.errors import ConsumerFailed, StoreError

log = logging.getLogger("databus.client")

_EVERY_KEY = b""
"""The key of a truncate, which concerns every row of its source."""


class HeldEvents:
    """The dead letters of one consumer while it runs.

    Invariants:
        I1. An event is delivered only if no letter of its key, or of a truncate of its source,
            lies at or before it.  Otherwise it becomes a letter: the order of a key holds.
        I2. A letter is durable before a checkpoint covers its event.
        I3. Letters before a truncate that was delivered are removed just before the checkpoint
            that covers the truncate.

    Owner: the task that delivers; ``note`` is called by any worker.
    Raises: StoreError; ConsumerFailed when there are more letters than ``most``.
    """

    def __init__(self, store: DeadLetterStore, most: int) -> None:
        self._store = store
        self._most = most
        self._letters: dict[Position, DeadLetter] = {}
        self._first: dict[tuple[str, bytes], Position] = {}
        self._emptied: list[tuple[str, Position]] = []
        self._noted: list[tuple[BaseException, Event]] = []
        self._culprit: Event | None = None
        self._failures: Counter[Position] = Counter()

    async def load(self) -> None:
        """Read the store."""
        found: Sequence[DeadLetter] = await settled(self._store.all())
        self._letters = {one.position: one for one in found}
        self.rolled_back()
        if found:
            log.warning("%d dead letters hold back %d keys", len(found), len(self._first))

    def note(self, error: BaseException, event: Event) -> None:
        """A call with ``event`` has raised ``error``."""
        self._noted.append((error, event))

    def failed(self, error: BaseException, attempt: int) -> None:
        """Delivery has failed with ``error``, ``attempt`` times since the last checkpoint."""
        noted, self._noted = self._noted, []
        if attempt == 1:
            self._failures.clear()
        self._culprit = next(
            (event for one, event in noted if one is error or one is error.__cause__), None
        )
        if self._culprit is not None:
            self._failures[self._culprit.position] += 1

    @property
    def has_letters(self) -> bool:
        """Whether an event may be held back."""
        return bool(self._first)

    @property
    def has_culprit(self) -> bool:
        """Whether the last failure was that of an event."""
        return self._culprit is not None

    async def bury(self, cause: BaseException, max_retries: int) -> bool:
        """Store the event that has failed, if it has failed often enough; whether it has."""
        event = self._culprit
        if event is None or self._failures[event.position] <= max_retries:
            return False
        await self.set_aside(event, cause, self._failures.pop(event.position))
        return True

    async def set_aside(self, event: Event, cause: BaseException, attempt_count: int = 1) -> None:
        """Store an event as a dead letter."""
        await self._put([DeadLetter.of(event, repr(cause), attempt_count)])
        log.error("%r is a dead letter: %r", event, cause)

    async def screen(self, events: list[Event]) -> list[Event]:
        """The events that may be delivered; the others are letters when this returns."""
        if not self._first:
            return events
        passed: list[Event] = []
        held: list[DeadLetter] = []
        for event in events:
            if self._is_held(event):
                known = self._letters.get(event.position)
                if known is None:
                    held.append(DeadLetter.of(event, BEHIND, 0))
            else:
                if event.op == "t":
                    self._emptied.append((event.source, event.position))
                    self._release(event.source, event.position)
                passed.append(event)
        if held:
            await self._put(held)
        return passed

    async def before_checkpoint(self, position: Position) -> None:
        """A checkpoint will cover everything up to ``position``."""
        for source, at in [one for one in self._emptied if one[1] <= position]:
            gone = [x for x in self._letters.values() if x.source == source and x.position < at]
            if gone:
                await settled(self._store.remove(gone))
                log.warning("truncate of %s: %d dead letters before it are gone", source, len(gone))
            for letter in gone:
                del self._letters[letter.position]
            self._emptied.remove((source, at))

    def rolled_back(self) -> None:
        """Events after the last checkpoint come again, truncates too."""
        self._emptied.clear()
        self._first.clear()
        for position in sorted(self._letters):
            letter = self._letters[position]
            self._first.setdefault((letter.source, letter.key_bytes), position)

    def _is_held(self, event: Event) -> bool:
        source, position = event.source, event.position
        for key in (event.key_bytes, _EVERY_KEY):
            first = self._first.get((source, key))
            if first is not None and position >= first:
                return True
        return False

    def _release(self, source: str, position: Position) -> None:
        """Letters before ``position`` hold nothing back any more; later ones of their keys do."""
        for key in [one for one in self._first if one[0] == source]:
            if self._first[key] < position:
                del self._first[key]
        for at in sorted(self._letters):
            letter = self._letters[at]
            if letter.source == source and at > position:
                self._first.setdefault((source, letter.key_bytes), at)

    async def _put(self, letters: list[DeadLetter]) -> None:
        new = [one for one in letters if one.position not in self._letters]
        if len(self._letters) + len(new) > self._most:
            raise ConsumerFailed(
                f"there are {len(self._letters)} dead letters, and max_dead_letters is "
                f"{self._most}: remove their cause, then replay them with `databus deadletters "
                "replay`"
            )
        try:
            await settled(self._store.put(letters))
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"a dead letter could not be stored: {error!r}") from error
        for one in letters:
            self._letters[one.position] = one
            self._first.setdefault((one.source, one.key_bytes), one.position)


async def settled(answer: Any) -> Any:
    """The answer of a plain or an asynchronous function."""
    return await answer if inspect.isawaitable(answer) else answer
