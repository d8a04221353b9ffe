"""Appends the source's batches to the ring: what is new, where windows end, where to resume.

Synchronous: the fetcher around it waits, reconnects and syncs.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Protocol

import numpy as np

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, SourcePositionLost
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Flag, FrameColumns, FrameView, Op
from databus.common.frame.window_builder import WindowBuilder, end_of_window
from databus.common.schema.source_schema import SourceSchema
from databus.relay.capture.announced_definitions import AnnouncedDefinitions
from databus.relay.capture.leader_term import LeaderTerm
from databus.relay.ring.data_folder import DatabaseFolder, read_document, write_document
from databus.relay.ring.ring import Ring, RingWriter
from databus.relay.ring.schema_registry import Registry
from databus.relay.sources.contract import Batch, RelayingSource, Source, Transaction

SCAN_BYTES = 4 << 20


class StreamObserver(Protocol):
    """An observer of the stream while a dump is running."""

    def observe(self, columns: FrameColumns, data: memoryview) -> None:
        """These frames have just been appended."""

    def at_window_end(self) -> None:
        """No window is open: a window of the observer's own may be appended now."""


async def first_position(source: Source) -> Position:
    """The first position of the ring of a source that was never read."""
    if isinstance(source, RelayingSource):
        return await source.first_position()
    # No frame holds the first position: a dump window may follow it.
    return Position(await source.first_scn(), 0)


