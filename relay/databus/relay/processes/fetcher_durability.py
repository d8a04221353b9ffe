"""Writes what a fetcher's restart relies on, in the order in which it relies on it.

It syncs the ring, writes the records beside it, and then acknowledges.  The fetcher decides
when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from databus.common.checkpoint import Position
from databus.common.errors import SyncFailed
from databus.relay.capture.intake import Intake
from databus.relay.dumps.dump_runner import DumpRunner
from databus.relay.dumps.resync import Resync
from databus.relay.processes.source_link import SourceLink
from databus.relay.ring.data_folder import DatabaseFolder, write_document
from databus.relay.sources import contract


class FetcherDurability:
    """Writes what was captured to disk, then acknowledges it.

    Invariants:
        I1. The source is acknowledged only up to a window that is on disk; in a cluster, while the
            lease holds, and up to what a follower has on disk.
        I2. No record on disk is ahead of the ring on disk, and the resume state is not ahead of
            the suspended tables.
        I3. After a failed sync of the ring nothing more is synced, recorded or acknowledged,
            because the kernel reports it once; ``stop`` is called, and ``failure`` has the reason.

    ``lock`` is held during a write: the ring must not be closed meanwhile.

    Owner: the fetcher's event loop.
    Raises: SyncFailed; StoreError for the records, which the next call writes again.
    """

    def __init__(
        self,
        folder: DatabaseFolder,
        link: SourceLink,
        tables: Resync,
        dumps: DumpRunner,
        stop: Callable[[], None],
        ackable: Callable[[Position], int] = lambda complete: complete.scn,
    ) -> None:
        self.lock = asyncio.Lock()
        self.failure: SyncFailed | None = None
        self.resume_state: contract.ResumeState | None = None
        self.synced_tail = -1
        self._folder = folder
        self._link = link
        self._tables = tables
        self._dumps = dumps
        self._stop = stop
        self._ackable = ackable
        self._stored_resume_state = ""
        self._unsaved_dumps = False
        self._durable: Position | None = None

    async def make(self, intake: Intake | None, *, acknowledges: bool = True) -> None:
        """Sync the ring if it is dirty, record the dumps' progress, acknowledge the source."""
        # Not to be cancelled: the ring must not be closed under the syncing thread.
        await asyncio.shield(asyncio.ensure_future(self._make(intake, acknowledges)))

    async def _make(self, intake: Intake | None, acknowledges: bool) -> None:
        async with self.lock:
            emitted = self._dumps.emitted
            resume_state = self.resume_text()
            tables = self._tables.unwritten()
            if intake is None:
                return
            complete = intake.complete
            await self._sync(intake)
            if tables is not None:
                # Before the resume state: a table that the source reads again is still named here.
                await asyncio.to_thread(self._tables.book.write, tables)
                self._tables.written(tables)
            if resume_state != self._stored_resume_state:
                # Not before the ring: the resume state must not be ahead of it.
                await asyncio.to_thread(
                    write_document, self._folder.resume_state, resume_state.encode()
                )
                self._stored_resume_state = resume_state
            self._unsaved_dumps |= self._dumps.settle(emitted)
            if self._unsaved_dumps:
                await self._keep_dumps()
                self._unsaved_dumps = False
            self._dumps.recorded(emitted)
        if acknowledges:
            await self._link.acknowledge(self._ackable(complete), self._durable)

    def resume_text(self) -> str:
        """The source's newest resume state as text; empty if it gave none."""
        state = self.resume_state
        return state.encode() if state is not None else self._stored_resume_state

    async def _sync(self, intake: Intake) -> None:
        tail = intake.ring.state.tail
        if tail == self.synced_tail:
            return
        try:
            self._durable = await asyncio.to_thread(intake.ring.sync)
        except SyncFailed as error:
            self.failure = error
            self._stop()
            raise
        self.synced_tail = tail

    async def save_dumps(self) -> None:
        """Write the dumps' records to disk."""
        async with self.lock:
            await self._keep_dumps()

    async def _keep_dumps(self) -> None:
        book = self._dumps.book
        await asyncio.to_thread(book.write, book.content())
