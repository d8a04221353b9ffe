"""Answers to ``/stream``: from the ring through a cursor and a format into the response.

``StreamAnswer`` takes one step at each call and never waits; ``StreamSender``
waits, writes and ends.  A reader costs one task, one cursor and at most one block of bytes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from databus.common.access.request_limits import BytePace
from databus.common.checkpoint import ORIGIN, SEQ_END, After, AtTime, Oldest, Position
from databus.common.config import RelayConfig
from databus.common.errors import (
    DatabusError,
    InternalError,
    ReaderOvertaken,
    ScnTooOld,
    SourceUnavailable,
)
from databus.common.frame.frame_format import Buffer, Op, read_frame
from databus.common.http.admission import pace_of, paced
from databus.common.http.http_application import STOPPING
from databus.common.http.json_rendering import Renderer
from databus.common.http.stream_formats import Format, error_frame, make_format
from databus.relay.columns.projection import ProjectedFrames
from databus.relay.ring.ring_format import RingState
from databus.relay.serving.content_coding import CODED_BLOCK_BYTES, CODERS, Coder
from databus.relay.serving.counters.client_counters import ClientCounter
from databus.relay.serving.counters.worker_counters import WorkerCounters
from databus.relay.serving.database_view import DatabaseView
from databus.relay.serving.debezium_lines import DebeziumLines
from databus.relay.serving.extents import Extent
from databus.relay.serving.header_cache import CachedHeaders
from databus.relay.serving.row_filter import FILTERED_BLOCK_BYTES, SlowRowsError
from databus.relay.serving.send_batching import PendingBatch
from databus.relay.serving.socket_writer import CutOff, SocketWriter
from databus.relay.serving.stream_cursor import StreamCursor, is_ahead, start_position, too_old
from databus.relay.serving.stream_request import StreamRequest

OLDEST_ATTEMPTS = 10
MERGED_BYTES = 128 << 10
"""An answer of so many bytes or fewer goes out as a whole, head and body in one write."""

_log = logging.getLogger("databus.relay.serving.stream_sender")


class StreamAnswer:
    """One answer's steps through the ring.

    Invariants:
        I1. Between ``next_part`` returning None and the wait for a wake-up nothing is awaited,
            so that no commit is missed.

    Owner: the task of the request.
    Raises: ScnTooOld from the constructor and ``next_part``; ClockMismatch, UnknownSource and
        SourceUnavailable from the constructor.
    """

    def __init__(
        self, database: DatabaseView, request: StreamRequest, *, is_encrypted: bool = False
    ) -> None:
        """An encrypted connection gets no extents: TLS has to see every byte."""
        self.database = database
        self.request = request
        if request.names_schemas:  # Otherwise the first read is soon enough.
            database.refresh_schemas()
        sources = database.require_sources(request.filter.sources, request.filter.granted)
        if request.columns is not None:
            database.require_columns(request.columns, sources)
        row_filter = None
        if request.where is not None:
            row_filter = database.row_filters.of(request.where)
            row_filter.check(sources)
        ring = self._ring = database.ring
        state = ring.snapshot()
        start = request.start
        if isinstance(start, AtTime):
            start = After(ring.before_time(start.commit_us))
        position = start_position(start, state, ring.clock, database.name)
        self.is_ahead = is_ahead(position, state)
        self.headers = database.range_headers()
        if self.is_ahead:
            self.headers["Databus-Ahead"] = "true"
        if epoch := database.epoch:
            self.headers["Databus-Epoch"] = str(epoch)
        if isinstance(request.start, AtTime):
            # A second look-up of the same time may give another position: the stream has moved on.
            self.headers["Databus-Start"] = f"{position.scn}:{position.seq}"
        self.cursor = StreamCursor(
            position,
            request.filter,
            max_bytes=request.max_bytes,
            may_be_inside=self._may_be_inside(position, state),
            row_filter=row_filter,
        )
        self.cursor.commit_us = state.max_commit_us if position >= state.max else 0
        projected = request.shown_columns if request.format == "frames" else None
        if projected is not None:
            rewriter = database.projections.of(projected)
            self.format: Format = ProjectedFrames(rewriter, database.schemas)
        elif request.format == "debezium":
            self.format = DebeziumLines(database, ring.clock)
        else:
            self.format = make_format(
                request.format, Renderer(database.name, database.schema_of, request.shown_columns)
            )
        self._block_bytes = self.format.block_bytes
        if row_filter is not None:
            self._block_bytes = min(self._block_bytes, FILTERED_BLOCK_BYTES)
        self.coder: Coder | None = None
        if request.coding is not None:
            self.coder = CODERS[request.coding]()
            self.headers["Content-Encoding"] = request.coding
            self._block_bytes = min(self._block_bytes, CODED_BLOCK_BYTES)
        sends_as_it_lies = request.format == "frames" and self.coder is None and projected is None
        self._sends_extents = sends_as_it_lies and self.cursor.takes_all and not is_encrypted
        self._row_filter = row_filter
        self._uses_listings = sends_as_it_lies and self.cursor.uses_cached_headers
        self.batch = PendingBatch(request.batch_s, request.batch_bytes) if request.batch_s else None
        self.has_lost_its_place = False
        self._is_limited = False
        self._known_schemas = -1
        self._ring_position = -1
        self._stop_at = state.tail
        self._sent_a_frame = False
        self._told_events = 0

    def _may_be_inside(self, position: Position, state: RingState) -> bool:
        """Whether ``position`` is, or may be, before the end of its window."""
        if position.seq == SEQ_END or position == ORIGIN or position > state.max:
            return False
        if position.seq:
            before = Position(position.scn, position.seq - 1)
        else:
            before = Position(position.scn - 1, SEQ_END)
        ring = self.database.ring
        try:
            data, _ = ring.read(ring.find(before), 1)
        except ScnTooOld:
            return True
        if not data:
            return False
        frame = read_frame(data)
        return frame.position == position and frame.op != Op.END_OF_WINDOW

    def next_of_batch(self, now_s: float, *, is_last: bool) -> Buffer | Extent | None:
        """``next_part``, or None while the batch waits for more; not if ``is_last``."""
        batch = self.batch
        if batch is None:
            return self.next_part()
        if batch.holds(self._waiting_bytes(), now_s) and not is_last:
            return None
        part = self.next_part()
        if part is None:
            batch.sent_all()
        return part

    def _waiting_bytes(self) -> int:
        """Bytes of the stream that were not sent to the reader yet."""
        if self._ring_position < 0 and not self._find():
            return 0
        return max(0, self.database.ring.snapshot().tail - self._ring_position)

    def next_part(self) -> Buffer | Extent | None:
        """The next bytes of the body, b"" after filtered-out frames, None at the end for now."""
        database, cursor = self.database, self.cursor
        ring = database.ring
        if ring is not self._ring:
            raise SourceUnavailable(
                f"the ring of {database.name} that was served here is no longer in its folder",
                database=database.name,
            )
        self.has_lost_its_place = False
        if self._ring_position < 0 and not self._find():
            return None
        try:
            if self._sends_extents and (extent := self._next_extent()):
                return extent
            if self._uses_listings and (
                cached_headers := database.header_cache.at(ring, self._ring_position)
            ):
                try:
                    return self._take_cached(cached_headers)
                except SlowRowsError:
                    self._uses_listings = False
            block, after = self._read()
        except ReaderOvertaken:
            self._ring_position = -1  # the next step looks it up again, perhaps in a new ring
            self.has_lost_its_place = True
            return b""
        if not block:
            return None
        columns, last, commit_us, row_count = database.reads.facts(block)
        if cursor.takes_all and cursor.has_room(len(block)):
            cursor.pass_over(last, commit_us, len(block), row_count)
            self._ring_position = after
            self._sent_a_frame = True
            return self.format.render(block)
        self._set_sources()
        part = cursor.take(block, after - len(block), columns)
        if part.used_bytes == len(block):
            self._ring_position = after
        self._sent_a_frame |= bool(part.data)
        return self.format.render(part.data) if part.data else b""

    def _read(self) -> tuple[memoryview, int]:
        """The next block; the schemas of all of its frames are in the registry then."""
        database = self.database
        reads, count = database.reads, database.reads.read_count
        found = reads.read(database.ring, self._ring_position, self._block_bytes)
        if found[0] and reads.read_count != count:  # others' reads were followed by this
            database.refresh_schemas()
        return found

    def _next_extent(self) -> Extent | None:
        """An extent that can go to the socket without a copy."""
        database = self.database
        found = database.extents.at(database.ring, self._ring_position, self.cursor.left_bytes)
        if found is None:
            return None
        extent, self._is_limited = found
        self._ring_position = extent.after
        self._sent_a_frame = True
        return extent

    def _take_cached(self, cached_headers: CachedHeaders) -> Buffer:
        """The selected frames of cached headers."""
        self._refresh_sources()
        ring = self.database.ring
        row_filter = self._row_filter
        refine = (
            None if row_filter is None else partial(row_filter.refine_cached, cached_headers, ring)
        )
        part = self.cursor.take_cached(cached_headers, partial(cached_headers.fetch, ring), refine)
        if part.used_bytes == cached_headers.stop - cached_headers.start:
            self._ring_position = cached_headers.after
        else:
            self._ring_position = cached_headers.start + part.used_bytes
        self._sent_a_frame |= bool(part.data)
        return part.data

    def passed_on(self, extent: Extent) -> None:
        """The extent of ``next_part`` has been sent, whole."""
        self.cursor.pass_on(extent, is_limited=self._is_limited)

    def _find(self) -> bool:
        """Look up the cursor's position; False while the stream is not beyond it."""
        ring, position = self.database.ring, self.cursor.position
        if position > ring.snapshot().max:
            return False
        try:
            self._ring_position = ring.find(position)
        except ScnTooOld:
            raise too_old(position, ring.snapshot(), self.database.name) from None
        return True

    def _refresh_sources(self) -> None:
        """After a read: the schemas of all frames that were read are in the registry."""
        self.database.refresh_schemas()
        self._set_sources()

    def _set_sources(self) -> None:
        known = len(self.database.schemas)
        if known != self._known_schemas:
            self._known_schemas = known
            self.cursor.set_sources(self.database.source_ids(self.request.filter))

    @property
    def has_reached_tail(self) -> bool:
        """Whether everything has been examined that was there when the answer began."""
        return self._ring_position >= self._stop_at

    @property
    def sent_a_frame(self) -> bool:
        """Whether the reader got anything but heartbeats."""
        return self._sent_a_frame

    def take_event_count(self) -> int:
        """Events chosen since the last call."""
        count = self.cursor.sent_events - self._told_events
        self._told_events += count
        return count

    def heartbeat(self) -> Buffer:
        """The bytes that show the reader how far it has come."""
        return self.format.render(self.cursor.heartbeat())

    def error(self, error: DatabusError) -> Buffer:
        """The bytes that end the body because of ``error``."""
        return self.format.render(error_frame(error, self.cursor.position))


