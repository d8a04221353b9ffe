"""Tables that have stopped alone: of which the stream cannot say what their rows are.

A table of this kind does not hold up the others, and nothing of it is guessed.  It is named in
the status and remembered over restarts, and it begins again when somebody reads all of it: then
a dump brings its rows, or a comparison with repair also deletes what is gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from databus.common.errors import FormatError, SourceUnavailable


@dataclass(frozen=True, slots=True)
class TableSuspension:
    """Since which transaction a table is passed over, and why.

    ``keeps_rows``: each row that the stream gave is there still, under its key, with other
    values.  So the stream resumes behind this transaction, and a dump brings the values.
    ``waits_for``: what has to be done before anybody can read the table; empty: nothing.
    ``is_gone``: there is no table of this name any more.  Its readers are emptied, and then the
    source is asked to ``forget`` it.
    """

    since_scn: int
    why: str
    keeps_rows: bool = False
    waits_for: str = ""
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class SuspensionState:
    """The memo of a source that has nothing else to remember."""

    stopped: Mapping[str, TableSuspension] = field(default_factory=dict)

    def encode(self) -> str:
        """As JSON."""
        stopped = sorted(self.stopped.items())
        return json.dumps({"stopped": {name: [stop.since_scn, stop.why] for name, stop in stopped}})


def decode_stops(text: str) -> SuspensionState:
    """The memo in a text that ``SuspensionState.encode`` made.

    Raises:
        FormatError: it is no memo.
    """
    try:
        return SuspensionState(
            {
                str(name): TableSuspension(int(since_scn), str(why))
                for name, (since_scn, why) in json.loads(text)["stopped"].items()
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{text[:200]!r} is no memo of stopped tables: {error}") from error


class SuspendedTables:
    """The tables that are passed over.

    Invariants:
        I1. Of a table in ``stops`` nothing is packed that was committed after ``since_scn``.
        I2. What is to begin again does so between two transactions.
        I3. ``suspended_count`` grows with every table that is suspended.

    Owner: the task that reads the stream; ``ask_for`` may be called beside it.
    """

    def __init__(self, stops: Mapping[str, TableSuspension]) -> None:
        self.stops = dict(stops)
        self.suspended_count = 0
        self._asked: set[str] = set()
        self._taken_up: dict[str, TableSuspension] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._is_streamed = False

    def passes_over(self, source: str, scn: int) -> bool:
        """Whether the table's changes at ``scn`` are not to be read.

        In the very transaction in which it stopped the same place is found again.
        """
        stop = self.stops.get(source)
        return stop is not None and scn > stop.since_scn

    @property
    def passed_over(self) -> set[str]:
        """The tables of which nothing is read: those that do not keep their rows."""
        return {source for source, stop in self.stops.items() if not stop.keeps_rows}

    def stop(
        self, source: str, scn: int, why: str, *, keeps_rows: bool = False, waits_for: str = ""
    ) -> None:
        """Pass over a table from here on; the first reason counts, unless it keeps the rows."""
        before = self.stops.get(source)
        if before is None or (before.keeps_rows and not keeps_rows):
            self.stops[source] = TableSuspension(scn, why, keeps_rows, waits_for)
            self.suspended_count += 1
            if keeps_rows:
                self._asked.add(source)
            else:
                self._asked.discard(source)

    def stop_again(self, source: str, scn: int, why: str, *, waits_for: str = "") -> None:
        """Pass over a table that began again, for nobody could read all of it.

        It has not been whole since it stopped first.
        """
        first = self._taken_up.get(source)
        self.stop(source, scn if first is None else first.since_scn, why, waits_for=waits_for)

    def wait_for(self, source: str, what: str) -> None:
        """A suspended table cannot be read before this is done; "": now it can."""
        if (stop := self.stops.get(source)) is not None:
            self.stops[source] = replace(stop, waits_for=what)

    def follow_again(self, source: str) -> None:
        """A table was emptied: from here on the stream has all of it."""
        self.stops.pop(source, None)
        self._taken_up.pop(source, None)
        self._asked.discard(source)
        self._wake()

    def ask_for(self, source: str) -> None:
        """Let a table begin again after the transaction that is being read."""
        if source in self.stops:
            self._asked.add(source)

    @property
    def is_asked(self) -> bool:
        """Whether ``begin_again`` has something to do."""
        return bool(self._asked)

    def begin_again(self) -> None:
        """The tables that were asked for are no longer passed over."""
        for source in self._asked:
            if source in self.stops:
                self._taken_up[source] = self.stops.pop(source)
        self._asked.clear()
        self._wake()

    async def resumption(self, source: str) -> None:
        """Ask for a table, and return once the stream reads it again.

        Raises:
            SourceUnavailable: the stream is not connected, or has ended before, or the table
                was suspended again.
        """
        self.ask_for(source)
        while source in self.stops:
            if source not in self._asked:
                raise SourceUnavailable(f"{source} was suspended again: {self.stops[source].why}")
            if not self._is_streamed:
                raise SourceUnavailable(
                    f"{source} resumes with the stream, which is not connected now"
                )
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def withdraw(self, source: str) -> None:
        """What has asked for a table did not know what is known by now: it has to ask again."""
        self._asked.discard(source)
        self._wake()

    def end(self) -> None:
        """The stream has ended: nothing resumes with it any more."""
        self._is_streamed = False
        self._wake()

    def begin(self) -> None:
        """The stream begins: what is asked for can resume."""
        self._is_streamed = True

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def document(self) -> dict[str, dict[str, Any]]:
        """For the status: since when and why, by table."""
        return {
            source: {"since_scn": stop.since_scn, "why": stop.why}
            for source, stop in self.stops.items()
        }

    def warnings(self) -> list[str]:
        """For people."""
        return [
            f"{source} has stopped: its changes after scn {stop.since_scn} are passed over: "
            f"{stop.why}. {stop.waits_for or 'Mend that'}, then databus verify --repair, or dump "
            "the table"
            for source, stop in sorted(self.stops.items())
        ]
