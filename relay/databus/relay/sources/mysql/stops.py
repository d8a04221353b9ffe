"""Tables that have stopped alone: of which the stream cannot say what their rows are.

A table of this kind does not hold up the others, and nothing of it is guessed.  It is named in
the status and remembered over restarts, and it begins again when somebody reads all of it: then
a dump brings its rows, or a comparison with repair also deletes what is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from databus.common.errors import UnsupportedChange


class TableUncertain(UnsupportedChange):
    """What a change of one table means cannot be known; those of other tables can."""

    code = "table_uncertain"
    hint = "The table has stopped alone; see docs/failover.md for how it is synchronised again."


@dataclass(frozen=True, slots=True)
class Stop:
    """Since which transaction a table is passed over, and why."""

    since_scn: int
    why: str


class StoppedTables:
    """The tables that are passed over.

    Invariants:
        I1. Of a table in ``stops`` nothing is packed that was committed after ``since_scn``.
        I2. What is to begin again does so between two transactions.

    Owner: the task that reads the stream; ``ask_for`` may be called beside it.
    """

    def __init__(self, stops: Mapping[str, Stop]) -> None:
        self.stops = dict(stops)
        self._asked: set[str] = set()

    def passes_over(self, source: str, scn: int) -> bool:
        """Whether the table's changes at ``scn`` are not to be read.

        In the very transaction in which it stopped the same place is found again.
        """
        stop = self.stops.get(source)
        return stop is not None and scn > stop.since_scn

    def stop(self, source: str, scn: int, why: str) -> None:
        """Pass over a table from here on; the first reason counts."""
        self.stops.setdefault(source, Stop(scn, why))

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
            self.stops.pop(source, None)
        self._asked.clear()

    def warnings(self) -> list[str]:
        """For people."""
        return [
            f"{source} has stopped: its changes after scn {stop.since_scn} are passed over: "
            f"{stop.why}. Mend that, then databus verify --repair, or dump the table"
            for source, stop in sorted(self.stops.items())
        ]


def named_in(statement: str, tables: Iterable[tuple[str, str]]) -> list[str]:
    """The sources whose table's name is a word of a statement; ``tables`` are (source, name)."""
    words = set(re.findall(r"[\w$]+", statement.lower()))
    return [source for source, name in tables if name.lower() in words]