@dataclass(slots=True, eq=False)
class _Output:
    """The head and the body of one answer: coded, from the mapping, or unchanged.

    The head is held back with the beginning of the body, so that a short answer is one write.
    The owner calls ``open`` before it waits for anything.

    Owner: the task of the request, which closes it.
    """

    request: web.Request
    answer: StreamAnswer
    counters: WorkerCounters
    client: ClientCounter
    _pace: BytePace | None = field(init=False)
    _held: list[Buffer] = field(default_factory=list, init=False)
    _held_bytes: int = field(default=0, init=False)
    _response: web.StreamResponse | None = field(default=None, init=False)
    _direct: SocketWriter | None = field(default=None, init=False)
    _is_corked: bool = field(default=False, init=False)
    _is_last: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._pace = pace_of(self.request)

    async def write(self, part: Buffer | Extent) -> None:
        """Send or hold some of the body; returns when there is room for more."""
        answer = self.answer
        if isinstance(part, Extent):
            if self._response is None and not answer.request.follow:
                self._directly().set_corked(True)
                self._is_corked = True
            await self.open()
            await self._directly().send(answer.database.ring, part)
            answer.passed_on(part)
            size = part.size_bytes
        else:
            size = len(part)
            await self._write(part if answer.coder is None else answer.coder.encode(part))
        name = answer.database.name
        events = answer.take_event_count()
        self.counters.add(name, "bytes", size)
        self.counters.add(name, "events", events)
        self.client.sent(size, events, answer.cursor.position.scn, answer.cursor.commit_us)
        if self._pace is not None:
            await paced(self.request, self._pace, size)

    def _directly(self) -> SocketWriter:
        if self._direct is None:
            self._direct = SocketWriter(self.request, spans=self.answer.request.spans)
        return self._direct

    async def _write(self, data: Buffer) -> None:
        if self._response is None and self._held_bytes + len(data) <= MERGED_BYTES:
            self._held.append(data)
            self._held_bytes += len(data)
            return
        await (await self.open()).write(data)

    @property
    def is_open(self) -> bool:
        """Whether the head has gone out."""
        return self._response is not None

    async def open(self) -> web.StreamResponse:
        """Send the head and what is held, if this has not been done yet."""
        if self._response is None:
            self._response = web.StreamResponse(headers=self._headers())
            if self._is_last:
                self._response.force_close()
            await self._response.prepare(self.request)
            if self._held:
                await self._response.write(b"".join(self._held))
                self._held.clear()
        return self._response

    def _headers(self) -> dict[str, str]:
        return {
            **self.answer.headers,
            "Content-Type": self.answer.format.content_type,
            "Cache-Control": "no-store",
            "Vary": "Accept, Accept-Encoding",
            "X-Accel-Buffering": "no",
        }

    def set_last(self) -> None:
        """Let the connection end with this answer."""
        self._is_last = True
        if self._response is not None:
            self._response.force_close()

    async def end(self) -> web.StreamResponse:
        """The response, with the end of its body; aiohttp sends the whole of one without a head."""
        coder = self.answer.coder
        end = b"" if coder is None else coder.finish()
        if self._response is None:
            whole = web.Response(body=b"".join((*self._held, end)), headers=self._headers())
            if self._is_last:
                whole.force_close()
            return whole
        await self._response.write_eof(end)
        if self._is_corked:
            self._directly().set_corked(False)
        return self._response

    def cut(self) -> web.StreamResponse:
        """The response of a connection that is lost, or that ends in the middle of the body."""
        self.set_last()
        return self._response or web.Response(headers=self._headers())

    def close(self) -> None:
        """Close the socket's descriptor."""
        if self._direct is not None:
            self._direct.close()


