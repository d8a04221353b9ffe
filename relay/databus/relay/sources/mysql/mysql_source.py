"""A MariaDB or MySQL server as a source: its binlog as a stream, its tables in chunks."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from databus.common.compiled.kernels import COMPILED
from databus.common.config import DatabaseConfig
from databus.common.errors import (
    DatabusError,
    SourcePositionLost,
    SourceUnavailable,
    UnknownSource,
)
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources import row_buffers
from databus.relay.sources.announced_schemas import AnnouncedSchemas
from databus.relay.sources.contract import (
    Batch,
    Chunk,
    ChunkRequest,
    Finding,
    Snapshot,
    TableSize,
    Transaction,
    raise_findings,
)
from databus.relay.sources.mysql.binlog.binlog_decoder import PART_BYTES, BinlogDecoder
from databus.relay.sources.mysql.binlog.ddl_lookahead import DdlLookahead
from databus.relay.sources.mysql.binlog.fast_path import FastPath, warm_up
from databus.relay.sources.mysql.binlog.gtid_numbering import (
    DomainNumbering,
    Numbering,
    has_prepared,
)
from databus.relay.sources.mysql.chunks import mysql_chunk_kernels, mysql_chunks
from databus.relay.sources.mysql.chunks.shown_commits import shown, until
from databus.relay.sources.mysql.gtid.binlog_locations import (
    BinlogLocation,
    BinlogLocations,
    LocatedSnapshot,
)
from databus.relay.sources.mysql.gtid.mysql_lineage import (
    MySqlResumeState,
    RestoredState,
    decode_resume_state,
    mark_of,
)
from databus.relay.sources.mysql.mysql_preflight import (
    choose_numbering,
    left_out_tables,
    server_findings,
    table_findings,
)
from databus.relay.sources.mysql.protocol.mysql_connection import BinlogRequest, MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings
from databus.relay.sources.mysql.protocol.mysql_tls import receive_into
from databus.relay.sources.mysql.protocol.packet_buffer import PacketBuffer
from databus.relay.sources.mysql.rows.charsets import Charsets, load_charsets
from databus.relay.sources.mysql.statements.routine_catalogue import read_dialect
from databus.relay.sources.mysql.tables.cascades import cascade_findings, load_cascades
from databus.relay.sources.mysql.tables.dropped_columns import DroppedColumns
from databus.relay.sources.mysql.tables.inferred_columns import InferredColumns, LookaheadResult
from databus.relay.sources.mysql.tables.mysql_tables import (
    Catalogue,
    carried_schemas,
    load_catalogue,
    require_readable,
    visible,
)
from databus.relay.sources.suspended_tables import SuspendedTables, TableSuspension

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_SILENCE_S = 10.0
_BATCH_AT_LEAST_EVERY_S, _STREAM_COMES_BY_S = 0.4, 0.5
_CHECK_INVISIBLE_EVERY_S = 2.0
_MOST_READERS = 32  # more than a dump's parallelism
_WHICH_SERVER = "CONCAT_WS(':', @@hostname, @@port, @@server_id)"


class MySqlSource:
    """One MariaDB or MySQL server, read as a replica reads it.

    An scn is the sequence number of a GTID of the chosen domain, or on MySQL the number of a
    GTID of one of the chosen servers.  The source writes nothing to the server.

    Invariants:
        I1. Windows come in the order of the GTIDs, one window for each GTID group.
        I2. A window's content depends only on its position: a window that is read again has the
            same events with the same seqs.
        I3. A chunk is read in one snapshot.  MariaDB gives its binlog position; on MySQL two
            GTID sets enclose it.

    Owner: one fetcher's event loop.  The stream and each chunk that is being read have their own
        connections; all other queries share one, one at a time.
    """

    def __init__(self, config: DatabaseConfig, *, use_kernels: bool = True) -> None:
        """``use_kernels`` False reads with the Python decoder alone, for comparison."""
        self.use_kernels = use_kernels
        self._settings = read_settings(config)
        self._lock = asyncio.Lock()
        self._idle: list[MySqlConnection] = []
        # Not the loop's own pool, whose few threads sync the ring.  These end with the source.
        self._readers = ThreadPoolExecutor(_MOST_READERS, "databus-mysql")
        self._connection: MySqlConnection | None = None
        self._stream_connection: MySqlConnection | None = None
        self._charsets: Charsets | None = None
        self._catalogue: Catalogue = {}
        self._numbering: Numbering = DomainNumbering(0)
        self._decoder: BinlogDecoder | None = None
        self._restored: RestoredState | None = None
        self._suspended = SuspendedTables({})
        self._locations: BinlogLocations | None = None
        self._lookahead = DdlLookahead()
        self._beginning = self._resume_state = MySqlResumeState(-1)
        self._resolved = 0
        self._streams_from = self._reset = ""

    @property
    def clock(self) -> str:
        """``mariadb:<domain>:<clock name>`` or ``mysql:<first uuid>:<clock name>``.

        It does not change with the server's address.
        """
        return self._numbering.clock(self._settings.clock_name)

    # -- opening

    async def preflight(self) -> list[Finding]:
        """Examine version, settings, privileges, domain and tables.

        Of several hosts it takes the first that answers and can resume at the stored position.
        """
        hosts = self._settings.hosts
        if len(hosts) == 1:
            return await self._query(self._examine)
        lost: list[DatabusError] = []
        for host in hosts:
            self._leave()
            self._settings = self._settings.at(host)
            try:
                findings = await self._query(self._examine)
                if not any(finding.forbids_all for finding in findings):
                    await self._query(self._try_position)
            except (SourceUnavailable, SourcePositionLost) as error:
                _log.info("database %s: skipping %s: %s", self._settings.name, host, error)
                lost.append(error)
                continue
            return findings
        reasons = "; ".join(error.message for error in lost)
        # A server that does not answer may come back; where all answered, nothing will change.
        all_lost = all(isinstance(error, SourcePositionLost) for error in lost)
        kind = SourcePositionLost if all_lost else SourceUnavailable
        raise kind(f"none of {len(hosts)} hosts can be used: {reasons}")

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _try_position(self, connection: MySqlConnection) -> None:
        """Check that the stream can resume on this server."""
        if (restored := self._restored) is not None:
            resume_state = restored.resume_state(restored.after_scn)
            self._numbering.dump_after(connection, self._settings, resume_state)

    def _examine(self, connection: MySqlConnection) -> list[Finding]:
        settings = self._settings
        findings = server_findings(connection, settings)
        if any(finding.fatal for finding in findings):
            return findings
        self._numbering, numbering = choose_numbering(connection, settings)
        self._charsets = load_charsets(connection)
        self._catalogue = load_catalogue(connection, settings)
        return [
            *findings,
            *numbering,
            *table_findings(self._catalogue, self._charsets, settings),
            *cascade_findings(connection, settings),
        ]

    async def _query(self, question: Callable[[MySqlConnection], _T]) -> _T:
        """Run a query on the shared connection, in a thread.

        A connection that failed, or whose query was cancelled, is not used again.
        """
        async with self._lock:
            try:
                if self._connection is None:
                    self._connection = await asyncio.to_thread(MySqlConnection, self._settings)
                return await asyncio.to_thread(question, self._connection)
            except (SourceUnavailable, asyncio.CancelledError):
                self._leave()
                raise

    async def open(self) -> None:
        """Connect, run the preflight, load the tables."""
        resumes = self._restored is not None
        raise_findings(self._settings.name, await self.preflight(), resumes=resumes)
        if self.use_kernels:
            await asyncio.to_thread(warm_up)
            await asyncio.to_thread(mysql_chunk_kernels.warm_up)
            await asyncio.to_thread(row_buffers.warm_up)

    async def close(self) -> None:
        """Close both connections."""
        for connection in (self._connection, self._stream_connection, *self._idle):
            if connection is not None:
                connection.close()
        self._connection = self._stream_connection = None
        self._idle.clear()

    # -- the stream

    async def first_scn(self) -> int:
        """The scn of the server's last transaction."""
        self._beginning = await self._query(self._numbering.beginning)
        return self._beginning.scn

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """All windows after ``after_scn``; see ``Source.stream``."""
        settings = self._settings
        resume_state = await self._resume_state_for(after_scn)
        if resume_state.foreign is None:
            is_lost = self._restored is not None and self._restored.stored is None
            foreign = "" if is_lost else await self._query(self._numbering.foreign)
            resume_state = dataclasses.replace(resume_state, foreign=foreign)
        resumed = resume_state
        start = await self._query(lambda c: self._numbering.dump_after(c, settings, resumed))
        assert self._charsets is not None, "open() comes before stream()"
        decoder = self._numbering.decoder(settings, self._charsets, self._catalogue, resume_state)
        progress = decoder.progress
        progress.expected, progress.ends = start.expected, start.ends
        progress.mark_location = resume_state.location
        progress.last_seq_no, progress.begins_after = start.after_scn, start.begins_after
        decoder.suspended = self._suspended = self._suspensions_of(resume_state)
        inferred = decoder.known.inferred = InferredColumns(
            resume_state.inferred_scn, resume_state.inferred
        )
        decoder.known.dropped = DroppedColumns(resume_state.dropped)
        decoder.dialect = await self._query(read_dialect)
        decoder.known.resume_cascades(resume_state.cascades, await self._query(load_cascades))
        decoder.announced = AnnouncedSchemas(resume_state.announced)
        # The definitions at the end of the earlier stream; the tables may be altered by now.
        before = carried_schemas(inferred.tables.values(), settings.zero_dates)
        decoder.announced.assume([*before, *await self.schemas()])
        decoder.known.invisible = set(resume_state.invisible)
        self._decoder = decoder
        decoder.suspend_unlogged(self._catalogue)
        decoder.suspend_invisible({})
        if start.unread:
            decoder.suspend_captured(
                f"the server has purged GTIDs {start.unread}, of servers that are not followed, "
                "before they were read"
            )
        self._resolved, self._resume_state = after_scn, resume_state
        self._streams_from = self._reset = ""
        if after_scn == self._beginning.scn:
            # No later start can derive it; numbers missed from now on are counted from it.
            yield Batch(b"", resolved=after_scn, resume_state=resume_state, persist_first=True)
        is_mariadb = isinstance(self._numbering, DomainNumbering)
        self._locations = BinlogLocations() if is_mariadb else None
        connection = await asyncio.to_thread(MySqlConnection, settings)
        self._stream_connection = connection
        decoder.suspended.begin()
        try:
            async for batch in self._batches(connection, decoder, start.request):
                yield batch
        finally:
            decoder.suspended.end()
            self._locations = self._stream_connection = None
            connection.close()
            decoder.prepared.close()

    def restore(self, resume_state: str, last: Transaction | None, after_scn: int) -> None:
        """See ``ResumableSource``."""
        stored = decode_resume_state(resume_state) if resume_state else None
        mark = mark_of(last) if last is not None else None
        if mark is None and stored is not None:
            mark = stored.mark
        self._restored = RestoredState(after_scn, mark, stored)
        if stored is not None:
            self._suspended = self._suspensions_of(stored)

    def _suspensions_of(self, resume_state: MySqlResumeState) -> SuspendedTables:
        """The suspended tables that are still captured."""
        found = resume_state.suspended
        return SuspendedTables(
            {name: found[name] for name in found if self._settings.captures(*split_source(name))}
        )

    async def _resume_state_for(self, after_scn: int) -> MySqlResumeState:
        """The resume state for ``after_scn``: the restored one, or a new one from the server."""
        restored = self._restored or RestoredState(after_scn, None, None)
        if restored.stored is not None and restored.stored.scn <= after_scn:
            return restored.resume_state(after_scn)
        prepared = await self._query(has_prepared)
        resume_state = restored.resume_state(after_scn)
        if after_scn == self._beginning.scn:
            began = self._beginning
            resume_state = dataclasses.replace(
                resume_state, tagged=began.tagged, missed=began.missed, foreign=began.foreign
            )
        return dataclasses.replace(resume_state, prepared=1 if prepared else None)

    async def _batches(
        self, connection: MySqlConnection, decoder: BinlogDecoder, request: BinlogRequest
    ) -> AsyncGenerator[Batch, None]:
        settings = self._settings
        where = f"{settings.host}:{settings.port} (database={settings.name})"
        checksum, self._streams_from = await asyncio.to_thread(
            connection.row, f"SELECT @@global.binlog_checksum, {_WHICH_SERVER}"
        )
        decoder.cursor.checksums = checksum == "CRC32"
        raw = await asyncio.to_thread(
            connection.start_binlog, request, settings.server_id, _HEARTBEAT_S
        )
        packets = PacketBuffer(where)
        fast = FastPath(decoder) if COMPILED and self.use_kernels else None
        yielded_at_s = checked_at_s = time.monotonic()
        noticed = decoder.suspended.suspended_count, decoder.known.dropped.added_count
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    count = await receive_into(raw, packets.room())
            except TimeoutError:
                raise SourceUnavailable(
                    f"{where} has been silent for {_SILENCE_S:g} s, heartbeats included"
                ) from None
            except OSError as error:
                raise SourceUnavailable(f"{where}: the connection is gone: {error}") from error
            if not count:
                raise SourceUnavailable(f"{where} closed the connection")
            if self._reset:
                raise SourceUnavailable(f"{where}: {self._reset}")
            packets.received(count)
            while True:
                decoder.resume_requested()
                payload = decoder.cursor.payload
                current = payload.packets if payload else packets
                if fast is not None and not current.in_long_event:
                    need_bytes = fast.run(current)
                    decoder.spill()
                    if need_bytes:
                        if decoder.pending_bytes:
                            yield self._batch(decoder)
                        fast.make_room(need_bytes)
                        continue
                event = current.next_event()
                if event is None:
                    if payload is None:
                        break
                    if not payload.refill():
                        decoder.cursor.payload = None
                    elif decoder.pending_bytes >= PART_BYTES:
                        yield self._batch(decoder)
                    continue
                looks_ahead = not decoder.feed(event)
                if looks_ahead:
                    await self._look_ahead(decoder)
                    decoder.feed(event, fresh=True)
                counts = decoder.suspended.suspended_count, decoder.known.dropped.added_count
                if counts != noticed:
                    noticed = counts
                    yield self._suspension(decoder)
                if looks_ahead and decoder.known.inferred.is_needed:
                    yield self._batch(decoder, persist_first=True)
                current.used()
                decoder.spill()
                while decoder.prepared.is_replayed:
                    decoder.replay()
                    if decoder.pending_bytes >= PART_BYTES:
                        yield self._batch(decoder)
                if decoder.pending_bytes >= PART_BYTES:
                    yield self._batch(decoder)
            if self._locations is not None and decoder.progress.last_seq_no >= decoder.resolved:
                # Not while the stream reads groups again that are before its resume position.
                cursor = decoder.cursor
                self._locations.passed(cursor.file, cursor.offset, decoder.resolved)
            now_s = time.monotonic()
            if decoder.known.invisible and now_s - checked_at_s >= _CHECK_INVISIBLE_EVERY_S:
                checked_at_s = now_s
                await self._check_invisible(decoder)
            if decoder.pending_bytes or now_s - yielded_at_s >= _BATCH_AT_LEAST_EVERY_S:
                yielded_at_s = now_s
                yield self._batch(decoder)

    def _batch(self, decoder: BinlogDecoder, *, persist_first: bool = False) -> Batch:
        data, schemas = decoder.take()
        self._resolved, self._resume_state = decoder.resolved, decoder.resume_state()
        return Batch(data, schemas, self._resolved, self._resume_state, persist_first)

    def _suspension(self, decoder: BinlogDecoder) -> Batch:
        """The suspended tables and dropped columns, on disk before the window that adds to them.

        A window in the ring is not read again after a kill, so the resume state must have what was
        found in it.  Its other fields are those of the last batch.
        """
        suspended, dropped = dict(decoder.suspended.suspensions), decoder.known.dropped.names
        resume_state = dataclasses.replace(self._resume_state, suspended=suspended, dropped=dropped)
        return Batch(b"", resolved=self._resolved, resume_state=resume_state, persist_first=True)

    async def _look_ahead(self, decoder: BinlogDecoder) -> None:
        """The present catalogue, and the statements since the stream's position."""
        is_inferred, request = decoder.known.inferred.is_needed, decoder.lookahead_request
        if is_inferred:
            request = dataclasses.replace(request, statement=None)
        elif not request.is_for_statement:
            decoder.known.lookahead = LookaheadResult(await self._fresh_catalogue(), ())
            return
        decoder.known.lookahead = found = await self._read(
            lambda c: self._lookahead.look(c, self._settings, request)
        )
        self._catalogue = decoder.known.catalogue
        decoder.suspend_unlogged(self._catalogue)
        if found.cascades is not None:
            decoder.known.know_cascades(found.cascades, is_present=found.is_present)

    async def _fresh_catalogue(self) -> Catalogue:
        self._catalogue = await self._query(lambda c: load_catalogue(c, self._settings))
        if self._decoder is not None:
            self._decoder.suspend_unlogged(self._catalogue)
        return self._catalogue

    async def _check_invisible(self, decoder: BinlogDecoder) -> None:
        """Suspend tables that took a captured name unseen."""
        if seen := await self._query(lambda c: visible(c, decoder.known.invisible)):
            await self._fresh_catalogue()
        decoder.suspend_invisible(seen)

    async def ack(self, scn: int) -> None:
        """Nothing to do: the server purges its binlog by its own rules."""

    async def schemas(self) -> list[SourceSchema]:
        """The captured tables as they are now, without those that cannot be converted."""
        tables = (await self._fresh_catalogue()).values()
        return carried_schemas(tables, self._settings.zero_dates)

    async def largest_key(self, source: str) -> list[Any] | None:
        """The largest key of a table; None when it is empty."""
        settings = self._table_settings(source)
        await self._resume_first(source)
        return await self._read(lambda c: mysql_chunks.largest_key(c, settings, source))

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """The key of row number ``limit``; None if there are fewer."""
        settings = self._table_settings(request.source)
        return await self._read(lambda c: mysql_chunks.chunk_end(c, settings, request))

    def suspended(self) -> Mapping[str, TableSuspension]:
        """See ``SuspendingSource``."""
        return self._suspended.suspensions

    async def table_size(self, source: str) -> TableSize:
        """The estimate of the engine's statistics."""
        return await self._read(lambda c: mysql_chunks.table_size(c, source))

    async def write_watermark(self, table: str, token: str) -> None:
        """See ``WatermarkingSource``."""
        await self._read(lambda c: mysql_chunks.write_watermark(c, table, token))

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """Read a chunk in a snapshot whose binlog position is known."""
        settings = self._table_settings(request.source)
        if request.is_of_whole_table:
            await self._resume_first(request.source)
        if request.is_probe:
            require_readable(await self._fresh_catalogue(), request.source, settings.zero_dates)
        numbering = self._numbering
        chunk = await self._read(lambda c: mysql_chunks.read_chunk(c, settings, numbering, request))
        if (decoder := self._decoder) is not None:
            decoder.announced.assume((chunk.schema,))  # A TRUNCATE of its rows needs it.
        return dataclasses.replace(chunk, snapshot=await self._located(chunk.snapshot))

    async def _resume_first(self, source: str) -> None:
        """Before the whole table is read: if it is suspended, let the stream resume it first."""
        suspended = self._suspended
        if source not in suspended.suspensions:
            return
        if source in (catalogue := await self._fresh_catalogue()):
            require_readable(catalogue, source, self._settings.zero_dates)
        await suspended.resumption(source)
        decoder = self._decoder
        assert decoder is not None, "a table resumes with the stream"
        await shown(source, decoder.resolved, self._snapshot)
        if (group := decoder.suspended_by) is not None:
            is_shown = functools.partial(self._numbering.shows, group=group)
            await until(source, f"GTID {group.gtid}", lambda: self._read(is_shown))

    async def _snapshot(self) -> Snapshot:
        """A snapshot of now."""
        found = await self._read(lambda c: mysql_chunks.snapshot_now(c, self._numbering))
        return await self._located(found)

    async def _located(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with its scn: from the stream if it passes there soon, else by a query."""
        numbering = self._numbering
        if not (isinstance(snapshot, LocatedSnapshot) and isinstance(numbering, DomainNumbering)):
            return snapshot
        if self._locations is not None:
            location = BinlogLocation.of(snapshot.file, snapshot.offset)
            if found := await self._locations.wait_around(location, _STREAM_COMES_BY_S):
                return found
        return await self._read(lambda c: numbering.located(c, snapshot))

    async def _read(self, question: Callable[[MySqlConnection], _T]) -> _T:
        """Run a query for rows on a separate connection, in a thread."""
        loop = asyncio.get_running_loop()
        connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = await loop.run_in_executor(self._readers, MySqlConnection, self._settings)
        try:
            answer = await loop.run_in_executor(self._readers, question, connection)
        except asyncio.CancelledError:
            # Not among the readers, all of which may be waiting for such queries.
            loop.run_in_executor(None, connection.abandon())
            raise
        except SourceUnavailable:
            connection.close()
            raise
        finally:
            if connection.is_open:
                self._idle.append(connection)
        return answer

    def _table_settings(self, source: str) -> Any:
        if not self._settings.captures(*split_source(source)):
            raise UnknownSource(
                f"{source} is not among the sources of database {self._settings.name}"
            )
        return self._settings

    async def committed_scn(self) -> int:
        """See ``Source.committed_scn``."""
        return await self._query(self._numbering.head)

    async def status(self) -> dict[str, Any]:
        """Version, positions, skipped transactions, and the binlog's size."""
        decoder = self._decoder
        read_to = None
        if decoder is not None and decoder.cursor.file:
            read_to = BinlogLocation.of(decoder.cursor.file, decoder.cursor.offset)
        facts, server, end = await self._query(self._server_facts)
        if decoder is not None:
            if read_to and decoder is self._decoder and server == self._streams_from:
                self._notice_reset(read_to, end)
            facts["stream"] = {
                "scn": decoder.resolved,
                "file": decoder.cursor.file,
                "offset": decoder.cursor.offset,
                "foreign_groups": decoder.progress.foreign_groups,
                "groups_without_events": decoder.progress.other_groups,
            }
        facts["stopped_tables"] = self._suspended.document()
        facts["warnings"] = self._suspended.warnings()
        if self._charsets is not None:
            suspended = self._suspended.suspensions.keys()
            facts["warnings"] += left_out_tables(
                self._catalogue, self._charsets, self._settings, suspended
            )
        return facts

    def _notice_reset(self, read_to: BinlogLocation, end: BinlogLocation) -> None:
        """Note a reset of the binlog: an open stream would wait at the end of the deleted file.

        The server reports a reset only to a new stream, and only for some binlog contents.
        """
        if end < read_to:
            self._reset = (
                f"its binlog ends at {end.offset} of file {end.file_number}, but the relay read up "
                f"to {read_to.offset} of file {read_to.file_number}: it was reset"
            )

    def _server_facts(
        self, connection: MySqlConnection
    ) -> tuple[dict[str, Any], str, BinlogLocation]:
        """The server's facts for the status, its identity, and the end of its binlog."""
        files = connection.query("SHOW BINARY LOGS")
        facts = {
            "version": connection.row("SELECT VERSION()")[0],
            **self._numbering.facts(connection),
            "server_id": self._settings.server_id,
            "scn": self._numbering.head(connection),
            "binlog_files": len(files),
            "binlog_bytes": sum(int(row[1]) for row in files),
        }
        (server,) = connection.row(f"SELECT {_WHICH_SERVER}")
        return facts, str(server), BinlogLocation.of(str(files[-1][0]), int(files[-1][1]))
