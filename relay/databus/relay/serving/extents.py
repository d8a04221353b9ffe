"""Extents: stretches of whole frames of the ring that are sent without a copy.

Sockets, and the case that the writer overtakes a reader, are in ``socket_writer``.
"""

from __future__ import annotations

from dataclasses import dataclass

from databus.common.checkpoint import Position
from databus.common.errors import ReaderOvertaken
from databus.common.frame.spans import span_frame
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.ring_recovery import frame_at

EXTENT_BYTES = 4 << 20
MIN_EXTENT_BYTES = 64 << 10
"""Less is copied: all readers at the tail share the copy, and it goes out in one write."""
MAX_EXTENTS = 4096


@dataclass(frozen=True, slots=True)
class Extent:
    """Whole frames between two ring positions, in one lap.

    ``last`` is the position of the last frame, ``row_count`` how many frames are rows; ``after``
    is where to continue, ``span`` the frame that announces the extent to a reader.
    """

    file: RingFile
    start: int
    stop: int
    after: int
    last: Position
    commit_us: int
    row_count: int
    span: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of its frames."""
        return self.stop - self.start


class Head:
    """Where a ring's head is, read again only when something was published.

    Owner: the code that made it, in one event loop.
    """

    def __init__(self, ring: RingReader, file: RingFile) -> None:
        self._ring = ring
        self._file = file
        self._epoch = -1
        self._head = 0

    def has_passed(self, position: int) -> bool:
        """Whether bytes from ``position`` on may have been overwritten before this call.

        False means that every load of them before the call saw the original bytes.
        """
        if self._ring.file is not self._file:
            return True
        self._file.fence()
        epoch = self._file.epoch
        if epoch != self._epoch:
            self._head = self._file.snapshot().head
            self._epoch = epoch
        return position < self._head


class Extents:
    """The extents of one ring, walked once for all readers.

    Invariants:
        I1. An extent was whole between head and tail while it was walked.  Ring positions are
            not used twice, so its fields stay true until it is evicted.
        I2. Extents end at multiples of ``EXTENT_BYTES`` if nothing else ends them, so that
            readers with any start use the same ones.  What fits into one extent is one: each
            costs a reader a change of threads.
        I3. At most ``MAX_EXTENTS`` are cached; the first of them is not evicted yet.

    Owner: one worker's event loop.
    Raises: ReaderOvertaken as ``RingReader.read`` does.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Extent] = {}
        self._file: RingFile | None = None
        self.walk_count = 0

    def at(
        self, ring: RingReader, position: int, max_bytes: int | None
    ) -> tuple[Extent, bool] | None:
        """The extent at a ring position, and whether the frame after it exceeds ``max_bytes``.

        None if the bytes should be copied: a short stretch, a frame that is longer
        than an extent, or a ``max_bytes`` of less than one frame.
        """
        state = ring.snapshot()
        file = ring.file
        if file is not self._file:
            self._known.clear()
            self._file = file
        if position < state.head:
            raise ReaderOvertaken(f"ring position {position} was overwritten, head {state.head}")
        while state.tail - position >= MIN_EXTENT_BYTES:
            lap_end = position - position % file.data_bytes + file.data_bytes
            stop = min(state.tail, lap_end)
            if max_bytes is None or max_bytes > EXTENT_BYTES:
                stop = min(stop, grid_line(position, EXTENT_BYTES, MIN_EXTENT_BYTES))
            limit = stop if max_bytes is None else min(stop, position + max_bytes)
            if limit - position < MIN_EXTENT_BYTES:
                return None
            found = self._known.get((position, limit)) or self._walk(ring, position, limit)
            if isinstance(found, Extent):
                return found, limit < stop and found.after == found.stop
            if found != ring_kernels.WALK_PAD:
                return None
            position = lap_end
        return None

    def _walk(self, ring: RingReader, start: int, limit: int) -> Extent | int:
        """The extent from ``start`` to ``limit`` at most; without a frame, what is there."""
        file, head = ring.file, Head(ring, ring.file)
        lap_start = start - start % file.data_bytes
        self.walk_count += 1
        stop, what, last, row_count = ring_kernels.measure(
            file.data, start - lap_start, limit - lap_start
        )
        if last < 0:
            return int(what)
        position, commit_us = frame_at(file, lap_start + last)
        if head.has_passed(start):
            raise ReaderOvertaken(f"ring position {start} was overwritten while it was walked")
        after = lap_start + (file.data_bytes if what == ring_kernels.WALK_PAD else stop)
        kept_from = file.snapshot().head
        while self._known:
            first = next(iter(self._known))
            if first[0] >= kept_from and len(self._known) < MAX_EXTENTS:
                break
            del self._known[first]
        self._known[start, limit] = extent = Extent(
            file=file,
            start=start,
            stop=lap_start + stop,
            after=after,
            last=position,
            commit_us=commit_us,
            row_count=row_count,
            span=span_frame(position, lap_start + stop - start),
        )
        return extent


def grid_line(position: int, grid_bytes: int, least_bytes: int) -> int:
    """Where a part from ``position`` on should end: a grid line that is not too near."""
    return (position + least_bytes) // grid_bytes * grid_bytes + grid_bytes
