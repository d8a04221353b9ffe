"""Reads the replication slot and yields batches of windows until the connection ends."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace

import asyncpg
import numpy as np

from databus.common.errors import DatabusError, FormatError, SourcePositionLost, SourceUnavailable
from databus.relay.sources.announced_schemas import AnnouncedSchemas
from databus.relay.sources.contract import Batch
from databus.relay.sources.postgres.protocol import pgoutput_messages
from databus.relay.sources.postgres.protocol.lsn import flush_lsn, format_lsn
from databus.relay.sources.postgres.protocol.postgres_settings import PostgresSettings
from databus.relay.sources.postgres.protocol.replication_connection import (
    WAITING,
    WORK_SQL,
    PostgresError,
    ReplicationConnection,
    error_of,
)
from databus.relay.sources.postgres.stream.postgres_lineage import (
    PostgresResumeState,
    commits_between,
    create_slot,
)
from databus.relay.sources.postgres.stream.table_names import TableNames
from databus.relay.sources.postgres.stream.window_assembler import (
    PART_BYTES,
    WindowAssembler,
)
from databus.relay.sources.postgres.tables.postgres_catalogue import (
    Catalogue,
    start_replication_command,
)
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable
from databus.relay.sources.postgres.tables.publications import PublishedTables
from databus.relay.sources.postgres.tables.table_definitions import DefinitionGap
from databus.relay.sources.suspended_tables import SuspendedTables

_KEEP_ALIVE_S = 1.0
# The server answers a request for a reply, except while it decodes a large transaction.
_REQUEST_REPLY_AFTER_S = 10.0
_SILENCE_S = 60.0
_QUIET_S = 1.0
_RENEWED = (
    "the publication was altered beside open transactions: the relay connects again, for this "
    "version of PostgreSQL continues with the publication that such a transaction saw"
)
_RESOLVED_S = 0.05
_BEHIND_US = 20_000
_POLL_S = 0.01
_BUSY_TRIES = 30
_BUSY_PAUSE_S = 0.1
_IN_USE = "55006"
_LOST_STATES = {
    "42704": "the slot or the publication does not exist",
    "55000": "the slot can no longer be read",
    "58P01": "the log that it needs has been removed",
}

_length = struct.Struct("!I").unpack_from
_DATA, _XLOG, _KEEPALIVE, _ERROR = ord("d"), ord("w"), ord("k"), ord("E")
_IGNORED = frozenset(b"SN")
_BODY = 6
"""Offset of the content in a CopyData message: after its type, length and content type."""
_CHANGE = _BODY + pgoutput_messages.XLOG_HEADER_BYTES

_log = logging.getLogger(__name__)


class SlotStream:
    """One run of the slot's stream.

    Invariants:
        I1. The flush position sent to the server is that of the last ``ack``, never more.
        I2. The server gets a status message every second, even while no batch is taken.
        I3. The batch with a new suspension comes before the end of the transaction that caused it.

    ``resume_state`` and ``suspended`` are those at the start of this run.  ``discovery_error`` is
    the error of the last discovery of tables; empty if it succeeded.

    Owner: one task iterates ``batches``; the rest is called in the same loop.
    Raises: SourcePositionLost, SourceUnavailable, FormatError.
    """

    def __init__(
        self,
        settings: PostgresSettings,
        globs: tuple[str, ...],
        catalogue: Catalogue,
        discover: Callable[[], Awaitable[None]],
        resume_state: PostgresResumeState,
        suspended: SuspendedTables,
        *,
        published: Callable[[], PublishedTables],
        redefined: Callable[[PostgresTable], Awaitable[DefinitionGap | None]],
        is_stored: bool,
    ) -> None:
        self._settings = settings
        self._globs = globs
        self._catalogue = catalogue
        self._discover = discover
        self._connection = ReplicationConnection(settings, replication=True)
        self._resume_state = resume_state
        self._suspended, self._published = suspended, published
        self._redefined = redefined
        self._windows = self._assembler(0)
        self._received_lsn = 0
        self._acked_lsn = 0
        self._leaves_cache = (0, 0, PublishedTables())
        self._tasks: list[asyncio.Task[None]] = []
        self._ends_because = ""
        self._is_closed = False
        self._is_stored = is_stored
        self.discovery_error = ""
        self._sender_worked_s = 0.0

    def warnings(self) -> list[str]:
        """What an operator should know of this stream."""
        found = []
        if self.discovery_error:
            found.append(f"the catalogue could not be compared: {self.discovery_error}")
        if self._sender_worked_s:
            found.append(
                f"server process {self._connection.server_process} has sent nothing of the stream "
                f"for {self._sender_worked_s:.0f} s; pg_stat_activity shows what it waits for"
            )
        return found

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self._connection.encrypted

    def suspend_again(self, source: str, gap: DefinitionGap) -> None:
        """Suspend a table after the transaction that is being read.

        Its rows could not be read, the publication does not publish it completely, or its rows
        changed with its definition.
        """
        self._windows.suspend_again(source, gap)

    def add_found(self, oids: Mapping[str, int]) -> None:
        """Record the tables that a discovery found."""
        self._windows.add_found(oids)

    def truncated_by(self, oid: int) -> int | None:
        """The xid of the table's last TRUNCATE in the stream."""
        return self._windows.truncated_by.get(oid)

    @property
    def resolved(self) -> int:
        """The scn up to which the stream has every commit."""
        return self._windows.resolved

    async def come_to_now(self) -> None:
        """Return once the stream has every commit until now, or was closed.

        A table that resumes then has no change from before it was altered or replaced.
        """
        scn = await self._catalogue.written_scn()
        while self.resolved < scn and not self._is_closed:
            await asyncio.sleep(_POLL_S)

    def take_leaves(self) -> dict[int, int]:
        """The partitions that received rows of their roots since the last call."""
        leaves = dict(self._windows.leaves)
        self._windows.leaves.clear()
        return leaves

    def assign(self, source: str, oid: int) -> None:
        """From now on the source is this table, and no table that had its name before."""
        self._windows.assign(source, oid)

    def wake(self) -> None:
        """Have the stream look for requests now: a quiet one does so each second."""
        self._connection.interrupt()

    def ack(self, scn: int) -> None:
        """Report to the server the LSN up to which it may discard the WAL."""
        lsn = flush_lsn(scn)
        if lsn > self._acked_lsn:
            self._acked_lsn = lsn
            self._report()

    async def close(self) -> None:
        """Stop the background tasks and close the connection."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._connection.close()

    async def batches(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """Every window with an scn above ``after_scn``."""
        await self._check_slot(after_scn)
        await self._start(after_scn)
        self._windows = self._assembler(after_scn)
        self._received_lsn = flush_lsn(after_scn)
        self._tasks = [
            asyncio.create_task(self._keep_alive()),
            asyncio.create_task(self._keep_discovering()),
        ]
        clock = asyncio.get_running_loop().time
        reported, reported_at_s = after_scn, clock()
        try:
            while True:
                for task in self._tasks:
                    if task.done():
                        task.result()  # An unexpected error ends the stream.
                waiting = self._windows.resolved > reported
                waiting |= self._suspended.has_requests
                block = await self._connection.receive(
                    _RESOLVED_S if waiting else _QUIET_S, is_behind=self._is_behind()
                )
                if block is not None:
                    self._sender_worked_s = 0.0
                    async for batch in self._read(block):
                        reported, reported_at_s = batch.resolved, clock()
                        yield batch
                    self._connection.consumed(block)
                elif self._connection.silent_s >= _SILENCE_S:
                    await self._require_sender()
                self._windows.apply_suspensions()
                quiet_s = clock() - reported_at_s
                due = quiet_s >= (_RESOLVED_S if self._windows.resolved > reported else _QUIET_S)
                batch = self._batch()
                is_new = batch.data or batch.schemas or batch.persist_first
                if is_new or due or self._ends_because:
                    reported, reported_at_s = batch.resolved, clock()
                    yield batch
                if self._ends_because and not self._windows.has_pending_suspensions:
                    raise SourceUnavailable(self._ends_because)
        except PostgresError as error:
            raise self._mapped(error) from error

    def _with_leaves(self, published: PublishedTables) -> PublishedTables:
        """The publication, with the partitions that no discovery has found yet."""
        leaves = self._windows.leaves
        if not leaves:
            return published
        if self._leaves_cache[:2] != (id(published), len(leaves)):
            self._leaves_cache = (id(published), len(leaves), published.with_partitions(leaves))
        return self._leaves_cache[2]

    def _is_behind(self) -> bool:
        """Whether the commit that came last is old by this machine's clock.

        A clock that is ahead of the server's makes a burst at the tail look like a backlog, one
        that is behind a backlog like the tail: neither costs more than some speed.
        """
        return time.time_ns() // 1000 - self._windows.commit_us > _BEHIND_US

    async def _require_sender(self) -> None:
        """Check the WAL sender of a server that has been silent for long: it may be busy.

        Raises:
            SourceUnavailable: the WAL sender is gone, or it waits for the relay.
        """
        sql = WORK_SQL.format(process=self._connection.server_process)
        rows = await self._catalogue.fetch(sql)
        if rows and rows[0]["waits"] not in WAITING:
            self._sender_worked_s += self._connection.silent_s
            self._connection.silent_s = 0.0
            if self._sender_worked_s < 2 * _SILENCE_S:
                for warning in self.warnings()[-1:]:
                    _log.warning("database %s: %s", self._settings.name, warning)
            return
        state = "waits for us" if rows else "is gone"
        raise SourceUnavailable(
            f"{self._settings.address} has sent nothing for {_SILENCE_S:g} s, keepalives included, "
            f"and its sender {state}: the connection is broken somewhere between"
        )

    def _assembler(self, after_scn: int) -> WindowAssembler:
        return WindowAssembler(
            self._globs, self._settings.special_values, after_scn, keys=self._settings.keys,
            suspended=self._suspended, announced=AnnouncedSchemas(self._resume_state.announced),
            encoding=self._connection.encoding,
            names=TableNames(self._published().oids),
        )  # fmt: skip

    def _batch(self) -> Batch:
        """A batch of the packed frames, with the resume state."""
        windows = self._windows
        announced = windows.announced.encode()
        # A changed publication is saved only together with the suspensions that it causes, and a
        # partition together with its first rows: a later stream does not describe it again.
        is_early = windows.has_pending_suspensions
        before = self._resume_state.published
        published = self._with_leaves(before if is_early else self._published())
        has_leaves = bool(windows.leaves) and published is not before
        persist_first = windows.suspensions_changed or not self._is_stored or has_leaves
        self._is_stored = True
        if persist_first or announced != self._resume_state.announced or published is not before:
            suspensions = dict(windows.suspended.suspensions)
            self._resume_state = replace(
                self._resume_state, suspended=suspensions, announced=announced, published=published
            )
        windows.suspensions_changed = False
        data, schemas = windows.take()
        return Batch(data, schemas, windows.resolved, self._resume_state, persist_first)

    # -- messages

    async def _read(self, block: memoryview) -> AsyncGenerator[Batch, None]:
        """Feed a block's messages; yields a batch whenever PART_BYTES are packed."""
        windows, at, stop = self._windows, 0, len(block)
        array = np.frombuffer(block, dtype=np.uint8)
        while at < stop:
            at = windows.run(array, at)
            if at < stop and windows.pending_bytes < PART_BYTES:
                at = await self._read_one(block, at)
            if windows.pending_bytes >= PART_BYTES or windows.suspensions_changed:
                yield self._batch()

    async def _read_one(self, block: memoryview, at: int) -> int:
        """Read the message at ``at``; returns where the next one begins."""
        end = at + 1 + int(_length(block, at + 1)[0])
        kind = block[at]
        if kind == _DATA and block[at + 5] == _XLOG:
            relation = self._windows.feed(block[at + _CHANGE], bytes(block[at + _CHANGE + 1 : end]))
            if relation is not None:
                table = await self._catalogue.table(relation.oid)
                root = None if table else await self._catalogue.root_of(relation.oid)
                if table is not None and (gap := await self._redefined(table)):
                    self._windows.redefine(table.source, gap)
                if root is None:
                    self._windows.learn(relation, table)
                else:
                    self._windows.skip_partition(relation, root)
        elif kind == _DATA and block[at + 5] == _KEEPALIVE:
            self._on_keepalive(pgoutput_messages.read_keepalive(bytes(block[at + _BODY : end])))
        elif kind == _ERROR:
            raise error_of(block[at + 5 : end])
        elif kind not in _IGNORED:
            self._on_other(block, at, end)
        return end

    def _on_keepalive(self, keepalive: pgoutput_messages.Keepalive) -> None:
        self._windows.keepalive(keepalive.wal_end)
        if self._windows.is_idle:
            self._received_lsn = max(self._received_lsn, keepalive.wal_end)
        if keepalive.reply_asked:
            self._report()

    def _on_other(self, block: memoryview, at: int, end: int) -> None:
        kind = chr(block[at])
        if kind in "cCZ":
            raise SourceUnavailable(f"{self._settings.address} ended the stream")
        raise FormatError(
            f"{self._settings.address} sent a message {kind!r} of {end - at} bytes in the stream"
        )

    # -- background tasks

    def _report(self) -> None:
        self._connection.send_status(
            max(self._received_lsn, self._acked_lsn), self._acked_lsn,
            is_answered=self._connection.silent_s >= _REQUEST_REPLY_AFTER_S,
        )  # fmt: skip

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S)
            self._report()

    async def _keep_discovering(self) -> None:
        while True:
            await asyncio.sleep(self._settings.discover_every_s)
            before = self._published()
            try:
                await self._discover()
                self.discovery_error = ""
                if not self._catalogue.renames_partitions:
                    self._end_after(self._published().repartitioned(before))
                if self._published().renewal.begin_scn:
                    self._ends_because = _RENEWED
            except (DatabusError, asyncpg.PostgresError) as error:
                self.discovery_error = str(error)
                _log.warning("database %s: discovery of tables: %s", self._settings.name, error)

    def _end_after(self, repartitioned: str) -> None:
        """End the stream once the suspensions so far were delivered, to be connected again.

        A server before PostgreSQL 15 sends the rows of a partition under the name of its root, or
        its own, whichever it was when it sent the first one.  ``repartitioned``: a table with
        other partitions; "": there is none.
        """
        if repartitioned:
            self._ends_because = (
                f"{repartitioned} has other partitions: the relay connects again, for "
                f"{self._settings.address} still sends their rows under their earlier names"
            )

    # -- start

    async def _check_slot(self, after_scn: int) -> None:
        slot = await self._catalogue.slot()
        name = self._settings.slot
        if slot is None:
            await self._recreate_slot(after_scn)
            return
        if slot.wal_status == "lost" or slot.restart_lsn is None or slot.confirmed_lsn is None:
            raise SourcePositionLost(
                f"slot {name} was invalidated by the server (wal_status {slot.wal_status}): it "
                "had to retain more log than max_slot_wal_keep_size allows"
            )
        await self._require_no_missed_commit(slot.confirmed_lsn, after_scn)

    async def _recreate_slot(self, after_scn: int) -> None:
        """Replace a slot that is gone, if nothing was committed meanwhile.

        Before PostgreSQL 17 a promoted standby has no slots.  It is followed without a gap if
        nothing was written to it before the relay connects.
        """
        name, wanted = self._settings.slot, flush_lsn(after_scn)
        try:
            begins_lsn = await create_slot(self._settings)
        except (PostgresError, asyncpg.PostgresError) as error:
            raise SourcePositionLost(f"slot {name} is gone; creating it: {error}") from error
        try:
            await self._require_no_missed_commit(begins_lsn, after_scn)
        except SourcePositionLost as error:
            await self._catalogue.drop_slot()
            raise SourcePositionLost(
                f"slot {name} does not exist on {self._settings.address}: it was dropped, or the "
                "server is a promoted standby, which before PostgreSQL 17 has no slots; the "
                f"changes after {format_lsn(wanted)} (scn {after_scn}) are no longer retained. "
                f"A new slot misses commits: {error.message}"
            ) from error

    async def _require_no_missed_commit(self, begins_lsn: int, after_scn: int) -> None:
        """Check that no commit is between the relay's position and the start of the slot.

        Raises:
            SourcePositionLost: there are commits, or that cannot be determined.
        """
        name, wanted = self._settings.slot, flush_lsn(after_scn)
        if begins_lsn <= wanted:
            return
        commits = await commits_between(self._catalogue, wanted, begins_lsn)
        if commits == 0:
            _log.warning(
                "database %s: slot %s begins at %s, after the relay's position %s; the server's "
                "WAL has no commit between them, so nothing is missed",
                self._settings.name, name, format_lsn(begins_lsn), format_lsn(wanted),
            )  # fmt: skip
            return
        missed = (
            f"{commits} commits are missed"
            if commits is not None
            else "it is unknown how many commits are missed: run CREATE EXTENSION pg_walinspect "
            "(PostgreSQL 15 and later) and start the relay while the server still has that WAL"
        )
        raise SourcePositionLost(
            f"slot {name} begins at {format_lsn(begins_lsn)}, after the relay's position "
            f"{format_lsn(wanted)} (scn {after_scn}): it was recreated or advanced. In "
            f"{begins_lsn - wanted} bytes of WAL {missed}"
        )

    async def _start(self, after_scn: int) -> None:
        """Connect and start; retries while the last connection still holds the slot."""
        begin = format_lsn(flush_lsn(after_scn))
        command = start_replication_command(self._settings, begin)
        for tries_left in reversed(range(_BUSY_TRIES)):
            try:
                if self._settings.takes_over:
                    await self._catalogue.end_reader()
                await self._connection.connect()
                await self._connection.start_copy(command)
                return
            except PostgresError as error:
                self._connection.close()
                if error.sqlstate != _IN_USE or not tries_left:
                    raise self._mapped(error) from error
            await asyncio.sleep(_BUSY_PAUSE_S)
            self._connection = ReplicationConnection(self._settings, replication=True)

    def _mapped(self, error: PostgresError) -> DatabusError:
        address = f"{self._settings.address}, slot {self._settings.slot}"
        if error.sqlstate in _LOST_STATES:
            return SourcePositionLost(f"{address}: {_LOST_STATES[error.sqlstate]}: {error}")
        return SourceUnavailable(f"{address}: {error}")
