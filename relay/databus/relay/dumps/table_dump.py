"""One table of a dump: its chunks are read in parallel, and spliced into the stream in order.

The stream never waits for a chunk; only the chunk waits for the stream (see chunk_window.py).
Each chunk goes out as windows after the last window of the stream, a slice at a time,
and counts as finished only after the ring was synced.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from databus.common.checkpoint import Position
from databus.common.errors import DumpFailed, SourceUnavailable, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameColumns, Op
from databus.relay.capture.intake import Intake
from databus.relay.dumps.chunk_window import ChunkWindow, ReadAgain, Ready, Waiting
from databus.relay.dumps.dump_filter import filtered
from databus.relay.dumps.dump_packing import pack_window, with_deletions
from databus.relay.dumps.dump_records import (
    DEFAULT_CHUNK_ROWS,
    MAX_CHUNK_ROWS,
    Dump,
    DumpBook,
    TableProgress,
)
from databus.relay.dumps.resync import Resync
from databus.relay.dumps.watermark_writes import WatermarkWrite, WatermarkWrites
from databus.relay.sources.contract import (
    MAX_CHUNK_BYTES,
    Chunk,
    ChunkRequest,
    Source,
    WatermarkingSource,
)

MAX_SLICE_BYTES = 256 << 10
MAX_ATTEMPTS = 20
MAX_HALVINGS = 6
LEAST_CHUNK_ROWS = 10
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 5.0
WATERMARK_WAIT_S = 60.0
LIVE_S = 1.0
"""How long the stream counts as live after it has brought something."""
MAX_READ_DELAY_S = 60.0
"""No pause is longer, however long the read before it took: a server may have hung."""
LIVE_CHUNK_MS = 20
"""How long a chunk should take beside a live stream, above DEFAULT_CHUNK_ROWS rows."""
READER_SHARE = 4
"""More rows go out only while a dump's reader has less than this part of the ring before it."""
READER_WAIT_S = 60.0
_ANY_SCN = 1 << 64

_log = logging.getLogger(__name__)


class DumpHost(Protocol):
    """The part of the fetcher that a dump uses."""

    @property
    def skipped_operations(self) -> tuple[str, ...]:
        """The letters of the operations that the database's rules leave out."""

    async def connected(self) -> tuple[Source, Intake]:
        """The source, once it is streaming."""

    def recent(self) -> bytes:
        """The frames that were streamed in the last moment, the oldest first."""

    async def shaped(self, chunk: Chunk) -> Chunk:
        """Every chunk's rows pass through here, after the read and before they are
        compared with the stream and packed.  What changes the stream's rows between the
        source and the ring must change these in the same way."""

    def published(self) -> None:
        """Something was appended: wake the readers."""

    async def make_durable(self) -> None:
        """Sync the ring and record the progress of what was emitted before."""

    @property
    def tables(self) -> Resync:
        """The tables that are not followed: whole dumps of them resynchronise them."""

    async def save_dumps(self) -> None:
        """Write the dumps' records to disk."""


@dataclass(slots=True, eq=False)
class Emission:
    """A chunk whose rows are in the ring, and whose progress is not on disk yet.

    ``is_settled``: the rows are on disk, and the dump has the progress in memory.
    """

    dump: Dump
    table: TableProgress
    last_key: list[Any] | None
    done: bool
    row_count: int
    dropped_count: int
    missing: list[list[Any]]
    key_count: int
    is_settled: bool = False


@dataclass(slots=True, eq=False)
class _InFlightChunk:
    """An in-flight chunk: ``after`` and ``bound`` enclose its keys.

    Without a bound it ends where its rows end, and the next one can only begin then.
    """

    after: list[Any] | None
    limit: int
    waiting: Waiting
    bound: list[Any] | None = None
    bound_known: bool = True
    attempt: int = 0
    retry_at_s: float = 0.0
    task: asyncio.Task[None] | None = None
    chunk: Chunk | None = None
    took_s: float = 0.0
    arrived_s: float = 0.0
    watermark_write: WatermarkWrite | None = None
    row_count: int = 0
    key_count: int = 0
    is_sent: bool = False
    announced: int | None = None

    @property
    def next_after(self) -> list[Any] | None:
        """Where the next chunk begins; None while that is unknown, or if there is none."""
        if self.bound is not None:
            return self.bound
        if self.chunk is not None and not self.chunk.done:
            return self.chunk.last_key
        return None


