"""Suspended tables: those whose rows the stream cannot follow.

A suspended table does not hold up the others, and its changes are left out, never guessed.  The
status names it, and a restart does not end its suspension.  It resumes when a reader reads the
whole table: a dump brings its rows, and a comparison with repair also deletes rows that are gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from databus.common.errors import FormatError, SourceUnavailable


@dataclass(frozen=True, slots=True)
class TableSuspension:
    """Since which transaction a table is suspended, and why.

    ``rows_remain``: each row that the stream delivered still exists under its key, with other
    values.  The table resumes after this transaction, and a dump brings the values.
    ``waits_for``: what has to be done before the table can be read; empty: nothing.
    ``is_gone``: the table was dropped.  The relay empties it at its readers and then calls
    ``forget`` of the source.
    """

    since_scn: int
    why: str
    rows_remain: bool = False
    waits_for: str = ""
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class SuspensionState:
    """The resume state of a source that stores only its suspended tables."""

    suspended: Mapping[str, TableSuspension] = field(default_factory=dict)

    def encode(self) -> str:
        """As JSON."""
        suspended = sorted(self.suspended.items())
        return json.dumps(
            {"stopped": {name: [stop.since_scn, stop.why] for name, stop in suspended}}
        )


def decode_suspensions(text: str) -> SuspensionState:
    """The resume state in a text that ``SuspensionState.encode`` made.

    Raises:
        FormatError: the text is no such resume state.
    """
    try:
        return SuspensionState(
            {
                str(name): TableSuspension(int(since_scn), str(why))
                for name, (since_scn, why) in json.loads(text)["stopped"].items()
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{text[:200]!r} is no state of suspended tables: {error}") from error


def _no_wake() -> None:
    """The stream looks for requests by itself."""


class SuspendedTables:
    """The tables that the stream leaves out.

    Invariants:
        I1. The stream has no change of a table in ``suspensions`` committed after ``since_scn``.
        I2. A table resumes between two transactions.
        I3. ``suspended_count`` grows with every table that is suspended.

    Owner: the task that reads the stream; another task of its loop may call ``request_resume``.
    """

    def __init__(self, suspensions: Mapping[str, TableSuspension]) -> None:
        self.suspensions = dict(suspensions)
        self.suspended_count = 0
        self._requested: set[str] = set()
        self._resumed_from: dict[str, TableSuspension] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._is_streamed = False
        self._wake_stream: Callable[[], None] = _no_wake

    def leaves_out(self, source: str, scn: int) -> bool:
        """Whether the table's changes at ``scn`` are left out.

        They are not in the transaction that suspended it: if that is read again, its decoder
        suspends the table at the same row again.
        """
        stop = self.suspensions.get(source)
        return stop is not None and scn > stop.since_scn

    @property
    def left_out(self) -> set[str]:
        """The tables whose changes are left out: those without ``rows_remain``."""
        return {source for source, stop in self.suspensions.items() if not stop.rows_remain}

    def suspend(
        self, source: str, scn: int, why: str, *, rows_remain: bool = False, waits_for: str = ""
    ) -> None:
        """Suspend a table; the first reason counts, unless that one has ``rows_remain``."""
        before = self.suspensions.get(source)
        if before is None or (before.rows_remain and not rows_remain):
            self.suspensions[source] = TableSuspension(scn, why, rows_remain, waits_for)
            self.suspended_count += 1
            if rows_remain:
                self._requested.add(source)
            else:
                self._requested.discard(source)

    def suspend_again(self, source: str, scn: int, why: str, *, waits_for: str = "") -> None:
        """Suspend a resumed table because reading the whole table failed.

        It stays suspended since the scn of its first suspension.
        """
        first = self._resumed_from.get(source)
        self.suspend(source, scn if first is None else first.since_scn, why, waits_for=waits_for)

    def wait_for(self, source: str, what: str) -> None:
        """Record what has to be done before a suspended table can be read; "": nothing."""
        if (stop := self.suspensions.get(source)) is not None:
            self.suspensions[source] = replace(stop, waits_for=what)

    def resume_emptied(self, source: str) -> None:
        """Resume a table that was emptied: from here on the stream has all of it."""
        self.suspensions.pop(source, None)
        self._resumed_from.pop(source, None)
        self._requested.discard(source)
        self._wake()

    def request_resume(self, source: str) -> None:
        """Request that a table resumes after the transaction that is being read."""
        if source in self.suspensions:
            self._requested.add(source)

    @property
    def has_requests(self) -> bool:
        """Whether ``resume_requested`` has something to do."""
        return bool(self._requested)

    def resume_requested(self) -> None:
        """Resume the requested tables."""
        for source in self._requested:
            if source in self.suspensions:
                self._resumed_from[source] = self.suspensions.pop(source)
        self._requested.clear()
        self._wake()

    async def resumption(self, source: str) -> None:
        """Request a table, and return once the stream includes it again.

        Raises:
            SourceUnavailable: the stream is not connected, or it ended first, or the table was
                suspended again.
        """
        self.request_resume(source)
        self._wake_stream()
        while source in self.suspensions:
            if source not in self._requested:
                raise SourceUnavailable(
                    f"{source} was suspended again: {self.suspensions[source].why}"
                )
            if not self._is_streamed:
                raise SourceUnavailable(
                    f"{source} resumes with the stream, which is not connected now"
                )
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def withdraw(self, source: str) -> None:
        """Cancel the request for a table: it was made before the newest suspension."""
        self._requested.discard(source)
        self._wake()

    def end(self) -> None:
        """The stream has ended: no table can resume."""
        self._is_streamed, self._wake_stream = False, _no_wake
        self._wake()

    def begin(self, wake_stream: Callable[[], None] = _no_wake) -> None:
        """The stream begins: requested tables can resume.

        ``wake_stream``: has a stream that waits for its server look for requests.
        """
        self._is_streamed, self._wake_stream = True, wake_stream

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def document(self) -> dict[str, dict[str, Any]]:
        """For the status: since which scn and why, by table."""
        return {
            source: {"since_scn": stop.since_scn, "why": stop.why}
            for source, stop in self.suspensions.items()
        }

    def warnings(self) -> list[str]:
        """One message for each suspended table."""
        return [
            f"{source} is suspended: its changes after scn {stop.since_scn} are left out: "
            f"{stop.why}. {stop.waits_for or 'Fix that'}, then run databus verify --repair, or "
            "dump the table"
            for source, stop in sorted(self.suspensions.items())
        ]
