"""Seeding: every source is dumped through the relay once, and a record of which are whole.

A source is ``unseeded`` until a dump was requested, ``dumping`` until the dump has ended and
the log has passed its end, then ``seeded``.  The rows of the dump and the events in the log
have positions, so nothing is merged here.  After a gap of the log a source is ``repairing``
until its copy has been compared with the database and repaired.  A source that the relay cannot
read any more, because its table was dropped or lost its key, is ``gone`` until a dump succeeds.

A dump ends with the relay that makes it.  Rows that it has read and that are in the log are not
read again: the next dump begins after the last of their keys.

A source that cannot be read does not delay the others: sources are requested together, but one
whose dump or repair failed is retried by itself, after a growing back-off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.relay_api import RelayApi
from databus.common.checkpoint import ORIGIN, Position, decode_position
from databus.common.errors import DatabusError, NotFound, UnknownSource
from databus.common.filters.stream_filter import matches

_LOG = logging.getLogger("databus.bootstrap.log.seeding")

UNSEEDED, DUMPING, REPAIRING, SEEDED = "unseeded", "dumping", "repairing", "seeded"
GONE = "gone"
_ENDED_BADLY = ("failed", "cancelled")
AGAIN_S = 5.0
MOST_AGAIN_S = 300.0
MOST_IDLE_AGAIN_S = 30.0
"""The longest back-off after a dump that read no row of the source, which costs little."""
NO_SOURCE = {"source": ""}
ROWS_EVERY_S = 1.0
"""Interval at which the rows of a running dump are stored: the states of all sources are one
document."""

Repair = Callable[[str], Awaitable[Position | None]]
"""Makes a source's copy equal to the database; the position at which it is equal, or None if it
must be retried."""


@dataclass(slots=True, eq=False)
class Seeder:
    """Brings all sources of one database to ``seeded``.

    Invariants:
        I1. A source is ``seeded`` only if every row that it had at some moment lies in the
            log, or was changed in the log after that moment.
        I2. Progress is stored in the log's notes and survives restarts.
        I3. A source that cannot be read delays the others by one dump at most.
        I4. No dump is requested before the log has reached the position that the relay's stream had
            at the start: the rows of a dump would overwrite the ring before a writer at its oldest
            position could read it, and that loss would need another dump.
        I5. The relay learns how far the log is, and a dump does not overwrite what the log has not
            read; a dump that stopped waiting resumes where it was.

    Owner: the log writer of the database, from one start of its reading to the next.
    """

    log: HotLog
    relay: RelayApi
    database: str
    patterns: tuple[str, ...]
    repair: Repair
    _tail: Position | None = field(default=None, init=False)
    _shows_rows: bool = field(default=True, init=False)
    _rows_due_s: float = field(default=0.0, init=False)
    _seen: dict[str, list[Any]] = field(default_factory=dict, init=False)
    """By source, the last key that its dump had read at the last look, and whether it was done."""

    def is_dumping(self) -> bool:
        """Whether a dump is running, or the log has not reached its end."""
        return bool(self._dumps(self.states()))

    def states(self) -> dict[str, dict[str, Any]]:
        """By source: its state, dump and last error."""
        return dict(self.log.note("seeding") or {})

    async def step(self) -> bool:
        """Query the relay once and do what is due; True when every source is seeded.

        Raises:
            DatabusError: the relay does not answer; earlier progress is stored.
        """
        document = await self.relay.sources(self.database)
        names = [item["name"] for item in document["sources"]]
        names = [name for name in names if not self.patterns or matches(name, self.patterns)]
        self._shows_rows = time.monotonic() >= self._rows_due_s
        if self._shows_rows:
            self._rows_due_s = time.monotonic() + ROWS_EVERY_S
        before = self.states()
        states = {**before, **{n: {"state": UNSEEDED} for n in names if n not in before}}
        try:
            await self._dump(names, states, decode_position(document["max"]))
        finally:
            if states != before:
                self.log.put_note("seeding", states)
        for name in [name for name in names if states[name]["state"] == REPAIRING]:
            await self._repair_source(name)
        states = self.states()
        return is_whole(states)

    async def give_up(self) -> None:
        """Cancel the running dumps: the log has lost a part of them."""
        for dump in self._dumps(self.states()):
            try:
                await self.relay.cancel_dump(self.database, dump)
            except DatabusError as error:
                _LOG.warning("dump %s of %s: %s", dump, self.database, error.message)

    @staticmethod
    def _dumps(states: Mapping[str, Mapping[str, Any]]) -> set[str]:
        return {one["dump"] for one in states.values() if one["state"] == DUMPING}

    async def _dump(
        self, names: list[str], states: dict[str, dict[str, Any]], newest: Position
    ) -> None:
        """Follow the requested dumps, and request those that are due."""
        for dump in self._dumps(states):
            await self._follow(dump, states, newest)
        self._tail = self._tail or newest
        if self.log.state().last < self._tail:
            return
        waiting = [name for name in names if states[name]["state"] in (UNSEEDED, GONE)]
        due = [name for name in waiting if _is_time(states[name])]
        await self._start_dump([name for name in due if "tries" not in states[name]], states)
        for name in due:
            if "tries" in states[name]:
                await self._start_dump([name], states)

    async def _repair_source(self, name: str) -> None:
        """Repair a source that is ``repairing``; a failure is recorded and the repair retried."""
        one = self.states()[name]
        if one["state"] != REPAIRING or not _is_time(one):
            return
        try:
            end = await self.repair(name)
        except DatabusError as error:
            _LOG.warning("repair of %s: %s; it is retried", name, error.message)
            if not error.retry:
                self._note(name, _failed(one, error.message))
            return
        if end is not None:
            self._note(name, {"state": SEEDED, "end": end.to_json()})

    def _note(self, name: str, one: dict[str, Any]) -> None:
        self.log.put_note("seeding", {**self.states(), name: one})

    async def _start_dump(self, names: list[str], states: dict[str, dict[str, Any]]) -> None:
        if not names:
            return
        try:
            after = {name: states[name]["had"][0] for name in names if "had" in states[name]}
            answer = await self.relay.start_dump(self.database, names, self.log.state().last, after)
        except DatabusError as error:
            if error.retry:
                raise
            for name in names:
                states[name] = _failed(states[name], error.message)
            return
        _LOG.info("dump %s of %s seeds %s", answer["id"], self.database, ", ".join(names))
        for name in names:
            retained = {k: v for k, v in states[name].items() if k in ("error", "tries", "had")}
            states[name] = {**retained, "state": DUMPING, "dump": answer["id"], "rows": 0}

    async def _follow(self, dump: str, states: dict[str, dict[str, Any]], newest: Position) -> None:
        """Take over the state that the relay reports of a requested dump."""
        answer: Mapping[str, Any]
        is_lost = False
        try:
            last = self.log.state().last
            answer = await self.relay.dump(self.database, dump, last)
            if answer["state"] == "failed" and "reader" in (answer.get("error") or {}):
                answer = await self.relay.dump(self.database, dump, last, resume=True)
        except NotFound:
            detail = f"the relay has no dump {dump} any more"
            answer = {"state": "failed", "error": {"detail": detail, "failed_at": NO_SOURCE}}
            is_lost = True
        is_lost = is_lost or answer["state"] == "cancelled"
        culprits = _culprits(answer)
        tables = {table["source"]: table for table in answer.get("tables") or ()}
        for name, one in states.items():
            if one["state"] == DUMPING and one["dump"] == dump:
                is_to_blame = not culprits or name in culprits
                if not is_lost:
                    one = self._in_log(name, one, tables.get(name, {}), newest)
                found = self._after(name, one, answer, newest, is_to_blame)
                # Another failure may be about the key itself.
                if is_lost and found["state"] == UNSEEDED and "had" in one:
                    found["had"] = one["had"]
                states[name] = found

    def _in_log(
        self, name: str, one: dict[str, Any], table: Mapping[str, Any], newest: Position
    ) -> dict[str, Any]:
        """A dumped source with the last key up to which its rows are in the log.

        What the last look showed was in the relay's ring before it was at ``newest``.
        """
        seen = self._seen.pop(name, None)
        if "last_key" in table:
            self._seen[name] = [table["last_key"], bool(table["done"])]
        is_due = self._shows_rows or (seen is not None and seen[1])
        if seen is None or not seen[0] or not is_due or self.log.state().window < newest:
            return one
        return {**one, "had": seen, **({"end": newest.to_json()} if seen[1] else {})}

    def _after(
        self,
        name: str,
        one: dict[str, Any],
        answer: Mapping[str, Any],
        newest: Position,
        is_to_blame: bool,
    ) -> dict[str, Any]:
        state = str(answer["state"])
        if one.get("had", (None, False))[1]:
            return {"state": SEEDED, "dump": one["dump"], "rows": one["rows"], "end": one["end"]}
        if state in _ENDED_BADLY:
            error = _words(answer, name)
            _LOG.warning("dump %s %s: %s; it is requested again", one["dump"], state, error)
            if not is_to_blame:
                return {"state": UNSEEDED, "error": error}
            is_gone = (answer.get("error") or {}).get("code") == UnknownSource.code
            tables = answer.get("tables") or []
            read_rows = any(table["rows"] for table in tables if table["source"] == name)
            failed = _failed(one, error, read_rows=read_rows)
            return {**failed, **({"state": GONE} if is_gone else {})}
        if state != "completed" and not self._shows_rows:
            return one
        followed = {**one, "rows": answer.get("rows", 0)}
        if state != "completed":
            return followed
        # An empty table's dump writes nothing; then the relay's newest position is after it.
        end = decode_position(answer["end"]) if answer.get("end") else newest
        followed["end"] = one.get("end") or end.to_json()
        reached = decode_position(followed["end"])
        if self.log.state().window >= reached or reached == ORIGIN:
            return {
                "state": SEEDED,
                "dump": one["dump"],
                "rows": followed["rows"],
                "end": followed["end"],
            }
        return followed


def is_whole(states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether every source that can be read is seeded."""
    found = {str(one.get("state")) for one in states.values()}
    return SEEDED in found and found <= {SEEDED, GONE}


