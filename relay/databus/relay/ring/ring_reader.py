"""Reads the ring, from any process, without a lock and without ever delaying its writer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

import numpy as np

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import FormatError, ReaderOvertaken, ScnTooOld, StoreError
from databus.common.frame import header_layout
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_format import INDEX_NAME, RING_NAME, RingState
from databus.relay.ring.ring_recovery import frame_at
from databus.relay.ring.scn_index import ScnIndex, split

FIND_ATTEMPTS = 100


def read_piece(file: RingFile, position: int, tail: int, max_bytes: int) -> tuple[memoryview, int]:
    """Whole frames from ``position`` on, at most ``max_bytes`` unless one frame is longer.

    Returns (frames, ring position after them).  Bytes that the writer overwrote meanwhile are in
    the copy too: the caller compares it with the head afterwards.

    Raises:
        FormatError: the bytes there are no frames.
    """
    while position < tail:
        lap_rest = file.data_bytes - position % file.data_bytes
        room = min(lap_rest, tail - position)
        piece = file.copy(position, min(room, max(max_bytes, header_layout.HEADER_BYTES)))
        stop, what = ring_kernels.cut_frames(np.frombuffer(piece, dtype=np.uint8), lap_rest)
        if stop == 0 and what == ring_kernels.WALK_CUT:
            length = int.from_bytes(piece[4:8], "little")
            if length > room:
                what = ring_kernels.WALK_MALFORMED
            else:
                piece = file.copy(position, length)
                stop, what = ring_kernels.cut_frames(np.frombuffer(piece, dtype=np.uint8), lap_rest)
        if stop > 0:  # The frames before damage are good.
            return memoryview(piece)[:stop], position + stop
        if what == ring_kernels.WALK_MALFORMED:
            raise file.damage(position, piece[: header_layout.HEADER_BYTES])
        position += lap_rest
    return memoryview(b""), position


class RingReader:
    """Finds and copies frames that the writer has published.

    Invariants:
        I1. The frames that ``read`` returns were whole between head and tail while it copied them.
        I2. Nothing is ever written to the ring's files.
        I3. Ring positions are never used twice, not even by a rebuilt ring: an old one is
            overtaken, never misread.

    Owner: one task; the files belong to the writer.
    Raises: ReaderOvertaken from ``read``: call ``find`` again with the position of the last
    frame that you have; it answers, or raises ScnTooOld.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ring_kernels.warm_up()
        self.file = self._map()
        self._index: ScnIndex | None = None
        self._state: tuple[RingFile, int, RingState] | None = None

    def _map(self) -> RingFile:
        try:
            file = RingFile(self.directory / RING_NAME, writable=False)
        except FileNotFoundError:
            raise StoreError(
                f"there is no ring in {self.directory}; start its fetcher first"
            ) from None
        try:
            self._control = file.newest_control()
            if file.data_bytes != self._control.ring_bytes:
                raise StoreError(
                    f"{file.path} has {file.data_bytes} bytes of data, its control page states "
                    f"{self._control.ring_bytes}: it was cut or is a bad copy"
                )
        except BaseException:
            file.close()
            raise
        self.ring_bytes = file.data_bytes
        return file

    @property
    def index(self) -> ScnIndex | None:
        """The ring's index; None until the writer has made it."""
        if self._index is None:
            with contextlib.suppress(StoreError):
                self._index = ScnIndex(
                    self.directory / INDEX_NAME,
                    self.file.data,
                    self._control.ring_id,
                    self._control.index_step_bytes,
                    writable=False,
                )
        return self._index

    def _follow_replacement(self) -> None:
        """Map the new file if the writer has replaced the old one."""
        if not self.file.retired:
            return
        try:
            status = (self.directory / RING_NAME).stat()
        except OSError:
            self.file.require_in_place()
            return
        if (status.st_dev, status.st_ino) == self.file.inode:
            return
        old = self.file
        self.file = self._map()
        self._close_index()
        old.close()

    def require_in_place(self) -> None:
        """Check that the ring is still the one in the folder; to be called now and then.

        Raises:
            StoreError: it was moved away, deleted, replaced by another program than its writer,
                or cut.  It must not be read any more: reading a cut file ends the process.
        """
        try:
            self.file.require_in_place()
        except StoreError:
            if not self.file.retired:
                raise
            self._follow_replacement()
            self.file.require_in_place()

    @property
    def is_live(self) -> bool:
        """Whether its writer has opened the ring since the machine was started."""
        return self.file.is_live

    @property
    def clock(self) -> str:
        """The identity of the stream's clock; empty until the source has given one."""
        if not self._control.clock:  # A ring never takes another one.
            self._control = self.file.newest_control()
        return self._control.clock

    @property
    def epoch(self) -> int:
        """Changes whenever something was published or evicted; one load to poll."""
        return self.file.epoch

    def snapshot(self) -> RingState:
        """What the ring holds, consistent at one moment.

        While nothing is published or evicted it is the same object.
        """
        self._follow_replacement()
        file = self.file
        epoch = file.epoch
        file.fence()
        if self._state is None or self._state[0] is not file or self._state[1] != epoch:
            self._state = file, epoch, file.snapshot()
        return self._state[2]

    def find(self, position: Position) -> int:
        """Ring position of the first frame after ``position``; the tail if it is yet to come.

        A ``position`` beyond ``snapshot().max`` also gives the tail: wait until max has
        reached it and find again, for frames up to it may still come.

        Raises:
            ScnTooOld: frames after ``position`` have been evicted.
        """
        for _ in range(FIND_ATTEMPTS):
            state = self.snapshot()
            if position < state.prev:
                raise _too_old(position, state, self.directory)
            if position >= state.max:
                return state.tail
            if position == state.prev:
                return state.head
            start = self._hint(position, state)
            found = ring_kernels.seek(self.file.data, start, state.tail, *split(position))
            if found < 0 and start > state.head:
                start = state.head
                found = ring_kernels.seek(self.file.data, start, state.tail, *split(position))
            self.file.fence()
            if self.file.snapshot().head <= start:
                if found < 0:
                    raise self.file.damage(~found)
                return found
        raise ReaderOvertaken(
            f"{position} was overtaken {FIND_ATTEMPTS} times while it was looked up in "
            f"{self.directory} (ring_bytes={self.ring_bytes})"
        )

    def _hint(self, position: Position, state: RingState) -> int:
        """Where the scan for ``position`` begins: an index entry that proves true, or head."""
        index = self.index
        start = -1 if index is None else index.lookup(position)
        if start < state.head or start >= state.tail or start & 7:
            return state.head
        if start % self.ring_bytes > self.ring_bytes - header_layout.HEADER_BYTES:
            return state.head
        at = start % self.ring_bytes
        is_frame = header_layout.is_header(self.file.data, at)
        found, _ = frame_at(self.file, start)
        self.file.fence()
        if not is_frame or found > position or self.file.snapshot().head > start:
            return state.head
        return start

    def before_time(self, commit_us: int) -> Position:
        """The position just before the first frame with this commit time or a later one.

        If all are earlier it is ``snapshot().max``.  It is found by halving the index and a scan
        from there.  If the source's commit times step back, the result is one of the positions
        at which a later frame follows an earlier one.

        Raises:
            ScnTooOld: such frames may have been evicted: the oldest retained frame is not
                earlier, and does not begin the clock.
        """
        for _ in range(FIND_ATTEMPTS):
            state = self.snapshot()
            if state.is_empty:
                # The evicted frames were no younger than that.
                if state.evicted_frames and commit_us <= state.max_commit_us:
                    raise _time_too_old(commit_us, state, self.directory)
                return state.max
            if commit_us <= state.min_commit_us:
                if state.prev != ORIGIN:
                    raise _time_too_old(commit_us, state, self.directory)
                return state.prev
            start, probed = self._time_hint(commit_us, state)
            found, last = ring_kernels.seek_time(self.file.data, start, state.tail, commit_us)
            before = state.prev if last < 0 else frame_at(self.file, last)[0]
            self.file.fence()
            if self.file.snapshot().head <= min(start, probed):
                if found < 0:
                    raise self.file.damage(~found)
                return before
        raise ReaderOvertaken(
            f"commit time {commit_us} was overtaken {FIND_ATTEMPTS} times while it was looked "
            f"up in {self.directory} (ring_bytes={self.ring_bytes})"
        )

    def _time_hint(self, commit_us: int, state: RingState) -> tuple[int, int]:
        """(ring position of a frame earlier than ``commit_us``, or head; the least examined)."""
        start, probed, index = state.head, state.tail, self.index
        low, high = (0, 0) if index is None else index.bounds
        while index is not None and low < high:
            middle = (low + high) // 2
            position = index.position(middle)
            if position >= state.tail:
                high = middle
                continue
            at = position % self.ring_bytes
            is_kept = position >= state.head and at <= self.ring_bytes - header_layout.HEADER_BYTES
            if is_kept and header_layout.is_header(self.file.data, at):
                probed = min(probed, position)
                if frame_at(self.file, position)[1] >= commit_us:
                    high = middle
                    continue
                start = max(start, position)
            low = middle + 1
        return start, probed

    def read(self, position: int, max_bytes: int) -> tuple[memoryview, int]:
        """Copy whole frames from ring ``position`` on.

        Returns (frames back to back, ring position after them); empty at the tail.  There
        are at most ``max_bytes``, but always one frame, however large.

        Raises:
            ReaderOvertaken: the writer has passed ``position``, or replaced the ring.
            FormatError: the file is damaged there.
        """
        state = self.snapshot()
        self._require_retained(position, state)
        if position >= state.tail:
            return memoryview(b""), position
        try:
            frames, next_position = read_piece(self.file, position, state.tail, max_bytes)
        except FormatError:
            self._require_retained(position, self.file.snapshot())
            raise
        self.file.fence()
        self._require_retained(position, self.file.snapshot())
        return frames, next_position

    def _require_retained(self, position: int, state: RingState) -> None:
        if position < state.head:
            raise ReaderOvertaken(
                f"ring position {position} was overwritten, the head is at {state.head} "
                f"(servable: after {state.prev} up to {state.max}, "
                f"ring_bytes={self.ring_bytes}, {self.directory})",
                prev=state.prev.to_json(),
                max=state.max.to_json(),
            )

    def close(self) -> None:
        """Unmap the files."""
        self._close_index()
        self.file.close()

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _too_old(position: Position, state: RingState, directory: Path) -> ScnTooOld:
    return state.too_old(
        f"position {position} is older than the ring's oldest: it serves after {state.prev} "
        f"(frames {state.min} to {state.max}, {directory})"
    )


def _time_too_old(commit_us: int, state: RingState, directory: Path) -> ScnTooOld:
    oldest = (
        f"frame that has gone, {state.max_commit_us} us: none is left"
        if state.is_empty
        else f"oldest frame, {state.min_commit_us} us: earlier ones are gone"
    )
    return state.too_old(
        f"commit time {commit_us} us is not after that of the ring's {oldest} "
        f"(frames {state.min} to {state.max}, {directory})",
        min_commit_us=state.min_commit_us,
        max_commit_us=state.max_commit_us,
    )