class StreamSender:
    """Writes stream answers to their connections.

    Owner: one worker's event loop.
    """

    def __init__(self, config: RelayConfig, counters: WorkerCounters) -> None:
        self.config = config
        self.counters = counters

    async def send(
        self,
        request: web.Request,
        database: DatabaseView,
        stream_request: StreamRequest,
        client: ClientCounter,
    ) -> web.StreamResponse:
        """Answer a stream request, from the look-up in the ring to the last byte."""
        try:
            answer, part = _begin(database, stream_request, is_encrypted=request.secure)
        except ScnTooOld:
            client.add("too_old")
            raise
        output = _Output(request, answer, self.counters, client)
        self.counters.add(database.name, "readers")
        self.counters.add(database.name, "ahead", int(answer.is_ahead))
        try:
            return await self._run(output, part)
        except CutOff as error:
            self.counters.add(database.name, "overtaken")
            client.add("overtaken")
            _log.info("a reader of %s was cut off: %s", database.name, error)
            return output.cut()
        except ConnectionError:
            return output.cut()
        finally:
            output.close()
            self.counters.add(database.name, "readers", -1)

    async def _run(self, output: _Output, part: Buffer | Extent | None) -> web.StreamResponse:
        """Send part after part; an error becomes the last one."""
        answer = output.answer
        try:
            await self._send_parts(output, part)
        except ConnectionError:
            raise
        except ScnTooOld as error:
            overtaken = ReaderOvertaken(
                f"this reader was overtaken by the writer: {error.message}", **error.details
            )
            self.counters.add(answer.database.name, "overtaken")
            output.client.add("overtaken")
            await output.write(answer.error(overtaken))
            output.set_last()
        except DatabusError as error:
            await output.write(answer.error(error))
            output.set_last()
        except Exception:
            _log.exception("the stream of %s failed", answer.database.name)
            failed = InternalError(f"the stream failed after {answer.cursor.position}")
            await output.write(answer.error(failed))
            output.set_last()
        return await output.end()

    async def _send_parts(self, output: _Output, part: Buffer | Extent | None) -> None:
        request, answer = output.request, output.answer
        now = asyncio.get_running_loop().time
        follow, stopping = answer.request.follow, request.app[STOPPING]
        deadline_s = now() + min(answer.request.wait_s, self.config.max_wait)
        beat_s = now() + self.config.heartbeat
        while True:
            if part:
                await output.write(part)
                beat_s = now() + self.config.heartbeat
            if answer.cursor.is_full:
                return
            if stopping.is_set():
                break
            if part is None:
                if not follow and (answer.sent_a_frame or now() >= deadline_s):
                    break
                if not output.is_open:
                    # A commit may come while the head goes out (I1): look again after it.
                    await output.open()
                    part = answer.next_of_batch(now(), is_last=not follow and now() >= deadline_s)
                    continue
                until_s = beat_s if follow else min(deadline_s, now() + self.config.heartbeat)
                if answer.batch is not None and answer.batch.is_held:
                    await asyncio.sleep(answer.batch.poll_delay_s(until_s - now()))
                else:
                    await answer.database.wakeup.wait(max(0.0, until_s - now()))
                if stopping.is_set() or request.transport is None:
                    break
            elif (
                not follow
                and answer.has_reached_tail
                and (answer.sent_a_frame or now() >= deadline_s)
            ):
                break
            if follow and now() >= beat_s:
                await output.write(answer.heartbeat())
                beat_s = now() + self.config.heartbeat
            had_part = part is not None
            part = answer.next_of_batch(now(), is_last=not follow and now() >= deadline_s)
            if had_part and part is not None:
                await asyncio.sleep(0)  # let the other readers run
        if answer.cursor.owes_heartbeat:
            await output.write(answer.heartbeat())


def _begin(
    database: DatabaseView, stream_request: StreamRequest, *, is_encrypted: bool
) -> tuple[StreamAnswer, Buffer | Extent | None]:
    """An answer and its first part, so that a refusal is known before the headers.

    The oldest event may be evicted between the look-up of the range and the read.
    """
    for _ in range(OLDEST_ATTEMPTS):
        answer = StreamAnswer(database, stream_request, is_encrypted=is_encrypted)
        try:
            is_last = not (stream_request.follow or stream_request.wait_s)
            now_s = asyncio.get_running_loop().time()
            part = answer.next_of_batch(now_s, is_last=is_last)
            while answer.has_lost_its_place:
                part = answer.next_of_batch(now_s, is_last=is_last)
            return answer, part
        except ScnTooOld:
            if not isinstance(stream_request.start, Oldest):
                raise
    raise SourceUnavailable(
        f"the ring of {database.name} is overwritten faster than its oldest event can be read; "
        f"enlarge ring_bytes={database.config.ring_bytes}"
    )
