"""Runs dumps: reads chunks beside the stream and splices them into it.

The stream never waits for a chunk; only the chunk waits for the stream (watermark.py says
why).  Each chunk goes out as a window behind the last window of the stream, and counts as
done only after the ring was synced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from databus.common import frame
from databus.common.errors import (
    DatabusError,
    DumpFailed,
    InternalError,
    SourceUnavailable,
    UnknownSource,
    to_problem,
)
from databus.common.filters import matches
from databus.common.frame import FIRST_CONTROL_OP, FrameColumns, Op
from databus.common.window import WindowBuilder
from databus.relay.dumps import KEPT_MISSING, Dump, DumpBook, DumpState, TableProgress
from databus.relay.intake import Intake
from databus.relay.sources.source import Chunk, ChunkRequest, Row, Source
from databus.relay.watermark import ChunkWindow, ReadAgain, Spliced

MAX_WINDOW_BYTES = 4 << 20
MAX_ATTEMPTS = 20
MAX_HALVINGS = 6
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 5.0

_log = logging.getLogger(__name__)


class DumpHost(Protocol):
    """What a dump needs from the fetcher around it."""

    async def connected(self) -> tuple[Source, Intake]:
        """The source, once it is streaming."""

    def recent(self) -> Iterable[bytes]:
        """The batches of the last moment, the oldest first."""

    def published(self) -> None:
        """Something was appended: wake the readers."""

    async def make_durable(self) -> None:
        """Sync the ring, then call ``DumpRunner.settle`` for what was emitted before."""

    async def save_dumps(self) -> None:
        """Put the dumps' records on disk."""


@dataclass(frozen=True, slots=True)
class Emission:
    """A chunk whose rows are in the ring, but perhaps not on disk yet."""

    dump: Dump
    table: TableProgress
    request: ChunkRequest
    chunk: Chunk
    row_count: int
    dropped_count: int


