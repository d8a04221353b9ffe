"""Where a batch of changes ends that has at most so many events or bytes.  Pure.

It counts events in frames as they come; ``table_reader`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from databus.common.checkpoint import ORIGIN, Position
from databus.common.frame.frame_format import FIRST_CONTROL_OP, FrameColumns, Op

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """The most events and bytes of frames of a batch; None is no bound."""

    events: int | None = None
    bytes: int | None = None


class BatchEnd:
    """Finds the end of a batch in the frames after its start.

    Invariants:
        I1. ``end`` is the end of a window.  The windows up to it have at most the limit's events
            and bytes, or it is the first window with an event, which is larger than that.

    Owner: one reader, which calls ``take`` until it is True or the frames end.
    """

    def __init__(self, limit: BatchLimit) -> None:
        self._most_events = _NO_LIMIT if limit.events is None else limit.events
        self._most_bytes = _NO_LIMIT if limit.bytes is None else limit.bytes
        self._events = self._bytes = 0
        self._end: Position | None = None

    @property
    def end(self) -> Position:
        """The end that was found; the origin before the first window's."""
        return self._end or ORIGIN

    @property
    def is_over(self) -> bool:
        """Whether the frames so far have more than the limit, and the end is found."""
        is_over = self._events > self._most_events or self._bytes > self._most_bytes
        return is_over and self._end is not None

    def take(self, columns: FrameColumns) -> bool:
        """Count frames in order, whole or in parts of windows; True once the end is found."""
        is_event = columns.op < FIRST_CONTROL_OP
        events = self._events + np.cumsum(is_event)
        sizes = self._bytes + np.cumsum(np.where(is_event, columns.length.astype(np.int64), 0))
        ends = np.flatnonzero(columns.op == Op.END_OF_WINDOW)
        fits = (events[ends] <= self._most_events) & (sizes[ends] <= self._most_bytes)
        if fits.any():
            self._end = _position(columns, int(ends[fits][-1]))
        elif len(ends) and self._end is None:
            self._end = _position(columns, int(ends[0]))
        self._events, self._bytes = int(events[-1]), int(sizes[-1])
        return self.is_over


def _position(columns: FrameColumns, index: int) -> Position:
    return Position(int(columns.scn[index]), int(columns.seq[index]))
