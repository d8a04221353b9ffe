"""Seeding: having every source dumped through the relay once, and knowing when it is whole.

A source is ``unseeded`` until a dump was asked for, ``dumping`` until the dump has ended and
the log has passed its end, then ``seeded``.  The dump's rows meet the events in the log; both
carry positions, so nothing is merged here.  After a gap of the log a source is ``repairing``
until its copy has been compared with the database and mended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from databus.bootstrap.log import HotLog
from databus.bootstrap.relays import RelayApi
from databus.common.checkpoint import ORIGIN, Position, decode_position
from databus.common.errors import DatabusError, NotFound
from databus.common.filters import matches

_LOG = logging.getLogger("databus.bootstrap.seeding")

UNSEEDED, DUMPING, REPAIRING, SEEDED = "unseeded", "dumping", "repairing", "seeded"
_ENDED_BADLY = ("failed", "cancelled")

Repair = Callable[[str], Awaitable[Position | None]]
"""Makes a source's copy equal to the database; the position from which on it is, or None if
it has to be tried again."""


class Seeder:
    """Brings all sources of one database to ``seeded``.

    Invariants:
        I1. A source is ``seeded`` only if every row that it had at some moment lies in the
            log, or was changed in the log after that moment.
        I2. What has been reached is kept in the log's notes, over restarts.

    Owner: the log writer of the database.
    """

    def __init__(
        self,
        log: HotLog,
        relay: RelayApi,
        database: str,
        patterns: tuple[str, ...],
        repair: Repair,
    ) -> None:
        self.log = log
        self._repair = repair
        self.relay = relay
        self.database = database
        self.patterns = patterns

    def states(self) -> dict[str, dict[str, Any]]:
        """By source: its state, dump and last error."""
        return dict(self.log.note("seeding") or {})

    async def step(self) -> bool:
        """Look at the relay once and do what is due; True when every source is seeded.

        Raises:
            DatabusError: the relay does not answer; nothing was changed.
        """
        document = await self.relay.sources(self.database)
        names = [item["name"] for item in document["sources"]]
        names = [name for name in names if not self.patterns or matches(name, self.patterns)]
        before = self.states()
        states = {**before, **{n: {"state": UNSEEDED} for n in names if n not in before}}
        newest = decode_position(document["max"])
        for dump in {one["dump"] for one in states.values() if one["state"] == DUMPING}:
            await self._follow(dump, states, newest)
        for name in [n for n, one in states.items() if one["state"] == REPAIRING and n in names]:
            end = await self._repair(name)
            if end is not None:
                states[name] = {"state": SEEDED, "end": end.to_json()}
                self.log.put_note("seeding", states)
        due = [name for name, one in states.items() if one["state"] == UNSEEDED and name in names]
        if due:
            await self._ask(due, states)
        if states != before:
            self.log.put_note("seeding", states)
        return bool(states) and all(one["state"] == SEEDED for one in states.values())

    async def _ask(self, names: list[str], states: dict[str, dict[str, Any]]) -> None:
        answer = await self.relay.start_dump(self.database, names)
        _LOG.info("dump %s of %s seeds %s", answer["id"], self.database, ", ".join(names))
        for name in names:
            error = states[name].get("error")
            states[name] = {"state": DUMPING, "dump": answer["id"], "rows": 0}
            if error:
                states[name]["error"] = error

    async def _follow(self, dump: str, states: dict[str, dict[str, Any]], newest: Position) -> None:
        """Take over what the relay says about a dump that was asked for."""
        answer: Mapping[str, Any]
        try:
            answer = await self.relay.dump(self.database, dump)
        except NotFound:
            answer = {"state": "failed", "error": f"the relay does not know dump {dump} any more"}
        for name, one in states.items():
            if one["state"] == DUMPING and one["dump"] == dump:
                states[name] = self._after(one, answer, newest)

    def _after(
        self, one: dict[str, Any], answer: Mapping[str, Any], newest: Position
    ) -> dict[str, Any]:
        state = str(answer["state"])
        if state in _ENDED_BADLY:
            error = str(answer.get("error") or state)
            _LOG.warning("dump %s %s: %s; it is asked for again", one["dump"], state, error)
            return {"state": UNSEEDED, "error": error}
        followed = {**one, "rows": answer.get("rows", 0)}
        if state != "completed":
            return followed
        # An empty table's dump writes nothing; then whatever the relay has now is after it.
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


async def try_step(seeder: Seeder) -> bool:
    """``step``, with a relay that does not answer taken for "not yet"."""
    try:
        return await seeder.step()
    except DatabusError as error:
        _LOG.warning("seeding of %s waits: %s", seeder.database, error.message)
        return False
