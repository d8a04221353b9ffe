"""A block of whole frames as it was received, with its headers as columns.

The columns are plain lists, because the dispatcher walks them frame by frame.  The parts of
frames stay in the block until they are decoded.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
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
from databus.common.frame.window_builder import require_chain

_Afters: TypeAlias = "tuple[I64Array, I64Array, I64Array, npt.NDArray[np.uint64]]"


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
        "_key_hashes",
        "_run_ends",
        "_window_ends",
        "_window_rows",
        "bootstrap",
        "columns",
        "count",
        "data",
        "first",
        "has_control",
        "offsets",
        "ops",
        "schema_fps",
        "scns",
        "seqs",
        "size_bytes",
        "source_ids",
        "values",
    )

    def __init__(self, data: bytes | memoryview, *, first: int = 0, bootstrap: bool) -> None:
        columns = scan(data, verify=False)
        self.data = memoryview(data)
        self.size_bytes = len(data)
        self.first = first
        self.bootstrap = bootstrap
        self.count = len(columns)
        self.offsets: list[int] = columns.offset.tolist()
        self.ops: list[int] = columns.op.tolist()
        self.scns: list[int] = columns.scn.tolist()
        self.seqs: list[int] = columns.seq.tolist()
        self.source_ids: list[int] = columns.source_id.tolist()
        self.schema_fps: list[int] = columns.schema_fp.tolist()
        if not bootstrap:
            _check_order(columns)
        kinds = columns.source_id.astype(np.int64)
        kinds[columns.op >= FIRST_CONTROL_OP] = -1
        changed = kinds[1:] != kinds[:-1]
        if not bootstrap:
            changed |= columns.scn[1:] != columns.scn[:-1]
        self._run_ends: list[int] = [*(np.flatnonzero(changed) + 1).tolist(), self.count]
        self.has_control = bool((kinds < 0).any())
        ends = np.flatnonzero(columns.op == Op.END_OF_WINDOW)
        self._window_ends: list[int] = ends.tolist()
        # Where the rows begin that come before each of them, without a control frame between.
        controls = np.flatnonzero(kinds < 0)
        before = np.searchsorted(controls, ends)
        self._window_rows: list[int] = np.concatenate(([0], controls + 1))[before].tolist()
        self.columns = columns
        """The headers as arrays."""
        self._key_hashes: list[int] | None = None
        self._afters: _Afters | None = None
        self.values: dict[int, dict[str, Any]] = {}
        """Rows that were decoded together with others and not read yet, by index."""

    @property
    def key_hashes(self) -> list[int]:
        """The key hash of each frame."""
        if self._key_hashes is None:
            self._key_hashes = self.columns.key_hash.tolist()
        return self._key_hashes

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

    def row_count(self, start: int) -> int:
        """How many of the frames from ``start`` on are rows."""
        return int(np.count_nonzero(self.columns.op[start:] < FIRST_CONTROL_OP))

    def rows_by_source(self, start: int, stop: int) -> dict[int, I64Array]:
        """The indices of the rows from ``start`` to before ``stop``, by source id."""
        rows = start + np.flatnonzero(self.columns.op[start:stop] < FIRST_CONTROL_OP)
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

    def whole_rows(self, index: int, most: int) -> tuple[I64Array, I64Array, I64Array]:
        """Indices, starts and stops in ``data`` of row ``index`` and those after it, ``most`` rows.

        They have one schema, and all columns of the row after the change.  The arrays are empty
        if ``index`` is no such row.
        """
        if self._afters is None:
            self._afters = _afters(self.columns)
        indices, starts, stops, schema_fps = self._afters
        at = int(np.searchsorted(indices, index))
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
        if self.has_control:
            for index in range(self.count - 1, -1, -1):
                if self.ops[index] == op:
                    return index
        return -1

    def all_of(self, op: Op) -> Iterator[int]:
        """The indices of the frames with this op."""
        if self.has_control:
            for index, found in enumerate(self.ops):
                if found == op:
                    yield index

    def row_schemas(self) -> set[int]:
        """The fingerprints that the block's rows need."""
        found = set(self.schema_fps)
        if self.has_control:
            pairs = zip(self.schema_fps, self.ops, strict=True)
            found = {fp for fp, op in pairs if op < FIRST_CONTROL_OP}
        return found

    def require_chain(self, before: Position) -> None:
        """Check that no window is missing among all frames of the stream after ``before``.

        Raises:
            WindowMissing: one is missing.
        """
        if self._window_ends:
            require_chain(self.columns, before)

    def raise_error_frame(self) -> None:
        """Raise the error that the server sent, if it sent one."""
        index = self.last_of(Op.ERROR)
        if index < 0:
            return
        raise from_problem(control_json(self, index))


def _afters(columns: FrameColumns) -> _Afters:
    """All rows of a block that have every column of the row after the change."""
    wanted = (columns.op < FIRST_CONTROL_OP) & (
        (columns.flags & (Flag.HAS_AFTER | Flag.PARTIAL)) == Flag.HAS_AFTER
    )
    indices = np.flatnonzero(wanted)
    starts = columns.offset + HEADER_BYTES + columns.key_len + columns.before_len
    stops = starts + columns.after_len
    return indices, starts[indices], stops[indices], columns.schema_fp[indices]


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


def _check_order(columns: FrameColumns) -> None:
    if len(columns) < 2:
        return
    scn, seq, op = columns.scn, columns.seq, columns.op
    later = (scn[1:] > scn[:-1]) | ((scn[1:] == scn[:-1]) & (seq[1:] > seq[:-1]))
    same = (scn[1:] == scn[:-1]) & (seq[1:] == seq[:-1])
    wrong = np.flatnonzero(~(later | (same & (op[1:] == Op.HEARTBEAT))))
    if len(wrong):
        at = int(wrong[0])
        raise FormatError(
            f"the stream goes backwards: {scn[at + 1]}:{seq[at + 1]} comes after "
            f"{scn[at]}:{seq[at]}"
        )
