"""The open transactions that have written to suspended tables, for which dumps wait.

What a transaction wrote to a table while the publication did not give it has no events.  Only when
it has ended does a SELECT show these rows, or that there are none.
"""

from __future__ import annotations

import asyncio
import time

from databus.common.errors import UnsupportedChange
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable

WAIT_S = 2.0
"""How long dumps wait for one transaction, all tables together."""
_EVERY_S = 0.1


class OpenWriters:
    """Waits for the transactions that had written to a suspended table.

    Invariants:
        I1. ``wait`` returns only if every transaction has ended that had written to the table at
            the first ``wait`` after its last suspension.  Later ones do not matter: on a busy table
            there is always one.
        I2. One transaction holds up the dumps for WAIT_S at most, however many tables it has
            written to and however often they are tried.

    Owner: the source's loop.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._left: dict[str, set[str]] = {}
        self._outlasted: set[str] = set()

    def forget(self, source: str) -> None:
        """The table is suspended again, or resumed: the next ``wait`` is a first one."""
        self._left.pop(source, None)

    async def wait(self, table: PostgresTable) -> None:
        """Wait for the end of the transactions that have written to a suspended table.

        Raises:
            UnsupportedChange: one of them is still open; it is named.
        """
        deadline_s, before = time.monotonic() + WAIT_S, self._left.get(table.source)
        if before is None:
            before = await self._catalogue.writers(table)
        while left := before & await self._catalogue.writers(table):
            self._left[table.source] = left
            self._outlasted &= set().union(*self._left.values())
            if self._outlasted & left or time.monotonic() > deadline_s:
                self._outlasted |= left
                who = await self._catalogue.named(left)
                raise UnsupportedChange(
                    f"{table.source} waits for transactions that have written to it and are still "
                    f"open: {who}; let them end",
                    held_by=who,
                )
            await asyncio.sleep(_EVERY_S)
        self._left[table.source] = set()
