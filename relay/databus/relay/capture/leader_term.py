"""The term of a leader in a ring: its mark in the stream, and where its own windows may be.  Pure.

A relay's own windows (dumps, announcements, table states) exist only in its stream.  A reader that
moves to another leader must not be behind them already.  docs/decisions/0142 has the argument.
"""

from __future__ import annotations

from typing import NamedTuple

from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Flag, FrameColumns, Op, trusted_frame
from databus.common.frame.window_builder import end_of_window

SLOTS = 15
SLOT_SEQS = 1 << 28
_MARK = b"leader:"


class LeaderTerm(NamedTuple):
    """The term of the leader ``relay`` with the fencing number ``epoch``; 0 without a cluster.

    ``shown_scn`` is an scn at or after everything that an earlier leader can have shown.
    """

    epoch: int = 0
    relay: str = ""
    shown_scn: int = -1

    @property
    def _first_seq(self) -> int:
        """The first seq of this term's own windows at an scn where earlier leaders may have some:
        consecutive terms have slots of 2^28 each, one after the other."""
        return (1 + (self.epoch - 1) % SLOTS) * SLOT_SEQS

    def after(self, complete: Position) -> Position:
        """The position after which a window of this term's own begins."""
        if not self.epoch or complete.scn > self.shown_scn:
            return complete
        return Position(complete.scn, max(complete.seq, self._first_seq - 1))

    def admits(self, complete: Position) -> bool:
        """Whether a window of this term's own that readers must not miss may follow ``complete``.

        Not before the stream has passed what an earlier leader can have shown.  At that very scn
        only within this term's slot: after fifteen terms at one scn the next commit must come.
        """
        if complete.scn != self.shown_scn:
            return complete.scn > self.shown_scn
        return complete.seq < self._first_seq + SLOT_SEQS // 2

    def mark(self, complete: Position, commit_us: int) -> bytes:
        """An empty window that names the term."""
        after = self.after(complete)
        text = f"{_MARK.decode()}{self.epoch}:{self.relay}"
        return end_of_window(after.scn, after.seq + 1, commit_us, 0, text, dump=True)


def newest_mark(columns: FrameColumns, data: memoryview) -> LeaderTerm | None:
    """The term of the last mark among some frames."""
    is_own = (columns.op == Op.END_OF_WINDOW) & ((columns.flags & Flag.DUMP) != 0)
    for index in reversed(is_own.nonzero()[0].tolist()):
        key = bytes(trusted_frame(data, int(columns.offset[index])).key)
        if key.startswith(_MARK):
            epoch, _, relay = key[len(_MARK) :].decode().partition(":")
            return LeaderTerm(int(epoch), relay)
    return None
