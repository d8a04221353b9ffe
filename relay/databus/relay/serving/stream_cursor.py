"""Decides what a reader at a position gets: the serving rule and the cut of each block.  No I/O.

The serving rule: a reader at position p gets every frame after p that its filter selects, if and
only if p is not before ``prev``, the position just before the oldest retained frame.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from databus.common.checkpoint import SEQ_END, Latest, Oldest, Position, StartPoint
from databus.common.errors import ClockMismatch, ScnTooOld
from databus.common.filters.frame_selection import HeaderFilter, close_windows, gather
from databus.common.filters.stream_filter import (
    HashPartition,
    Mask,
    ModPartition,
    RangePartition,
    StreamFilter,
)
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    Buffer,
    FrameColumns,
    Op,
    scan,
)
from databus.common.frame.window_builder import WindowBuilder, heartbeat, require_chain
from databus.relay.ring.ring_format import RingState
from databus.relay.serving.extents import Extent
from databus.relay.serving.filter import predicate_kernels
from databus.relay.serving.header_cache import CachedHeaders
from databus.relay.serving.row_filter import RowFilter


def start_position(start: StartPoint, state: RingState, clock: str, database: str) -> Position:
    """The position after which a new reader begins.

    Raises:
        ClockMismatch: its checkpoint belongs to another clock than the stream.
        ScnTooOld: frames after it are gone.
    """
    if isinstance(start, Oldest):
        return state.prev
    if isinstance(start, Latest):
        return state.max
    if start.clock is not None and start.clock != clock:
        raise ClockMismatch(
            f"the checkpoint belongs to the clock {start.clock!r}, the stream of {database} has "
            f"{clock!r}",
            expected=clock,
            got=start.clock,
        )
    if start.position < state.prev:
        raise too_old(start.position, state, database)
    return start.position


def too_old(position: Position, state: RingState, database: str) -> ScnTooOld:
    """The refusal of a position before ``prev``, with the served range."""
    return state.too_old(
        f"position {position} is older than what the ring serves, after {state.prev} up to "
        f"{state.max} (database={database})"
    )


def is_ahead(position: Position, state: RingState) -> bool:
    """Whether the reader is ahead of the stream.

    A reader that requested "after everything at this scn" is not ahead at that scn.
    """
    if position.scn == state.max.scn and position.seq == SEQ_END:
        return False
    return position > state.max


PART_BYTES = 1 << 20
_NONE = np.empty(0, dtype=np.int64)


class StreamPart(NamedTuple):
    """What to send of a block.

    ``data`` are whole frames; ``used_bytes`` of the block are finished, the rest would
    exceed the reader's limit.
    """

    data: Buffer
    used_bytes: int


class StreamCursor:
    """One reader's progress through the stream, in one answer.

    Invariants:
        I1. The frames sent are those after the start position that the filter selects,
            and the end of each window with a selected frame; in order, each once.
        I2. A reader that began inside a window gets the end of that window in any case, since
            an answer before this one may have had the rest.
        I3. ``position`` is the last frame that was examined; nothing at or before it is
            still to come for this reader.
        I4. No more than ``max_bytes`` are sent, but always a first frame.  Heartbeats
            do not count.

    Owner: the task that answers one request.
    """

    def __init__(
        self,
        position: Position,
        stream_filter: StreamFilter,
        *,
        max_bytes: int | None = None,
        may_be_inside: bool = False,
        row_filter: RowFilter | None = None,
    ) -> None:
        """``may_be_inside``: ``position`` may be before the end of its window;
        ``row_filter`` decides about rows that the filter selects."""
        self.position = position
        self.commit_us = 0
        self.sent_position: Position | None = None
        self.sent_bytes = 0
        self.sent_events = 0
        self.is_full = False
        self._filter = stream_filter
        self._row_filter = row_filter
        self._takes_all = stream_filter.is_empty and row_filter is None
        self._by_headers: HeaderFilter | None = None
        if self.decides_by_headers and not self._takes_all:
            self._by_headers = HeaderFilter(stream_filter)
        self._max_bytes = max_bytes
        self._may_be_inside = may_be_inside
        self._in_window = False
        self._source_ids = np.empty(0, dtype=np.uint32)

    def set_sources(self, source_ids: npt.NDArray[np.uint32]) -> None:
        """Set the numbers of the sources that the filter selects, as known now."""
        self._source_ids = source_ids

    def take(
        self,
        block: Buffer,
        ring_position: int | None = None,
        columns: FrameColumns | None = None,
    ) -> StreamPart:
        """Choose from the next frames of the ring; ``block`` is not empty and holds whole ones.

        ``ring_position`` is where it begins, for the row filter's cache; ``columns`` are the
        block's, if it was scanned already.
        """
        raw = np.frombuffer(block, dtype=np.uint8)
        if columns is None:
            columns = scan(raw, verify=False)
        if self._may_be_inside:
            self._in_window = int(columns.scn[0]) == self.position.scn
            self._may_be_inside = False
        if self._takes_all and self.has_room(columns.stop):
            self._look(columns, len(columns))
            self._send(columns, len(columns) - 1, columns.stop, columns.op)
            return StreamPart(block, columns.stop)
        return self._take_some(raw, columns, ring_position)

    @property
    def left_bytes(self) -> int | None:
        """How much may still be sent; None without a limit."""
        return None if self._max_bytes is None else max(0, self._max_bytes - self.sent_bytes)

    @property
    def takes_all(self) -> bool:
        """Whether frames go out unchanged."""
        return self._takes_all

    @property
    def _has_masked_partition(self) -> bool:
        """Whether it has a partition that ``HeaderFilter`` does not have."""
        return isinstance(self._filter.partition, HashPartition | RangePartition)

    @property
    def decides_by_headers(self) -> bool:
        """Whether only the headers of frames are examined."""
        return self._row_filter is None and not self._has_masked_partition

    @property
    def uses_cached_headers(self) -> bool:
        """Whether it selects by headers, and by rows that a row filter reads in the ring itself."""
        if self._has_masked_partition or self._takes_all:
            return False
        return self._row_filter is None or self._row_filter.uses_cached_headers

    def pass_on(self, extent: Extent, *, is_limited: bool) -> None:
        """Count all frames of an extent as sent; ``is_limited``: the next one exceeds the limit."""
        self.pass_over(extent.last, extent.commit_us, extent.size_bytes, extent.row_count)
        self.is_full = is_limited

    def pass_over(self, last: Position, commit_us: int, size: int, row_count: int) -> None:
        """Count all frames of a block as sent unchanged, the last of them at ``last``."""
        self._may_be_inside = False
        self.position = self.sent_position = last
        self.commit_us = commit_us
        self.sent_bytes += size
        self.sent_events += row_count

    def take_cached(
        self,
        cached_headers: CachedHeaders,
        fetch: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Buffer],
        refine: Callable[[Mask], Mask] | None = None,
    ) -> StreamPart:
        """Select from frames of which only headers are here; ``fetch`` gets the selected ones.

        ``refine`` applies the row filter to the cached headers, if there is one.  At most
        ``PART_BYTES`` of frames, or one frame.  If either raises, the cursor does not move.
        """
        columns = cached_headers.columns
        if self._may_be_inside:
            self._in_window = int(columns.scn[0]) == self.position.scn
            self._may_be_inside = False
        data, looked_at = self._choose(
            columns, cached_headers.headers, fetch, PART_BYTES, refine=refine
        )
        return StreamPart(data, cached_headers.used_bytes(looked_at))

    def _take_some(
        self, raw: npt.NDArray[np.uint8], columns: FrameColumns, ring_position: int | None
    ) -> StreamPart:
        refine = None
        if self._row_filter is not None:
            refine = partial(
                self._row_filter.refine, columns=columns, block=raw, ring_position=ring_position
            )
        data, looked_at = self._choose(
            columns,
            raw,
            lambda chosen, lengths: gather(raw, columns.offset[chosen], lengths),
            refine=refine,
        )
        used = columns.stop if looked_at == len(columns) else int(columns.offset[looked_at])
        return StreamPart(data, used)

    def _taken(
        self,
        columns: FrameColumns,
        raw: npt.NDArray[np.uint8],
        refine: Callable[[Mask], Mask] | None,
    ) -> tuple[npt.NDArray[np.int64], bool]:
        """(numbers of the selected frames, whether a window is open after them)."""
        if self._takes_all:
            return np.arange(len(columns)), self._in_window
        if self._by_headers is not None:
            mask, count, in_window = self._by_headers.choose(
                raw, columns.offset, self._source_ids, in_window=self._in_window
            )
            return mask.nonzero()[0] if count else _NONE, in_window
        taken = self._filter.mask(columns, raw, self._source_ids)
        if refine is not None:
            taken = refine(taken)
        mask, in_window = close_windows(columns, taken, in_window=self._in_window)
        return mask.nonzero()[0], in_window

    def _choose(
        self,
        columns: FrameColumns,
        raw: npt.NDArray[np.uint8],
        fetch: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Buffer],
        part_bytes: int | None = None,
        refine: Callable[[Mask], Mask] | None = None,
    ) -> tuple[Buffer, int]:
        """(the frames to send, how many frames are finished).

        No more than ``part_bytes`` are sent, but always a first frame.
        """
        # A reader that gets only some of the windows cannot see that one is missing.
        require_chain(columns, self.position)
        chosen, in_window = self._taken(columns, raw, refine)
        if not len(chosen):
            self._in_window, self.is_full = in_window, False
            self._look(columns, len(columns))
            return b"", len(columns)
        lengths = columns.length[chosen].astype(np.int64)
        fitting = self._fitting(lengths)
        is_full = fitting < len(chosen)
        if part_bytes is not None:
            fits = int(np.searchsorted(np.cumsum(lengths), part_bytes, side="right"))
            if max(1, fits) < fitting:
                fitting, is_full = max(1, fits), False
                # The end of a window with a selected frame is sent, too.
                in_window = columns.op[chosen[fitting - 1]] != Op.END_OF_WINDOW
        looked_at = len(columns)
        if fitting < len(chosen):
            looked_at = int(chosen[fitting])
            chosen, lengths = chosen[:fitting], lengths[:fitting]
        data: Buffer = fetch(chosen, lengths) if len(chosen) else b""
        self._in_window, self.is_full = in_window, is_full
        self._look(columns, looked_at)
        if len(chosen):
            self._send(columns, int(chosen[-1]), len(data), columns.op[chosen])
        return data, looked_at

    def _look(self, columns: FrameColumns, count: int) -> None:
        """Move past the first ``count`` frames."""
        if count:
            self.position = columns.header(count - 1).position
            self.commit_us = columns.header(count - 1).commit_us

    def _send(
        self, columns: FrameColumns, last: int, sent_bytes: int, ops: npt.NDArray[np.uint8]
    ) -> None:
        """Record that frames up to the one numbered ``last`` are sent."""
        self.sent_position = columns.header(last).position
        self.sent_bytes += sent_bytes
        self.sent_events += int(np.count_nonzero(ops < FIRST_CONTROL_OP))

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may still be sent."""
        return self._max_bytes is None or self.sent_bytes + size <= self._max_bytes

    def _fitting(self, lengths: npt.NDArray[np.int64]) -> int:
        """How many frames of these lengths may still be sent."""
        if self._max_bytes is None:
            return len(lengths)
        left = self._max_bytes - self.sent_bytes
        count = int(np.searchsorted(np.cumsum(lengths), left, side="right"))
        return count or (1 if len(lengths) and not self.sent_bytes else 0)

    @property
    def owes_heartbeat(self) -> bool:
        """Whether the frames sent do not show the reader how far it has come."""
        return self.sent_position != self.position

    def heartbeat(self) -> bytes:
        """The frame that shows the reader how far it has come."""
        self.sent_position = self.position
        return heartbeat(self.position, self.commit_us)


def warm_up() -> None:
    """Run every kernel of a filtered stream once, so that no reader waits for the compiler."""
    predicate_kernels.warm_up()
    builder = WindowBuilder(1, 0)
    for number in range(3):
        builder.event(Op.INSERT, 1, 0, bytes([number]))
    built = builder.end()
    for partition in (ModPartition(2, frozenset({0, 1})), RangePartition(1, -1, -1)):
        for block in (built, bytearray(built)):  # cached headers are not read-only
            StreamCursor(Position(0, 0), StreamFilter(partition=partition)).take(block)
