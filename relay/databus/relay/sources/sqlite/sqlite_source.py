"""SQLite as a source: polls the trigger-fed log, one poll being one consistent window.

SQLite does not report where a transaction ends.  So a window here is everything new that one
read transaction sees: one or several whole transactions of the database.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from pydantic import Field

from databus.common.compiled.kernels import COMPILED
from databus.common.config import DatabaseConfig
from databus.common.errors import (
    ConfigError,
    SourcePositionLost,
    SourceUnavailable,
    UnsupportedChange,
)
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_names import join_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.configured_keys import ConfiguredKeys
from databus.relay.sources.contract import (
    Batch,
    Chunk,
    ChunkRequest,
    Finding,
    TableSize,
    Transaction,
    raise_findings,
)
from databus.relay.sources.source_options import SourceOptions, read_options
from databus.relay.sources.sqlite import sqlite_kernels
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite import sqlite_replacements as replacements
from databus.relay.sources.sqlite.sqlite_chunks import SqliteChunkReader
from databus.relay.sources.sqlite.sqlite_claim import claim
from databus.relay.sources.sqlite.sqlite_definitions import ShownDefinitions
from databus.relay.sources.sqlite.sqlite_packing import (
    LogBlock,
    LogPacker,
    LogRow,
    add_event,
    add_schema_change,
    read_block,
)
from databus.relay.sources.sqlite.sqlite_tables import CapturedTables, Unseen
from databus.relay.sources.suspended_tables import (
    SuspendedTables,
    SuspensionState,
    TableSuspension,
    decode_suspensions,
)

_T = TypeVar("_T")

_PART_BYTES = 1 << 20
_PART_ROWS = 2000
_IDLE_S = 0.5
_PRUNE_ROWS = 5000
_PRUNE_STEPS = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Poll:
    """The first rows of a window that ends at the log id ``upto``, committed at ``at_ms``.

    Rows of the versions in ``passed_over`` are left out.
    """

    block: LogBlock
    at_ms: int
    upto: int
    left_out: frozenset[int]


class SqliteOptions(SourceOptions):
    """The options of an SQLite source."""

    poll_ms: float = Field(default=5, ge=0)
    """Interval at which the relay looks for new rows of the log."""
    retain_rows: int = Field(default=0, ge=0)
    """Rows of the log that remain after the relay has read them."""
    recursive_triggers: bool = False
    """Whether every writer sets PRAGMA recursive_triggers = ON: REPLACE fires DELETE triggers."""


class SqliteSource:
    """The changes of one SQLite file.

    Invariants:
        I1. The scn is the largest log id of the window.  Before a window is yielded in parts,
            its end is recorded in the database, so that a restart gives the same window.
        I2. Log rows are deleted only up to the acknowledged scn, which is recorded in the same
            transaction.
        I3. A table with a row that cannot be converted is suspended: none of its rows is packed
            from that row on, until it resumes between two windows.

    Owner: one event loop; SQLite itself runs in two threads, one for the stream and the log,
    one for chunks, each with its own connection.
    Durability: none of its own; the log is as durable as the database.
    Raises: SourceUnavailable, SourcePositionLost, UnsupportedChange, PreflightFailed.
    """

    def __init__(self, config: DatabaseConfig, *, use_kernel: bool = COMPILED) -> None:
        """``use_kernel`` False packs each row in Python, for comparison.

        Raises:
            ConfigError: the URL is no path, or an option is unknown.
        """
        self.use_kernel = use_kernel
        options = read_options(config, SqliteOptions)
        self._config = config
        self._keys = ConfiguredKeys(config.keys)
        self._path = _path(config)
        self._poll_s = options.poll_ms / 1000
        self._retain = options.retain_rows
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-log")
        self._chunk_thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-chunk")
        self._connection: sqlite3.Connection | None = None
        self._claim: socket.socket | None = None
        self._tables = CapturedTables(
            self._captures, self._keys, recursive_triggers=options.recursive_triggers
        )
        self._chunks = SqliteChunkReader(self._path, self._keys, self._tables.search)
        self._clock = ""
        self._versions: dict[int, SourceSchema] = {}
        self._changes: list[tuple[int, SourceSchema]] = []
        self._announced: set[int] = set()
        self._packer = LogPacker()
        self._unseen: dict[str, Unseen] = {}
        self._emptied: set[str] = set()
        self._position = self._last_scn = 0
        self._resumes = self._is_closed = False
        self._suspended = SuspendedTables({})
        self._resume_state = SuspensionState()
        self._left_out: dict[str, str] = {}
        self._resumed_from: set[str] = set()
        self._suspend_next: dict[str, str] = {}
        self._definitions = ShownDefinitions(self._findings)

    @property
    def clock(self) -> str:
        """``sqlite:`` and the uuid that the log was created with."""
        return self._clock

    async def preflight(self) -> list[Finding]:
        """See ``Source.preflight``."""

        def examine() -> list[Finding]:
            connection = log.connect(self._path)
            try:
                return self._findings(connection)
            finally:
                connection.close()

        return await self._run(examine)

    def _findings(self, connection: sqlite3.Connection) -> list[Finding]:
        names = [*log.user_tables(connection), *log.virtual_tables(connection)]
        tables = [table for table in names if self._captures(table)]
        found = log.findings(connection, tables, self._keys)
        return [*found, *self._tables.findings(connection)]

    async def open(self) -> None:
        """See ``Source.open``; creates the log and its triggers."""
        raise_findings(self._config.name, await self.preflight(), resumes=self._resumes)
        if self.use_kernel:
            await asyncio.to_thread(sqlite_kernels.warm_up)
        self._claim = self._claim or claim(self._path)
        await self._run(self._open)
        while not await self._run(self._refresh_tables):
            await asyncio.sleep(max(0.0, self._tables.next_refresh_s - time.monotonic()))

    def _open(self) -> None:
        self._connection = log.connect(self._path)
        self._clock = log.install(self._connection)
        self._tables.resumes = self._resumes
        if not self._resumes:
            self._position = log.last_id(self._connection)
            self._tables.settled(self._connection, self._tables.unseen(self._connection))

    def restore(self, resume_state: str, last: Transaction | None, after_scn: int) -> None:
        """See ``ResumableSource``: the suspended tables."""
        self._resumes, self._position = True, after_scn
        restored = decode_suspensions(resume_state) if resume_state else SuspensionState()
        # A suspension of a later window happens again, at the same row.
        self._resume_state = SuspensionState(
            {
                name: stop
                for name, stop in restored.suspended.items()
                if stop.since_scn <= after_scn and self._config.captures(name)
            }
        )
        self._suspended = SuspendedTables(self._resume_state.suspended)

    async def first_scn(self) -> int:
        """The log's last id: the log exists from now on."""
        return await self._run(lambda: log.last_id(self._db))

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """See ``Source.stream``."""
        await self._run(partial(self._check_position, after_scn))
        self._position = self._last_scn = after_scn
        self._announced.clear()
        self._packer.forget()
        loop = asyncio.get_running_loop()
        idle_since = loop.time()
        data_version = -1
        self._suspended.begin()
        self._resumes = self._tables.resumes = True
        try:
            while True:
                if self._settle():
                    unseen, self._unseen = self._unseen, {}
                    yield Batch(
                        b"",
                        resolved=self._position,
                        resume_state=self._resume_state,
                        persist_first=True,
                    )
                    if unseen:
                        await self._run(partial(self._tables.settled, self._db, unseen))
                    data_version = -1
                    continue
                data_version, poll = await self._run(partial(self._poll, data_version))
                if self._is_to_settle:
                    continue  # Read before the requested tables resumed.
                if poll is not None:
                    async for batch in self._window(poll):
                        yield batch
                    idle_since = loop.time()
                    continue
                if loop.time() - idle_since >= _IDLE_S:
                    idle_since = loop.time()
                    yield Batch(b"", resolved=self._position, resume_state=self._resume_state)
                await asyncio.sleep(self._poll_s)
        finally:
            self._suspended.end()

    async def ack(self, scn: int) -> None:
        """Delete the log up to ``scn``, in steps with pauses; the next ``ack`` deletes the rest."""
        for step in range(_PRUNE_STEPS):
            pause_s = await self._run(partial(self._prune, scn, 1 if step else _PRUNE_ROWS))
            if not pause_s:
                break
            await asyncio.sleep(pause_s)

    async def schemas(self) -> list[SourceSchema]:
        """See ``Source.schemas``; before ``open`` over a connection of its own."""

        def read() -> list[SourceSchema]:
            if self._connection is not None:
                return self._tables.schemas(self._connection)
            self._connection = log.connect(self._path)
            try:
                return self._tables.schemas(self._connection)
            finally:
                self._connection.close()
                self._connection = None

        return await self._run(read)

    async def largest_key(self, source: str) -> list[Any] | None:
        """See ``Source.largest_key``."""

        await self._resume_first(source)
        return await self._read(partial(self._chunks.largest_key, source))

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """See ``Source.chunk_end``."""
        return await self._read(partial(self._chunks.chunk_end, request))

    def suspended(self) -> Mapping[str, TableSuspension]:
        """See ``SuspendingSource``."""
        return self._suspended.suspensions

    async def table_size(self, source: str) -> TableSize:
        """The largest rowid, or else the number of rows."""
        return await self._read(partial(self._chunks.size, source))

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """See ``Source.read_chunk``."""
        if request.is_of_whole_table:
            await self._resume_first(request.source)
        try:
            return await self._read(partial(self._chunks.read, request))
        except UnsupportedChange as error:
            if request.source in self._resumed_from:
                self._suspend_next[request.source] = error.message
            raise

    async def _read(self, question: Callable[[], _T]) -> _T:
        """Run a query for rows; a cancelled one is interrupted."""
        try:
            return await self._run(question, self._chunk_thread)
        except asyncio.CancelledError:
            self._chunks.interrupt()
            raise

    async def _resume_first(self, source: str) -> None:
        """Before the whole table is read: if it is suspended, let the stream resume it first."""
        if source not in self._suspended.suspensions:
            return
        await self._read(partial(self._chunks.examine, source))
        await self._suspended.resumption(source)
        self._resumed_from.add(source)

    async def committed_scn(self) -> int:
        """See ``Source.committed_scn``."""
        return await self._run(lambda: log.last_id(self._db))

    async def status(self) -> dict[str, Any]:
        """Version, the log's last id and row count, tables that are left out or suspended."""
        suspended = SuspendedTables(self._suspended.suspensions)

        def read() -> dict[str, Any]:
            count = self._db.execute("SELECT count(*) FROM databus_log").fetchone()[0]
            tables, without = self._definitions.read(self._db)
            return {
                "server": f"SQLite {sqlite3.sqlite_version}",
                "scn": log.last_id(self._db),
                "log_rows": count,
                "tables": tables,
                "stopped_tables": suspended.document(),
                "warnings": [*suspended.warnings(), *without],
            }

        return await self._run(read)

    async def close(self) -> None:
        """See ``Source.close``; later calls raise SourceUnavailable."""
        if self._is_closed:
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()
        if self._connection is not None:
            await loop.run_in_executor(self._thread, self._connection.close)
        await loop.run_in_executor(self._chunk_thread, self._chunks.close)
        for thread in (self._thread, self._chunk_thread):
            thread.shutdown(wait=False)
        self._connection = None
        if self._claim is not None:
            self._claim.close()

    async def _run(self, work: Callable[[], _T], thread: ThreadPoolExecutor | None = None) -> _T:
        if self._is_closed:
            raise SourceUnavailable(f"SQLite database {self._path}: the source was closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(thread or self._thread, work)
        except sqlite3.Error as error:
            raise SourceUnavailable(f"SQLite database {self._path}: {error}") from error

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise SourceUnavailable(f"SQLite database {self._path} is not open")
        return self._connection

    def _captures(self, table: str) -> bool:
        return self._config.captures(join_source("main", table))

    def _refresh_tables(self) -> bool:
        """Update some tables' triggers in a short transaction; whether all are up to date."""
        is_done = self._tables.refresh(self._db, self._position)
        known = max(self._versions, default=0)
        self._changes += log.schema_changes(self._db, known)
        self._versions |= log.registered(self._db, known)
        return is_done

    def _check_position(self, after_scn: int) -> None:
        pruned, last = log.meta(self._db, "pruned"), log.last_id(self._db)
        if not pruned <= after_scn <= last:
            raise SourcePositionLost(
                f"the change log of {self._path} reaches from {pruned} to {last}; the relay is "
                f"at {after_scn} (database={self._config.name})"
            )

    def _poll(self, seen_version: int) -> tuple[int, _Poll | None]:
        """The new rows, or None if there was no commit since ``seen_version``."""
        db, tables = self._db, self._tables
        version = db.execute("PRAGMA data_version").fetchone()[0]
        # Before the definitions: these rows were written with the definitions read next.
        last = log.last_id(db) if version != seen_version else self._position
        if not tables.in_step(db):
            if time.monotonic() >= tables.next_refresh_s:
                self._refresh_tables()
                return -1, None
            if not tables.is_current(db):
                return -1, None  # Rows that old triggers log lack the new columns.
        if tables.has_unseen and self._position >= log.meta(db, "window_end"):
            self._unseen = tables.unseen(db)
            if self._unseen:
                return -1, None
        if last <= self._position:
            return version, None
        if log.meta(db, "pruned") > self._position:
            self._check_position(self._position)  # Another relay may have pruned the log.
        planned = log.meta(db, "window_end")
        if self._position < planned <= last:
            upto = planned
        elif (examined := self._examined(last)) is not None:
            upto = examined
        else:
            return -1, None  # A definition has changed meanwhile.
        left_out = self._versions_left_out(upto)
        upto = log.first_emptied(db, self._position, upto, left_out) or upto
        block = read_block(db, self._position, upto, _PART_ROWS, left_out)
        if not block.text:
            self._position = upto
            return -1, None
        if not block.is_last and planned != upto:
            log.write_briefly(db, partial(log.set_meta, db, "window_end", upto))
        (at_ms,) = db.execute(
            "SELECT at_ms FROM databus_log WHERE id > ? ORDER BY id LIMIT 1", (self._position,)
        ).fetchone()
        return -1, _Poll(block, at_ms, upto, left_out)

    def _examined(self, last: int) -> int | None:
        """The end of a window of whole transactions, the rows that REPLACE removed among its
        events; None if the definitions have changed.  ``last``: an id that the log had before."""
        candidates = replacements.Candidates(self._db, self._versions)
        if not candidates.read(self._position, last):
            return last
        with log.reading(self._db):
            upto = log.last_id(self._db)
            if not self._tables.is_current(self._db):
                return None
            candidates.read(last, upto)
            candidates.retain_missing()
        if replaced := candidates.replaced(upto):
            log.write_briefly(self._db, partial(replacements.publish, self._db, replaced, upto))
        return upto

    # -- suspended tables

    def _versions_left_out(self, scn: int) -> frozenset[int]:
        """The versions of tables that were suspended in a window before ``scn``."""
        leaves_out = self._suspended.leaves_out
        return frozenset(v for v, s in self._versions.items() if leaves_out(s.source, scn))

    @property
    def _is_to_settle(self) -> bool:
        return self._suspended.has_requests or bool(self._suspend_next or self._unseen)

    def _settle(self) -> bool:
        """Between two windows, resume and suspend tables as requested; whether there were any."""
        if not self._is_to_settle:
            return False
        self._suspended.resume_requested()
        unreadable = {source: Unseen(why) for source, why in self._suspend_next.items()}
        for source, unseen in (unreadable | self._unseen).items():
            _log.warning("database %s: %s is suspended: %s", self._config.name, source, unseen.why)
            if unseen.rows_remain:
                self._suspended.suspend(source, self._last_scn, unseen.why, rows_remain=True)
            else:
                self._suspended.suspend_again(source, self._last_scn, unseen.why)
        self._suspend_next.clear()
        self._resume_state = SuspensionState(dict(self._suspended.suspensions))
        return True

    def _suspend(self, tables: Mapping[str, str], scn: int) -> bool:
        """Suspend these tables, which cannot be read, after ``scn``; whether any is new."""
        fresh = {
            source: why
            for source, why in tables.items()
            if source not in self._suspended.suspensions
        }
        for source, why in fresh.items():
            _log.warning("database %s: %s is suspended: %s", self._config.name, source, why)
            self._suspended.suspend(source, scn, why)
        if fresh:
            self._resume_state = SuspensionState(dict(self._suspended.suspensions))
        return bool(fresh)

    def _follow_emptied(self) -> None:
        """Resume tables that were emptied.  The window ends with that row, so no row follows."""
        for source in self._emptied:
            self._suspended.resume_emptied(source)
        if self._emptied:
            self._emptied.clear()
            self._resume_state = SuspensionState(dict(self._suspended.suspensions))

    # -- windows

    async def _window(self, poll: _Poll) -> AsyncIterator[Batch]:
        """Pack a poll into one window, yielded in parts if it is large.

        A suspension is on disk before the window in which it happened ends.
        """
        self._left_out.clear()
        window = WindowBuilder(poll.upto, poll.at_ms * 1000)
        block, after = poll.block, self._position
        while True:
            schemas = await self._run(partial(self._pack, window, block, after))
            if self._suspend(self._left_out, poll.upto):
                yield Batch(b"", resume_state=self._resume_state, persist_first=True)
            self._follow_emptied()
            if block.is_last:
                self._position = poll.upto
                data = window.end(str(poll.upto)) if window.seq else b""
                self._last_scn = poll.upto if data else self._last_scn
                yield Batch(data, schemas, resolved=poll.upto, resume_state=self._resume_state)
                return
            if window.pending_bytes >= _PART_BYTES or schemas:
                yield Batch(window.take(), schemas)
            after = block.last_id
            block = await self._run(
                partial(read_block, self._db, after, poll.upto, _PART_ROWS, poll.left_out)
            )

    def _pack(self, window: WindowBuilder, block: LogBlock, after: int) -> tuple[SourceSchema, ...]:
        """Pack log rows, the first of which follows the log id ``after``."""
        schemas: list[SourceSchema] = []
        packer = self._packer
        packer.begin(block, after, window.scn, window.commit_us)
        more = True
        while more:
            if self.use_kernel and block.is_utf8:
                changes = (at for at, _ in self._changes if at >= packer.last_id)
                frames, count, more = packer.run(window.seq, min(changes, default=None))
                window.packed(frames, count)
            else:
                more = packer.has_more
            if more:
                self._pack_row(window, packer.last_id, packer.take_row(), schemas)
        return tuple(schemas)

    def _pack_row(
        self, window: WindowBuilder, after: int, row: LogRow, schemas: list[SourceSchema]
    ) -> None:
        """Pack a row that the kernel did not take; new ``schemas`` are added."""
        for changed_after, changed in self._changes:
            if after <= changed_after < row.log_id:
                add_schema_change(window, changed)
                schemas.append(changed)
        if (schema := self._versions.get(row.version)) is None:
            self._versions = log.registered(self._db)
            schema = self._versions[row.version]
        if row.op == "t" and schema.source in self._suspended.suspensions:
            self._emptied.add(schema.source)
        elif schema.source in self._left_out:
            return
        if row.version not in self._announced:
            self._announced.add(row.version)
            self._packer.learn(row.version, schema)
            schemas.append(schema)
        try:
            old = None if row.old is None else log.logged(schema, row.old)
            new = None if row.new is None else log.logged(schema, row.new)
        except UnsupportedChange as error:
            self._pass_over(schema.source, error.message)
        else:
            add_event(window, schema, row.op, old, new)

    def _pass_over(self, source: str, why: str) -> None:
        """Leave out the rest of a table's rows in this window."""
        self._left_out[source] = why
        versions = {v for v, schema in self._versions.items() if schema.source == source}
        self._packer.unlearn(versions)
        self._announced -= versions

    def _prune(self, scn: int, least_rows: int) -> float:
        """Delete one step of the log; seconds to wait before the next, 0 if there is none."""
        pruned = log.meta(self._db, "pruned")
        if scn - self._retain - pruned < least_rows:
            return 0.0
        upto = min(scn - self._retain, pruned + _PRUNE_ROWS)

        def prune() -> float:
            began_s = time.monotonic()
            log.delete_upto(self._db, upto)
            return time.monotonic() - began_s

        return max(0.001, 4 * log.write_briefly(self._db, prune))


def _path(config: DatabaseConfig) -> str:
    path = unquote(config.url.reveal.removeprefix("sqlite://"))
    if not path.startswith("/") or len(path) < 2:
        raise ConfigError(
            f"{config.url} is not an SQLite URL: write sqlite:///relative/file or "
            "sqlite:////absolute/file"
        )
    return path[1:]
