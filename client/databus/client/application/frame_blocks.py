"""A block of whole frames as it was received, with its headers as columns.

Where the dispatcher walks them frame by frame, the columns are plain lists.  They are made when
they are first asked for: batches of rows need none.  The parts of frames stay in the block until
they are decoded.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from databus.common.checkpoint import Position
from databus.common.compiled.kernels import I64Array
from databus.common.errors import FormatError, from_problem
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    HEADER_BYTES,
    Flag,
    FrameColumns,
    FrameView,
    Op,
    scan,
    trusted_frame,
)
from databus.common.frame.header_layout import END_OF_WINDOW
from databus.common.frame.window_builder import require_chain

_Afters: TypeAlias = "tuple[I64Array, I64Array, I64Array, npt.NDArray[np.uint64]]"
_Windows: TypeAlias = "tuple[I64Array, I64Array, I64Array]"


class Block:
    """Some frames in stream order.

    Invariants:
        I1. ``data`` holds exactly ``count`` whole frames; frame i begins at ``offsets[i]``.
        I2. ``first`` is how many frames the reader got before this block.
        I3. In a block of a relay positions grow (those of heartbeats may repeat).

    Owner: made by the puller, then read only; but for ``values``, which ``Decoding`` fills and
        takes from, in any thread.
    Raises: FormatError if I3 does not hold.
    """

    __slots__ = (
        "_afters",
        "_breaks",
        "_run_ends",
        "_window_ends",
        "_window_rows",
        "_windows",
        "bootstrap",
        "columns",
        "count",
        "data",
        "first",
        "has_control",
        "key_hashes",
        "offsets",
        "op_column",
        "op_counts",
        "ops",
        "row_total",
        "schema_fps",
        "scn_column",
        "scns",
        "seqs",
        "size_bytes",
        "source_ids",
        "values",
    )
    offsets: list[int]
    ops: list[int]
    scns: list[int]
    seqs: list[int]
    source_ids: list[int]
    schema_fps: list[int]
    key_hashes: list[int]
    row_total: int
    _afters: _Afters
    _breaks: I64Array
    _run_ends: list[int]
    _window_ends: list[int]
    _window_rows: list[int]
    _windows: _Windows

    def __init__(
        self,
        data: bytes | memoryview,
        columns: FrameColumns | None = None,
        *,
        first: int = 0,
        bootstrap: bool,
    ) -> None:
        columns = columns or scan(data, verify=False).with_headers()
        self.data = memoryview(data)
        self.size_bytes = len(data)
        self.first = first
        self.bootstrap = bootstrap
        self.count = len(columns)
        self.columns = columns
        """The headers as arrays."""
        self.op_column = columns.op
        self.scn_column = columns.scn
        if not bootstrap:
            _check_order(columns, self.scn_column, self.op_column)
        self.op_counts: list[int] = np.bincount(self.op_column, minlength=256).tolist()
        """How many frames there are of each op."""
        self.row_total = sum(self.op_counts[:FIRST_CONTROL_OP])
        """How many of the frames are rows."""
        self.has_control = self.row_total < self.count
        self.values: dict[int, dict[str, Any]] = {}
        """Rows that were decoded together with others and not read yet, by index."""

    def __getattr__(self, name: str) -> Any:
        """A column as a list, or an index of the frames: made now, and from then on a field."""
        make = _MADE.get(name)
        if make is None:
            raise AttributeError(f"a block has no {name}")
        made = make(self)
        setattr(self, name, made)
        return made

    def window_end(self, index: int) -> int:
        """The index of the next end of window at or after ``index``; -1 if not in the block."""
        at = bisect_left(self._window_ends, index)
        return self._window_ends[at] if at < len(self._window_ends) else -1

    def whole_window(self, index: int) -> int:
        """The index of the end of the window that begins at ``index``, if all frames between are
        rows of it; -1 otherwise."""
        at = bisect_left(self._window_ends, index)
        if at == len(self._window_ends) or index < self._window_rows[at]:
            return -1
        end = self._window_ends[at]
        return end if index < end and self.scns[index] == self.scns[end] else -1

    def whole_windows(self, index: int, most_rows: int) -> tuple[int, int]:
        """The index after the windows from ``index`` on that are whole, and their number.

        All frames of them are rows, but for their ends.  They have ``most_rows`` rows at most,
        unless the first one alone has more.  (``index``, 0) if there is no such window.
        """
        stop, has_end = self.window_part(index, int(self.scn_column[index]))
        if not has_end or stop - index == 1:
            return index, 0
        ends, row_marks, broken = self._windows
        at = int(ends.searchsorted(index))
        run_stop = int(broken[broken.searchsorted(at, side="right")])
        most = int(row_marks[at]) - (stop - 1 - index) + most_rows
        count = int(row_marks[at:run_stop].searchsorted(most, side="right")) or 1
        return int(ends[at + count - 1]) + 1, count

    def window_part(self, index: int, scn: int) -> tuple[int, bool]:
        """The index after the frames from ``index`` on of the window ``scn``, and whether the last
        of them is its end.

        All others are rows.  Without the end, the window may continue in the next block if the
        index is ``count``, and is none of rows alone otherwise.
        """
        stop = index
        if self.scn_column[index] == scn and self.op_column[index] < FIRST_CONTROL_OP:
            breaks = self._breaks
            stop = int(breaks[breaks.searchsorted(index, side="right")])
        if stop == self.count:
            return stop, False
        has_end = self.op_column[stop] == END_OF_WINDOW and self.scn_column[stop] == scn
        return (stop + 1, True) if has_end else (index, False)

    def row_count(self, start: int) -> int:
        """How many of the frames from ``start`` on are rows."""
        if not start:
            return self.row_total
        return int(np.count_nonzero(self.op_column[start:] < FIRST_CONTROL_OP))

    def rows_by_source(self, start: int, stop: int) -> dict[int, I64Array]:
        """The indices of the rows from ``start`` to before ``stop``, by source id."""
        rows = start + (self.op_column[start:stop] < FIRST_CONTROL_OP).nonzero()[0]
        ids = self.columns.source_id[rows]
        if not len(rows) or (ids == ids[0]).all():
            return {int(ids[0]): rows} if len(rows) else {}
        return {found: rows[ids == found] for found in dict.fromkeys(ids.tolist())}

    def run_end(self, index: int) -> int:
        """Where the run of rows of one source that ``index`` lies in ends."""
        return self._run_ends[bisect_right(self._run_ends, index)]

    def position(self, index: int) -> Position:
        """The position of a frame."""
        return Position(self.scns[index], self.seqs[index])

    def frame(self, index: int) -> FrameView:
        """A frame."""
        return trusted_frame(self.data, self.offsets[index])

    def single_frame(self, index: int) -> FrameView:
        """A frame, where few of the block are asked for: it does not make ``offsets``."""
        return trusted_frame(self.data, int(self.columns.offset[index]))

    def whole_rows(self, index: int, most: int) -> tuple[I64Array, I64Array, I64Array]:
        """Indices, starts and stops in ``data`` of row ``index`` and those after it, ``most`` rows.

        They have one schema, and all columns of the row after the change.  The arrays are empty
        if ``index`` is no such row.
        """
        indices, starts, stops, schema_fps = self._afters
        at = int(indices.searchsorted(index))
        piece = slice(at, at + most)
        same = schema_fps[piece] == self.schema_fps[index]
        if not same.size or indices[at] != index:
            piece = slice(0, 0)
        elif not same.all():
            piece = slice(at, at + int(np.argmin(same)))
        return indices[piece], starts[piece], stops[piece]

    def frames_from(self, index: int) -> memoryview:
        """The bytes of frame ``index`` and all after it."""
        return self.data[self.offsets[index] :] if index < self.count else self.data[:0]

    def index_after(self, position: Position) -> int:
        """The index of the first frame after ``position``; ``count`` if there is none."""
        for index in range(self.count):
            if (self.scns[index], self.seqs[index]) > position:
                return index
        return self.count

    def last_of(self, op: Op) -> int:
        """The index of the last frame with this op, or -1."""
        return int((self.op_column == op).nonzero()[0][-1]) if self.op_counts[op] else -1

    def all_of(self, op: Op) -> list[int]:
        """The indices of the frames with this op."""
        found: list[int] = []
        if self.op_counts[op]:
            found = (self.op_column == op).nonzero()[0].tolist()
        return found

    def has_row_from(self, index: int) -> bool:
        """Whether any of the frames from ``index`` on is a row."""
        return bool((self.op_column[index:] < FIRST_CONTROL_OP).any())

    def row_schemas(self) -> set[int]:
        """The fingerprints that the block's rows need."""
        found = self.columns.schema_fp
        if self.has_control:
            found = found[self.op_column < FIRST_CONTROL_OP]
        if len(found) and (found == found[0]).all():
            return {int(found[0])}
        return set(found.tolist())

    def require_chain(self, before: Position) -> None:
        """Check that no window is missing among all frames of the stream after ``before``.

        Raises:
            WindowMissing: one is missing.
        """
        if self.op_counts[END_OF_WINDOW]:
            require_chain(self.columns, before)

    def raise_error_frame(self) -> None:
        """Raise the error that the server sent, if it sent one."""
        index = self.last_of(Op.ERROR)
        if index < 0:
            return
        raise from_problem(control_json(self, index))


