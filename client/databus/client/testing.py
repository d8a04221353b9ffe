"""For tests of any consumer: a recorder, the grammar of callbacks, a mirror, a merge's recorder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from databus.client.application.consumer import Answer, Consumer, Result
from databus.client.application.events import Event, Window
from databus.common.checkpoint import BootstrapCheckpoint, Checkpoint, OnlineCheckpoint, Position
from databus.common.errors import DatabusError
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import TableState


class Step(NamedTuple):
    """One callback; ``what`` is its subject in short.

    ``is_online`` is False for the checkpoints of a bootstrap, which count rows and not positions.
    """

    call: str
    what: Any = None
    is_online: bool = True


Trouble = Callable[[Step], "Result | None"]


class Recorder(Consumer):
    """Records every callback, with its subject copied out of the buffer.

    ``trouble`` is called after each recorded step; its return value is the callback's result,
    and it may raise.
    """

    def __init__(self, trouble: Trouble | None = None) -> None:
        self.steps: list[Step] = []
        self.errors: list[DatabusError] = []
        self.checkpoints: list[Checkpoint] = []
        self.trouble = trouble
        self.changed = asyncio.Event()

    @property
    def calls(self) -> list[str]:
        """The names of all callbacks in order."""
        return [step.call for step in self.steps]

    @property
    def positions(self) -> list[Position]:
        """The positions of all data events in order, repetitions included."""
        return [step.what[2] for step in self.steps if step.call == "onDataEvent"]

    def _note(self, call: str, what: Any = None, *, is_online: bool = True) -> Result | None:
        step = Step(call, what, is_online)
        self.steps.append(step)
        self.changed.set()
        return self.trouble(step) if self.trouble else None

    async def until(self, condition: Callable[[Recorder], bool], timeout_s: float = 10.0) -> None:
        """Return when ``condition`` holds; it is checked after each callback."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

    def onStartConsumption(self) -> Answer:
        """Recorded."""
        return self._note("onStartConsumption")

    def onStartDataEventSequence(self, window: Window) -> Answer:
        """Recorded with the scn."""
        return self._note("onStartDataEventSequence", window.scn)

    def onStartSource(self, source: str, schema: SourceSchema) -> Answer:
        """Recorded with the source."""
        return self._note("onStartSource", source)

    def onDataEvent(self, event: Event) -> Answer:
        """Recorded with source, op, position and key."""
        what = (event.source, event.op, event.position, tuple(event.key.values()))
        return self._note("onDataEvent", what)

    def onTableState(self, source: str, state: TableState) -> Answer:
        """Recorded with the source and its state."""
        return self._note("onTableState", (source, str(state.state)))

    def onEndSource(self, source: str, schema: SourceSchema) -> Answer:
        """Recorded with the source."""
        return self._note("onEndSource", source)

    def onEndDataEventSequence(self, window: Window) -> Answer:
        """Recorded with the scn."""
        return self._note("onEndDataEventSequence", window.scn)

    def onCheckpoint(self, checkpoint: Checkpoint) -> Answer:
        """Recorded with the position."""
        self.checkpoints.append(checkpoint)
        is_online = isinstance(checkpoint, OnlineCheckpoint)
        return self._note("onCheckpoint", checkpoint.position, is_online=is_online)

    def onRollback(self, checkpoint: Checkpoint | None) -> Answer:
        """Recorded with the position."""
        return self._note("onRollback", checkpoint.position if checkpoint else None)

    def onError(self, error: DatabusError) -> Answer:
        """Recorded with the error's code."""
        self.errors.append(error)
        return self._note("onError", error.code)

    def onStopConsumption(self) -> Answer:
        """Recorded."""
        return self._note("onStopConsumption")


_BETWEEN = frozenset({"onCheckpoint", "onTableState", "onStartDataEventSequence"})
_NEXT: dict[str, frozenset[str]] = {
    "": frozenset({"onStartConsumption"}),
    "onStartConsumption": frozenset(
        {
            "onStartDataEventSequence",
            "onTableState",
            "onCheckpoint",
            "onRollback",
            "onError",
            "onStopConsumption",
        }
    ),
    "onStartDataEventSequence": frozenset({"onStartSource", "onEndDataEventSequence"}),
    "onStartSource": frozenset({"onDataEvent"}),
    "onDataEvent": frozenset({"onDataEvent", "onEndSource"}),
    "onEndSource": frozenset({"onStartSource", "onEndDataEventSequence"}),
    "onEndDataEventSequence": _BETWEEN,
    "onTableState": _BETWEEN,
    "onCheckpoint": _BETWEEN,
    "onRollback": _BETWEEN,
    "onError": frozenset({"onStopConsumption"}),
    "onStopConsumption": frozenset(),
}
_ANYWHERE = frozenset({"onRollback", "onError", "onStopConsumption"})


