"""Loops over the bytes of the ring and of its index, compiled if numba exists.

They walk from frame to frame in a block or in the ring, and descend through the index's lanes.
They do not use files, processes or errors.
Every walk is total: whatever the bytes are, it ends, and it never leaves its array.

A position is passed as three numbers, (high half of the scn, low half of the scn, seq), so
that compiled (64-bit, signed) and undecorated (unbounded) code compare alike.  A frame whose
length is odd is no frame but the pad that fills a lap of the ring up to its end: it has the
pad's magic and reaches to the end of the lap exactly, otherwise the bytes are damaged.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import I64Array, U8Array, copy, jit, jit_uncounted, load_u32
from databus.common.frame.header_layout import (
    END_OF_WINDOW,
    HEADER_BYTES,
    commit_us_of,
    has_crc,
    is_frame,
    is_header,
    length_of,
    op_of,
    position_of,
    put_window_before,
)
from databus.relay.ring.ring_format import PAD_MAGIC

WALK_OK, WALK_CUT, WALK_MALFORMED, WALK_TOO_LARGE, WALK_NOT_GROWING, WALK_PAD = range(6)


@jit_uncounted
def is_after(hi: int, lo: int, seq: int, hi2: int, lo2: int, seq2: int) -> bool:
    """Whether position (hi, lo, seq) is greater than (hi2, lo2, seq2)."""
    if hi != hi2:
        return hi > hi2
    if lo != lo2:
        return lo > lo2
    return seq > seq2


@jit_uncounted
def is_pad(buf: U8Array, at: int, lap_rest: int) -> bool:
    """Whether the bytes at ``at`` are the pad of the ``lap_rest`` bytes up to the lap's end."""
    return load_u32(buf, at) == PAD_MAGIC and length_of(buf, at) == lap_rest | 1


@jit_uncounted
def step_at(ring: U8Array, at: int) -> int:
    """Bytes of the frame at offset ``at`` of the ring; -n for the pad of n bytes; 0 for neither."""
    length = length_of(ring, at)
    rest = len(ring) - at
    if length & 1:
        return -rest if is_pad(ring, at, rest) else 0
    if HEADER_BYTES > rest or length > rest or not is_header(ring, at):
        return 0
    return length


@jit
def check_block(
    block: U8Array, max_frame_bytes: int, hi: int, lo: int, seq: int
) -> tuple[int, int]:
    """Check that ``block`` is whole frames with positions that grow from (hi, lo, seq) on.

    Returns (WALK_OK, len(block)), or the problem and the offset of the frame that has it.
    """
    at = 0
    stop = len(block)
    while at < stop:
        if at + HEADER_BYTES > stop:
            return WALK_CUT, at
        if not is_header(block, at):
            return WALK_MALFORMED, at
        length = length_of(block, at)
        if length > max_frame_bytes:
            return WALK_TOO_LARGE, at
        if at + length > stop:
            return WALK_CUT, at
        hi2, lo2, seq2 = position_of(block, at)
        if not is_after(hi2, lo2, seq2, hi, lo, seq):
            return WALK_NOT_GROWING, at
        hi, lo, seq = hi2, lo2, seq2
        at += length
    return WALK_OK, at


