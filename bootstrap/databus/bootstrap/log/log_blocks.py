"""Blocks of frames on their way into the log: order, cutting, and the part after a position.

Pure functions over bytes and their columns; nothing here touches single events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from databus.bootstrap.runs.parquet_runs import SCN_LIMIT
from databus.common.checkpoint import Position
from databus.common.errors import FormatError
from databus.common.filters.frame_selection import gather
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameColumns, Op

BLOCK_BYTES = 4 << 20
"""Frames are stored in values of about this size at most; a larger frame has one of its own."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Value:
    """What is stored under the key ``stop``: whole frames, the last of which is at ``stop``."""

    data: bytes
    stop: Position
    ends_window: bool


def cut_values(block: bytes, columns: FrameColumns, wanted: Mask) -> Iterator[Value]:
    """The selected frames as values of about ``BLOCK_BYTES`` at most.

    A value ends with the end of a window, or has none in it.

    Raises:
        FormatError: an scn is above the log's limit.
    """
    indices = np.flatnonzero(wanted)
    if not len(indices):
        return
    if int(columns.scn[indices].max()) >= SCN_LIMIT:
        raise FormatError(f"scn {int(columns.scn.max())} is over {SCN_LIMIT - 1}, the log's limit")
    starts = columns.offset[indices]
    lengths = columns.length[indices].astype(np.int64)
    is_end = columns.op[indices] == Op.END_OF_WINDOW
    last_end = int(np.flatnonzero(is_end)[-1]) + 1 if is_end.any() else 0
    ends = np.cumsum(lengths)
    raw = np.frombuffer(block, dtype=np.uint8)
    at = 0
    while at < len(indices):
        room = (int(ends[at - 1]) if at else 0) + BLOCK_BYTES
        cut = max(at + 1, int(np.searchsorted(ends, room, side="right")))
        limit = last_end if at < last_end else len(indices)
        cut = min(cut, limit)
        if at < last_end and cut < last_end:
            inner = np.flatnonzero(is_end[at:cut])
            cut = at + int(inner[-1]) + 1 if len(inner) else cut
        data = bytes(gather(raw, starts[at:cut], lengths[at:cut]))
        stop = position_at(columns, int(indices[cut - 1]))
        yield Value(data, stop, bool(is_end[cut - 1]))
        at = cut


def position_at(columns: FrameColumns, index: int) -> Position:
    """The position of a frame."""
    return Position(int(columns.scn[index]), int(columns.seq[index]))


def is_after(columns: FrameColumns, position: Position) -> Mask:
    """Which frames lie after a position."""
    scn, seq = np.uint64(position.scn), np.uint32(position.seq)
    later: Mask = (columns.scn > scn) | ((columns.scn == scn) & (columns.seq > seq))
    return later


def check_order(columns: FrameColumns) -> None:
    """Make sure that positions ascend; those of heartbeats do not count.

    Raises:
        FormatError: with the two positions.
    """
    rows = columns.op != Op.HEARTBEAT
    scn, seq = columns.scn[rows], columns.seq[rows]
    falls = (scn[1:] < scn[:-1]) | ((scn[1:] == scn[:-1]) & (seq[1:] <= seq[:-1]))
    if falls.any():
        index = int(np.flatnonzero(falls)[0])
        raise FormatError(
            f"the frame at {scn[index + 1]}:{seq[index + 1]} follows {scn[index]}:{seq[index]}; "
            "positions must ascend"
        )


def tail_after(data: bytes, after: Position) -> bytes:
    """The frames of ``data`` that lie after a position."""
    columns = frame_format.scan(data, verify=False)
    later = np.flatnonzero(is_after(columns, after))
    return data[int(columns.offset[later[0]]) :] if len(later) else b""


def check_blocks(
    blocks: Iterable[tuple[Position, bytes]],
    start: Position,
    window: Position,
    checkpoint: Position,
    frame_bytes: int,
) -> int:
    """Assert the invariants I1-I4 of a log over its (key, value) pairs; the number of frames.

    Raises:
        FormatError: with the block that is wrong.
    """
    last, whole, size, count = start, start, 0, 0
    for stop, value in blocks:
        columns = frame_format.scan(value)
        check_order(columns)
        first = position_at(columns, 0)
        if columns.stop != len(value) or position_at(columns, len(columns) - 1) != stop:
            raise FormatError(f"I1: the block at {stop} ends elsewhere")
        if first <= last:
            raise FormatError(f"I1: the block at {stop} begins at {first} after {last}")
        last, size, count = stop, size + len(value), count + len(columns)
        ends = np.flatnonzero(columns.op == Op.END_OF_WINDOW)
        if len(ends) and ends[-1] == len(columns) - 1:
            whole = stop
        elif len(ends):
            raise FormatError(f"I2: the block at {stop} continues after a window's end")
    if not start <= whole <= window <= checkpoint:
        raise FormatError(
            f"I3: whole windows end at {whole}, but the facts are {start}, {window}, {checkpoint}"
        )
    if whole < last and window != whole:
        raise FormatError(f"I3: a window is open after {whole}, but the facts have {window}")
    if checkpoint < last:
        raise FormatError(f"I4: frames up to {last}, checkpoint {checkpoint}")
    if size != frame_bytes:
        raise FormatError(f"{size} bytes are stored, the facts state {frame_bytes}")
    return count
