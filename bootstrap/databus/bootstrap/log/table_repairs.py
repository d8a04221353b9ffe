"""Tables that the relay has suspended are compared with the copy and repaired.

If no bootstrap server claims a suspended table, the relay empties and dumps it.  This module
claims it and compares it, and the relay dumps only the rows that differ, for all consumers.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.relay_api import RelayApi
from databus.bootstrap.log.seeding import SEEDED
from databus.common.errors import DatabusError, NotFound, UnknownSource
from databus.common.filters.stream_filter import matches

NOTE = "suspended"
_NAME_NOTE = "name"

Compare = Callable[[str], Awaitable[bool]]
"""Claims, compares and repairs a table; whether its copy is equal and the relay follows it."""

_LOG = logging.getLogger("databus.bootstrap.log.table_repairs")


def name_of(log: HotLog) -> str:
    """The name under which this log's server claims tables, ``bootstrap-`` and eight digits.

    It is stored with the log: a server that was restarted during a comparison finds its own claim.
    """
    name = log.note(_NAME_NOTE)
    if name is None:
        name = f"bootstrap-{secrets.token_hex(4)}"
        log.put_note(_NAME_NOTE, name)
    return str(name)


@dataclass(slots=True, eq=False)
class TableRepairs:
    """Repairs the tables that the relay has suspended.

    Invariants:
        I1. A table that was seen suspended is named in the log's note until its copy was compared,
            or until the relay's own dump of it has ended.
        I2. A table that cannot be repaired does not delay the others.

    Owner: the log writer of the database.
    """

    log: HotLog
    relay: RelayApi
    database: str
    patterns: tuple[str, ...]
    compare: Compare
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = name_of(self.log)

    def marks(self) -> dict[str, dict[str, Any]]:
        """By table: what the relay reported of it at the last request."""
        return dict(self.log.note(NOTE) or {})

    async def step(self) -> bool:
        """Query the relay once and repair what can be repaired; True if nothing is left.

        Raises:
            DatabusError: the relay does not answer.
        """
        try:
            answer = await self.relay.report(self.database, self.name, self.patterns)
        except NotFound:
            return True  # A relay of an earlier version.
        tables = {
            str(one["source"]): one
            for one in answer["tables"]
            if not self.patterns or matches(one["source"], self.patterns)
        }
        marks = self._marked(tables)
        for source in marks:
            await self._repair(source, tables.get(source))
        return not self.marks()

    def _marked(self, tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The marks, with the tables that are not followed now; those never seeded have none."""
        seeding = self.log.note("seeding") or {}
        before = self.marks()
        marks = dict(before)
        for source, table in tables.items():
            if source in marks or seeding.get(source, {}).get("state") == SEEDED:
                dump = table["dump"] or marks.get(source, {}).get("dump", "")
                names = ("state", "since_scn", "reason", "cure")
                marks[source] = {**{name: table[name] for name in names}, "dump": dump}
        if marks != before:
            self.log.put_note(NOTE, marks)
        return marks

    async def _repair(self, source: str, table: Mapping[str, Any] | None) -> None:
        if table is None and self.marks()[source]["dump"]:
            # The relay has emptied and dumped it, and the stream applies that to the copy.
            self._unmark(source)
            return
        if table is not None and not (table["is_free"] or self._was_left(table)):
            return
        try:
            if await self.compare(source):
                self._unmark(source)
        except UnknownSource as error:
            _LOG.info("%s of %s is gone: %s", source, self.database, error.message)
            if table is None:  # The stream brings the events that empty its copy.
                self._unmark(source)
        except DatabusError as error:
            _LOG.warning("%s of %s is not repaired: %s", source, self.database, error.message)

    def _was_left(self, table: Mapping[str, Any]) -> bool:
        """Whether this server claimed the table and ended before the repair did."""
        return bool(table["by"] == self.name)

    def _unmark(self, source: str) -> None:
        marks = self.marks()
        marks.pop(source, None)
        self.log.put_note(NOTE, marks)
