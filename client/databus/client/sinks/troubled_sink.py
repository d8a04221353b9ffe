"""For tests of any sink: failures at a chosen call, and the contract of the calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import SinkBatch
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position
from databus.common.table_state import TableState


class SinkTrouble(Exception):
    """The failure that a test ordered."""


class TroubledSink(Sink):
    """Passes every call on to a sink, and fails once: at call ``fails_at``, counted from 0, before
    or ``after`` the sink made it.  ``open`` is not counted.

    Invariants (of the calls, as ``check`` asserts them):
        C1. Positions of rows only grow between two rollbacks: order, and no repetition.
        C2. An online checkpoint is not before a row that was written, and never goes back.
        C3. A row at or below a resolved position is a repetition of one that was written before.

    Owner: the sink's runner.
    """

    def __init__(self, sink: Sink, fails_at: int = -1, *, after: bool = False) -> None:
        self.sink = sink
        self.call_count = 0
        self.row_count = 0
        self.committed: list[Checkpoint] = []
        self.violations: list[str] = []
        self._fails_at, self._after = fails_at, after
        self._seen: set[Position] = set()
        self._newest = Position(0, 0)
        self._resolved = Position(0, 0)

    @property
    def stores_checkpoint(self) -> bool:  # type: ignore[override]  # that of the sink
        """Whether the sink stores its checkpoint itself."""
        return self.sink.stores_checkpoint

    @property
    def default_target(self) -> str:  # type: ignore[override]  # that of the sink
        """The target of a source without a route."""
        return self.sink.default_target

    def check(self) -> None:
        """Raise AssertionError if a call was against C1 to C3."""
        assert self.violations == []

    async def open(self, context: SinkContext) -> Checkpoint | None:
        """Open the sink."""
        found: Checkpoint | None = await _made(self.sink.open, context)
        return found

    async def write(self, batch: SinkBatch) -> None:
        """Note the rows, and write them."""
        for row in batch.rows():
            self._note(row.position, is_online=row.event.window.mode == "online")
        await self._call(self.sink.write, batch)

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Note the checkpoint, and commit."""
        position = checkpoint.position
        if isinstance(checkpoint, OnlineCheckpoint):
            if position < self._newest:
                self.violations.append(f"checkpoint {position} after the row {self._newest}")
            self._resolved = max(self._resolved, position)
        await self._call(self.sink.commit, checkpoint)
        self.committed.append(checkpoint)

    async def rollback(self) -> None:
        """Rows come again."""
        self._newest = Position(0, 0)
        await self._call(self.sink.rollback)

    async def table_state(self, state: TableState) -> None:
        """Pass it on."""
        await self._call(self.sink.table_state, state)

    async def close(self) -> None:
        """Close the sink."""
        await _made(self.sink.close)

    def _note(self, position: Position, *, is_online: bool) -> None:
        self.row_count += 1
        if is_online:
            if position <= self._newest:
                self.violations.append(f"row {position} after {self._newest}")
            self._newest = position
        if position <= self._resolved and position not in self._seen:
            self.violations.append(f"new row {position} below the resolved {self._resolved}")
        self._seen.add(position)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        is_failing = self.call_count == self._fails_at
        self.call_count += 1
        if is_failing and not self._after:
            raise SinkTrouble(f"before {method.__name__}")
        await _made(method, *arguments)
        if is_failing:
            raise SinkTrouble(f"after {method.__name__}")


async def _made(method: Callable[..., Any], *arguments: Any) -> Any:
    found = method(*arguments)
    return await found if inspect.isawaitable(found) else found