def _failed(one: Mapping[str, Any], error: str, *, read_rows: bool = True) -> dict[str, Any]:
    """A source that is retried by itself: at once, then after a growing back-off."""
    tries = int(one.get("tries", 0)) + 1
    longest_s = MOST_AGAIN_S if read_rows else MOST_IDLE_AGAIN_S
    pause_s = min(AGAIN_S * 2 ** min(tries - 2, 20), longest_s) if tries > 1 else 0.0
    state = REPAIRING if one["state"] == REPAIRING else UNSEEDED
    again_us = time.time_ns() // 1000 + int(pause_s * 1e6)
    return {"state": state, "error": error, "tries": tries, "again_us": again_us}


def _is_time(one: Mapping[str, Any]) -> bool:
    again_us: int = one.get("again_us", 0)
    return time.time_ns() // 1000 >= again_us


def _culprits(answer: Mapping[str, Any]) -> set[str]:
    """The sources that a dump could not read; none if the answer does not name them."""
    error = answer.get("error")
    if not isinstance(error, Mapping):
        return set()
    at = error.get("failed_at")
    return set(error.get("unread") or ([str(at["source"])] if at else []))


def _words(answer: Mapping[str, Any], name: str) -> str:
    error = answer.get("error")
    if isinstance(error, Mapping):
        if why := (error.get("unread") or {}).get(name):
            return str(why)
        return str(error.get("detail") or error.get("title") or error)
    return str(error or answer["state"])


async def try_step(seeder: Seeder) -> bool:
    """``step``; a relay that does not answer counts as "not yet"."""
    try:
        return await seeder.step()
    except DatabusError as error:
        _LOG.warning("seeding of %s waits: %s", seeder.database, error.message)
        return False
