"""Which rows of dumped chunks may still go out, given what the stream has shown: pure.

The idea is DBLog's, without its watermark writes ("point splice"): a chunk is read at
a known point of the source's clock, its snapshot.  It is held until the stream has passed that
point.  If a streamed transaction that the snapshot does *not* show wrote a row's key, the row
is older than what readers have: it is dropped, because the stream has the newer state.  Every
other row is the newest state at that moment, and may go out.

Several chunks may be read at once; each is filtered by itself, so the order in which they go out
does not matter here.  watermark_writes.py handles the optional watermark writes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from databus.common.compiled.kernels import I64Array, U8Array
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FIRST_CONTROL_OP, FrameColumns, Op
from databus.relay.sources.contract import Chunk
from databus.relay.sources.row_buffers import BoolArray, U64Array, drop_keys

MAX_TOUCHED_KEYS = 200_000
MAX_WINDOWS = 65_536
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Ready:
    """The chunk may go out: the numbers of the remaining rows, and how many were dropped."""

    left: I64Array
    dropped_count: int


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """The chunk cannot be filtered, or is outdated; it has to be read again."""

    reason: str


@dataclass(slots=True, eq=False)
class Waiting:
    """An in-flight chunk: being read (``chunk`` is None), or waiting for the stream."""

    began: int
    chunk: Chunk | None = None
    is_left: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    next_row: int = 0
    dropped_count: int = 0
    reason: str = ""

    @property
    def high(self) -> int | None:
        """The scn that the stream must pass; None until the chunk was read."""
        return None if self.chunk is None else self.chunk.snapshot.high


@dataclass(slots=True, eq=False)
class _Touched:
    """Keys that the stream has written, in order."""

    keys: U8Array
    spans: I64Array
    hashes: U64Array
    schema_fps: U64Array

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(slots=True, eq=False)
class _Streamed:
    """Windows that ended in one block of the stream, those that touched the table.

    ``stops[i]`` is where the keys of window ``i`` end in ``touched``; a window in ``unnamed``
    touched more than that, or something without a name.  ``seen_at[i]`` is when a chunk first
    showed it.
    """

    scns: list[int]
    txids: list[str]
    stops: list[int]
    unnamed: list[bool]
    touched: _Touched
    seen_at: list[int]


_NOTHING = _Touched(
    np.zeros(1, dtype=np.uint8),
    np.zeros((0, 2), dtype=np.int64),
    np.zeros(0, dtype=np.uint64),
    np.zeros(0, dtype=np.uint64),
)


class ChunkWindow:
    """Filters the chunks of one table by the stream.

    Invariants:
        I1. Every observed window that touched the table, and that a chunk being read now or later
            may not show, is remembered with its keys.  If there were too many keys, the chunk must
            show the window, or is read again.
        I2. ``take`` returns a row only if every streamed window that touched its key shows in
            the chunk's snapshot.
        I3. At most ``max_keys`` keys and ``max_windows`` windows are remembered.

    Owner: the fetcher's task.  The observed windows reach back to a moment before the first chunk,
    because a database may stream a commit before its snapshots show it.  With
    ``in_window`` the observation begins inside a window.
    """

    def __init__(
        self,
        source_id: int,
        *,
        in_window: bool = False,
        max_keys: int = MAX_TOUCHED_KEYS,
        max_windows: int = MAX_WINDOWS,
    ) -> None:
        self._source_id = source_id
        self._max_keys = max_keys
        self._max_windows = max_windows
        self._open = _NOTHING
        self._open_unnamed = in_window
        self._memory: deque[_Streamed] = deque()
        self._key_count = 0
        self._window_count = 0
        self._waiting: list[Waiting] = []
        self._moment = 0

    # -- the stream --

    def observe(self, columns: FrameColumns, data: memoryview) -> None:
        """Observe streamed frames."""
        ops = columns.op
        ours = (columns.source_id == self._source_id) & (ops < FIRST_CONTROL_OP)
        if not ours.any():
            if not len(self._open) and not self._open_unnamed:
                return
            ends = np.flatnonzero(ops == Op.END_OF_WINDOW)[:1]
            rows = np.zeros(0, dtype=np.int64)
        else:
            ends = np.flatnonzero(ops == Op.END_OF_WINDOW)
            rows = np.flatnonzero(ours)
        unnamed = rows[ops[rows] == Op.TRUNCATE]
        touched = _joined(self._open, _keys(columns, data, rows))
        # How many keys lie before each end: those from before this block, and its own.
        stops = len(self._open) + np.searchsorted(rows, ends)
        begins = np.concatenate(([0], stops[:-1])) if len(ends) else stops
        cut = np.searchsorted(unnamed, ends)
        unnamed_in = np.diff(np.concatenate(([0], cut))) > 0
        if len(ends):
            unnamed_in[0] |= self._open_unnamed
            touching = np.flatnonzero((stops > begins) | unnamed_in)
            # A window that touched nothing has no keys: the remaining keys are adjacent.
            last_stop = int(stops[-1])
            self._close(
                columns, data, ends[touching], stops[touching], unnamed_in[touching],
                _part(touched, 0, last_stop),
            )  # fmt: skip
            self._open = _part(touched, last_stop, len(touched))
            self._open_unnamed = len(unnamed) > (int(cut[-1]) if len(cut) else 0)
        else:
            self._open = touched
            self._open_unnamed |= len(unnamed) > 0
        if len(self._open) > self._max_keys:
            self._open, self._open_unnamed = _NOTHING, True

    def _close(
        self,
        columns: FrameColumns,
        data: memoryview,
        ends: I64Array,
        stops: I64Array,
        unnamed: BoolArray,
        touched: _Touched,
    ) -> None:
        if not len(ends):
            return
        starts = columns.offset[ends] + frame_format.HEADER_BYTES
        key_stops = starts + columns.key_len[ends]
        streamed = _Streamed(
            columns.scn[ends].tolist(),
            [
                bytes(data[start:stop]).decode()
                for start, stop in zip(starts.tolist(), key_stops.tolist(), strict=True)
            ],
            stops.tolist(),
            unnamed.tolist(),
            touched,
            [_NEVER] * len(ends),
        )
        for waiting in self._waiting:
            if waiting.chunk is not None:
                self._filter_rows(streamed, waiting, waiting.chunk)
        self._memory.append(streamed)
        self._key_count += len(touched)
        self._window_count += len(ends)
        self._forget()

    def _forget(self) -> None:
        if self._key_count > self._max_keys:
            # Down to half, so that one walk serves many windows.
            for old in self._memory:
                if self._key_count <= self._max_keys // 2:
                    break
                if len(old.touched):
                    self._key_count -= len(old.touched)
                    old.unnamed = [True] * len(old.unnamed)
                    old.stops = [0] * len(old.stops)
                    old.touched = _NOTHING
        while self._window_count > self._max_windows:
            dropped = self._memory.popleft()
            self._window_count -= len(dropped.scns)
            self._key_count -= len(dropped.touched)
            for waiting in self._waiting:
                if waiting.chunk is None:
                    waiting.reason = (
                        f"over {self._max_windows} windows were streamed while the chunk was read"
                    )

    # -- the chunks --

    def begin(self) -> Waiting:
        """A chunk is about to be read: windows forgotten so far are old enough."""
        self._moment += 1
        waiting = Waiting(self._moment)
        self._waiting.append(waiting)
        return waiting

    def arrived(self, waiting: Waiting, chunk: Chunk) -> None:
        """The chunk was read; the windows since ``begin``, and those before, filter it."""
        self._moment += 1
        waiting.is_left = np.ones(len(chunk.rows), dtype=np.bool_)
        for streamed in self._memory:
            self._filter_rows(streamed, waiting, chunk)
        waiting.chunk = chunk
        # A window that one chunk shows is shown by every chunk whose read begins later.
        oldest = min((w.began for w in self._waiting if w.chunk is None), default=self._moment + 1)
        for _ in range(len(self._memory)):
            streamed = self._memory.popleft()
            if max(streamed.seen_at) < oldest:
                self._window_count -= len(streamed.scns)
                self._key_count -= len(streamed.touched)
            else:
                self._memory.append(streamed)

    def leave(self, waiting: Waiting) -> None:
        """The chunk is finished or given up."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)

    def _filter_rows(self, streamed: _Streamed, waiting: Waiting, chunk: Chunk) -> None:
        """Drop the rows that windows have overtaken and the chunk does not show."""
        snapshot, rows, touched = chunk.snapshot, chunk.rows, streamed.touched
        start = 0
        for number, scn in enumerate(streamed.scns):
            first, start = start, streamed.stops[number]
            if snapshot.sees(scn, streamed.txids[number]):
                streamed.seen_at[number] = min(streamed.seen_at[number], self._moment)
                continue
            if streamed.unnamed[number]:
                waiting.reason = (
                    f"the window at scn {scn} touched too many rows to be compared, and the "
                    f"chunk does not show it"
                )
                continue
            others = touched.schema_fps[first:start] != np.uint64(chunk.schema.fingerprint)
            if others.any():
                schema_fp = int(touched.schema_fps[first:start][others][0])
                waiting.reason = (
                    f"{chunk.schema.source} has schema {schema_fp:016x} at scn {scn}, the "
                    f"chunk was read with {chunk.schema.fingerprint:016x}"
                )
            waiting.dropped_count += drop_keys(
                rows.data, rows.spans, rows.hashes, rows.slots, waiting.is_left,
                touched.keys, touched.spans, touched.hashes, first, start,
            )  # fmt: skip

    def outcome(self, waiting: Waiting, resolved_scn: int) -> Ready | ReadAgain | None:
        """The chunk's result now; None while it is being read or has to wait.

        ``resolved_scn``: everything up to there was observed.  Only to be called while no
        window is open.
        """
        chunk = waiting.chunk
        if chunk is None or len(self._open) or self._open_unnamed:
            return None
        if waiting.reason:
            return ReadAgain(waiting.reason)
        if resolved_scn < chunk.snapshot.high:
            return None
        left = np.flatnonzero(waiting.is_left[waiting.next_row :]) + waiting.next_row
        return Ready(left, waiting.dropped_count)

    def sent(self, waiting: Waiting, next_row: int) -> None:
        """The rows before ``next_row`` have gone out: the stream cannot overtake them now."""
        waiting.is_left[waiting.next_row : next_row] = False
        waiting.next_row = next_row


