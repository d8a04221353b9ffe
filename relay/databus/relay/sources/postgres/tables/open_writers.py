"""The open transactions for which dumps of suspended tables wait.

What a transaction wrote to a table while the publication did not give it has no events.  Only when
it has ended does a SELECT show these rows, or that there are none.

A transaction that was open while the publication was altered is decoded with the publication that
it saw.  Until PostgreSQL 14.18, 15.13, 16.9 and 17.5 the process that sends the stream then keeps
this publication for later transactions, too: their changes do not come, and no error does.  With
such a server suspended tables wait until these transactions have ended, the stream has passed them,
and another process sends it.
"""

from __future__ import annotations

import asyncio
import time

from databus.common.errors import SourceUnavailable, UnsupportedChange
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable
from databus.relay.sources.postgres.tables.publications import (
    Publication,
    PublishedTable,
    PublishedTables,
    Renewal,
)

WAIT_S = 2.0
"""How long dumps wait for one transaction, all tables together."""
_EVERY_S = 0.1
_DONE = Renewal()


class OpenWriters:
    """Waits for the transactions that had written to a suspended table.

    Invariants:
        I1. ``wait`` returns only if every transaction has ended that had written to the table at
            the first ``wait`` after its last suspension.  Later ones do not matter: on a busy table
            there is always one.
        I2. It returns only if the stream does not have to be connected again.
        I3. One transaction holds up the dumps for WAIT_S at most, however many tables it has
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

    async def may_be_kept(
        self, table: PostgresTable, known: PublishedTable | None, publication: Publication
    ) -> bool:
        """Whether the server's process may keep what the publication gave of a table before.

        It reads the publication again with any transaction, and a table's entry of it with one that
        has written to the table.  ``known``: the table at the check before.
        """
        if self._catalogue.has_fresh_senders:
            return False
        if known is not None and known.version == publication.version_of(table):
            return False
        if known is not None and publication.was_altered(known):
            return True
        return bool(await self._catalogue.writers(table))

    async def renewal(
        self, published: PublishedTables, *, is_altered: bool, resolved: int
    ) -> PublishedTables:
        """The publication of a discovery, with what the stream waits for.

        ``is_altered``: it is another one than at the discovery before.  ``resolved``: the scn up to
        which the stream has every commit.
        """
        catalogue = self._catalogue
        if is_altered and not catalogue.has_fresh_senders:
            published = published.renewed(open_xid=await catalogue.next_xid(), passed_scn=0)
        waits = published.renewal
        if waits.open_xid and await catalogue.have_ended(waits.open_xid):
            published = published.renewed(open_xid=0, passed_scn=await catalogue.written_scn())
            waits = published.renewal
        if waits.passed_scn and resolved >= waits.passed_scn:
            published = published.renewed(passed_scn=0, begin_scn=waits.passed_scn)
        return published

    async def wait(self, table: PostgresTable, renewal: Renewal = _DONE) -> None:
        """Wait for the end of the transactions that have written to a suspended table.

        Raises:
            SourceUnavailable: the stream has to be connected again first.
            UnsupportedChange: one of the transactions is still open; it is named.
        """
        if renewal.is_pending:
            raise SourceUnavailable(
                f"{table.source} is read once the stream is connected again, behind the "
                "transactions that were open when the publication was altered"
            )
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
