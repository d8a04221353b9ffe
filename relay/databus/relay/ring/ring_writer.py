"""Writes the ring: appends at the tail, evicts at the head, syncs, replaces."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Self

import numpy as np

from databus.common.checkpoint import Position
from databus.common.compiled.kernels import U8Array, whole
from databus.common.errors import (
    ClockMismatch,
    FormatError,
    FrameTooLarge,
    RingFull,
    StoreError,
    SyncFailed,
)
from databus.common.frame import header_layout
from databus.common.frame.frame_format import Buffer, trusted_frame
from databus.relay.ring import expiry, ring_kernels
from databus.relay.ring.ring_file import (
    RingFile,
    make_ring,
    remove_folder,
    sync_directory,
)
from databus.relay.ring.ring_format import (
    EMPTY_STATE,
    INDEX_NAME,
    MODE_BLOCK,
    RING_NAME,
    RingState,
    largest_frame_bytes,
    whole_pages,
)
from databus.relay.ring.ring_reader import read_piece
from databus.relay.ring.ring_recovery import (
    Recovered,
    frame_at,
    recover,
    with_oldest,
    without_damage,
)
from databus.relay.ring.scn_index import ScnIndex, split

NEXT_NAME = "ring.next"
PART_SHARE = 8
EVICT_SHARE = 256
COPY_BYTES = 1 << 20


_log = logging.getLogger("databus.relay.ring.ring_writer")


class RingWriter:
    """Appends frames at the tail and evicts them at the head.

    Invariants:
        I1. head <= tail <= written <= head + ring_bytes, in ring positions.
        I2. A frame is in one piece; if it does not fit into the rest of a lap, a pad fills that.
        I3. Positions (scn, seq) of the frames from head to written grow strictly.
        I4. Before a byte is overwritten, the head after it has been published.
        I5. What readers see ends with a whole window, or inside a window that is larger than
            part_bytes; windows up to that size are evicted whole.
        I6. A part of a window that has not been published is dropped by ``discard_open``, by
            ``close`` and by a restart.
        I7. After a sync that failed it takes no frame and syncs no more.  The next open of the
            ring verifies what is after the last sync, and writes it again or drops it.

    Owner: one task of one process, which holds the lock file.  ``sync`` may run in another
    thread beside ``append``.
    Durability: what ``append`` published outlives the process; what ``sync`` returned
    outlives the machine.
    Raises: FormatError, FrameTooLarge, RingFull, SyncFailed; after any of them nothing has been
        appended.
    """

    def __init__(self, directory: Path, lock: int) -> None:
        self.directory = directory
        self._lock = lock
        self._sync_lock = threading.Lock()
        ring_kernels.warm_up()
        expiry.warm_up()
        remove_folder(directory / NEXT_NAME)
        self._open()

    def _open(self) -> None:
        file = RingFile(self.directory / RING_NAME, writable=True)
        self._file = file
        self.recovered: Recovered = recover(file)
        control = self.recovered.control
        state = self.recovered.state
        self._control = control
        self.ring_bytes = control.ring_bytes
        self.part_bytes = control.ring_bytes // PART_SHARE
        self.max_frame_bytes = largest_frame_bytes(control.ring_bytes)
        self._index = ScnIndex(
            self.directory / INDEX_NAME,
            file.data,
            control.ring_id,
            control.index_step_bytes,
            writable=True,
        )
        self.index_rebuilt = self._index.restore(state.head, state.tail)
        self._points = np.empty(control.ring_bytes // control.index_step_bytes + 2, dtype=np.int64)
        self._released = state.head
        self._synced = state.synced
        self._state = state
        self._written = state.tail
        self._last = state.max
        self._last_place = state.tail
        self._open_frames = 0
        self._chain: tuple[int, int, int] | None = None
        self._failure: SyncFailed | None = None
        file.set_retired(False)
        file.rewrite(max(state.head, min(state.synced, control.state.synced)), state.tail)
        file.publish(state)
        self.sync()
        if self.recovered.shown > state.tail:
            self.resize(self.ring_bytes)

    # -- what it is --

    @property
    def clock(self) -> str:
        """Identity of the clock that the stream's scn belong to."""
        return self._control.clock

    @property
    def blocks(self) -> bool:
        """Whether frames are retained until they are released."""
        return self._control.mode == MODE_BLOCK

    @property
    def last(self) -> Position:
        """Position of the last frame appended, published or not."""
        return self._last

    @property
    def state(self) -> RingState:
        """What readers see."""
        return self._state

    @property
    def open_bytes(self) -> int:
        """Bytes appended and not published: the window that has not ended yet."""
        return self._written - self._state.tail

    def bytes_after(self, position: Position) -> int:
        """How many bytes readers at ``position`` have before them, up to an index step too much;
        everything if the next frame has been evicted."""
        state = self._state
        if position >= state.max:
            return 0
        return state.tail - max(self._index.lookup(position), state.head)

    def require_clock(self, clock: str | None) -> None:
        """Take over ``clock`` if the ring has none; refuse any other than its own."""
        if clock is None or clock == self.clock:
            return
        if self.clock:
            raise ClockMismatch(
                f"the ring in {self.directory} holds the stream of clock {self.clock!r}, "
                f"the source is {clock!r}; move the folder away to begin a new stream"
            )
        self._control = self._control._replace(clock=clock)
        self.sync()
        self.sync()

    # -- append --

    def append(self, block: Buffer, after: Position | None = None) -> Position:
        """Append ``block``, whole frames in order; return the position of the last one.

        It may hold many windows and end inside one.  Readers see everything up to the last
        window that is whole, and the parts of a window that is larger than ``part_bytes``.
        With ``after``, the end of the last whole window, each end of a window
        gets the end of the one before it; without, the frames stay as they are.

        Raises:
            FormatError: it is not whole frames with positions growing from ``last`` on.
            FrameTooLarge: a frame is larger than ``max_frame_bytes``.
            RingFull: in block mode, there is no room until ``release``.
            StoreError: the ring has been closed.
        """
        if self._lock < 0:
            raise StoreError(f"the ring in {self.directory} has been closed; open it again")
        self._require_sound()
        frames = np.frombuffer(block, dtype=np.uint8)
        frames.flags.writeable = False
        self._check(frames, block)
        view = memoryview(block).cast("B")
        start, size = 0, len(view)
        if self.blocks:
            self._require_room(size)
        self._chain = None if after is None else split(after)
        while start < size:
            start = self._append_piece(frames, view, start)
        return self._last

    def _append_piece(self, frames: U8Array, view: memoryview, start: int) -> int:
        """Copy as many frames as are adjacent in the ring; returns where the rest begins."""
        written, index = self._written, self._index
        room = self.ring_bytes - written % self.ring_bytes
        (
            stop,
            last,
            frame_count,
            window_stop,
            window_last,
            window_frames,
            windows,
            point_count,
            _,
        ) = whole(
            ring_kernels.take_piece(
                frames,
                start,
                room,
                self.part_bytes,
                index.next_point(written) - written,
                index.step_bytes,
                self._points,
            )
        )
        if stop == start:
            self._make_room(written + room)
            self._written = written + self._file.write_pad(written)
            return start
        end = written + stop - start
        self._make_room(end)
        self._file.write(written, view[start:stop])
        if self._chain is not None and windows:
            at = written % self.ring_bytes
            self._chain = ring_kernels.chain_windows(
                self._file.changeable, at, at + stop - start, *self._chain
            )
        self._written = end
        self._last = trusted_frame(view, last).position
        self._last_place = written + last - start
        index.add(self._points[:point_count] + (written - start))
        if window_stop >= 0:
            self._publish(
                written + window_stop - start,
                written + window_last - start,
                self._open_frames + window_frames,
                windows,
            )
            self._open_frames = frame_count - window_frames
        else:
            self._open_frames += frame_count
        if end - self._state.tail > self.part_bytes:
            self._publish_open()
        return stop

    def _publish_open(self) -> None:
        """Publish the appended part of the open window."""
        if self._open_frames:
            self._publish(self._written, self._last_place, self._open_frames, 0)
            self._open_frames = 0

    def _check(self, frames: U8Array, block: Buffer) -> None:
        problem, at = ring_kernels.check_block(frames, self.max_frame_bytes, *split(self._last))
        if problem == ring_kernels.WALK_OK:
            return
        if problem == ring_kernels.WALK_TOO_LARGE:
            raise FrameTooLarge(
                f"a frame of {header_layout.length_of(frames, at)} bytes does not fit: "
                f"at most a quarter of ring_bytes={self.ring_bytes}, {self.max_frame_bytes} bytes, "
                f"may be one frame; enlarge ring_bytes"
            )
        if problem == ring_kernels.WALK_NOT_GROWING:
            found = trusted_frame(memoryview(block), at).position
            raise FormatError(
                f"the frame at offset {at} of the block has position {found}, which is not after "
                f"the frame before it (last of the ring {self._last}); drop what the ring has"
            )
        what = "is cut off" if problem == ring_kernels.WALK_CUT else "is no frame"
        raise FormatError(f"the frame at offset {at} of the block's {len(frames)} bytes {what}")

    def _make_room(self, end: int) -> None:
        """Evict everything before ``end`` - ring_bytes, and publish that first."""
        needed = end - self.ring_bytes
        state = self._state
        if needed <= state.head:
            return
        # A little more than needed, so that most appends find room and publish once.
        limit = self._released if self.blocks else state.tail
        needed = min(needed + self.ring_bytes // EVICT_SHARE, limit)
        whole_until = limit if self.blocks else needed + self.part_bytes
        head, last, frames, windows = whole(
            ring_kernels.evict(self._file.data, state.head, needed, whole_until, state.tail)
        )
        if head < 0 or not self._has_sound_edge(head, last):
            # The walk began at the head and ended within one lap of it.
            self._drop_damage(state.head + (last - state.head) % self.ring_bytes)
            return self._make_room(end)
        self._evict(head, last, frames, windows)

    def _has_sound_edge(self, head: int, last: int) -> bool:
        """Whether the frames at both sides of a new head are whole; ``last`` is the offset of the
        one before it."""
        data, tail = self._file.data, self._state.tail
        at = head % self.ring_bytes
        if ring_kernels.is_pad(data, at, self.ring_bytes - at):
            head, at = head + self.ring_bytes - at, 0
        return (last < 0 or header_layout.is_frame(data, last)) and (
            head >= tail or header_layout.is_frame(data, at)
        )

    def _evict(self, head: int, last: int, frames: int, windows: int) -> None:
        """Evict everything before ``head``; the frame at the offset ``last`` is the last of it."""
        state = self._state
        state = with_oldest(
            self._file,
            state._replace(
                head=head,
                synced=self._synced,
                prev=frame_at(self._file, last)[0] if last >= 0 else state.prev,
                evicted_frames=state.evicted_frames + frames,
                evicted_windows=state.evicted_windows + windows,
            ),
        )
        self._show(state)
        self._index.evict(head)

    def _drop_damage(self, position: int) -> None:
        """Evict everything up to the last damaged frame: it is unreadable, or was due anyway.

        Raises:
            FormatError: the ring is in block mode, and the reader has not released it.
        """
        damage = self._file.damage(position)
        state = without_damage(self._file, self._state)
        if self.blocks or state.head == self._state.head:
            raise damage
        _log.warning("%s; windows up to %s are dropped", damage.message, state.prev)
        self._show(state._replace(synced=self._synced))
        self._index.evict(state.head)

    def _publish(self, tail: int, last: int, frames: int, windows: int) -> None:
        """Publish ``frames`` more frames up to ``tail``; the last of them is at ``last``."""
        state = self._state
        newest, commit_us = frame_at(self._file, last)
        was_empty = state.is_empty
        state = state._replace(
            tail=tail,
            synced=self._synced,
            max=newest,
            max_commit_us=commit_us,
            frames=state.frames + frames,
            windows=state.windows + windows,
        )
        if was_empty:
            state = with_oldest(self._file, state)
        self._show(state)

    def _show(self, state: RingState) -> None:
        self._state = state
        self._file.publish(state)

    def expire(self, before_us: int) -> bool:
        """Evict the whole windows at the head that committed before ``before_us``.

        It ends at the first window that did not, whatever follows, and in block mode at
        frames that were not released.  Returns whether anything was evicted.
        """
        state = self._state
        if state.is_empty or state.min_commit_us >= before_us:
            return False
        stop = self._released if self.blocks else state.tail
        head, last, frames, windows = expiry.expired(self._file.data, state.head, stop, before_us)
        if head == state.head or not self._has_sound_edge(head, last):
            return False
        self._evict(head, last, frames, windows)
        return True

    # -- block mode --

    def release(self, position: int) -> None:
        """In block mode: the reader no longer needs what lies before ring ``position``."""
        self._released = max(self._released, min(position, self._state.tail))

    def _require_room(self, size: int) -> None:
        lap_rest = self.ring_bytes - self._written % self.ring_bytes
        pad = self.max_frame_bytes if size > lap_rest else 0
        needed = self._written + size + pad - self.ring_bytes
        if needed > self._released:
            raise RingFull(
                f"{size} bytes need ring positions up to {needed} released, the reader is at "
                f"{self._released} (ring_bytes={self.ring_bytes}, tail={self._state.tail}); "
                f"append at most {self.part_bytes} bytes at once and wait for the reader"
            )

    # -- replace, open window, sync, reset, close --

    def discard_open(self) -> None:
        """Drop the frames after the last published one: the source sends their window again."""
        state = self._state
        if self._written == state.tail:
            return
        self._index.truncate(state.tail)
        self._written = state.tail
        self._last = state.max
        self._open_frames = 0
        self._file.write_stop(state.tail)

    def sync(self) -> Position:
        """Sync everything published to disk; returns the position that is safe now.

        The source may drop everything up to there.

        Raises:
            SyncFailed: the disk failed, now or before; close the ring and open it again.
        """
        with self._sync_lock:
            self._require_sound()
            state = self._state
            try:
                self._require_in_place()
                self._file.flush()
                state = state._replace(synced=state.tail)
                self._control = self._control._replace(
                    sequence=self._control.sequence + 1, state=state
                )
                self._file.write_control(self._control)
            except SyncFailed as error:
                self._failure = error
                raise
            self._synced = state.tail
        return state.max

    def _require_in_place(self) -> None:
        try:
            self._file.require_in_place()
        except StoreError as error:
            raise SyncFailed(f"{error.message}; nothing more is acknowledged") from error

    def _require_sound(self) -> None:
        if self._failure is not None:
            raise SyncFailed(self._failure.message)

    def resize(self, ring_bytes: int) -> None:
        """Rebuild the ring with the newest windows that fit, at positions that no reader has seen.

        Raises:
            FrameTooLarge: a retained frame is larger than the new size allows.
        """
        old = self._state = without_damage(self._file, self._state)
        ring_bytes = whole_pages(ring_bytes)
        self.discard_open()
        remove_folder(self.directory / NEXT_NAME)
        folder = self.directory / NEXT_NAME
        folder.mkdir()
        shown = max(self._state.tail, self.recovered.shown)
        base = -(-(shown + 1) // ring_bytes) * ring_bytes
        state = EMPTY_STATE._replace(
            head=base, tail=base, prev=old.prev, min=old.prev, max=old.prev,
            frames=old.evicted_frames, evicted_frames=old.evicted_frames,
            windows=old.evicted_windows, evicted_windows=old.evicted_windows,
        )  # fmt: skip
        try:
            make_ring(folder / RING_NAME, ring_bytes, self.clock, self._control.mode, state)
            with RingWriter(folder, os.dup(self._lock)) as successor:
                self._copy_to(successor)
        except BaseException:
            remove_folder(folder)
            raise
        self._file.set_retired(True)
        try:
            (folder / RING_NAME).replace(self.directory / RING_NAME)
            (folder / INDEX_NAME).replace(self.directory / INDEX_NAME)
            sync_directory(self.directory)
            folder.rmdir()
        except (OSError, StoreError) as error:
            self._failure = SyncFailed(f"{self.directory / RING_NAME} was not replaced: {error}")
            raise self._failure from error
        self._index.close()
        self._file.close()
        self._open()

    def _copy_to(self, successor: RingWriter) -> None:
        position, tail = self._state.head, self._state.tail
        while position < tail:
            frames, position = read_piece(self._file, position, tail, COPY_BYTES)
            successor.append(frames)
        successor._publish_open()

    def close(self) -> None:
        """Sync and close the ring; a window that has not ended is dropped."""
        if self._lock < 0:
            return
        self.discard_open()
        try:
            if self._failure is None:
                self.sync()
        finally:
            self._index.close()
            self._file.close()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
