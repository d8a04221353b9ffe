"""The SCN index: a bounded circular skip list over the ring.

An entry is (scn, seq, ring position) of one frame; two entries lie at least ``step_bytes`` of
the ring apart.  Lane 0 has every entry, each lane above every ``FANOUT``-th of the one below,
so that a look-up reads about FANOUT entries a lane.  Entries are evicted in step with the ring.

Readers take an entry as a hint only and examine the frame itself; so they need no lock, and
a torn entry costs them a second look, never a wrong answer.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import google_crc32c
import numpy as np

from databus.common.checkpoint import Position
from databus.common.compiled.kernels import I64Array, U8Array
from databus.common.errors import StoreError
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring_file import make_file
from databus.relay.ring.ring_format import INDEX_FIELDS, PAGE_BYTES, layout

INDEX_MAGIC = b"DBUSINDX"
INDEX_VERSION = 1
FANOUT = 16
WORDS_OFFSET = 128
ROW_BYTES = 32
MOST_ENTRIES = 2**62  # more were never counted; kernels take signed numbers

INDEX_HEADER = layout(INDEX_FIELDS)

REBUILD_INDEX: dict[bool, bool] = {
    # every entry is the frame that it points at: rebuild?
    True: False,
    False: True,
}


def lane_row_counts(ring_bytes: int, step: int) -> list[int]:
    """Rows of each lane, lane 0 first; the last is short enough to be walked."""
    counts = [ring_bytes // step + 2]
    while counts[-1] > FANOUT:
        counts.append(counts[-1] // FANOUT + 2)
    return counts


def split(position: Position) -> tuple[int, int, int]:
    """A position as the three numbers that kernels take."""
    return position.scn >> 32, position.scn & 0xFFFFFFFF, position.seq


class ScnIndex:
    """Entries ``first`` to ``stop - 1``, numbered from 0 without end, in circular lanes.

    Invariants:
        I1. Entry positions grow, lie in [head, written) of the ring, and are ``step_bytes`` or
            more apart.
        I2. Entry n lies in lane k iff FANOUT**k divides n, in row n / FANOUT**k modulo the
            lane's rows; so no lane ever needs more rows than it has.
        I3. Every entry repeats scn and seq of the frame at its position.

    Owner: the ring's writer.  Readers only look up.
    Durability: none; after a loss it is rebuilt from the ring.
    """

    def __init__(
        self, path: Path, ring: U8Array, ring_id: int, step: int, *, writable: bool
    ) -> None:
        """Map the index at ``path``; a writer makes a new one if it is missing or foreign.

        Raises:
            StoreError: a reader finds none, or another ring's.
        """
        self.path = path
        self.ring = ring
        self.step_bytes = step
        counts = lane_row_counts(len(ring), step)
        self.lane_rows = np.array(counts, dtype=np.int64)
        self.lane_starts = np.array([sum(counts[:lane]) for lane in range(len(counts))])
        header = INDEX_HEADER.pack(
            INDEX_MAGIC, INDEX_VERSION, FANOUT, ring_id, len(ring), step, len(counts), 0
        )[:-8]
        header += struct.pack("<Q", google_crc32c.value(header))
        size = PAGE_BYTES + ROW_BYTES * sum(counts)
        if not _has_header(path, header, size):
            if not writable:
                raise StoreError(f"{path} is missing or is not the index of this ring")
            make_file(path, size)
            with path.open("r+b") as file:
                file.write(header)
        flags = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(path, flags)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(fd, size, access=access)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        self._words = self._view[WORDS_OFFSET : WORDS_OFFSET + 16].cast("Q")
        self.rows = np.frombuffer(self._map, dtype=np.int64, offset=PAGE_BYTES).reshape(-1, 4)

    def close(self) -> None:
        """Unmap the file."""
        self.rows = np.empty((0, 4), dtype=np.int64)
        self.ring = np.empty(0, dtype=np.uint8)
        self._words.release()
        self._view.release()
        self._map.close()

    @property
    def bounds(self) -> tuple[int, int]:
        """``first`` and ``stop``; (0, 0) if the file's numbers cannot be true."""
        first, stop = self._words[0], self._words[1]
        return (first, stop) if self._is_bounded(first, stop) else (0, 0)

    @property
    def first(self) -> int:
        """Number of the oldest entry."""
        return self._words[0]

    @property
    def stop(self) -> int:
        """Number of the next entry."""
        return self._words[1]

    def __len__(self) -> int:
        first, stop = self.bounds
        return stop - first

    def position(self, number: int) -> int:
        """Ring position of an entry."""
        return int(self.rows[number % self.lane_rows[0], 3])

    # -- the writer's side --

    def add(self, positions: I64Array) -> None:
        """Add the frames at ``positions`` after all others."""
        if not len(positions):
            return
        number = self._words[1]
        ring_kernels.index_add(
            self.rows,
            self.lane_starts,
            self.lane_rows,
            FANOUT,
            number,
            self.ring,
            positions,
        )
        self._words[1] = number + len(positions)

    def evict(self, head: int) -> None:
        """Drop the entries before ``head``."""
        first = self._words[0]
        if first < self._words[1] and self.position(first) < head:
            self._words[0] = ring_kernels.index_first_kept(
                self.rows, int(self.lane_rows[0]), first, self._words[1], head
            )

    def truncate(self, tail: int) -> None:
        """Drop the entries at and after ``tail``."""
        stop = self._words[1]
        while stop > self._words[0] and self.position(stop - 1) >= tail:
            stop -= 1
        self._words[1] = stop

    def next_point(self, head: int) -> int:
        """The earliest position that the next entry may have."""
        stop = self._words[1]
        return self.position(stop - 1) + self.step_bytes if stop > self._words[0] else head

    def clear(self) -> None:
        """Drop all entries."""
        self._words[0] = self._words[1] = 0

    def complete(self, head: int, tail: int) -> None:
        """Add the missing entries between the last entry, or ``head``, and ``tail``.

        Raises:
            ValueError: the bytes there are no frames.
        """
        start = self.position(self.stop - 1) if len(self) else head
        points = np.empty((tail - start) // self.step_bytes + 2, dtype=np.int64)
        count = ring_kernels.list_points(
            self.ring, start, tail, self.next_point(head), self.step_bytes, points
        )
        if count < 0:
            raise ValueError(f"no frames between ring positions {start} and {tail}")
        self.add(points[:count])

    def restore(self, head: int, tail: int) -> bool:
        """Make the entries those of the ring's [head, tail); True if it had to be rebuilt.

        Raises:
            ValueError: the bytes there are no frames.
        """
        sound = self._is_bounded(self.first, self.stop)
        if sound:
            self.truncate(tail)
            self.evict(head)
            sound = self.problem(head, tail) is None
        rebuild = REBUILD_INDEX[sound]
        if rebuild:
            self.clear()
        self.complete(head, tail)
        return rebuild

    def _is_bounded(self, first: int, stop: int) -> bool:
        return 0 <= stop - first < int(self.lane_rows[0]) and stop <= MOST_ENTRIES

    # -- for writer and readers --

    def lookup(self, position: Position) -> int:
        """Ring position of the last entry not after ``position``, or -1.  A hint, see above."""
        first, stop = self.bounds
        if first == stop:
            return -1
        number = ring_kernels.index_lookup(
            self.rows,
            self.lane_starts,
            self.lane_rows,
            FANOUT,
            first,
            stop,
            *split(position),
        )
        return self.position(number) if number >= 0 else -1

    def problem(self, head: int, tail: int) -> str | None:
        """A contradiction to the ring's frames in [head, tail), or None."""
        first, stop = self.first, self.stop
        if not self._is_bounded(first, stop):
            return f"entries {first} to {stop} do not fit into {self.lane_rows[0]} rows"
        every = 1
        for lane, (start, count) in enumerate(
            zip(self.lane_starts.tolist(), self.lane_rows.tolist(), strict=True)
        ):
            number = ring_kernels.index_false_entry(
                self.rows[start : start + count],
                count,
                -(-first // every),
                -(-stop // every),
                self.ring,
                head,
                tail,
            )
            if number >= 0:
                return f"lane {lane}: entry {number * every} is not the frame that it points at"
            every *= FANOUT
        return None


def _has_header(path: Path, header: bytes, size: int) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(header)) == header and os.fstat(file.fileno()).st_size == size
    except FileNotFoundError:
        return False