def _afters(block: Block) -> _Afters:
    """All rows of a block that have every column of the row after the change."""
    columns = block.columns
    wanted = (block.op_column < FIRST_CONTROL_OP) & (
        (columns.flags & (Flag.HAS_AFTER | Flag.PARTIAL)) == Flag.HAS_AFTER
    )
    indices = np.flatnonzero(wanted)
    starts = columns.offset + HEADER_BYTES + columns.key_len + columns.before_len
    stops = starts + columns.after_len
    return indices, starts[indices], stops[indices], columns.schema_fp[indices]


def _run_ends(block: Block) -> list[int]:
    """Where runs of rows of one source end, and in a block of a relay of one window."""
    kinds = block.columns.source_id.astype(np.int64)
    kinds[block.op_column >= FIRST_CONTROL_OP] = -1
    changed = kinds[1:] != kinds[:-1]
    if not block.bootstrap:
        changed |= block.scn_column[1:] != block.scn_column[:-1]
    return [*(np.flatnonzero(changed) + 1).tolist(), block.count]


def _window_rows(block: Block) -> list[int]:
    """Where the rows begin that come before each end, without a control frame between."""
    controls = np.flatnonzero(block.op_column >= FIRST_CONTROL_OP)
    before = np.searchsorted(controls, block._window_ends)
    rows: list[int] = np.concatenate(([0], controls + 1))[before].tolist()
    return rows


