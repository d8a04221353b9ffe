"""Watermarks as rows of a table, as DBLog writes them: which of them have come in the stream.

Before a chunk is read its low token is committed to one row of a watermark table, after it the
high token.  Both come back in the stream, in this order and once each.  Anything else means
that the stream is not the log of the server that was read, or that another program writes the
row; then no chunk may go out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_LOW, _HIGH = "low", "high"


@dataclass(slots=True, eq=False)
class WatermarkWrite:
    """The two tokens of one chunk, and how many of them the stream has shown."""

    low: str
    high: str
    seen_low: bool = False
    seen_high: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether the stream has passed both."""
        return self.seen_high


@dataclass(slots=True)
class WatermarkWrites:
    """The tokens of one dump in one life of the fetcher.

    A token is ``<dump>:<run>:<number>:low`` or ``...:high``.  Tokens of an earlier run of a
    known dump are leftovers of a crash in the log and are ignored.

    Invariants:
        I1. A pair of watermarks is closed only after its low and then its high token were
            streamed, each once.
        I2. A token that is missing, doubled, reversed or foreign sets ``violation``, permanently.

    Owner: the fetcher's task.
    """

    dump_id: str
    run: str
    is_known_dump: Callable[[str], bool]
    violation: str = ""
    _open: dict[int, WatermarkWrite] = field(default_factory=dict)
    _next: int = 0

    def begin(self) -> WatermarkWrite:
        """A chunk's two tokens, to be written before and after it is read."""
        prefix = f"{self.dump_id}:{self.run}:{self._next}"
        watermark_write = WatermarkWrite(f"{prefix}:{_LOW}", f"{prefix}:{_HIGH}")
        self._open[self._next] = watermark_write
        self._next += 1
        return watermark_write

    def streamed(self, token: str | None) -> None:
        """The row of the watermark table holds ``token`` now; None: it was deleted."""
        if not self.violation:
            self.violation = self._problem(token)

    def _problem(self, token: str | None) -> str:
        if token is None:
            return "the row of the watermark table was deleted"
        parts = token.split(":")
        if len(parts) != 4 or parts[3] not in (_LOW, _HIGH) or not parts[2].isdigit():
            return f"the watermark {token!r} is not one of ours: another program writes the table"
        dump_id, run, number, _ = parts
        if (dump_id, run) != (self.dump_id, self.run):
            if self.is_known_dump(dump_id):
                return ""
            return f"the watermark {token!r} is of a dump that is unknown here"
        watermark_write = self._open.get(int(number))
        if watermark_write is None:
            return f"the watermark {token!r} was never written by this run"
        if token == watermark_write.low:
            if watermark_write.seen_low:
                return f"the low watermark {token!r} was streamed twice"
            watermark_write.seen_low = True
            return ""
        if not watermark_write.seen_low:
            return f"the high watermark {token!r} was streamed before its low one"
        if watermark_write.seen_high:
            return f"the high watermark {token!r} was streamed twice"
        watermark_write.seen_high = True
        return ""
