"""Runs dumps one after the other: plans them, stores their records, reports their progress.

table_dump.py reads a table's chunks and splices them into the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from databus.common.errors import (
    BadRequest,
    DatabusError,
    DumpFailed,
    InternalError,
    StoreError,
    UnknownSource,
    UnsupportedChange,
    to_problem,
)
from databus.common.filters.stream_filter import matches
from databus.common.schema.source_schema import SourceSchema
from databus.relay.dumps.dump_progress import DumpProgress
from databus.relay.dumps.dump_records import (
    ACTIVE,
    FINISHED,
    KEPT_MISSING,
    Dump,
    DumpBook,
    DumpState,
    TableProgress,
)
from databus.relay.dumps.table_dump import DumpHost, Emission, TableDump
from databus.relay.sources.contract import ChunkRequest, Source, WatermarkingSource

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class DumpRunner:
    """Works through the queue of a database's dumps.

    Invariants:
        I1. A chunk's progress is recorded after its windows are on disk, and before the next
            chunk's windows, so after a kill at most one chunk is sent again.
        I2. A chunk that cannot be read fails its dump, with the problem and its key; the
            next dump continues.  A record that the disk does not take does the same.

    Owner: the fetcher's loop.
    """

    def __init__(self, book: DumpBook, host: DumpHost) -> None:
        self.book = book
        self.progress = DumpProgress()
        self._host = host
        self._changed = asyncio.Event()
        self._emitted: list[Emission] = []

    @property
    def emitted(self) -> tuple[Emission, ...]:
        """Chunks that are in the ring, and whose progress is not on disk yet."""
        return tuple(self._emitted)

    def poke(self) -> None:
        """A dump was added or changed."""
        self._changed.set()

    def document(self, dump: Dump) -> dict[str, Any]:
        """A dump as it is served: its record, and how fast it advances."""
        return {**dump.to_json(), "progress": self.progress.document(dump)}

    def counts(self) -> dict[str, Any]:
        """All dumps together, for the status and the metrics."""
        running = next((dump for dump in self.book if dump.is_running), None)
        return {
            "active": sum(dump.state in ACTIVE for dump in self.book),
            "failed": sum(dump.state == DumpState.FAILED for dump in self.book),
            "total": sum(1 for _ in self.book),
            **self.progress.totals(),
            **({} if running is None else {"running": self.progress.document(running)}),
        }

    async def run(self) -> None:
        """Run dumps as they come, forever."""
        while True:
            self._changed.clear()
            dump = self.book.next_active()
            if dump is None:
                await self._changed.wait()
                continue
            try:
                await self._run(dump)
            except DatabusError as error:
                await self._fail(dump, error)
            except Exception as error:
                _log.exception("dump %s", dump.id)
                await self._fail(dump, InternalError(f"{type(error).__name__}: {error}"))
            finally:
                self.progress.rest(dump)
            if dump.state in FINISHED:
                self._host.tables.dump_ended(dump)

    async def _fail(self, dump: Dump, error: DatabusError) -> None:
        _log.error("dump %s failed: %s", dump.id, error.message)
        self._emitted.clear()
        if dump.is_running:
            dump.state = DumpState.FAILED
            dump.error = to_problem(error)
            at = next((table for table in dump.tables or () if not table.done), None)
            if at is not None:
                dump.error["failed_at"] = {"source": at.source, "after": at.last_key}
        try:
            await self._host.save_dumps()
        except StoreError as unsaved:
            _log.error("dump %s: its failure is not recorded: %s", dump.id, unsaved.message)

    async def _run(self, dump: Dump) -> None:
        dump.state = DumpState.RUNNING
        await self._host.save_dumps()
        source, intake = await self._host.connected()
        if dump.tables is None:
            dump.tables = await self._while_running(dump, self._plan(dump, source))
            await self._host.save_dumps()
        if dump.tables is None:
            return
        self.progress.begin(dump)
        unread: dict[str, DatabusError] = {}
        for table in dump.tables:
            if not table.done:
                try:
                    await TableDump(
                        dump, table, self._host, self.book, self._changed, self._emitted
                    ).run()
                except (UnsupportedChange, UnknownSource) as error:
                    # One table's value, or its end, does not stop the tables after it.
                    _log.error("dump %s: %s", dump.id, error.message)
                    unread[table.source] = error
            if self._emitted:
                await self._host.make_durable()
            if not dump.is_running:
                return
        if unread:
            raise unread_tables(unread)
        dump.end = intake.complete
        dump.state = DumpState.COMPLETED
        await self._host.save_dumps()

    async def _while_running(self, dump: Dump, work: Coroutine[Any, Any, _T]) -> _T | None:
        """The result of the work; None once the dump is paused or cancelled, which ends it."""
        task = asyncio.create_task(work)
        try:
            while not task.done() and dump.is_running:
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _plan(self, dump: Dump, source: Source) -> list[TableProgress]:
        schemas = {schema.source: schema for schema in await source.schemas()}
        names = list(schemas)
        if dump.watermark_table is not None:
            if not isinstance(source, WatermarkingSource):
                raise DumpFailed("this source writes no watermarks; leave watermark_table out")
            if dump.watermark_table not in names:
                raise DumpFailed(
                    f"the watermark table {dump.watermark_table} is not captured: CREATE TABLE "
                    f"{dump.watermark_table} (id INT PRIMARY KEY, token VARCHAR(200) NOT NULL), "
                    f"and name it in the database's sources"
                )
            names.remove(dump.watermark_table)
        wanted = [name for name in names if matches(name, dump.sources)]
        if not wanted:
            raise UnknownSource(await self._why_none(dump, source, names))
        if dump.keys is not None:
            if len(wanted) != 1:
                raise DumpFailed(f"keys are of one table, but {dump.sources} match {wanted}")
            return [TableProgress(wanted[0], estimated_rows=len(dump.keys))]
        tables = []
        for name in wanted:
            try:
                if dump.where is None:
                    await self._host.tables.before_dump(dump, source, schemas[name])
                after = _after_key(dump, schemas[name])
                upto, size = await source.largest_key(name), await source.table_size(name)
            except (UnsupportedChange, UnknownSource):
                if len(wanted) == 1:
                    raise
                tables.append(TableProgress(name))  # It fails by itself, when it is dumped.
                continue
            # An empty one has a chunk too: the stream may not have come to where it was emptied.
            tables.append(
                TableProgress(
                    name,
                    upto=upto,
                    last_key=after,
                    # The number of rows that fulfil a condition is unknown.
                    estimated_rows=size.rows if dump.where is None else None,
                    row_bytes=size.row_bytes,
                    is_scanned=size.is_scanned,
                )
            )
        return tables

    async def _why_none(self, dump: Dump, source: Source, names: list[str]) -> str:
        """Why nothing can be dumped: for suspended tables, the source's reason."""
        found = []
        for record in self._host.tables.book:
            if matches(record.source, dump.sources):
                try:
                    await source.read_chunk(ChunkRequest(record.source, 1, is_probe=True))
                except DatabusError as error:
                    if error.retry:
                        raise
                    found.append(error.message)
        return "; ".join(found) or (
            f"no source matches {dump.sources}; there are {', '.join(sorted(names))}; the status "
            "names tables that cannot be captured"
        )

    def settle(self, emitted: tuple[Emission, ...]) -> bool:
        """Note the progress of emissions whose rows are on disk; True if that changed a dump."""
        changed = False
        for emission in emitted:
            if emission.is_settled or emission not in self._emitted:
                continue
            emission.is_settled = changed = True
            dump, table = emission.dump, emission.table
            table.last_key = emission.last_key
            table.done = emission.done
            table.chunks += 1
            table.rows += emission.row_count
            table.dropped += emission.dropped_count
            dump.missing.extend(emission.missing[: KEPT_MISSING - len(dump.missing)])
            if dump.keys is not None:
                dump.keys = dump.keys[emission.key_count :]
                table.done = not dump.keys
            self.progress.settled(dump)
            self.progress.count(emission.row_count, emission.dropped_count)
        return changed

    def recorded(self, emitted: tuple[Emission, ...]) -> None:
        """The progress of settled emissions is on disk: the next chunk may go out."""
        self._emitted[:] = [entry for entry in self._emitted if entry not in emitted]
        if emitted:
            self._changed.set()


def _after_key(dump: Dump, schema: SourceSchema) -> list[Any] | None:
    """The key after which the rows of a table are read.

    Raises:
        BadRequest: it has another number of columns than the table's key.
    """
    after = dump.after.get(schema.source)
    if after is not None and len(after) != len(schema.key):
        raise BadRequest(
            f"the key of {schema.source} is ({', '.join(schema.key)}), and after has {after}"
        )
    return after


def unread_tables(unread: dict[str, DatabusError]) -> DatabusError:
    """The error of a dump that has read all tables but these; ``unread`` has their reasons."""
    reasons = {source: error.message for source, error in unread.items()}
    first = next(iter(unread.values()))
    error = first if len(unread) == 1 else UnsupportedChange("; ".join(reasons.values()))
    error.details["unread"] = reasons
    return error
