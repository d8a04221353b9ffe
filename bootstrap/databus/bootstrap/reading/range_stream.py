"""The changes between two positions, or the state at one, as a stream of frames.

Both come from one ``FrameRange`` that is planned before the first byte goes out, so that
merging, sealing and retention do not disturb an answer that has begun.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from databus.bootstrap.reading.bootstrap_stream import IDLE, Piece
from databus.bootstrap.reading.frame_ranges import FrameRange, Mask, Unit
from databus.bootstrap.reading.net_changes import PASS_ROWS, NetChanges
from databus.bootstrap.reading.row_group_pruning import Selection
from databus.bootstrap.runs.parquet_runs import RowGroup, RunFile
from databus.client.splits.frame_tables import FrameBlock
from databus.common.checkpoint import OnlineCheckpoint, Position
from databus.common.filters.frame_selection import close_windows, gather
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame.frame_format import FrameColumns, Op

Opening = Callable[[Callable[[RunFile], bool]], FrameRange]
"""Plans a range, of whose runs only the files are read that the argument chooses."""

_GONE = (int(Op.DELETE), int(Op.TRUNCATE))
_Selected = tuple[FrameBlock, Mask]


class RangeContent(enum.StrEnum):
    """Which frames of a range are sent."""

    ALL = "all"
    NET = "net"
    STATE = "state"


class RangeStream:
    """The selected frames of a range, then the checkpoint to resume at.

    Invariants:
        I1. ALL sends every change in commit order, in windows.  NET sends the last state of each
            key in the range, deletions included: by source and key as far as runs are merged, and
            in commit order after that.  STATE is NET of a range that begins with nothing, without
            deletions, and never cuts a window.
        I2. The last piece alone has a checkpoint: an answer without it is not whole.
        I3. ``groups_read`` and ``groups_skipped`` count the row groups in the range whose rows
            were read, and those that the filter's statistics left out.
        I4. Between two pieces one row group is read at most, or one part of the keys; and one file
            of a run is open at most.

    Owner: one reader; ``pieces`` may be advanced from any thread, one at a time.
    Raises: from ``pieces``: LogTooYoung, StoreError.
    """

    def __init__(
        self,
        *,
        database: str,
        clock: str,
        since: Position,
        until: Position,
        content: RangeContent,
        opening: Opening,
        stream_filter: StreamFilter,
        source_ids: npt.NDArray[np.uint32],
        piece_bytes: int,
        pass_rows: int = PASS_ROWS,
    ) -> None:
        self.database, self.clock = database, clock
        self.position = since
        self.target = until
        self._content = content
        self._opening = opening
        self._selection = Selection(stream_filter, source_ids)
        self._in_window = False
        self.groups_read = self.groups_skipped = 0
        self._piece_bytes = piece_bytes
        self._pass_rows = pass_rows

    def pieces(self) -> Generator[Piece, None, None]:
        """All frames in order, then the checkpoint."""
        found = self._opening(self._selection.may_open)
        self.groups_skipped += found.unopened
        try:
            if self._content is RangeContent.STATE:
                found.cut_at_window()
            self.target = found.until
            for one in self._selected(found):
                if one is None:
                    yield IDLE
                else:
                    yield from self._cut(*one)
        finally:
            found.close()
        self.position = self.target
        yield Piece(b"", OnlineCheckpoint(self.database, self.clock, self.target), 0)

    def _selected(self, found: FrameRange) -> Iterator[_Selected | None]:
        """The blocks with their masks; None after a step that gave none."""
        if self._content is RangeContent.ALL:
            yield from self._every_change(found.units())
            return
        for one in self._last_states(found):
            if one is None:
                yield None
                continue
            block, columns, last = one
            mask = last & self._selection.mask(columns, block.data)
            if self._content is RangeContent.STATE:
                mask &= ~np.isin(columns.op, _GONE)
            yield block, mask

    def _due(
        self, units: Iterable[Unit], may_matter: Callable[[RowGroup], bool]
    ) -> Iterator[Unit | None]:
        """The units to be read, each decided when it comes up; None for one that is left out."""
        for unit in units:
            if unit.group is None or may_matter(unit.group):
                self.groups_read += unit.group is not None
                yield unit
            else:
                self.groups_skipped += 1
                yield None

    def _every_change(self, units: Iterable[Unit]) -> Iterator[_Selected | None]:
        # Inside a window that has begun, every unit is read: the window's end must come.
        due = self._due(units, lambda group: self._in_window or self._selection.may_match(group))
        for unit in due:
            if unit is None:
                yield None
                continue
            for block in unit.blocks():
                columns = block.columns()
                taken = unit.is_wanted(columns.scn, columns.seq)
                if not self._selection.filter.is_empty:
                    taken &= self._selection.mask(columns, block.data)
                    wanted = unit.is_wanted(columns.scn, columns.seq)
                    taken, self._in_window = close_windows(
                        columns, taken, in_window=self._in_window
                    )
                    taken &= wanted
                yield block, taken

    def _last_states(
        self, found: FrameRange
    ) -> Iterator[tuple[FrameBlock, FrameColumns, Mask] | None]:
        if found.is_reduced:
            # One merged run has been reduced to the last states already.
            for unit in self._due(found.units(), self._selection.may_match):
                if unit is None:
                    yield None
                    continue
                for block in unit.blocks():
                    columns = block.columns()
                    yield block, columns, unit.is_wanted(columns.scn, columns.seq)
            return
        ids = None if self._selection.filter.takes_every_source else self._selection.source_ids
        units = self._due(found.units(), self._selection.may_decide)
        net = NetChanges(units, found.rows, source_ids=ids, pass_rows=self._pass_rows)
        for _ in net.reading():
            yield None
        for _, block, last in net.blocks():
            yield block, block.columns(), last

    def _cut(self, block: FrameBlock, mask: Mask) -> Iterator[Piece]:
        """The chosen frames of a block in pieces of about ``piece_bytes``."""
        rows = np.flatnonzero(mask)
        lengths = np.diff(block.edges)[rows]
        ends = np.cumsum(lengths)
        at = 0
        while at < len(rows):
            room = (int(ends[at - 1]) if at else 0) + self._piece_bytes
            cut = max(at + 1, int(np.searchsorted(ends, room, side="right")))
            frames = gather(block.data, block.edges[:-1][rows[at:cut]], lengths[at:cut])
            yield Piece(frames, None, cut - at)
            at = cut