class Intake:
    """The only writer of a database's ring.

    Invariants:
        I1. A schema is in the registry before the first frame that uses it is in the ring.
        I2. Every window reaches the ring once, whatever the source repeats.
        I3. ``complete`` is the last end of window in the ring; every window of the source
            with a smaller or equal scn is there as a whole.
        I4. A window of our own (idle, dump) is never inside a window of the source.
        I5. Each end of a window states the end of the window before it in the ring, so that a
            reader of everything sees that one is missing.
        I6. A window that readers have seen a part of is continued only if the part read again
            is the same: another server may have another transaction under its scn.
        I7. Nothing is appended unless ``guard`` returns: in a cluster, the lease holds.
        I8. In a cluster, a window of our own that readers must not miss is at a position after all
            that an earlier leader can have shown.

    Owner: the fetcher's task.
    Durability: the ring's; see ``RingWriter``.
    """

    def __init__(
        self, ring: RingWriter, registry: Registry, guard: Callable[[], None] = lambda: None
    ) -> None:
        self.ring = ring
        self._guard = guard
        self.term = LeaderTerm()
        self.registry = registry
        self.definitions = AnnouncedDefinitions(registry)
        self.observer: StreamObserver | None = None
        self.window_count = 0
        self._last_is_row_of_dump = False
        self._open_window = DatabaseFolder(ring.directory).open_window
        self._noted_scn = -1
        self._torn: FrameView | None = None
        self.complete = self._last_window_end()
        self.resolved = self.complete.scn

    def _last_window_end(self) -> Position:
        state = self.ring.state
        if state.is_empty:
            return state.max
        last = state.max
        op = self._last_frame().op
        if op == Op.END_OF_WINDOW:
            return last
        self._last_is_row_of_dump = op == Op.READ
        return self._before_open_window(last)

    def _before_open_window(self, last: Position) -> Position:
        """The end of the window before the one that the ring ends in.

        The source must be read again from there: scn - 1 would not do, because a window that
        collects a range of a log (SQLite) has it inside.
        """
        try:
            noted = json.loads(read_document(self._open_window) or b"{}")
            if noted.get("window") == last.scn:
                return Position(int(noted["after"]["scn"]), int(noted["after"]["seq"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{self._open_window} is damaged: {error!r}; move it away") from error
        # Not written yet: then the end is still in the ring.
        with Ring.open_reader(self.ring.directory) as reader:
            state = reader.snapshot()
            found = state.prev if state.prev.scn < last.scn else Position(last.scn - 1)
            at = state.head
            while at < state.tail:
                frames, at = reader.read(at, SCAN_BYTES)
                columns = frame_format.scan(frames, verify=False)
                ends = np.flatnonzero(columns.op == Op.END_OF_WINDOW)
                if len(ends):
                    found = _position(columns, int(ends[-1]))
            return found

    def _note_open_window(self) -> None:
        """Store on disk the position before a window that readers have seen a part of."""
        shown = self.ring.state.max
        if shown == self.complete or self._noted_scn == shown.scn:
            return
        after = {"scn": self.complete.scn, "seq": self.complete.seq}
        content = json.dumps({"window": shown.scn, "after": after}).encode()
        write_document(self._open_window, content)
        self._noted_scn = shown.scn

    def _last_frame(self) -> FrameView:
        """The last frame that readers can see."""
        last = self.ring.state.max
        before = Position(last.scn, last.seq - 1) if last.seq else Position(last.scn - 1)
        with Ring.open_reader(self.ring.directory) as reader:
            at = reader.snapshot().head
            if before >= reader.snapshot().prev:
                at = reader.find(before)
            frames, _ = reader.read(at, 1)
            return frame_format.read_frame(frames)

    def last_transaction(self) -> Transaction | None:
        """The transaction whose window is ``complete``; None if that window is our own."""
        before = Position(self.complete.scn, self.complete.seq - 1)
        if not self.complete.seq or self.ring.state.is_empty or before < self.ring.state.prev:
            return None
        with Ring.open_reader(self.ring.directory) as reader:
            frames, _ = reader.read(reader.find(before), 1)
            end = frame_format.read_frame(frames)
        if end.position != self.complete or end.flags & Flag.DUMP or not end.key_len:
            return None
        return Transaction(end.scn, bytes(end.key).decode(), end.commit_us)

    @property
    def is_closed(self) -> bool:
        """Whether a window of our own may be appended now."""
        return not self.in_window and self.term.admits(self.complete)

    @property
    def own_after(self) -> Position:
        """The position after which a window of our own begins."""
        return self.term.after(self.complete)

    def mark_term(self) -> bool:
        """Append the mark of the term, for the relays that follow; False inside a window."""
        if self.in_window:
            return False
        commit_us = self.ring.state.max_commit_us or time.time_ns() // 1000
        self.append_dump_window(self.term.mark(self.complete, commit_us))
        return True

    @property
    def in_window(self) -> bool:
        """Whether the ring, its unpublished part included, ends inside a window."""
        return self.ring.last != self.complete

    def resume(self) -> int:
        """Drop what has not been published; returns the scn after which the source resumes."""
        self.resume_position()
        if self.in_window and self._last_is_row_of_dump:
            # A dump's window of one huge row, which we have to end.
            self._end_torn_dump()
        shown = self._last_frame() if self.in_window else None
        self._torn = shown if shown and shown.position == self.ring.last else None
        return self.complete.scn

    def resume_position(self) -> Position:
        """Drop what has not been published; the frame after which a relayed stream resumes."""
        self.ring.discard_open()
        return self.ring.last

    def stream(self, source: Source) -> AsyncGenerator[Batch, None]:
        """The source's batches from the ring's end on."""
        if isinstance(source, RelayingSource):
            return source.stream_from(self.resume_position())
        return source.stream(self.resume())

    def _end_torn_dump(self) -> None:
        """End the dump window that the ring ends in."""
        last, commit_us = self.ring.last, self.ring.state.max_commit_us
        end = end_of_window(last.scn, last.seq + 1, commit_us, 1, "", dump=True)
        self.append_dump_window(end)

    def _leave_torn(self, following: Position) -> None:
        """Close the window that the stream has left without its end.

        Only one relay has a given dump window: a child that moves to another parent inside it
        never gets its rest.  A commit's window has an end at every relay.

        Raises:
            FormatError: it is a commit's window.
            SourcePositionLost: it is a commit's window, and a server had to send it again.
        """
        if self._torn is not None:
            raise _another(self._torn, f"is not there: the stream continues at {following}")
        last = self.ring.last
        if not self._last_is_row_of_dump:
            raise FormatError(
                f"the window at {last} has not ended, and the source continues at {following}; "
                f"its parents do not have the same stream"
            )
        self.ring.discard_open()
        if self.in_window:
            self._end_torn_dump()

    def take(self, batch: Batch) -> bool:
        """Append what is new in ``batch``; True if readers can see more than before."""
        tail = self.ring.state.tail
        self.definitions.follow(batch.schemas)
        if batch.data:
            self._append(memoryview(batch.data))
        if self._torn is not None and batch.resolved >= self._torn.scn:
            raise _another(self._torn, "is without any of them")
        self.resolved = max(self.resolved, batch.resolved, self.complete.scn)
        if self.observer is not None and self.is_closed:
            self.observer.at_window_end()
        return self.ring.state.tail != tail

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """``batch`` cut between frames into parts that a ring in block mode can take."""
        columns = frame_format.scan(batch.data, verify=False)
        stops = columns.offset + columns.length
        schemas, start, count = batch.schemas, 0, 0
        while start < columns.stop:
            fitting = int(np.searchsorted(stops, start + self.ring.part_bytes, side="right"))
            count = max(count + 1, fitting)
            stop = int(stops[count - 1])
            yield Batch(batch.data[start:stop], schemas)
            schemas, start = (), stop
        yield Batch(b"", schemas, batch.resolved, batch.resume_state)

    def _append(self, data: memoryview) -> None:
        columns = frame_format.scan(data, verify=False)
        if self._torn is not None and len(columns):
            self._recognise(self._torn, columns, data)
        first = _first_after(columns, self.ring.last)
        if first:
            if first == len(columns):
                return
            data = data[int(columns.offset[first]) :]
            columns = frame_format.scan(data, verify=False)
        if self.in_window and columns.header(0).scn != self.ring.last.scn:
            self._leave_torn(_position(columns, 0))
        _require_ends(columns)
        ends = np.flatnonzero(columns.op == Op.END_OF_WINDOW)
        if len(ends) == 0:
            self._put(columns, data)
            self._note_open_window()
            self._observe(columns, data)
            return
        last_end = int(ends[-1])
        complete = _position(columns, last_end)
        cut = int(columns.offset[last_end]) + columns.header(last_end).length
        observer = self.observer
        if observer is None or cut == len(data):
            self._put(columns, data)
            self.complete = complete
            self.window_count += len(ends)
            self._note_open_window()
            self._observe(columns, data)
            return
        # A dump window may have to go between the two parts.
        self._append(data[:cut])
        if self.is_closed:
            observer.at_window_end()
        self._append(data[cut:])

    def _recognise(self, torn: FrameView, columns: FrameColumns, data: memoryview) -> None:
        """Check that the source continues inside the transaction that the ring ends in.

        Raises:
            SourcePositionLost: it has another transaction there.
        """
        of_it = np.flatnonzero(columns.scn == torn.scn)
        again = of_it[columns.seq[of_it] <= torn.seq]
        ends = again[columns.op[again] == Op.END_OF_WINDOW]
        if len(ends):
            raise _another(torn, f"ends after {int(columns.seq[ends[0]])}")
        last_again = (
            frame_format.read_frame(data, int(columns.offset[again[-1]])) if len(again) else torn
        )
        if last_again.seq == torn.seq and not _is_same(last_again, torn):
            raise _another(torn, "has another change instead of the last one")
        if len(of_it) and columns.seq[of_it[-1]] >= torn.seq:
            self._torn = None

    def _put(self, columns: FrameColumns, data: memoryview) -> None:
        self.definitions.observe(columns)
        self._guard()
        self.ring.append(data, self.complete)
        self._last_is_row_of_dump = columns.header(-1).op == Op.READ

    def _observe(self, columns: FrameColumns, data: memoryview) -> None:
        if self.observer is not None:
            self.observer.observe(columns, data)

    def append_idle_window(self, commit_us: int) -> bool:
        """Publish ``resolved`` by an empty window, if it is ahead of the ring."""
        if self.in_window or self.resolved <= self.ring.last.scn:
            return False
        self.append_dump_window(end_of_window(self.resolved, 0, commit_us, 0))
        return True

    def announce_due(self) -> bool:
        """Announce the definitions that rows have and that no frame has announced."""
        due = self.definitions.take_due() if self.is_closed else []
        for schema in due:
            self._announce(schema)
        return bool(due)

    def come_to(self, schema: SourceSchema, announced: int | None) -> None:
        """Rows that were read come next.  ``announced`` is ``definitions.of`` their table before
        they were read: if it is another one now, the stream has passed their definition."""
        if announced != self.definitions.of(schema.source):
            self.registry.add((schema,))
            return
        self.registry.follow((schema,))
        if announced != schema.fingerprint and self.registry.schemas.has_several(schema.source):
            self._announce(schema)

    def changed_key(self, schema: SourceSchema, *, is_compared: bool = False) -> str:
        """Why readers have a table's rows under other keys than this definition gives; "": they
        do not.  A source cannot always see that before the next row.

        ``is_compared``: the keys come from a comparison with a reader's rows by the bytes of their
        keys, so that other names of the same columns make no difference.
        """
        known = self.registry.schemas.latest(schema.source)
        if known is None or _key_types(known) == _key_types(schema):
            return ""
        if is_compared and known.key_form == schema.key_form:
            return ""
        return f"its key was ({', '.join(known.key)}) and is ({', '.join(schema.key)})"

    def _announce(self, schema: SourceSchema) -> None:
        commit_us = self.ring.state.max_commit_us or time.time_ns() // 1000
        after = self.own_after
        window = WindowBuilder(after.scn, commit_us, after.seq + 1)
        window.control(
            Op.SCHEMA_CHANGE,
            source=schema.source_id,
            schema_fp=schema.fingerprint,
            after=schema.to_json_bytes(),
        )
        self.append_dump_window(window.end(dump=True))
        self.definitions.announce(schema)

    def append_dump_window(self, window: bytes) -> Position:
        """Append a whole window of our own; returns its end."""
        self._guard()
        self.complete = self.ring.append(window, self.complete)
        return self.complete


def _key_types(schema: SourceSchema) -> list[tuple[str, Any]]:
    return [(column.name, column.avro_type) for column in schema.key_columns]


def _position(columns: FrameColumns, index: int) -> Position:
    # Not by the columns: each access gathers a field of all frames.
    return columns.header(index).position


def _require_ends(columns: FrameColumns) -> None:
    """Refuse frames that continue at another scn inside a window; none of them is in the ring.

    Raises:
        FormatError.
    """
    scn = columns.scn
    is_left = scn[1:] != scn[:-1]
    if is_left.any():
        is_left &= columns.op[:-1] != Op.END_OF_WINDOW
    if is_left.any():
        at = int(np.argmax(is_left))
        raise FormatError(
            f"the window at {_position(columns, at)} has not ended, and the source continues "
            f"at {_position(columns, at + 1)}"
        )


def _is_same(found: FrameView, known: FrameView) -> bool:
    """Whether both are the same change of the same transaction.

    The rows are not compared if the table's definition has changed since.
    """
    if found.schema_fp == known.schema_fp:
        return bytes(found.bytes) == bytes(known.bytes)
    same_commit = (found.op, found.commit_us) == (known.op, known.commit_us)
    return same_commit and bytes(found.key) == bytes(known.key)


def _another(torn: FrameView, found: str) -> SourcePositionLost:
    return SourcePositionLost(
        f"readers have seen {torn.seq + 1} frames of the transaction at scn {torn.scn}, and the "
        f"one that this server has there {found}: its history is not the one that the relay has "
        "read. It was reset, is another server, or was promoted without the last transactions of "
        "its primary"
    )


def _first_after(columns: FrameColumns, last: Position) -> int:
    """Index of the first frame after ``last``; the number of frames if there is none."""
    if len(columns) == 0 or _position(columns, 0) > last:
        return 0
    scn = np.uint64(last.scn)
    after = (columns.scn > scn) | ((columns.scn == scn) & (columns.seq > last.seq))
    return int(np.argmax(after)) if after.any() else len(columns)
