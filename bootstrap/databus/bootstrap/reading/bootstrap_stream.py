"""A bootstrap as one stream of frames: runs in plan order, then the hot log, to the target.

It decides which frames go out, where they are cut, and where the checkpoints are.
Everything is synchronous and reads disks; ``bootstrap_server`` runs it in threads.

Consistency.  After a run is finished the reader has the state at the run's end, and from there
a new plan is made; so runs may be merged, sealed or dropped while a reader is in between.  The
target is fixed at the start.  A run that extends beyond it is sent whole, and the bootstrap
then ends where that run ends.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from databus.bootstrap.log import log_handover
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_blocks import is_after, position_at
from databus.bootstrap.merging import run_planner
from databus.bootstrap.reading.retained_runs import Retain, are_retained
from databus.bootstrap.reading.row_group_pruning import Selection
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.open_run import OpenRun
from databus.bootstrap.runs.parquet_runs import RowGroup, Run, RunKind
from databus.bootstrap.runs.run_ids import stop_of
from databus.client.splits.frame_tables import FrameBlock
from databus.common import checkpoint as checkpoints
from databus.common.checkpoint import (
    ORIGIN,
    BootstrapCheckpoint,
    Checkpoint,
    OnlineCheckpoint,
    Position,
)
from databus.common.filters.frame_selection import close_windows, gather
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Buffer, FrameColumns, Op

PIECE_BYTES = 4 << 20
"""Frame bytes between two checkpoints, approximately."""

LOG = "log"
"""The name of the hot log in checkpoints, in the field for a run's id."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some frames, and the checkpoint after them; None inside a large window."""

    frames: Buffer
    checkpoint: Checkpoint | None
    rows: int

    @property
    def checkpoint_frame(self) -> bytes:
        """The checkpoint as a frame, b"" if there is none."""
        if self.checkpoint is None:
            return b""
        position = self.checkpoint.position
        return frame_format.pack_frame(
            op=Op.CHECKPOINT,
            scn=position.scn,
            seq=position.seq,
            after=checkpoints.encode(self.checkpoint).encode(),
        )


IDLE = Piece(b"", None, 0)
"""Nothing to send: the reader has gone a step further, of one file or one row group at most."""