class TableDump:
    """Dumps one table from its recorded progress on.

    Invariants:
        I1. Chunks go out in the order of their keys, each after the stream has passed its
            snapshot; the progress follows in the same order.
        I2. At most ``parallel`` chunks are being read, and one more is waiting or going out.
        I3. A chunk's rows are appended only while no window of the stream is open.
        I4. With a watermark table a chunk goes out only between its own two tokens; any
            disorder among the tokens fails the dump.
        I5. While the stream brings changes, no chunk begins before the pause that ``share`` gives
            after the last read.
        I6. No rows go out while a dump's ``reader`` has a READER_SHARE of the ring before it, so
            the rows alone never overwrite unread frames.  A reader that has not moved for
            READER_WAIT_S fails the dump: other dumps wait behind it.
        I7. An error in a dump fails that dump, and never the stream that it observes.

    Owner: the fetcher's loop.  ``observe`` and ``at_window_end`` are called by its intake.
    Raises: the errors of a chunk's read, except SourceUnavailable, which is retried.
    """

    def __init__(
        self,
        dump: Dump,
        table: TableProgress,
        host: DumpHost,
        book: DumpBook,
        changed: asyncio.Event,
        emitted: list[Emission],
    ) -> None:
        self._dump = dump
        self._table = table
        self._host = host
        self._changed = changed
        self._emitted = emitted
        self._in_flight_chunks: deque[_InFlightChunk] = deque()
        self._intake: Intake | None = None
        self._window = ChunkWindow(frame_format.source_id(table.source))
        self._finished_s = 0.0
        self._read_end_s = self._read_took_s = 0.0
        self._streamed_s = -LIVE_S
        self._held: tuple[Position, float] | None = None
        self._problem: Exception | None = None
        self._watermark_writes: WatermarkWrites | None = None
        self._watermark_id = 0
        if dump.watermark_table is not None:
            known = {other.id for other in book}
            self._watermark_writes = WatermarkWrites(
                dump.id, secrets.token_hex(4), known.__contains__
            )
            self._watermark_id = frame_format.source_id(dump.watermark_table)

    async def run(self) -> None:
        """Run until the table is done, or the dump is paused or cancelled."""
        try:
            while not self._table.done and self._dump.is_running:
                self._changed.clear()
                if self._problem is not None:
                    raise self._problem
                began_s = time.monotonic()
                await self._launch()
                head = self._in_flight_chunks[0] if self._in_flight_chunks else None
                if head is not None and self._advance(head):
                    if head.is_sent:
                        await self._finish(head)
                    else:
                        await asyncio.sleep(0)
                    continue
                await self._wait(self._patience_s(head, began_s))
        finally:
            await self._cancel_reads()

    async def _cancel_reads(self) -> None:
        """Cancel the in-flight chunks."""
        if self._intake is not None:
            self._intake.observer = None
        tasks = [
            in_flight.task for in_flight in self._in_flight_chunks if in_flight.task is not None
        ]
        self._in_flight_chunks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _patience_s(self, head: _InFlightChunk | None, since_s: float) -> float | None:
        """How long nothing is due; None: until an event.

        What has become due after ``since_s``, the last check, is due at once.
        """
        times = [
            in_flight.retry_at_s for in_flight in self._in_flight_chunks if in_flight.task is None
        ]
        times.append(self._not_before_s)
        if head is not None and head.watermark_write is not None and head.chunk is not None:
            times.append(head.arrived_s + WATERMARK_WAIT_S)
        if self._held is not None:
            times.append(self._held[1] + READER_WAIT_S)
        coming = [at_s for at_s in times if at_s > since_s]
        return max(0.0, min(coming) - time.monotonic()) + 0.001 if coming else None

    # -- reading --

    async def _launch(self) -> None:
        """Start the reads that may start now."""
        now_s = time.monotonic()
        for in_flight in self._in_flight_chunks:
            if in_flight.task is None and in_flight.retry_at_s <= now_s:
                await self._start(in_flight)
        while self._may_start(now_s):
            last = self._in_flight_chunks[-1] if self._in_flight_chunks else None
            in_flight = _InFlightChunk(
                after=self._table.last_key if last is None else last.next_after,
                limit=self._limit(),
                waiting=Waiting(0),
                bound_known=self._parallelism == 1,
            )
            self._in_flight_chunks.append(in_flight)
            await self._start(in_flight)

    @property
    def _parallelism(self) -> int:
        return 1 if self._dump.keys is not None else self._dump.parallel

    def _may_start(self, now_s: float) -> bool:
        if not self._in_flight_chunks:
            # A list of keys is cut off after the recorded keys, so those come first.
            return not self._emitted and now_s >= self._not_before_s
        if self._dump.keys is not None or now_s < self._not_before_s:
            return False
        if self._parallelism == 1 and self._dump.delay_ms:
            return False
        reading = sum(in_flight.chunk is None for in_flight in self._in_flight_chunks)
        last = self._in_flight_chunks[-1]
        return (
            reading < self._parallelism
            and len(self._in_flight_chunks) <= self._parallelism
            and last.bound_known
            and last.next_after is not None
        )

    @property
    def _not_before_s(self) -> float:
        """When the next chunk may begin, by the current pace."""
        delayed_s = self._finished_s + self._dump.delay_ms / 1000 if self._finished_s else 0.0
        read_delay_s = min(MAX_READ_DELAY_S, self._read_took_s * (100 / self._dump.share - 1))
        return max(delayed_s, self._read_end_s + read_delay_s)

    @property
    def _is_careful(self) -> bool:
        """Whether the stream must have the machines for a part of the time."""
        return self._dump.share < 100 and time.monotonic() - self._streamed_s < LIVE_S

    def _limit(self) -> int:
        limit = self._dump.chunk_rows
        if self._table.row_bytes:
            limit = min(limit, max(1, 4 * MAX_CHUNK_BYTES // self._table.row_bytes))
        return limit

    async def _start(self, in_flight: _InFlightChunk) -> None:
        source, intake = await self._host.connected()
        self._observe_from(intake)
        in_flight.waiting = self._window.begin()
        in_flight.chunk, in_flight.row_count = None, 0
        in_flight.announced = intake.definitions.of(self._table.source)
        in_flight.task = asyncio.ensure_future(self._read(in_flight, source))
        in_flight.task.add_done_callback(lambda _: self._changed.set())

    async def _read(self, in_flight: _InFlightChunk, source: Source) -> None:
        dump, table = self._dump, self._table
        # A chunk that the stream outran is read again in less time, so with fewer rows.
        limit = max(1, in_flight.limit >> min(in_flight.attempt, MAX_HALVINGS))
        request = ChunkRequest(table.source, limit, keys=dump.keys and dump.keys[:limit])
        if dump.keys is None:
            upto = table.upto if in_flight.bound is None else in_flight.bound
            request = ChunkRequest(
                table.source,
                limit,
                after=in_flight.after,
                upto=upto,
                is_filtered=dump.where is not None,
            )
        if not in_flight.bound_known:
            in_flight.bound = await source.chunk_end(request)
            in_flight.bound_known = True
            self._changed.set()
        if in_flight.bound is not None:
            # Some room for rows that are new in it; the excess becomes a chunk of its own.
            request = dataclasses.replace(
                request, limit=limit + limit // 8 + 1, upto=in_flight.bound
            )
        in_flight.key_count = len(request.keys or ())
        if self._watermark_writes is not None:
            in_flight.watermark_write = self._watermark_writes.begin()
            await self._mark(source, in_flight.watermark_write.low)
        began_s = time.monotonic()
        chunk = await source.read_chunk(request)
        in_flight.took_s = time.monotonic() - began_s
        if in_flight.watermark_write is not None:
            await self._mark(source, in_flight.watermark_write.high)
        if chunk.key_count is not None:
            in_flight.key_count = chunk.key_count
        gone = chunk.schema, chunk.missing
        chunk = await self._host.shaped(chunk)
        self._adapt(in_flight, limit, chunk)
        if dump.where is not None:
            chunk = await asyncio.to_thread(filtered, chunk, dump.where)
        if dump.delete_missing and chunk.missing and "d" not in self._host.skipped_operations:
            chunk = with_deletions(chunk, *gone)
        self._read_end_s = time.monotonic()
        self._read_took_s = in_flight.took_s if self._is_careful else 0.0
        self._window.arrived(in_flight.waiting, chunk)
        in_flight.chunk, in_flight.arrived_s = chunk, time.monotonic()

    async def _mark(self, source: Source, token: str) -> None:
        if not isinstance(source, WatermarkingSource) or self._dump.watermark_table is None:
            raise DumpFailed(f"{type(source).__name__} writes no watermarks; leave the table out")
        await source.write_watermark(self._dump.watermark_table, token)

    def _adapt(self, in_flight: _InFlightChunk, limit: int, chunk: Chunk) -> None:
        """Adapt the size of chunks to the time they take."""
        dump = self._dump
        size_bytes = chunk.rows.size_bytes
        if not chunk.done and size_bytes >= MAX_CHUNK_BYTES // 2:
            limit = min(limit, len(chunk.rows))  # The limit in bytes ended it before the rows did.
        if not dump.chunk_ms or in_flight.attempt or len(chunk.rows) < limit // 2:
            return
        wanted_ms = min(dump.chunk_ms, LIVE_CHUNK_MS) if self._is_careful else dump.chunk_ms
        factor = min(2.0, max(0.5, wanted_ms / 1000 / max(in_flight.took_s, 1e-4)))
        if self._table.is_scanned:
            factor = 2.0  # A smaller chunk takes as long, and there would be more of them.
        if size_bytes:
            factor = min(factor, MAX_CHUNK_BYTES / size_bytes)
        least = min(limit, DEFAULT_CHUNK_ROWS) if wanted_ms < dump.chunk_ms else LEAST_CHUNK_ROWS
        dump.chunk_rows = min(MAX_CHUNK_ROWS, max(least, int(limit * factor)))

    # -- going out --

    def _advance(self, head: _InFlightChunk) -> bool:
        """Do what can be done for the first chunk now; False if it has to wait."""
        if head.is_sent:
            return True
        if head.task is None or not head.task.done():
            return False
        cut = head.task.cancelled()
        problem = SourceUnavailable("the read was cut off") if cut else head.task.exception()
        if isinstance(problem, SourceUnavailable):
            self._read_again(head, problem.message)
            return False
        if problem is not None:
            raise problem
        self._check_watermarks(head)
        intake = self._intake
        if intake is None or not intake.is_closed:
            return False
        return self._send(head, intake)

    def _check_watermarks(self, head: _InFlightChunk) -> None:
        if self._watermark_writes is None or head.watermark_write is None:
            return
        if self._watermark_writes.violation:
            raise DumpFailed(
                f"{self._table.source} after {self._table.last_key}: "
                f"{self._watermark_writes.violation}; nothing of this chunk was sent"
            )
        if head.watermark_write.is_closed or time.monotonic() < head.arrived_s + WATERMARK_WAIT_S:
            return
        missing = (
            head.watermark_write.high if head.watermark_write.seen_low else head.watermark_write.low
        )
        raise DumpFailed(
            f"the watermark {missing!r} was written to {self._dump.watermark_table}, and "
            f"{WATERMARK_WAIT_S:g} s later it has not come in the stream: is the table captured, "
            f"and the log that of the server that is read?"
        )

    def _send(self, head: _InFlightChunk, intake: Intake) -> bool:
        """Append a slice of the chunk, if it is due; True if that has changed anything."""
        if self._emitted:
            return False  # A kill now would repeat the previous chunk, and must not repeat two.
        if self._is_ahead(intake):
            return False
        resolved_scn = max(intake.resolved, intake.complete.scn)
        if head.watermark_write is not None:
            if not head.watermark_write.is_closed or (
                self._watermark_writes and self._watermark_writes.violation
            ):
                return False
            resolved_scn = _ANY_SCN
        outcome = self._window.outcome(head.waiting, resolved_scn)
        if outcome is None or head.chunk is None:
            return False
        if isinstance(outcome, ReadAgain):
            self._read_again(head, outcome.reason)
            return False
        if len(outcome.left):
            self._append(head, head.chunk, outcome, intake)
        head.is_sent = head.waiting.next_row >= len(head.chunk.rows) or not len(outcome.left)
        return True

    def _is_ahead(self, intake: Intake) -> bool:
        """Whether the dump's reader has too much before it already."""
        reader, ring = self._dump.reader, intake.ring
        if reader is None or ring.bytes_after(reader) < ring.ring_bytes // READER_SHARE:
            self._held = None
            return False
        now_s = time.monotonic()
        if self._held is None or self._held[0] != reader:
            self._held = (reader, now_s)
        if now_s < self._held[1] + READER_WAIT_S:
            return True
        raise DumpFailed(
            f"the dump's reader has been at {reader} for {READER_WAIT_S:g} s, and further rows "
            f"would overwrite what it has not read; resume the dump when the reader continues",
            reader=reader.to_json(),
        )

    def _append(self, head: _InFlightChunk, chunk: Chunk, ready: Ready, intake: Intake) -> None:
        if why := intake.changed_key(chunk.schema, is_compared=self._dump.keys is not None):
            # Since the dump began: readers would keep the rows under the old keys.
            raise UnsupportedChange(
                f"{self._table.source}: {why}; dump it again", source=self._table.source
            )
        intake.come_to(chunk.schema, head.announced)
        commit_us = intake.ring.state.max_commit_us or time.time_ns() // 1000
        limit_bytes = min(MAX_SLICE_BYTES, intake.ring.part_bytes // 2)
        window, count = pack_window(
            chunk.schema, chunk.rows, ready.left, intake.own_after, commit_us, limit_bytes
        )
        intake.append_dump_window(window)
        next_row = int(ready.left[count]) if count < len(ready.left) else len(chunk.rows)
        self._window.sent(head.waiting, next_row)
        head.row_count += count
        self._host.published()

    async def _finish(self, head: _InFlightChunk) -> None:
        """The head is in the ring: the next chunk becomes the head."""
        chunk = head.chunk
        assert chunk is not None, "only what was read is sent"
        self._in_flight_chunks.popleft()
        self._window.leave(head.waiting)
        last_key = head.bound if head.bound is not None and chunk.done else chunk.last_key
        if head.bound is not None and not chunk.done:
            rest = _InFlightChunk(chunk.last_key, head.limit, Waiting(0), bound=head.bound)
            self._in_flight_chunks.appendleft(rest)
        self._emitted.append(
            Emission(
                self._dump,
                self._table,
                last_key,
                head.bound is None and chunk.done,
                head.row_count,
                head.waiting.dropped_count,
                chunk.missing,
                head.key_count,
            )
        )
        self._finished_s = time.monotonic()
        await self._launch()
        await self._host.make_durable()

    def _read_again(self, in_flight: _InFlightChunk, reason: str) -> None:
        """Have the chunk read again after a while; the later ones stay as they are."""
        if in_flight.attempt + 1 >= MAX_ATTEMPTS:
            raise DumpFailed(
                f"a chunk of {self._table.source} after {in_flight.after} was read {MAX_ATTEMPTS} "
                f"times without a usable result; the last: {reason}"
            )
        _log.info(
            "dump %s reads a chunk of %s again: %s", self._dump.id, self._table.source, reason
        )
        self._dump.reread_chunks += 1
        self._window.leave(in_flight.waiting)
        if len(self._in_flight_chunks) > 1:
            in_flight.bound = in_flight.next_after
        delay_s = min(RETRY_MOST_S, RETRY_FIRST_S * 2**in_flight.attempt)
        in_flight.attempt += 1
        in_flight.task, in_flight.chunk = None, None
        in_flight.retry_at_s = time.monotonic() + delay_s

    # -- watching the stream --

    def _observe_from(self, intake: Intake) -> None:
        """Begin to observe, with what was streamed a moment before."""
        if self._intake is intake:
            return
        self._intake = intake
        recent = self._host.recent()
        starts_inside = bool(recent) and frame_format.read_frame(recent).seq > 0
        self._window = ChunkWindow(
            frame_format.source_id(self._table.source),
            in_window=starts_inside or (not recent and intake.in_window),
        )
        if recent:
            self._window.observe(frame_format.scan(recent, verify=False), memoryview(recent))
        intake.observer = self

    def observe(self, columns: FrameColumns, data: memoryview) -> None:
        """Observe frames that were just appended."""
        self._streamed_s = time.monotonic()
        with self._failing_the_dump():
            self._window.observe(columns, data)
            if self._watermark_writes is not None and self._intake is not None:
                for index in np.flatnonzero(columns.source_id == self._watermark_id).tolist():
                    self._watermark_writes.streamed(self._token(columns, data, index))

    def _token(self, columns: FrameColumns, data: memoryview, index: int) -> str | None:
        view = frame_format.read_frame(data, int(columns.offset[index]))
        if view.op in (Op.DELETE, Op.TRUNCATE) or view.after is None or self._intake is None:
            return None
        row = self._intake.registry.schemas.by_fingerprint(view.schema_fp).decode_row(view.after)
        return str(row.get("token", ""))

    def at_window_end(self) -> None:
        """No window is open: a slice of the first chunk may go out."""
        head, intake = self._in_flight_chunks[0] if self._in_flight_chunks else None, self._intake
        if self._problem is not None or head is None or intake is None:
            return
        if head.chunk is not None and not head.is_sent:
            with self._failing_the_dump():
                self._send(head, intake)
        self._changed.set()

    @contextlib.contextmanager
    def _failing_the_dump(self) -> Iterator[None]:
        """Store an error for ``run``, and stop observing the stream, which continues."""
        try:
            yield
        except Exception as error:
            self._problem = error
            if self._intake is not None:
                self._intake.observer = None
            self._changed.set()