@jit
def take_piece(
    block: U8Array, start: int, room: int, limit: int, to_point: int, step: int, points: I64Array
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """Choose the frames of a checked ``block`` from ``start`` on that are copied at once.

    They fit into ``room`` bytes, and into ``limit`` unless the first alone is longer.  The
    offsets of frames that begin ``to_point`` bytes or more after ``start``, and then each
    ``step`` bytes or more after the last, are written to ``points``.

    Returns (stop, offset of the last frame, frames, stop of the last whole window or -1,
    offset of its end-of-window frame, frames up to there, windows, points, to_point of the
    next piece).  stop == start: not even one frame fits.
    """
    at = start
    size = len(block)
    last, frames = -1, 0
    window_stop, window_last, window_frames, windows = -1, -1, 0, 0
    point_count = 0
    next_point = start + to_point
    while at < size:
        length = length_of(block, at)
        used = at + length - start
        if used > room or (used > limit and frames > 0):
            break
        if at >= next_point and point_count < len(points):
            points[point_count] = at
            point_count += 1
            next_point = at + step
        last = at
        frames += 1
        at += length
        if op_of(block, last) == END_OF_WINDOW:
            window_stop, window_last, window_frames = at, last, frames
            windows += 1
    return (
        at,
        last,
        frames,
        window_stop,
        window_last,
        window_frames,
        windows,
        point_count,
        next_point - at,
    )


@jit
def chain_windows(
    ring: U8Array, start: int, stop: int, hi: int, lo: int, seq: int
) -> tuple[int, int, int]:
    """Write into each end of a window between two offsets where the window before it ended.

    (hi, lo, seq) is the end of the window before the first one.  Returns the end of the last
    window.
    """
    at = start
    while at < stop:
        length = length_of(ring, at)
        if op_of(ring, at) == END_OF_WINDOW:
            put_window_before(ring, at, hi, lo, seq)
            hi, lo, seq = position_of(ring, at)
        at += length
    return hi, lo, seq


@jit
def cut_frames(buf: U8Array, lap_rest: int) -> tuple[int, int]:
    """Where the whole frames at the start of ``buf`` end, and what follows them.

    The lap of the ring that ``buf`` was copied from ends ``lap_rest`` bytes after its start.
    Returns (stop, WALK_OK | WALK_CUT | WALK_PAD | WALK_MALFORMED).
    """
    at = 0
    size = len(buf)
    while at + 8 <= size:
        length = length_of(buf, at)
        if length & 1:
            return at, WALK_PAD if is_pad(buf, at, lap_rest - at) else WALK_MALFORMED
        if at + HEADER_BYTES > size:
            return at, WALK_CUT
        if not is_header(buf, at):
            return at, WALK_MALFORMED
        if at + length > size:
            return at, WALK_CUT
        if not has_crc(buf, at, length):
            return at, WALK_MALFORMED
        at += length
    return at, WALK_CUT if at < size else WALK_OK


@jit
def measure(ring: U8Array, at: int, stop: int) -> tuple[int, int, int, int]:
    """The whole frames between the offsets ``at`` and ``stop``, which lie in one lap.

    Returns (where they end, WALK_OK | WALK_CUT | WALK_PAD | WALK_MALFORMED, offset of the last
    of them or -1, how many of them are rows).
    """
    last, rows = -1, 0
    while at + 8 <= stop:
        length = length_of(ring, at)
        if length & 1:
            what = WALK_PAD if is_pad(ring, at, len(ring) - at) else WALK_MALFORMED
            return at, what, last, rows
        if at + HEADER_BYTES > stop:
            return at, WALK_CUT, last, rows
        if not is_header(ring, at):
            return at, WALK_MALFORMED, last, rows
        if at + length > stop:
            return at, WALK_CUT, last, rows
        if not has_crc(ring, at, length):
            return at, WALK_MALFORMED, last, rows
        if op_of(ring, at) < END_OF_WINDOW:
            rows += 1
        last = at
        at += length
    return at, WALK_CUT if at < stop else WALK_OK, last, rows


@jit
def list_headers(
    ring: U8Array, at: int, stop: int, offsets: I64Array, headers: U8Array
) -> tuple[int, int, int]:
    """Copy the headers of the whole frames between two offsets, which lie in one lap.

    The offsets of the frames go to ``offsets``.  The copies are checked: if the bytes change
    meanwhile, offsets and headers still agree.

    Returns (frames, where they end, WALK_OK | WALK_CUT | WALK_PAD | WALK_MALFORMED).
    """
    count = 0
    while at + 8 <= stop and count < len(offsets):
        if length_of(ring, at) & 1:
            return count, at, WALK_PAD if is_pad(ring, at, len(ring) - at) else WALK_MALFORMED
        if at + HEADER_BYTES > stop:
            return count, at, WALK_CUT
        to = count * HEADER_BYTES
        copy(headers, to, ring, at, HEADER_BYTES)
        if not is_header(headers, to):
            return count, at, WALK_MALFORMED
        length = length_of(headers, to)
        if at + length > stop:
            return count, at, WALK_CUT
        if not has_crc(ring, at, length):
            return count, at, WALK_MALFORMED
        offsets[count] = at
        count += 1
        at += length
    return count, at, WALK_CUT if at < stop else WALK_OK


@jit
def evict(
    ring: U8Array, head: int, needed: int, whole_until: int, tail: int
) -> tuple[int, int, int, int]:
    """Walk from ``head`` to the first boundary at or after ``needed``.

    The boundary is the end of a window if there is one at or before ``whole_until``, otherwise
    the end of a frame.

    Returns (new head, offset of the last frame before it, frames, windows passed); a new
    head of -1 means that the bytes at that offset are no frame.
    """
    size = len(ring)
    position, last, frames, windows = head, -1, 0, 0
    cut, cut_last, cut_frames_, cut_windows = -1, -1, 0, 0
    at_window_end = False
    while True:
        if position >= needed:
            if at_window_end and (position <= whole_until or cut < 0):
                return position, last, frames, windows
            if cut < 0:
                cut, cut_last, cut_frames_, cut_windows = position, last, frames, windows
            if position > whole_until:
                return cut, cut_last, cut_frames_, cut_windows
        if position >= tail:
            return cut, cut_last, cut_frames_, cut_windows
        at = position % size
        length = step_at(ring, at)
        if length < 0:
            position -= length
            continue
        if length == 0:
            return -1, at, frames, windows
        last = at
        frames += 1
        position += length
        at_window_end = op_of(ring, at) == END_OF_WINDOW
        if at_window_end:
            if not has_crc(ring, at, length):
                return -1, at, frames, windows
            windows += 1


@jit
def seek(ring: U8Array, start: int, tail: int, hi: int, lo: int, seq: int) -> int:
    """Position of the first frame from ``start`` on that is after (hi, lo, seq), or ``tail``.

    The frame before it is examined whole: its position proves that nothing was skipped.
    Returns ~position (which is negative) if the bytes on the way are no frame.
    """
    size = len(ring)
    position, last = start, -1
    while position < tail:
        at = position % size
        length = step_at(ring, at)
        if length < 0:
            position -= length
            continue
        if length == 0:
            return ~position
        hi2, lo2, seq2 = position_of(ring, at)
        if is_after(hi2, lo2, seq2, hi, lo, seq):
            break
        last = position
        position += length
    if last >= 0 and not is_frame(ring, last % size):
        return ~last
    return position if position <= tail else ~position


@jit
def seek_time(ring: U8Array, start: int, tail: int, commit_us: int) -> tuple[int, int]:
    """The first frame from ``start`` on with this commit time or a later one.

    Returns (its position or ``tail``, position of the frame before it or -1 if it is the first
    that was examined); (~position, -1) if the bytes on the way are no frame.  The frame
    before it is examined whole.
    """
    size = len(ring)
    position, last = start, -1
    while position < tail:
        at = position % size
        length = step_at(ring, at)
        if length < 0:
            position -= length
            continue
        if length == 0:
            return ~position, -1
        if commit_us_of(ring, at) >= commit_us:
            break
        last = position
        position += length
    if last >= 0 and not is_frame(ring, last % size):
        return ~last, -1
    return (position, last) if position <= tail else (~position, -1)


@jit
def follow(
    ring: U8Array, start: int, stop: int, hi: int, lo: int, seq: int
) -> tuple[int, int, int, int]:
    """Follow undamaged frames with growing positions from ``start`` to at most ``stop``.

    Frames have a right CRC and are after (hi, lo, seq); pads have their mark and reach to
    the ring's end exactly.

    Returns (where it ended, offset of the last frame or -1, frames, ends of windows).
    """
    size = len(ring)
    position, last, frames, windows = start, -1, 0, 0
    while position < stop:
        at = position % size
        length = length_of(ring, at)
        if length & 1:
            if not is_pad(ring, at, size - at):
                break
            if position + size - at > stop:
                break
            position += size - at
            continue
        if at + HEADER_BYTES > size or not is_header(ring, at):
            break
        if at + length > size or position + length > stop:
            break
        hi2, lo2, seq2 = position_of(ring, at)
        if not is_after(hi2, lo2, seq2, hi, lo, seq):
            break
        if not has_crc(ring, at, length):
            break
        hi, lo, seq = hi2, lo2, seq2
        last = at
        frames += 1
        position += length
        if op_of(ring, at) == END_OF_WINDOW:
            windows += 1
    return position, last, frames, windows


@jit
def next_header(ring: U8Array, start: int, stop: int) -> int:
    """First position in [start, stop) of an undamaged frame, or -1."""
    size = len(ring)
    position = start
    while position < stop:
        at = position % size
        if is_frame(ring, at):
            return position
        position += 8
    return -1


@jit
def list_points(
    ring: U8Array, start: int, stop: int, first_at: int, step: int, points: I64Array
) -> int:
    """Positions of frames in [start, stop) for the index, the first at or after ``first_at``.

    Each further one is ``step`` bytes or more after the last.  ``points`` is long enough
    for (stop - start) / step + 1.  Returns how many there are, or -1 at bytes that are no
    frame.
    """
    size = len(ring)
    position, count, next_at = start, 0, first_at
    while position < stop:
        at = position % size
        length = step_at(ring, at)
        if length < 0:
            position -= length
            continue
        if length == 0:
            return -1
        if position >= next_at and count < len(points):
            points[count] = position
            count += 1
            next_at = position + step
        position += length
    return count


# ---- the index: rows of (scn high, scn low, seq, position), one block of rows per lane ----


@jit
def index_add(
    rows: I64Array,
    lane_starts: I64Array,
    lane_rows: I64Array,
    fanout: int,
    number: int,
    ring: U8Array,
    positions: I64Array,
) -> None:
    """Write the entries from ``number`` on, the frames at ``positions``, each into every lane
    that it belongs to."""
    for position in positions:
        at = position % len(ring)
        every = 1
        for lane in range(len(lane_starts)):
            if number % every != 0:
                break
            row = lane_starts[lane] + (number // every) % lane_rows[lane]
            rows[row, 0], rows[row, 1], rows[row, 2] = position_of(ring, at)
            rows[row, 3] = position
            every *= fanout
        number += 1


@jit
def index_lookup(
    rows: I64Array,
    lane_starts: I64Array,
    lane_rows: I64Array,
    fanout: int,
    first: int,
    stop: int,
    hi: int,
    lo: int,
    seq: int,
) -> int:
    """Number of the last entry in [first, stop) that is not after (hi, lo, seq), or -1.

    Descends from the express lanes, each followed as far as possible, down to lane 0.
    """
    lanes = len(lane_starts)
    every = 1
    for _ in range(lanes - 1):
        every *= fanout
    best = -1
    for back in range(lanes):
        lane = lanes - 1 - back
        number = -(-first // every) if best < 0 else best // every + 1
        while number * every < stop:
            row = lane_starts[lane] + number % lane_rows[lane]
            if is_after(rows[row, 0], rows[row, 1], rows[row, 2], hi, lo, seq):
                break
            best = number * every
            number += 1
        every //= fanout
    return best


@jit
def index_first_kept(rows: I64Array, lane_zero_rows: int, first: int, stop: int, head: int) -> int:
    """Number of the first entry in [first, stop) whose frame lies at or after ``head``."""
    while first < stop and rows[first % lane_zero_rows, 3] < head:
        first += 1
    return first


@jit
def index_false_entry(
    rows: I64Array, lane_zero_rows: int, first: int, stop: int, ring: U8Array, head: int, tail: int
) -> int:
    """Number of the first entry that does not match the ring, or -1."""
    size = len(ring)
    before = head - 1
    for number in range(first, stop):
        row = number % lane_zero_rows
        position = rows[row, 3]
        if position <= before or position >= tail:
            return number
        at = position % size
        if at & 7 or at + HEADER_BYTES > size or not is_header(ring, at):
            return number
        hi, lo, seq = position_of(ring, at)
        if hi != rows[row, 0] or lo != rows[row, 1] or seq != rows[row, 2]:
            return number
        before = position
    return -1


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, so that no append or read waits for it."""
    ring = np.zeros(256, dtype=np.uint8)
    ring.flags.writeable = False
    points = np.zeros(1, dtype=np.int64)
    lanes = np.zeros(1, dtype=np.int64)
    counts = np.ones(1, dtype=np.int64)
    rows = np.zeros((1, 4), dtype=np.int64)
    shared_rows = rows[:]
    shared_rows.flags.writeable = False
    is_header(ring, 0)
    has_crc(ring, 0, HEADER_BYTES)
    is_frame(ring, 0)
    is_pad(ring, 0, 8)
    step_at(ring, 0)
    check_block(ring, 64, 0, 0, 0)
    chain_windows(ring.copy(), 0, 0, 0, 0, 0)
    take_piece(ring, 256, 0, 0, 0, 1, points)
    cut_frames(ring, len(ring))
    measure(ring, 0, 0)
    list_headers(ring, 0, 0, points, np.zeros(HEADER_BYTES, dtype=np.uint8))
    evict(ring, 0, 0, 0, 0)
    seek(ring, 0, 0, 0, 0, 0)
    seek_time(ring, 0, 0, 0)
    follow(ring, 0, 0, 0, 0, 0)
    next_header(ring, 0, 8)
    list_points(ring, 0, 0, 0, 1, points)
    index_add(rows, lanes, counts, 2, 0, ring, points)
    for table in (rows, shared_rows):
        index_lookup(table, lanes, counts, 2, 0, 0, 0, 0, 0)
        index_first_kept(table, 1, 0, 0, 0)
        index_false_entry(table, 1, 0, 0, ring, 0, 0)