class BootstrapStream:
    """Brings one reader from ``since`` to ``target``.

    Invariants:
        I1. The rows of a segment go out in ascending order, those of a clustered run by source
            and key, the rows of one key in ascending order, and runs in ascending order: no
            older state of a row follows a newer one.
        I2. A checkpoint's ``position`` is one at which the reader's state is that of the
            source; until the first run is finished it is the reader's start position.
        I3. The last piece's checkpoint is an online one, at ``target`` or after it.
        I4. Between two pieces one row group is read at most, and one file is open at most.

    Owner: one reader; ``pieces`` may be advanced from any thread, one at a time.
    Raises: from ``pieces``: LogTooYoung, StoreError, FormatError.
    """

    def __init__(
        self,
        *,
        store: Store,
        log: HotLog,
        since: Position,
        target: Position,
        stream_filter: StreamFilter,
        source_ids: npt.NDArray[np.uint32],
        resume: BootstrapCheckpoint | None = None,
        piece_bytes: int = PIECE_BYTES,
        retain: Retain | None = None,
    ) -> None:
        state = log.state()
        self.database, self.clock = state.database, state.clock
        self.store = store
        self.log = log
        self.since = since
        self.target = target
        self._selection = Selection(stream_filter, source_ids)
        self._resume = resume
        self._retain = retain
        self._piece_bytes = piece_bytes
        self._in_window = False
        self.groups_read = self.groups_skipped = 0
        self.position = resume.position if resume else since

    def pieces(self) -> Generator[Piece, None, None]:
        """All frames in order; ends after the online checkpoint."""
        if self._resume is not None:
            yield from self._resumed(self._resume)
        while self.position < self.target:
            log_start, manifest = log_handover.read(self.log, self.store)
            steps = run_planner.plan(manifest, self.position, log_start)
            if steps:
                yield from self._run(steps[0].run, steps[0].after, 0)
            else:
                # From the origin the log alone is enough if it has everything.
                self.position = max(self.position, log_start)
                yield from self._hot()
        online = OnlineCheckpoint(self.database, self.clock, self.position)
        yield Piece(b"", online, 0)

    def _resumed(self, resume: BootstrapCheckpoint) -> Iterator[Piece]:
        """The rest of the run that the reader is inside, or what must replace it."""
        manifest = self.store.read()
        if not are_retained(self.store, manifest, {resume.run}, self._retain):
            manifest = self.store.read()
        run = manifest.find(resume.run)
        if run is not None and run.stop > self.position:
            yield from self._run(run, self.position, resume.row)
            return
        base, had = manifest.base, stop_of(resume.run)
        if resume.position != ORIGIN or not resume.row or base is None or had is None:
            return
        # The base is gone.  A new base names no deleted keys, so keys that were deleted since
        # the old one are sent first.
        if had < base.stop:
            for step in run_planner.chain(manifest, had, base.stop):
                yield from self._tombstones(step.run, had, base.stop, resume)
        yield from self._run(base, ORIGIN, 0)

    def _tombstones(
        self, run: Run, after: Position, upto: Position, resume: BootstrapCheckpoint
    ) -> Iterator[Piece]:
        may_open = self._selection.may_open
        opened = self.store.open_run(run, lambda file: file.last > after and may_open(file))
        try:
            for group in opened.row_groups():
                for block in opened.frames(group) if group.last > after else ():
                    columns = block.columns()
                    gone = np.isin(columns.op, (int(Op.DELETE), int(Op.TRUNCATE)))
                    gone &= is_after(columns, after) & ~is_after(columns, upto)
                    gone &= self._selection.mask(columns, block.data)
                    lengths = columns.length[gone].astype(np.int64)
                    frames = gather(block.data, columns.offset[gone], lengths)
                    yield Piece(frames, resume, 0)
        finally:
            opened.close()

    def _checkpoint(self, run: str, row: int) -> BootstrapCheckpoint:
        return BootstrapCheckpoint(
            self.database,
            self.clock,
            since=self.since,
            target=self.target,
            run=run,
            row=row,
            position=self.position,
        )

    # -- runs ---------------------------------------------------------------------------

    def _run(self, run: Run, after: Position, from_row: int) -> Iterator[Piece]:
        may_open = self._selection.may_open
        opened = self.store.open_run(run, lambda file: file.last > after and may_open(file))
        self.groups_skipped += opened.unopened
        try:
            # Shows the reader at once where it is: at the row that it requested, or elsewhere.
            yield Piece(b"", self._checkpoint(run.id, from_row), 0)
            for group in opened.row_groups(from_row):
                is_due = group.last > after and group.first_row + group.rows > from_row
                # Inside a window that has begun, every group is read: the window's end must come.
                if is_due and (self._in_window or self._selection.may_match(group)):
                    self.groups_read += 1
                    yield from self._group(opened, group, after, from_row)
                else:
                    self.groups_skipped += 1
                    yield IDLE
        finally:
            opened.close()
        self.position = max(self.position, run.stop)
        # Row 0: the reader has nothing after this position.  With a row number it would take the
        # beginning of the next run for a run that was replaced, and roll back.
        yield Piece(b"", self._checkpoint(run.id, 0), 0)

    def _group(
        self, opened: OpenRun, group: RowGroup, after: Position, from_row: int
    ) -> Iterator[Piece]:
        row = group.first_row
        for block in opened.frames(group):
            count = len(block.edges) - 1
            at = min(max(0, from_row - row), count)
            while at < count:
                cut = self._cut(block, at, opened.run.kind)
                yield self._piece(opened.run, block, at, cut, row, after, group)
                at = cut
            row += count

    def _cut(self, block: FrameBlock, at: int, kind: RunKind) -> int:
        """Where the piece that begins at frame ``at`` ends: at a window's end if possible."""
        limit = int(block.edges[at]) + self._piece_bytes
        cut = max(at + 1, int(np.searchsorted(block.edges, limit, side="right")) - 1)
        if kind is RunKind.SEGMENT:
            ends = np.flatnonzero(block.columns().op[at:cut] == Op.END_OF_WINDOW)
            if len(ends):
                return at + int(ends[-1]) + 1
        return cut

    def _piece(
        self,
        run: Run,
        block: FrameBlock,
        at: int,
        cut: int,
        row: int,
        after: Position,
        group: RowGroup,
    ) -> Piece:
        part = block.slice(at, cut)
        columns = part.columns()
        checkpoint: Checkpoint | None = None
        if run.kind is not RunKind.SEGMENT:
            checkpoint = self._checkpoint(run.id, row + cut)
        elif columns.op[-1] == Op.END_OF_WINDOW:
            # Inside a segment every window's end is a consistent point: no row number is needed.
            last = position_at(columns, len(columns) - 1)
            self.position = max(self.position, last)
            checkpoint = self._checkpoint(run.id, 0)
        floor = ORIGIN if group.first > after else after
        return Piece(self._selected(columns, part.data, floor), checkpoint, cut - at)

    def _selected(
        self, columns: FrameColumns, data: npt.NDArray[np.uint8], after: Position
    ) -> Buffer:
        """The frames after ``after`` that the filter selects, with the ends of their windows."""
        if self._selection.filter.is_empty and after == ORIGIN:
            return data.data
        taken = is_after(columns, after)
        if not self._selection.filter.is_empty:
            taken &= self._selection.mask(columns, data)
            taken, self._in_window = close_windows(columns, taken, in_window=self._in_window)
        return gather(data, columns.offset[taken], columns.length[taken].astype(np.int64))

    # -- hot log ------------------------------------------------------------------------

    def _hot(self) -> Iterator[Piece]:
        """Whole windows of the hot log; ends early if a part of it was sealed meanwhile."""
        while self.position < self.target:
            part = self.log.read(self.position, self.target, self._piece_bytes)
            if part is None:
                return
            columns = frame_format.scan(part.data, verify=False)
            data = np.frombuffer(part.data, dtype=np.uint8)
            block = FrameBlock(data, np.append(columns.offset, len(data)))
            at, count = 0, len(columns)
            while at < count:
                cut = self._cut(block, at, RunKind.SEGMENT)
                piece = block.slice(at, cut)
                frames = self._selected(piece.columns(), piece.data, ORIGIN)
                self.position = position_at(columns, cut - 1)
                ends_window = columns.op[cut - 1] == Op.END_OF_WINDOW
                checkpoint = self._checkpoint(LOG, 0) if ends_window else None
                yield Piece(frames, checkpoint, cut - at)
                at = cut
            self.position = part.stop