class DumpRunner:
    """Works through the queue of a database's dumps, one chunk at a time.

    Invariants:
        I1. A chunk's progress is recorded after its window is on disk, so a crash repeats at
            most one chunk.
        I2. A chunk's window is appended only while no window of the stream is open.
        I3. A chunk that cannot be read fails its dump, with the problem; the next goes on.

    Owner: the fetcher's loop.  ``observe`` and ``at_window_end`` are called by its intake.
    """

    def __init__(self, book: DumpBook, host: DumpHost) -> None:
        self.book = book
        self.emitted: Emission | None = None
        self._host = host
        self._changed = asyncio.Event()
        self._intake: Intake | None = None
        self._table: TableProgress | None = None
        self._source_id = 0
        self._window = ChunkWindow()
        self._verdict: asyncio.Future[Spliced | ReadAgain] | None = None
        self._chunk: Chunk | None = None

    def poke(self) -> None:
        """A dump was added or changed."""
        self._changed.set()

    async def run(self) -> None:
        """Run dumps as they come, for ever."""
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
                self._stop_observing()

    async def _fail(self, dump: Dump, error: DatabusError) -> None:
        _log.error("dump %s failed: %s", dump.id, error.message)
        if dump.is_running:
            dump.state = DumpState.FAILED
            dump.error = to_problem(error)
        await self._host.save_dumps()

    async def _run(self, dump: Dump) -> None:
        dump.state = DumpState.RUNNING
        await self._host.save_dumps()
        source, intake = await self._host.connected()
        if dump.tables is None:
            dump.tables = await self._plan(dump, source)
            await self._host.save_dumps()
        for table in dump.tables:
            while not table.done:
                await self._run_chunk(dump, table)
                if not table.done:
                    await self._delay(dump)
                if not dump.is_running:
                    return
        dump.end = intake.complete
        dump.state = DumpState.COMPLETED
        await self._host.save_dumps()

    async def _delay(self, dump: Dump) -> None:
        """Wait as long between two chunks as the dump wants, also if it changes its mind."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while dump.is_running:
            left_s = started_s + dump.delay_ms / 1000 - loop.time()
            if left_s <= 0:
                return
            await self._wait_changed(left_s)

    async def _wait_changed(self, timeout_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _plan(self, dump: Dump, source: Source) -> list[TableProgress]:
        names = [schema.source for schema in await source.schemas()]
        wanted = [name for name in names if matches(name, dump.sources)]
        if not wanted:
            raise UnknownSource(
                f"no source matches {dump.sources}; there are {', '.join(sorted(names))}"
            )
        if dump.keys is not None:
            if len(wanted) != 1:
                raise DumpFailed(f"keys are of one table, but {dump.sources} match {wanted}")
            return [TableProgress(wanted[0])]
        tables = []
        for name in wanted:
            upto = await source.largest_key(name)
            # Empty when the dump began: whatever comes later is in the stream.
            tables.append(TableProgress(name, upto=upto, done=upto is None))
        return tables

    # -- one chunk --

    async def _run_chunk(self, dump: Dump, table: TableProgress) -> None:
        reason = ""
        delay_s = RETRY_FIRST_S
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                dump.reread_chunks += 1
                await self._wait_changed(delay_s)
                delay_s = min(RETRY_MOST_S, delay_s * 2)
                if not dump.is_running:
                    return
            source, intake = await self._host.connected()
            self._observe_table(table, intake)
            self._window.begin()
            request = _request(dump, table, attempt)
            try:
                chunk = await source.read_chunk(request)
            except SourceUnavailable as error:
                reason = error.message
                continue
            outcome = await self._splice(dump, chunk)
            if isinstance(outcome, Spliced):
                self.emitted = Emission(
                    dump, table, request, chunk, len(outcome.rows), outcome.dropped_count
                )
                await self._host.make_durable()
                return
            if outcome is None:
                return
            reason = outcome.reason
            _log.info("dump %s reads a chunk of %s again: %s", dump.id, table.source, reason)
        raise DumpFailed(
            f"a chunk of {table.source} after {table.last_key} was read {MAX_ATTEMPTS} times "
            f"without a usable result; the last: {reason}"
        )

    async def _splice(self, dump: Dump, chunk: Chunk) -> Spliced | ReadAgain | None:
        """Wait until the chunk has gone out or turns out useless; None if the dump stopped."""
        verdict: asyncio.Future[Spliced | ReadAgain] = asyncio.get_running_loop().create_future()
        self._window.arrived(chunk)
        self._chunk, self._verdict = chunk, verdict
        try:
            if self._intake is not None and not self._intake.in_window:
                self.at_window_end()
            while not verdict.done():
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    either: set[asyncio.Future[Any]] = {verdict, changed}
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if not dump.is_running and not verdict.done():
                    return None
            return verdict.result()
        finally:
            self._chunk = self._verdict = None

    def settle(self, emission: Emission | None) -> bool:
        """Record the progress of an emission that is on disk; True if that changed a dump."""
        if emission is None or emission is not self.emitted:
            return False
        self.emitted = None
        dump, table, chunk = emission.dump, emission.table, emission.chunk
        table.last_key = chunk.last_key
        table.done = chunk.done
        table.chunks += 1
        table.rows += emission.row_count
        table.dropped += emission.dropped_count
        dump.missing.extend(chunk.missing[: KEPT_MISSING - len(dump.missing)])
        if dump.keys is not None and emission.request.keys is not None:
            dump.keys = dump.keys[len(emission.request.keys) :]
            table.done = not dump.keys
        return True

    # -- watching the stream --

    def _observe_table(self, table: TableProgress, intake: Intake) -> None:
        """Begin to watch a table, with what was streamed a moment before."""
        if self._table is table and self._intake is intake:
            return
        self._stop_observing()
        self._table, self._intake = table, intake
        self._source_id = frame.source_id(table.source)
        recent = list(self._host.recent())
        starts_inside = bool(recent) and frame.read_frame(recent[0]).seq > 0
        self._window = ChunkWindow(in_window=starts_inside or (not recent and intake.in_window))
        for data in recent:
            self.observe(frame.scan(data, verify=False), memoryview(data))
        intake.observer = self

    def _stop_observing(self) -> None:
        if self._intake is not None:
            self._intake.observer = None
        self._table = self._intake = None

    def observe(self, columns: FrameColumns, data: memoryview) -> None:
        """Tell the window of the current chunk what was streamed."""
        ops = columns.op
        rows = (columns.source_id == self._source_id) & (ops < FIRST_CONTROL_OP)
        taken = np.flatnonzero(rows | (ops == Op.END_OF_WINDOW))
        starts = columns.offset[taken] + frame.HEADER_BYTES
        window = self._window
        for op, start, stop, scn, schema_fp in zip(
            ops[taken].tolist(),
            starts.tolist(),
            (starts + columns.key_len[taken]).tolist(),
            columns.scn[taken].tolist(),
            columns.schema_fp[taken].tolist(),
            strict=True,
        ):
            key = bytes(data[start:stop])
            if op == Op.END_OF_WINDOW:
                window.end_window(scn, key.decode())
            elif op == Op.TRUNCATE:
                window.touch_unknown()
            else:
                window.touch(key, schema_fp)

    def at_window_end(self) -> None:
        """Let the waiting chunk go out, if the stream has passed its snapshot."""
        verdict, chunk, intake = self._verdict, self._chunk, self._intake
        if verdict is None or verdict.done() or chunk is None or intake is None:
            return
        outcome = self._window.take(max(intake.resolved, intake.complete.scn))
        if outcome is None:
            return
        if isinstance(outcome, Spliced):
            try:
                self._emit(chunk, outcome.rows, intake)
            except DatabusError as error:
                verdict.set_exception(error)
                return
        verdict.set_result(outcome)

    def _emit(self, chunk: Chunk, rows: list[Row], intake: Intake) -> None:
        """Append the rows as windows behind the last one of the stream."""
        if not rows:
            return
        intake.registry.add((chunk.schema,))
        source, fingerprint = chunk.schema.source_id, chunk.schema.fingerprint
        commit_us = intake.ring.state.max_commit_us or time.time_ns() // 1000
        limit_bytes = min(MAX_WINDOW_BYTES, intake.ring.part_bytes // 2)
        builder: WindowBuilder | None = None
        for row in rows:
            size = len(row.key) + len(row.row) + frame.HEADER_BYTES
            if builder is not None and builder.pending_bytes + size > limit_bytes:
                intake.append_dump_window(builder.end(dump=True))
                builder = None
            if builder is None:
                last = intake.complete
                builder = WindowBuilder(last.scn, commit_us, first_seq=last.seq + 1)
            builder.event(Op.READ, source, fingerprint, row.key, after=row.row)
        if builder is not None:
            intake.append_dump_window(builder.end(dump=True))
        self._host.published()


def _request(dump: Dump, table: TableProgress, attempt: int) -> ChunkRequest:
    # A chunk that the stream outran is read again in less time, so in fewer rows.
    limit = max(1, dump.chunk_rows >> min(attempt, MAX_HALVINGS))
    if dump.keys is not None:
        return ChunkRequest(table.source, limit, keys=dump.keys[:limit])
    return ChunkRequest(
        table.source, limit, after=table.last_key, upto=table.upto, where=dump.where
    )
