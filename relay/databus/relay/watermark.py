"""Which rows of a dumped chunk may still go out, given what the stream has shown: pure.

The idea is DBLog's, without its watermark writes ("point splice"): a chunk is read at a known
point of the source's clock, its snapshot.  It is held until the stream has passed that point.
A row whose key was written by a streamed transaction that the snapshot does *not* show is
older than what readers have: it is dropped, for the stream has the newer state.  Every other
row is the newest state there is at that moment, and goes out as a window of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from databus.relay.sources.source import Chunk, Row

MAX_TOUCHED_KEYS = 200_000
MAX_WINDOWS = 65_536


@dataclass(slots=True)
class _Window:
    """A streamed window: what it touched of the dumped table, None if that was too much."""

    scn: int
    txid: str
    touched: dict[bytes, int] | None


@dataclass(slots=True)
class _Pending:
    """A chunk that waits for the stream: its rows by key, and why it may have to be reread."""

    chunk: Chunk
    rows: dict[bytes, Row]
    dropped_count: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Spliced:
    """What is left of a chunk: its rows in key order, and how many the stream overtook."""

    rows: list[Row]
    dropped_count: int


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """The chunk cannot be judged, or is outdated; it has to be read again."""

    reason: str


@dataclass(slots=True)
class _Memory:
    windows: deque[_Window] = field(default_factory=deque)
    key_count: int = 0


class ChunkWindow:
    """Judges the chunks of one table against the stream, one chunk at a time.

    Invariants:
        I1. Every window that was observed and that no snapshot has shown yet is remembered;
            with its keys, unless there were too many: then it must be shown, or the chunk is
            read again.
        I2. ``take`` gives a row only if every streamed window that touched its key shows in
            the chunk's snapshot.
        I3. At most ``max_keys`` keys and ``max_windows`` windows are remembered.

    Owner: the fetcher's task.  What is observed before the first chunk reaches back a moment
    before it, for a database may stream a commit before its snapshots show it.  With
    ``in_window`` it begins inside a window whose beginning it has not seen.
    """

    def __init__(
        self,
        *,
        in_window: bool = False,
        max_keys: int = MAX_TOUCHED_KEYS,
        max_windows: int = MAX_WINDOWS,
    ) -> None:
        self._max_keys = max_keys
        self._max_windows = max_windows
        self._memory = _Memory()
        self._open: dict[bytes, int] | None = None if in_window else {}
        self._pending: _Pending | None = None
        self._overflowed = False

    # -- the stream --

    def touch(self, key: bytes, schema_fp: int) -> None:
        """A row change of the table in the window that is open now."""
        if self._open is None:
            return
        self._open[key] = schema_fp
        if len(self._open) > self._max_keys:
            self._open = None

    def touch_unknown(self) -> None:
        """The open window touched rows of the table that cannot be named."""
        self._open = None

    def end_window(self, scn: int, txid: str) -> None:
        """The open window has ended as transaction ``txid`` at ``scn``."""
        window = _Window(scn, txid, self._open)
        self._open = {}
        if self._pending is not None:
            self._judge(window, self._pending)
        self._remember(window)

    def _remember(self, window: _Window) -> None:
        memory = self._memory
        memory.windows.append(window)
        memory.key_count += len(window.touched or ())
        if memory.key_count > self._max_keys:
            # Down to half, so that this walk is paid for by many windows.
            for old in memory.windows:
                if memory.key_count <= self._max_keys // 2:
                    break
                if old.touched:
                    memory.key_count -= len(old.touched)
                    old.touched = None
        if len(memory.windows) > self._max_windows:
            dropped = memory.windows.popleft()
            memory.key_count -= len(dropped.touched or ())
            self._overflowed = True

    # -- the chunk --

    def begin(self) -> None:
        """A chunk is about to be read: what was forgotten until now is old enough."""
        self._overflowed = False
        self._pending = None

    def arrived(self, chunk: Chunk) -> None:
        """The chunk was read; the windows since ``begin``, and those before, judge it."""
        pending = _Pending(chunk, {row.key: row for row in chunk.rows})
        if self._overflowed:
            pending.reason = (
                f"over {self._max_windows} windows were streamed while the chunk was read"
            )
        kept = _Memory()
        for window in self._memory.windows:
            if not self._judge(window, pending):
                kept.windows.append(window)
                kept.key_count += len(window.touched or ())
        self._memory = kept
        self._pending = pending

    def _judge(self, window: _Window, pending: _Pending) -> bool:
        """Drop what the window has overtaken; True if the snapshot shows the window."""
        chunk = pending.chunk
        if chunk.snapshot.sees(window.scn, window.txid):
            return True
        if window.touched is None:
            pending.reason = (
                f"the window at scn {window.scn} touched too many rows to be compared, and the "
                f"chunk does not show it"
            )
            return False
        for key, schema_fp in window.touched.items():
            if schema_fp != chunk.schema.fingerprint:
                pending.reason = (
                    f"{chunk.schema.source} has schema {schema_fp:016x} at scn {window.scn}, the "
                    f"chunk was read with {chunk.schema.fingerprint:016x}"
                )
            if pending.rows.pop(key, None) is not None:
                pending.dropped_count += 1
        return False

    @property
    def waits_for(self) -> int | None:
        """The scn that the stream must pass; None while no chunk waits."""
        return None if self._pending is None else self._pending.chunk.snapshot.high

    def take(self, resolved_scn: int) -> Spliced | ReadAgain | None:
        """The chunk's verdict, once; None while there is no chunk or it has to wait.

        ``resolved_scn``: everything up to there was observed.  Only to be called while no
        window is open.
        """
        pending = self._pending
        if pending is None or self._open is None or self._open:
            return None
        if pending.reason:
            self._pending = None
            return ReadAgain(pending.reason)
        if resolved_scn < pending.chunk.snapshot.high:
            return None
        self._pending = None
        return Spliced(list(pending.rows.values()), pending.dropped_count)