def _breaks(block: Block) -> I64Array:
    """The frames that are controls or have another scn than the one before, and ``count``."""
    scn = block.scn_column
    is_break = block.op_column >= FIRST_CONTROL_OP
    is_break[1:] |= scn[1:] != scn[:-1]
    return np.append(is_break.nonzero()[0], block.count)


def _windows(block: Block) -> _Windows:
    """Of the windows of a block: their ends; how many of the frames before each end are no ends;
    and which of them are not whole, with their number as the last entry."""
    op, scn = block.op_column, block.scn_column
    ends = (op == END_OF_WINDOW).nonzero()[0]
    starts = np.concatenate(([0], ends[:-1] + 1))
    breaks = block._breaks
    is_whole = (
        (op[starts] < FIRST_CONTROL_OP)
        & (breaks[breaks.searchsorted(starts, side="right")] == ends)
        & (scn[starts] == scn[ends])
    )
    numbers = np.arange(len(ends))
    return ends, ends - numbers, np.append((~is_whole).nonzero()[0], len(ends))


_MADE: dict[str, Callable[[Block], Any]] = {
    "offsets": lambda block: block.columns.offset.tolist(),
    "ops": lambda block: block.op_column.tolist(),
    "scns": lambda block: block.scn_column.tolist(),
    "seqs": lambda block: block.columns.seq.tolist(),
    "source_ids": lambda block: block.columns.source_id.tolist(),
    "schema_fps": lambda block: block.columns.schema_fp.tolist(),
    "key_hashes": lambda block: block.columns.key_hash.tolist(),
    "_afters": _afters,
    "_breaks": _breaks,
    "_run_ends": _run_ends,
    "_window_ends": lambda block: block.all_of(Op.END_OF_WINDOW),
    "_window_rows": _window_rows,
    "_windows": _windows,
}


def control_json(block: Block, index: int) -> dict[str, object]:
    """The JSON object in a control frame.

    Raises:
        FormatError: it has no such object.
    """
    frame = block.frame(index)
    try:
        document = json.loads(bytes(frame.after or b""))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the frame at {frame.position} (op {frame.op}): {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"the frame at {frame.position} (op {frame.op}) holds no JSON object")
    return document


def _check_order(columns: FrameColumns, scn: npt.NDArray[Any], op: npt.NDArray[Any]) -> None:
    if len(columns) < 2:
        return
    seq = columns.seq
    is_later = (scn[1:] > scn[:-1]) | ((scn[1:] == scn[:-1]) & (seq[1:] > seq[:-1]))
    if is_later.all():
        return
    same = (scn[1:] == scn[:-1]) & (seq[1:] == seq[:-1])
    wrong = np.flatnonzero(~(is_later | (same & (op[1:] == Op.HEARTBEAT))))
    if len(wrong):
        at = int(wrong[0])
        raise FormatError(
            f"the stream goes backwards: {scn[at + 1]}:{seq[at + 1]} comes after "
            f"{scn[at]}:{seq[at]}"
        )