def _keys(columns: FrameColumns, data: memoryview, rows: I64Array) -> _Touched:
    """The keys of these frames, copied: the block may be freed."""
    if not len(rows):
        return _NOTHING
    starts = columns.offset[rows] + frame_format.HEADER_BYTES
    lengths = columns.key_len[rows].astype(np.int64)
    stops = np.cumsum(lengths)
    begins = stops - lengths
    raw = np.frombuffer(data, dtype=np.uint8)
    gather = np.arange(int(stops[-1]), dtype=np.int64) + np.repeat(starts - begins, lengths)
    return _Touched(
        np.append(raw[gather], np.uint8(0)),
        np.column_stack((begins, stops)),
        columns.key_hash[rows],
        columns.schema_fp[rows],
    )


def _joined(first: _Touched, second: _Touched) -> _Touched:
    if not len(first):
        return second
    if not len(second):
        return first
    return _Touched(
        np.concatenate((first.keys, second.keys)),
        np.concatenate((first.spans, second.spans + len(first.keys))),
        np.concatenate((first.hashes, second.hashes)),
        np.concatenate((first.schema_fps, second.schema_fps)),
    )


def _part(touched: _Touched, start: int, stop: int) -> _Touched:
    if start == 0 and stop == len(touched):
        return touched
    if start == stop:
        return _NOTHING
    spans = touched.spans[start:stop]
    first = int(spans[0, 0])
    return _Touched(
        touched.keys[first:],
        spans - first,
        touched.hashes[start:stop],
        touched.schema_fps[start:stop],
    )
