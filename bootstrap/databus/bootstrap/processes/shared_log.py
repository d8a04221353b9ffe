"""The log of one database in a cluster of bootstrap servers over one store.

One server has the lease of the database's log writer: it seals, seeds and repairs.  Each other one
is a standby.  With a store on S3 a standby has a log of its own, a copy: it reads the relays as the
writer does, and drops what the runs have.  So it serves what is not sealed yet, and takes over
without a gap.  With a store in a folder the servers share the log too, on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from databus.bootstrap.log.log_adoption import adopt
from databus.bootstrap.processes.log_writer import LogWriter
from databus.bootstrap.processes.writer_leases import log_lease, store_lease
from databus.bootstrap.runs.run_storage import Lease
from databus.common.errors import StoreBusy

_LOG = logging.getLogger("databus.bootstrap.processes.shared_log")

LOOK_S = 2.0
"""Interval at which a standby looks at the store and for the lease, and a writer at its lease."""


class SharedLog:
    """Writes a log while this process has the leases, and is a standby otherwise.

    Invariants:
        I1. Only the holder of the store's lease seals, seeds and repairs.  One that has lost it is
            refused by the store (its number is too low), and becomes a standby.
        I2. Only the holder of the log's lease changes the log.
        I3. Before it writes, the log continues the runs, and has the record of the writer before.

    Owner: one event loop.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._waits_for = ""
        self._lease: Lease | None = None

    async def run(self, *, leads: bool = True) -> None:
        """Write or stand by until cancelled; without ``leads``, never write."""
        while True:
            with contextlib.ExitStack() as held:
                try:
                    await self._writer.alone(held.enter_context, log_lease(self._writer.folder))
                    await self._stand_by(held, leads=leads)
                    await self._write()
                except StoreBusy as error:
                    self._wait_for(error)
                except Exception as error:
                    self._writer.report(error)
            await asyncio.sleep(LOOK_S)

    async def _stand_by(self, held: contextlib.ExitStack, *, leads: bool) -> None:
        """Copy the log until the store's lease is ours, which goes to ``held``."""
        writer = self._writer
        copying: asyncio.Task[None] | None = None
        try:
            while not leads or not await self._takes(held):
                await writer.alone(self._adopt)
                if copying is None and not writer.log.is_new():
                    copying = asyncio.create_task(writer.copy())
                await asyncio.sleep(LOOK_S)
        finally:
            if copying is not None:
                copying.cancel()
                await asyncio.wait({copying})
        await writer.alone(self._adopt)

    async def _takes(self, held: contextlib.ExitStack) -> bool:
        writer = self._writer
        try:
            await writer.alone(self._take, held)
        except StoreBusy as error:
            self._wait_for(error)
            return False
        _LOG.info("log of %s: this server writes it", writer.database)
        return True

    def _take(self, held: contextlib.ExitStack) -> None:
        writer = self._writer
        self._lease = held.enter_context(store_lease(writer.folder, writer.store))

    def _wait_for(self, error: StoreBusy) -> None:
        """Log once which process has the lease."""
        self._writer.report_nothing()
        if self._waits_for != error.message.partition(",")[0]:
            self._waits_for = error.message.partition(",")[0]
            _LOG.info("log of %s: standing by; %s", self._writer.database, error.message)

    def _adopt(self) -> None:
        writer = self._writer
        if writer.store.storage.folder is None:
            adopt(writer.log, writer.store, writer.database, time.time_ns() // 1000)

    async def _write(self) -> None:
        """Write until the lease is lost.

        Raises:
            StoreBusy: it is.
        """
        self._waits_for = ""
        writing = asyncio.create_task(self._writer.write())
        try:
            while not writing.done():
                await asyncio.wait({writing}, timeout=LOOK_S)
                if self._lease is not None:
                    self._lease.check()
            writing.result()
        finally:
            writing.cancel()
            await asyncio.wait({writing})
