"""PostgreSQL as a source: a logical replication slot read with pgoutput.

The parts: ``slot_stream`` reads the slot, ``postgres_chunks`` reads tables at a known point,
``postgres_preflight`` examines the server, ``postgres_catalogue`` queries it.  This module
implements the contract in ``databus.relay.sources.contract`` with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from typing import Any

import asyncpg

from databus.common.compiled.kernels import COMPILED
from databus.common.config import DatabaseConfig
from databus.common.errors import SourceUnavailable, UnknownSource, UnsupportedChange
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources import row_buffers
from databus.relay.sources.announced_schemas import AnnouncedSchemas
from databus.relay.sources.contract import (
    Batch,
    Chunk,
    ChunkRequest,
    Finding,
    TableSize,
    Transaction,
    raise_findings,
)
from databus.relay.sources.postgres import postgres_preflight
from databus.relay.sources.postgres.chunks.postgres_chunks import PostgresChunkReader
from databus.relay.sources.postgres.kernels import postgres_chunk_kernels
from databus.relay.sources.postgres.postgres_preflight import STANDBY
from databus.relay.sources.postgres.protocol.lsn import format_lsn, scn_before
from databus.relay.sources.postgres.protocol.postgres_settings import (
    PostgresSettings,
    read_settings,
)
from databus.relay.sources.postgres.protocol.replication_connection import PostgresError
from databus.relay.sources.postgres.rows.postgres_kernel_tables import warm_up
from databus.relay.sources.postgres.stream import postgres_lineage, wal_retention
from databus.relay.sources.postgres.stream.moved_files import MovedFiles
from databus.relay.sources.postgres.stream.postgres_lineage import (
    PostgresResumeState,
    decode_resume_state,
)
from databus.relay.sources.postgres.stream.slot_stream import SlotStream
from databus.relay.sources.postgres.tables.open_writers import OpenWriters
from databus.relay.sources.postgres.tables.postgres_catalogue import (
    Catalogue,
    create_publication_sql,
)
from databus.relay.sources.postgres.tables.postgres_tables import (
    PostgresTable,
    key_remedy,
    matches,
)
from databus.relay.sources.postgres.tables.publications import (
    FORGOTTEN,
    NO_OID,
    Publication,
    PublishedTables,
)
from databus.relay.sources.postgres.tables.table_definitions import Definition, DefinitionGap
from databus.relay.sources.server_hosts import Host
from databus.relay.sources.suspended_tables import SuspendedTables, TableSuspension

_GONE = "it was dropped or renamed, which has no event"
_RETURNED = "it was dropped and created again: its deleted rows have no events"

_log = logging.getLogger(__name__)


class PostgresSource:
    """One database of a PostgreSQL server, 13 or later.

    Invariants:
        I1. The slot is confirmed only up to the last ``ack``, so the server retains every
            commit that is not durable downstream.
        I2. The slot is created after the publication: every commit that the slot sends is later
            than the publication.

    Owner: one fetcher's event loop.
    Durability: ``ack`` is sent to the server at once.  The server stores it at its next
        checkpoint; after a server crash it sends unstored changes again.
    Raises: as the contract says.
    """

    def __init__(self, config: DatabaseConfig) -> None:
        self._use(read_settings(config))
        self._globs = (*config.sources, *(f"!{glob}" for glob in config.exclude_sources))
        self._clock = ""
        self._acked_scn = 0
        self._timeline = 0
        self._restored: tuple[PostgresResumeState, int] | None = None
        self._resumes = False
        self._suspended = SuspendedTables({})
        self._resumed_from: set[str] = set()
        self._schemas_at_open: list[SourceSchema] = []
        self._stream: SlotStream | None = None
        self._published = PublishedTables()
        self._suspend_first: dict[str, DefinitionGap] = {}
        self._redefined_in_stream: set[str] = set()
        self._unpublished: dict[str, str] = {}
        self._warned = False

    @property
    def clock(self) -> str:
        """``postgresql:`` and the system identifier, which replicas share; then a name."""
        return self._clock

    async def preflight(self) -> list[Finding]:
        """See postgres_preflight.py.  Connects to the first of the hosts that is a primary."""
        hosts, unavailable = self._settings.hosts, list[str]()
        for host in hosts:
            if len(hosts) > 1:
                await self._move_to(host)
            try:
                findings = await postgres_preflight.examine(
                    self._settings, self._globs, self._catalogue
                )
            except SourceUnavailable as error:
                unavailable.append(error.message)
                continue
            if len(hosts) == 1 or not any(f.setting == STANDBY for f in findings):
                return findings
            unavailable.append(f"{host} is a standby")
        raise SourceUnavailable(f"no primary among {len(hosts)} hosts: {'; '.join(unavailable)}")

    async def _move_to(self, host: Host) -> None:
        await self._chunks.close()
        await self._catalogue.close()
        self._use(self._settings.at(host))

    def _use(self, settings: PostgresSettings) -> None:
        self._settings = settings
        self._catalogue = Catalogue(settings)
        self._moved, self._writers = MovedFiles(self._catalogue), OpenWriters(self._catalogue)
        self._chunks = PostgresChunkReader(settings, self._catalogue)

    async def open(self) -> None:
        """Examine the server, update the publication, load the clock's identity."""
        raise_findings(self._settings.name, await self.preflight(), resumes=self._resumes)
        if COMPILED:
            await asyncio.to_thread(warm_up)
            await asyncio.to_thread(postgres_chunk_kernels.warm_up)
            await asyncio.to_thread(row_buffers.warm_up)
        try:
            await self._publish()
            # Before the slot is created: the stream has every later change of a definition.
            self._schemas_at_open = await self.schemas()
            now = await postgres_lineage.identify(self._settings)
        except (PostgresError, asyncpg.PostgresError) as error:
            raise SourceUnavailable(f"{self._settings.address}: {error}") from error
        name = self._settings.clock_name
        self._clock = f"postgresql:{now.system}" + (f":{name}" if name else "")
        self._timeline = now.timeline
        if self._restored is not None:
            stored, after_scn = self._restored
            await postgres_lineage.require_history(self._settings, now, stored.timeline, after_scn)

    def restore(self, resume_state: str, last: Transaction | None, after_scn: int) -> None:
        """See ``ResumableSource``: the resume state of the stream up to ``after_scn``."""
        self._resumes = True
        self._restored = (decode_resume_state(resume_state), after_scn) if resume_state else None
        suspensions = self._restored[0].suspended if self._restored else {}
        self._published = self._restored[0].published if self._restored else PublishedTables()
        # A suspension of a later transaction happens again, at the same change.
        self._suspended = SuspendedTables(
            {
                name: suspension
                for name, suspension in suspensions.items()
                if suspension.since_scn <= after_scn and matches(name, self._globs)
            }
        )

    async def first_scn(self) -> int:
        """Create the slot; drop the slot of an earlier ring.

        The scn is that of the slot's consistent point: the stream has every transaction that
        commits later, and a chunk shows every transaction that ended earlier.
        """
        try:
            slot = await self._catalogue.slot()
            if slot is not None:
                _log.warning(
                    "database %s: slot %s of an earlier ring (confirmed %s) is created again",
                    self._settings.name, self._settings.slot, format_lsn(slot.confirmed_lsn or 0),
                )  # fmt: skip
                await self._catalogue.drop_slot()
            self._acked_scn = scn_before(await postgres_lineage.create_slot(self._settings))
        except (PostgresError, asyncpg.PostgresError) as error:
            raise SourceUnavailable(
                f"slot {self._settings.slot} cannot be created: {error}"
            ) from error
        return self._acked_scn

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """See slot_stream.py."""
        after_scn = max(after_scn, self._published.renewal.begin_scn)
        self._published = self._published.renewed(begin_scn=0)
        self._acked_scn = max(self._acked_scn, after_scn)
        stored = self._restored[0] if self._restored else PostgresResumeState(self._timeline)
        announced = AnnouncedSchemas(stored.announced)
        announced.assume(self._schemas_at_open)
        name = self._settings.name
        for source, change in self._suspend_first.items():
            _log.warning("database %s: %s is suspended: %s", name, source, change.why)
            self._suspended.suspend(
                source, after_scn, change.why, rows_remain=change.rows_remain,
                waits_for=change.waits_for,
            )  # fmt: skip
        resume_state = PostgresResumeState(
            self._timeline, dict(self._suspended.suspensions), announced.encode(), self._published
        )
        if self._suspend_first:
            yield Batch(b"", resolved=after_scn, resume_state=resume_state, persist_first=True)
            self._suspend_first = {}
        running = SlotStream(
            self._settings,
            self._globs,
            self._catalogue,
            self._publish,
            resume_state,
            self._suspended,
            published=lambda: self._published,
            redefined=self._redefined,
            is_stored=stored.published.tables is not None,
        )
        self._stream = running
        self._suspended.begin(running.wake)
        running.ack(self._acked_scn)
        try:
            async for batch in running.batches(after_scn):
                yield batch
        finally:
            self._suspended.end()
            await running.close()
            self._stream = None

    async def ack(self, scn: int) -> None:
        """Confirm to the server that it may discard everything up to ``scn``."""
        self._acked_scn = max(self._acked_scn, scn)
        if self._stream is not None:
            self._stream.ack(self._acked_scn)

    async def schemas(self) -> list[SourceSchema]:
        """The tables that match and have a key."""
        values = self._settings.special_values
        return [table.schema(values) for table in await self._tables() if table.key]

    async def largest_key(self, source: str) -> list[Any] | None:
        """The last key in the database's own order."""
        await self._resume_first(source)
        return await self._chunks.largest_key(await self._found(source))

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """See postgres_chunks.py."""
        if request.is_of_whole_table:
            await self._resume_first(request.source)
        elif request.is_probe and request.keys is None:
            await self._resumable(request.source)
        table = await self._found(request.source)
        try:
            return await self._chunks.read(table, request)
        except UnsupportedChange as error:
            is_held = "held_by" in error.details  # It can be read later.
            if request.source in self._resumed_from and self._stream is not None and not is_held:
                self._stream.suspend_again(
                    request.source, DefinitionGap(error.message, rows_remain=False)
                )
            raise

    async def _resume_first(self, source: str) -> None:
        """Before the whole table is read: if it is suspended, let the stream resume it first."""
        if (table := await self._resumable(source)) is None:
            return
        if self._stream is not None:
            self._stream.assign(source, table.oid)
        await self._suspended.resumption(source)
        self._writers.forget(source)
        self._resumed_from.add(source)

    async def _resumable(self, source: str) -> PostgresTable | None:
        """A suspended table, once the stream can resume it; None: it is not suspended."""
        if source not in self._suspended.suspensions:
            return None
        before = self._published.of(source), self._unpublished.get(source)
        table = await self._found(source)
        if source in self._unpublished:
            raise UnsupportedChange(f"{source}: {self._unpublished[source]}", source=source)
        await self._writers.wait(table, self._published.renewal)
        table.schema(self._settings.special_values)
        if self._stream is not None:
            await self._stream.come_to_now()
        if before == (self._published.of(source), self._unpublished.get(source)):
            return table
        # A discovery that suspended it again meanwhile found no request to withdraw.
        self._writers.forget(source)
        raise SourceUnavailable(f"{source} was altered before it was read; read it again")

    async def _found(self, source: str) -> PostgresTable:
        """The table of this name; the last discovery has found the same one."""
        table = await self._table(source)
        if self._published.knows(table) or source in self._unpublished:
            return table
        raise SourceUnavailable(
            f"{source} is a new table, or another table than before: it is read once the relay "
            "has compared the catalogue again"
        )

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """See postgres_chunks.py."""
        return await self._chunks.chunk_end(await self._table(request.source), request)

    def suspended(self) -> Mapping[str, TableSuspension]:
        """See ``SuspendingSource``."""
        return {
            source: replace(one, is_gone=True) if self._published.is_gone(source) else one
            for source, one in self._suspended.suspensions.items()
        }

    async def confirm_drop(self, source: str) -> None:
        """See ``DropConfirmingSource``."""
        if self._stream is None or not self._published.is_gone(source):
            why = "a table of this name exists again" if self._stream else "it is not connected"
            raise SourceUnavailable(f"{source} cannot be given up: {why}")
        self._stream.assign(source, NO_OID)
        try:
            await self._suspended.resumption(source)
        except SourceUnavailable:
            self._suspended.withdraw(source)
            raise
        if self._published.is_gone(source):
            self._published = self._published.gone(source, FORGOTTEN)

    async def table_size(self, source: str) -> TableSize:
        """See postgres_chunks.py."""
        return await self._chunks.size(await self._table(source))

    async def write_watermark(self, table: str, token: str) -> None:
        """See ``WatermarkingSource``."""
        await self._chunks.write_watermark(await self._table(table), token)

    async def committed_scn(self) -> int:
        """See ``Source.committed_scn``."""
        return await self._catalogue.written_scn()

    async def status(self) -> dict[str, Any]:
        """Server version, current scn, slot and retained log, tables that are left out or
        suspended."""
        facts = await self._catalogue.facts()
        slot = await self._catalogue.slot()
        status: dict[str, Any] = {
            "server_version": facts["version"],
            "current_scn": await self._catalogue.written_scn(),
            "acked_scn": self._acked_scn,
            "slot": self._settings.slot,
            "publication": self._settings.publication,
            "refused_tables": dict(self._unpublished),
            "stopped_tables": self._suspended.document(),
            "warnings": [*self._suspended.warnings(), *self._chunks.warnings()],
        }
        status["warnings"] += [
            f"{source} cannot be captured: {why}"
            for source, why in self._unpublished.items()
            if source not in self._suspended.suspensions
        ]
        if self._stream is not None:
            status["encrypted"] = self._stream.encrypted
            status["warnings"] += self._stream.warnings()
        if slot is not None:
            status |= wal_retention.document(slot)
            warnings = wal_retention.warnings(slot, self._settings)
            if warnings and not self._warned:
                _log.warning("database %s: %s", self._settings.name, "; ".join(warnings))
            self._warned = bool(warnings)
            status["warnings"] += warnings
        return status

    async def close(self) -> None:
        """End the stream and the SQL session; the slot stays."""
        if self._stream is not None:
            await self._stream.close()
        await self._chunks.close()
        await self._catalogue.close()

    async def _tables(self) -> list[PostgresTable]:
        found = await self._catalogue.tables()
        return [table for table in found.values() if matches(table.source, self._globs)]

    async def _table(self, source: str) -> PostgresTable:
        table = None
        if matches(source, self._globs):
            table = await self._catalogue.table_named(source)
        if table is not None:
            return table
        raise UnknownSource(
            f"{self._settings.name} has no captured table {source}; the globs are "
            f"{', '.join(self._globs)}"
        )

    async def _publish(self) -> None:
        """Update the publication; suspend tables that it does not publish completely.

        A table without a key is not published: the application's own updates and deletes of it
        would fail.  A published table that loses its key is removed from the publication.
        """
        self._redefined_in_stream.clear()
        if self._stream is not None and (leaves := self._stream.take_leaves()):
            # These partitions existed before this discovery.
            self._published = self._published.with_partitions(leaves)
        tables = await self._tables()
        self._suspend_reused_names(tables)
        wanted = [table for table in tables if table.key]
        # Before a table is added: every change of its definition from then on is noticed.
        definitions = await self._catalogue.definitions(wanted)
        unpublished = {
            table.source: f"it has no key that identifies its rows; {key_remedy(table)}"
            for table in tables
            if not table.key
        }
        before, self._unpublished = self._unpublished, {**self._unpublished, **unpublished}
        publication = await self._catalogue.publication()
        is_new = publication is None
        if publication is None:
            try:
                await self._catalogue.create_publication()
            except asyncpg.InsufficientPrivilegeError as error:
                why = f"the publication {self._settings.publication} is gone: {error}"
                self._suspend_all(self._published.oids.keys() | {t.source for t in wanted}, why)
                raise
            publication = await self._catalogue.required_publication()
        if self._resumes and self._published.tables is None:  # An earlier version did not store it.
            whole = [table for table in wanted if publication.problem(table) is None]
            self._published = self._published.after(whole, publication, definitions)
        for table in wanted:
            is_left_out = self._published.knows(table) and not is_new  # by another session
            if publication.has(table) or publication.all_tables or is_left_out:
                continue
            try:
                await self._catalogue.extend_publication(table)
            except asyncpg.DuplicateObjectError:
                continue
            except (
                asyncpg.InsufficientPrivilegeError,
                asyncpg.LockNotAvailableError,
                asyncpg.UndefinedTableError,
            ) as error:
                unpublished[table.source] = f"it is not in the publication: {error}"
        published = self._published.oids
        unkeyed = [table for table in tables if not table.key and table.source in published]
        for table in unkeyed:
            # While it is published, the server refuses the application's updates of it.
            if table.oid in publication.members and (
                refused := await self._catalogue.reduce_publication(table)
            ):
                unpublished[table.source] += f", or {refused}"
            self._suspend_until(table.source, unpublished[table.source], key_remedy(table))
        if unkeyed:
            self._published = self._published.without(unkeyed)
        missing = published.keys() - {table.source for table in tables}
        await self._suspend_eventless(
            {source: published[source] for source in missing}, unpublished
        )
        await self._suspend_gone(tables)
        publication = await self._catalogue.required_publication()
        await self._check_published(wanted, publication, definitions, unpublished, published)
        if self._stream is not None:
            self._stream.add_found(self._published.oids)
        name = self._settings.name
        for source in unpublished.keys() - before.keys():
            _log.warning("database %s: %s is not captured: %s", name, source, unpublished[source])
        self._unpublished = unpublished

    async def _suspend_eventless(self, oids: dict[str, int], unpublished: dict[str, str]) -> None:
        """Suspend existing tables that can no longer be captured."""
        found = await self._catalogue.eventless(oids.values()) if oids else {}
        for source in found.keys() & oids:
            why, cure = found[source]
            unpublished[source] = f"{why}; {cure}"
            self._suspend_until(source, why, cure)
            self._published = self._published.lost([source])

    async def _suspend_gone(self, tables: Iterable[PostgresTable]) -> None:
        """Suspend tables that no longer exist under their names."""
        known = self._published.oids.keys() | self._suspended.suspensions.keys()
        for source in known - {table.source for table in tables}:
            is_suspended, published = source in self._suspended.suspensions, self._published
            is_known = published.is_gone(source) if is_suspended else published.is_forgotten(source)
            if is_known or not matches(source, self._globs):
                continue
            if await self._is_gone(source):
                self._published = self._published.gone(source)
                self._suspended.wait_for(source, "")
                self._suspend(source, DefinitionGap(_GONE, rows_remain=False))

    async def _is_gone(self, source: str) -> bool:
        oid, known = await self._catalogue.oid_named(source), self._published.oids.get(source)
        if oid is None:
            return True
        # Another relation that cannot be captured has its name.
        return known not in (None, oid) and await self._catalogue.table(oid) is None

    def _suspend_reused_names(self, tables: Iterable[PostgresTable]) -> None:
        """Suspend tables with the names of dropped tables: each must be dumped."""
        for table in tables:
            name = table.source
            if self._published.is_gone(name) or self._published.is_forgotten(name):
                self._published = self._published.lost([name])
                self._suspend(name, DefinitionGap(_RETURNED, rows_remain=False))

    def _suspend_all(self, sources: Iterable[str], why: str) -> None:
        """Suspend all tables: none has events until the publication exists again."""
        cure = create_publication_sql(self._settings.publication, [])
        gone = {
            source: f"{why}; {cure}" for source in sources
            if not (self._published.is_gone(source) or self._published.is_forgotten(source))
        }  # fmt: skip
        for source in gone.keys() - self._unpublished.keys():
            self._suspend(source, DefinitionGap(why, rows_remain=False, waits_for=cure))
        self._unpublished = {**self._unpublished, **gone}

    async def _redefined(self, table: PostgresTable) -> DefinitionGap | None:
        """How a table's rows may have changed with its definition since the last discovery."""
        if self._published.of(table.source) is None:
            return None
        definition = (await self._catalogue.definitions([table])).get(table.oid)
        change = self._published.change(table, definition)
        if change is None or definition is None:
            return None
        self._published = self._published.redefined(table, definition)
        self._redefined_in_stream.add(table.source)
        return change

    async def _check_published(
        self,
        tables: list[PostgresTable],
        publication: Publication,
        definitions: dict[int, Definition],
        unpublished: dict[str, str],
        before: dict[str, int],
    ) -> None:
        """Suspend the tables whose changes may not all be in the stream.

        The publication does not publish them completely, or did not for a while, or their rows
        changed with their definition.  ``before``: the oids of the last check.
        """
        is_new = not self._resumes and self._stream is None
        whole, is_altered = [], False
        for table in tables:
            problem = publication.problem(table)
            if problem is not None:
                is_known = self._unpublished.get(table.source) == str(problem)
                if not is_known and await self._catalogue.table(table.oid) != table:
                    continue  # It was altered or dropped meanwhile: the next discovery examines it.
                unpublished.setdefault(table.source, str(problem))
                self._suspend_until(table.source, str(problem), problem.cure)
                continue
            self._suspended.wait_for(table.source, self._published.renewal.cure)
            # The stream may have read a later definition meanwhile.
            definition = (
                None if table.source in self._redefined_in_stream else definitions.get(table.oid)
            )
            moved = await self._moved.other_rows(
                table, self._published, publication, definition, self._stream
            )
            if moved is None:
                continue  # A later discovery examines it.
            whole.append(table)
            gap = None if is_new else self._published.gap(table, publication, definition, moved)
            known = self._published.of(table.source)
            # A renamed table may have had rows where the stream is now, although it is empty.
            is_known = known is not None or table.oid in before.values()
            if gap and (is_known or not await self._catalogue.is_empty(table)):
                self._suspend(table.source, gap)
                is_altered |= await self._writers.may_be_kept(table, known, publication)
        later = {table.oid for table in whole if table.source in self._redefined_in_stream}
        found = {oid: found for oid, found in definitions.items() if oid not in later}
        self._moved.seen(whole, found)
        after = self._published.after(whole, publication, found)
        resolved = self._stream.resolved if self._stream is not None else 0
        after = await self._writers.renewal(after, is_altered=is_altered, resolved=resolved)
        if after != self._published:
            self._published = after

    def _suspend_until(self, source: str, why: str, cure: str) -> None:
        """Suspend a table; it is not read before ``waits_for`` is done."""
        self._suspend(source, DefinitionGap(why, rows_remain=False, waits_for=cure))
        self._suspended.wait_for(source, cure)

    def _suspend(self, source: str, change: DefinitionGap) -> None:
        self._writers.forget(source)
        if self._stream is not None:
            self._stream.suspend_again(source, change)
        else:
            self._suspend_first[source] = change
