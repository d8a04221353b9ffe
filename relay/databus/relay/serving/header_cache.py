"""A cache of the headers of the ring's frames, copied once for all filtered readers.

A filter decides by headers, which are spread over the whole ring; here they are adjacent.
Readers at the tail do not use it: they share copies of whole blocks.  Decisions by rows are
made elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.common.errors import ReaderOvertaken
from databus.common.filters.frame_selection import copy_of
from databus.common.frame import header_layout
from databus.common.frame.frame_format import HEADER_BYTES, Buffer, FrameColumns
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_reader import RingReader
from databus.relay.serving.extents import Head, grid_line

CACHE_PART_BYTES = 4 << 20
MIN_CACHE_PART_BYTES = 64 << 10
MAX_HEADERS_BYTES = 16 << 20

_MOST = (CACHE_PART_BYTES + MIN_CACHE_PART_BYTES) // HEADER_BYTES + 1
_offsets = np.empty(_MOST, dtype=np.int64)
_headers = np.empty(_MOST * HEADER_BYTES, dtype=np.uint8)


class HeaderColumns(FrameColumns):
    """``FrameColumns`` over adjacent headers: a field is every n-th number."""

    __slots__ = ()

    def __init__(self, headers: npt.NDArray[np.uint8]) -> None:
        count = len(headers) // HEADER_BYTES
        offset = np.arange(count, dtype=np.int64) * HEADER_BYTES
        super().__init__(headers.view(np.uint64), offset, headers.nbytes)

    def field(self, name: str) -> npt.NDArray[Any]:
        """The header field ``name`` of each frame, without an index."""
        return header_layout.strided(self.words, name)


@dataclass(frozen=True, slots=True)
class CachedHeaders:
    """The headers of the frames between two ring positions, in one lap.

    ``columns`` are over the headers alone, so that its offsets are offsets in ``headers``;
    ``offsets`` are the frames' offsets in the ring's data area.  ``after`` is where to continue.
    """

    file: RingFile
    start: int
    stop: int
    after: int
    columns: FrameColumns
    headers: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    def used_bytes(self, count: int) -> int:
        """How long the first ``count`` frames are together."""
        if count == len(self.offsets):
            return self.stop - self.start
        return int(self.offsets[count] - self.offsets[0])

    def fetch(
        self, ring: RingReader, chosen: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> Buffer:
        """A copy of the chosen frames.

        Raises:
            ReaderOvertaken: the writer may have overwritten one of them.
        """
        self.require_retained(ring)
        data = copy_of(self.file.data, self.offsets[chosen], lengths)
        self.require_retained(ring)
        return data

    def require_retained(self, ring: RingReader) -> None:
        """Check that what was read of these frames before this call was theirs.

        Raises:
            ReaderOvertaken: the writer may have overwritten one of them.
        """
        if Head(ring, self.file).has_passed(self.start):
            raise ReaderOvertaken(f"ring position {self.start} was overwritten while it was read")


class HeaderCache:
    """The cached headers of one ring.

    Invariants:
        I1. The frames of cached headers were whole between head and tail during the copy: the
            headers stay true for their ring positions, which are not used twice.
        I2. Cached headers end at multiples of ``CACHE_PART_BYTES`` if nothing else ends them, so
            that readers with any start use the same ones.
        I3. At most ``MAX_HEADERS_BYTES`` of headers are cached, and one part more; the first
            part is not of an earlier lap.

    Owner: one worker's event loop.
    Raises: ReaderOvertaken as ``RingReader.read`` does.
    """

    def __init__(self) -> None:
        self.listed_count = 0
        self._known: dict[tuple[int, int], CachedHeaders] = {}
        self._kept_bytes = 0
        self._file: RingFile | None = None

    def at(self, ring: RingReader, position: int) -> CachedHeaders | None:
        """The headers at a ring position; None before a short stretch or one very long frame."""
        state = ring.snapshot()
        file = ring.file
        if file is not self._file:
            self._known.clear()
            self._kept_bytes = 0
            self._file = file
        if position < state.head:
            raise ReaderOvertaken(f"ring position {position} was overwritten, head {state.head}")
        while state.tail - position >= MIN_CACHE_PART_BYTES:
            lap_end = position - position % file.data_bytes + file.data_bytes
            stop = min(
                state.tail, lap_end, grid_line(position, CACHE_PART_BYTES, MIN_CACHE_PART_BYTES)
            )
            found = self._known.get((position, stop)) or self._list(ring, position, stop)
            if isinstance(found, CachedHeaders):
                return found
            if found != ring_kernels.WALK_PAD:
                return None
            position = lap_end
        return None

    def _list(self, ring: RingReader, start: int, limit: int) -> CachedHeaders | int:
        """The headers from ``start`` to ``limit`` at most; without a frame, what is there."""
        file, head = ring.file, Head(ring, ring.file)
        lap_start = start - start % file.data_bytes
        count, stop, what = ring_kernels.list_headers(
            file.data,
            start - lap_start,
            limit - lap_start,
            _offsets,
            _headers,
        )
        if head.has_passed(start):
            raise ReaderOvertaken(f"ring position {start} was overwritten while it was listed")
        if not count:
            return int(what)
        self.listed_count += 1
        headers = _headers[: count * HEADER_BYTES].copy()
        cached_headers = CachedHeaders(
            file=file,
            start=start,
            stop=lap_start + stop,
            after=lap_start + (file.data_bytes if what == ring_kernels.WALK_PAD else stop),
            columns=HeaderColumns(headers),
            headers=headers,
            offsets=_offsets[:count].copy(),
        )
        self._store(start, limit, cached_headers)
        return cached_headers

    def _store(self, start: int, limit: int, cached_headers: CachedHeaders) -> None:
        head = cached_headers.file.snapshot().head
        while self._known:
            key = next(iter(self._known))
            if key[0] >= head and self._kept_bytes <= MAX_HEADERS_BYTES:
                break
            self._kept_bytes -= self._known.pop(key).headers.nbytes
        self._known[start, limit] = cached_headers
        self._kept_bytes += cached_headers.headers.nbytes