class Grammar:
    """Checks a trace of callbacks against section 3.6 of the Databus paper.

    Invariants (of a trace):
        G1. onStartConsumption is first and onStopConsumption last, each once; onError comes at
            most once, directly before the last.
        G2. Sequences, sources and events nest; sources and sequences end as they began.
        G3. Within a run all events are of the source that was opened.
        G4. onCheckpoint comes between sequences only, its position moves back only after an
            onRollback to before it (a seek), and no delivered online event lies after it.
        G5. After onRollback a new sequence begins; events after the checkpoint come again in
            the same order: without the replays, positions of online events only grow.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = list(steps)

    def check(self, *, is_complete: bool = True) -> None:
        """Raise AssertionError at the first step that the grammar forbids."""
        last, sequence, source = "", None, None
        for number, (call, what, _) in enumerate(self.steps):
            where = f"step {number}: {call}({what}) after {last or 'nothing'}"
            allowed = _NEXT[last] | (_ANYWHERE if last not in ("", "onError") else frozenset())
            assert call in allowed, f"{where}; allowed are {sorted(allowed)}"
            assert last != "onStopConsumption", f"{where}: it has stopped"
            if call == "onStartDataEventSequence":
                sequence = what
            elif call == "onStartSource":
                source = what
            elif call == "onDataEvent":
                assert what[0] == source, f"{where}: the open source is {source}"
            elif call == "onEndSource":
                assert what == source, f"{where}: the open source is {source}"
            elif call == "onEndDataEventSequence":
                assert what == sequence, f"{where}: the open sequence is {sequence}"
            last = call
        if is_complete:
            assert last == "onStopConsumption", f"the trace ends with {last}"
        self._check_positions()

    def _check_positions(self) -> None:
        checkpoint, newest = Position(0, 0), Position(0, 0)
        for number, (call, what, is_online) in enumerate(self.steps):
            if call == "onCheckpoint":
                assert what >= checkpoint, f"step {number}: checkpoint {what} after {checkpoint}"
                is_behind = is_online and what < newest
                assert not is_behind, f"step {number}: checkpoint {what}, but {newest} was given"
                checkpoint = what
            elif call == "onRollback":
                newest = what or Position(0, 0)
                checkpoint = min(checkpoint, newest)
            elif call == "onDataEvent":
                assert what[2] > newest, f"step {number}: event {what[2]} after {newest}"
                newest = what[2]

    def windows(self) -> list[list[Any]]:
        """The events of each sequence that was ended, replays included."""
        windows: list[list[Any]] = []
        events: list[Any] = []
        for call, what, _ in self.steps:
            if call == "onStartDataEventSequence":
                events = []
            elif call == "onDataEvent":
                events.append(what)
            elif call == "onEndDataEventSequence":
                windows.append(events)
        return windows


Key = tuple[Any, ...]


class Mirror(Consumer):
    """Holds the tables in memory, as a copy of the source: ``tables[source][key] = row``.

    Invariants:
        M1. After an online checkpoint the tables are as the source had them at that position.
        M2. ``stale`` is empty: outside announced replays no key went back to an older state.
    """

    def __init__(self) -> None:
        self.tables: dict[str, dict[Key, dict[str, Any]]] = {}
        self.stale: list[str] = []
        self.event_count = 0
        self.rollback_count = 0
        self.checkpoint: Checkpoint | None = None
        self._newest: dict[tuple[str, Key], Position] = {}

    def onDataEvent(self, event: Event) -> Answer:
        """Apply the change."""
        self.event_count += 1
        self.apply(event)
        return None

    def onRollback(self, checkpoint: Checkpoint | None) -> Answer:
        """Events that come again may be older than the rows here."""
        self.rollback_count += 1
        self._newest.clear()
        return None

    def onCheckpoint(self, checkpoint: Checkpoint) -> Answer:
        """Store it."""
        self.checkpoint = checkpoint
        return None

    @property
    def is_consistent(self) -> bool:
        """Whether the last checkpoint was an online one."""
        return self.checkpoint is not None and not isinstance(self.checkpoint, BootstrapCheckpoint)

    def apply(self, event: Event) -> None:
        """Apply one change to the tables: upsert, delete, merge or empty."""
        table = self.tables.setdefault(event.source, {})
        if event.op == "t":
            table.clear()
            return
        key = tuple(event.key.values())
        before = self._newest.get((event.source, key))
        if before is not None and event.position <= before:
            self.stale.append(f"{event.source} {key}: {event.position} came after {before}")
        self._newest[event.source, key] = event.position
        value = event.value
        if value is None:
            table.pop(key, None)
        elif event.absent:
            table[key] = table.get(key, {}) | value
        else:
            table[key] = value

    def differences(self, tables: Mapping[str, Mapping[Key, Mapping[str, Any]]]) -> list[str]:
        """How the tables differ from ``tables``, a line for each row."""
        found = []
        for source in sorted({*self.tables, *tables}):
            mine, theirs = self.tables.get(source, {}), tables.get(source, {})
            for key in [*theirs, *(key for key in mine if key not in theirs)]:
                if mine.get(key) != theirs.get(key):
                    found.append(f"{source} {key}: {mine.get(key)} here, {theirs.get(key)} there")
        return found


MergeTrouble = Callable[[str, int], "Result | None"]


class MergeRecorder(Consumer):
    """Records the windows of a ``MergedClient``, and checks their order.

    Invariants (of the windows, as ``check`` asserts them):
        M1. Between two rollbacks the windows are sorted by (merged time, database, scn), where the
            merged time is the greatest commit time so far of the database.
        M2. The positions of the events of a database only grow between two rollbacks.
        M3. After a rollback the windows behind its checkpoint come again, and no others.

    ``windows`` are those that ended and were not rolled back: database, scn, commit time and
    positions.  ``trouble`` is called with the name and the number of each call; its return value is
    the callback's result, and it may raise.  No stream may be left behind, and each database is one
    stream.
    """

    def __init__(self, trouble: MergeTrouble | None = None) -> None:
        self.windows: list[tuple[str, int, int, list[Position]]] = []
        self.rollback_count = 0
        self.checkpoint: Checkpoint | None = None
        self._trouble = trouble or (lambda call, count: None)
        self._call_count = 0
        self._durable_count = 0
        self._positions: list[Position] = []

    def onStartDataEventSequence(self, window: Window) -> Answer:
        """A window begins."""
        self._positions = []
        return self._called("onStartDataEventSequence")

    def onDataEvent(self, event: Event) -> Answer:
        """Record its position."""
        self._positions.append(event.position)
        return self._called("onDataEvent")

    def onEndDataEventSequence(self, window: Window) -> Answer:
        """Record the window."""
        answer = self._called("onEndDataEventSequence")
        self.windows.append((window.database, window.scn, window.commit_us, self._positions))
        return answer

    def onCheckpoint(self, checkpoint: Checkpoint) -> Answer:
        """Everything so far is durable."""
        answer = self._called("onCheckpoint")
        self.checkpoint, self._durable_count = checkpoint, len(self.windows)
        return answer

    def onRollback(self, checkpoint: Checkpoint | None) -> Answer:
        """Discard what is not durable."""
        assert checkpoint == self.checkpoint, f"rolled back to {checkpoint}, not {self.checkpoint}"
        self.rollback_count += 1
        del self.windows[self._durable_count :]
        return None

    def check(self) -> None:
        """Raise AssertionError at the first window that is out of order."""
        reached: dict[str, int] = {}
        newest: dict[str, Position] = {}
        last: tuple[int, str, int] = (0, "", 0)
        for database, scn, commit_us, positions in self.windows:
            reached[database] = max(reached.get(database, 0), commit_us)
            key = reached[database], database, scn
            assert key >= last, f"the window {key} came after {last}"
            last = key
            for position in positions:
                before = newest.get(database)
                assert before is None or position > before, f"{database}: {position} after {before}"
                newest[database] = position

    def _called(self, call: str) -> Result | None:
        self._call_count += 1
        return self._trouble(call, self._call_count)
