"""What to call next: the pure core of delivery.

It walks the frames of the buffer and returns the callback that is due; the caller reports the
result.  It calls nothing, waits for nothing, and gets the time as an argument.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from databus.client.application.consumer import Result
from databus.client.application.events import Decoding, Event, Mode, Window
from databus.client.application.frame_blocks import Block
from databus.client.application.options import Options
from databus.client.delivery.window_pieces import Piece, awaits_rest, whole_pieces
from databus.client.pulling.replay_buffer import ReplayBuffer
from databus.client.tables.data_batch import RowsOfBlock
from databus.common.checkpoint import (
    ORIGIN,
    BootstrapCheckpoint,
    Checkpoint,
    OnlineCheckpoint,
    Position,
    decode,
)
from databus.common.compiled.kernels import I64Array
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Op
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import CaptureState, TableState, decode_table_state


class Call(enum.Enum):
    """What is due."""

    START_SEQUENCE = "onStartDataEventSequence"
    START_SOURCE = "onStartSource"
    EVENTS = "onDataEvent"
    END_SOURCE = "onEndSource"
    END_SEQUENCE = "onEndDataEventSequence"
    CHECKPOINT = "onCheckpoint"
    ROLLBACK = "onRollback"
    TABLE_STATE = "onTableState"
    RESTREAM = "restream"
    """Not a callback: the buffer no longer has the frames after the checkpoint; read them again."""


@dataclass(slots=True)
class DispatchMark:
    """A point for a rollback: a checkpoint, and how many frames lie before it."""

    frame_count: int
    checkpoint: Checkpoint | None


@dataclass(slots=True)
class Due:
    """One call that is due, with its arguments.

    For EVENTS: the rows ``start`` .. ``stop`` - 1 of ``block``, and then those of ``more``.  For
    CHECKPOINT, ROLLBACK and
    RESTREAM: ``mark``; for ROLLBACK also the cause, None if only a server was lost.  For
    TABLE_STATE: ``table_state``, and ``block`` if a frame of the stream has it.
    """

    call: Call
    window: Window | None = None
    source: str = ""
    schema: SourceSchema | None = None
    block: Block | None = None
    start: int = 0
    stop: int = 0
    mark: DispatchMark | None = None
    cause: BaseException | None = None
    table_state: TableState | None = None
    more: list[Piece] = field(default_factory=list)

    @property
    def row_count(self) -> int:
        """How many rows the EVENTS have."""
        return self.stop - self.start + sum(stop - start for _, start, stop in self.more)

    def events(self) -> list[Event]:
        """The events of an EVENTS."""
        block, window = self.block, self.window
        assert block is not None
        assert window is not None
        return [Event(block, index, window) for index in range(self.start, self.stop)]


class Dispatcher:
    """Turns frames into the sequence of callbacks of the paper's section 3.6.

    Invariants:
        I1. The sequence of calls that ``next`` returns obeys ``testing.Grammar``.
        I2. A checkpoint is due only between windows, after every event before it was given
            out and before any after it is: it covers exactly what the application has.
        I3. ``mark`` is the last accepted checkpoint; after a rollback all events after it
            are given out again.
        I4. ``attempt`` counts the failures since ``mark`` moved.
        I5. A table's state is due between windows, once unless it changes; after a rollback
            again.

    Owner: one task.  Each ``next`` is followed by one ``done`` or ``failed``.
    Raises: BadCheckpoint, UnknownSchema and FormatError for frames that make no sense.
    """

    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        decoding: Decoding,
        options: Options,
        clock_of: Callable[[], str],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._buffer = buffer
        self.decoding = decoding
        self._options = options
        self._clock_of = clock_of
        self.mark = DispatchMark(buffer.cursor, checkpoint)
        self.attempt = 0
        self.event_count = 0
        self.window_count = 0
        self.position: Position | None = checkpoint.position if checkpoint else None
        self.mode: Mode = _mode(isinstance(checkpoint, BootstrapCheckpoint))
        self._states: dict[str, TableState] = {}
        self._unreported: deque[TableState] = deque()
        self._failure: Due | None = None
        self._restream = False
        self._window: Window | None = None
        self._whole_end: tuple[Block, int] | None = None
        self._batched = (0, 0, ORIGIN)  # rows and windows, and the end of the last
        self._source_id: int | None = None
        self._source = ""
        self._schema: SourceSchema | None = None
        # Frames before it, its position, and its checkpoint unless it is an online one.
        self._candidate: tuple[int, Position, Checkpoint | None] | None = None
        self._bootstrap_at = checkpoint
        self._is_progress_only = True
        self._forced = False
        self._skipped = False
        self._has_events = False
        self._windows_since = 0
        self._last_checkpoint_s = float("-inf")

    @property
    def in_window(self) -> bool:
        """Whether a sequence is open."""
        return self._window is not None

    def next(self, now_s: float) -> Due | None:
        """What is due now; None until more frames come or ``checkpoint_due_s`` is reached."""
        if self._failure is not None:
            return self._failure
        if self._restream:
            return Due(Call.RESTREAM, mark=self.mark)
        if self._buffer.is_cut:
            return self._roll_back(None)
        if self._buffer.reported is not None:
            self._compare_reported(self._buffer.reported)
            self._buffer.reported = None
        if self._unreported and self._window is None:
            return Due(Call.TABLE_STATE, table_state=self._unreported[0])
        while True:
            if self._candidate is not None and self._is_due(now_s, idle=False):
                return self._due_mark()
            here = self._buffer.here()
            if here is None:
                if self._candidate is not None and self._is_due(now_s, idle=True):
                    return self._due_mark()
                return None
            block, index = here
            if block.ops[index] < FIRST_CONTROL_OP:
                row = self._row(block, index)
                self._buffer.give(row.stop - row.start if row.call is Call.EVENTS else 1)
                return row
            due = self._control(block, index)
            if due is not None:
                return due

    def open_whole(self, now_s: float) -> list[Event] | None:
        """The events of the next window, if the buffer has all of it and nothing else is due.

        Instead of ``next``, for a consumer that gets none of a window's other calls; followed by
        ``close_whole`` or ``failed``.
        """
        whole = self._next_whole() if self.is_free(now_s) else None
        if whole is None:
            return None
        block, index, end = whole
        window = self._begin_whole(block, index, end)
        self._buffer.give(end - index)
        return [Event(block, row, window) for row in range(index, end)]

    def open_batch(self, now_s: float, most_rows: int) -> list[tuple[str, list[RowsOfBlock]]]:
        """The rows of the next whole windows, by source, as ``whole_pieces`` finds them.

        Instead of ``next``; followed by ``close_batch`` or ``failed``.
        """
        pieces, row_count, window_count = (
            whole_pieces(self._buffer.ahead(), most_rows) if self.is_free(now_s) else ([], 0, 0)
        )
        if not pieces:
            return []
        self.mode = "online"
        self._candidate = None
        block, _, stop = pieces[-1]
        self._batched = row_count, window_count, block.single_frame(stop - 1).position
        self._buffer.give(row_count + window_count)
        found: dict[int, list[RowsOfBlock]] = {}
        for block, start, stop in pieces:
            for source_id, rows in block.rows_by_source(start, stop).items():
                found.setdefault(source_id, []).append((block, rows))
        return [(self._source_of(*parts[0]), parts) for parts in found.values()]

    def awaits_rest(self) -> bool:
        """Whether only rows of a single window have arrived, and not its end."""
        return awaits_rest(self._buffer.ahead())

    def extend(self, due: Due, most_rows: int) -> None:
        """Add to EVENTS the rows that continue its run in later blocks, up to ``most_rows``."""
        assert due.block is not None
        assert due.window is not None
        row_count = due.row_count
        for block, _ in itertools.islice(self._buffer.ahead(), 1, None):
            before, _, stop = due.more[-1] if due.more else (due.block, due.start, due.stop)
            is_run = (
                stop == before.count
                and block.op_column[0] < FIRST_CONTROL_OP
                and block.source_ids[0] == self._source_id
                and block.bootstrap is due.block.bootstrap
                and (block.bootstrap or block.scns[0] == due.window.scn)
            )
            row_count += block.run_end(0) if is_run else 0
            if not is_run or row_count > most_rows:
                break
            due.more.append((block, 0, block.run_end(0)))
        self._buffer.give(due.row_count)

    def close_batch(self, now_s: float, result: Result) -> Due | None:
        """As ``close_whole``, for the windows of ``open_batch``."""
        row_count, window_count, end = self._batched
        self._windows_since += window_count - 1
        self.window_count += window_count - 1
        self._buffer.advance(row_count + window_count)
        return self._closed(row_count, end, now_s, result)

    def _source_of(self, block: Block, rows: I64Array) -> str:
        fingerprint = block.single_frame(int(rows[0])).schema_fp
        return self.decoding.schemas.by_fingerprint(fingerprint).source

    def is_free(self, now_s: float) -> bool:
        """Whether nothing but windows is due."""
        return not (
            self._window is not None
            or self._failure is not None
            or self._restream
            or self._unreported
            or self._buffer.is_cut
            or self._buffer.reported is not None
            or (self._candidate is not None and self._is_due(now_s, idle=False))
        )

    def _next_whole(self) -> tuple[Block, int, int] | None:
        here = self._buffer.here()
        if here is None or here[0].bootstrap:
            return None
        block, index = here
        end = block.whole_window(index)
        return None if end < 0 else (block, index, end)

    def _begin_whole(self, block: Block, index: int, end: int) -> Window:
        self.mode = "online"
        window = self._window = Window(self.decoding, "online", block, index)
        window.ended_by(block, end)
        self._candidate = None
        self._whole_end = block, end
        return window

    def close_whole(self, event_count: int, now_s: float, result: Result) -> Due | None:
        """The window of ``open_whole`` succeeded.  Returns the checkpoint if one is due now."""
        self._buffer.advance(event_count + 1)
        assert self._whole_end is not None
        block, end = self._whole_end
        return self._closed(event_count, block.position(end), now_s, result)

    def _closed(self, event_count: int, end: Position, now_s: float, result: Result) -> Due | None:
        if result is Result.CHECKPOINT:
            self._forced = True
        elif result is Result.SKIP_CHECKPOINT:
            self._skipped = True
        self._window = None
        self.event_count += event_count
        self.window_count += 1
        self._passed(end, is_progress_only=False)
        if self._candidate is not None and self._is_due(now_s, idle=False):
            return self._due_mark()
        return None

    def checkpoint_due_s(self) -> float | None:
        """When ``next`` will return a checkpoint without a further frame; None for never."""
        if self._candidate is None:
            return None
        options = self._options
        every_s = (
            options.idle_checkpoint_s if self._is_progress_only else options.checkpoint_every_s
        )
        return self._last_checkpoint_s + every_s

    def done(self, due: Due, now_s: float, result: Result = Result.SUCCESS) -> None:
        """``due`` succeeded."""
        if result is Result.CHECKPOINT:
            self._forced = True
        elif result is Result.SKIP_CHECKPOINT and due.call is not Call.CHECKPOINT:
            self._skipped = True
        call = due.call
        if call is Call.EVENTS:
            assert due.block is not None
            self.event_count += due.row_count
            self._has_events = True
            self._buffer.advance(due.row_count)
        elif call is Call.START_SEQUENCE:
            self._window = due.window
            # Soon the application will have more than this checkpoint covers.
            self._candidate = None
        elif call is Call.START_SOURCE:
            assert due.block is not None
            self._source_id = due.block.source_ids[due.start]
            self._source, self._schema = due.source, due.schema
        elif call is Call.END_SOURCE:
            self._source_id = None
        elif call is Call.END_SEQUENCE:
            self._window = None
            self.window_count += 1
            self._pass_end()
        elif call is Call.CHECKPOINT:
            self._checkpoint_done(due, now_s, result)
        elif call is Call.ROLLBACK:
            self._rolled_back()
        elif call is Call.TABLE_STATE:
            assert due.table_state is not None
            self._states[due.table_state.source] = due.table_state
            if due.block is None:
                self._unreported.popleft()
            else:
                self._buffer.advance(1)
        else:
            self._restream = False

    def accept(self, mark: DispatchMark) -> None:
        """``mark`` is stored: nothing before it is needed again."""
        self.mark = mark
        self.attempt = 0
        self._buffer.release(mark.frame_count)

    def defer(self, due: Due, now_s: float) -> None:
        """The checkpoint ``due`` will be accepted later, or never."""
        self._checkpoint_taken(now_s)

    def failed(self, cause: BaseException) -> None:
        """What was due failed: roll back."""
        self.attempt += 1
        self._roll_back(cause)

    def restreamed(self, frame_count: int) -> None:
        """Frames after the mark come again, counted from ``frame_count``."""
        self.mark = DispatchMark(frame_count, self.mark.checkpoint)
        self._restream = False

    @property
    def is_at_mark(self) -> bool:
        """Whether nothing has been delivered since ``mark``, and nothing has failed."""
        return self._failure is None and self.mark.frame_count == self._buffer.cursor

    def moved(self, checkpoint: Checkpoint | None) -> None:
        """The stream was moved by a seek to ``checkpoint``; None while that is not known."""
        self._roll_back(None)
        self.mark = DispatchMark(self._buffer.cursor, checkpoint)
        self.attempt = 0
        self._rolled_back()

    def _roll_back(self, cause: BaseException | None) -> Due:
        self._window = None
        self._source_id = None
        self._candidate = None
        self._forced = self._skipped = self._has_events = False
        self._failure = Due(Call.ROLLBACK, mark=self.mark, cause=cause)
        return self._failure

    def _rolled_back(self) -> None:
        self._failure = None
        self._windows_since = 0
        self._unreported.extendleft(self._states.values())
        self._states.clear()
        checkpoint = self.mark.checkpoint
        self.position = checkpoint.position if checkpoint else None
        self._bootstrap_at = checkpoint
        self._restream = not self._buffer.rewind(self.mark.frame_count)

    def _row(self, block: Block, index: int) -> Due:
        window = self._window
        if window is None:
            return Due(Call.START_SEQUENCE, window=self._open(block, index))
        if not block.bootstrap and window.scn != block.scns[index]:
            # The filter has left out the end of the window.
            return self._close(window)
        if block.source_ids[index] == self._source_id:
            stop = block.run_end(index)
            return Due(
                Call.EVENTS,
                window=window,
                source=self._source,
                schema=self._schema,
                block=block,
                start=index,
                stop=stop,
            )
        if self._source_id is not None:
            return self._end_source(window)
        writer = self.decoding.schemas.by_fingerprint(block.schema_fps[index])
        reader = self.decoding.reader_of(writer.source)
        return Due(
            Call.START_SOURCE,
            window=window,
            source=writer.source,
            schema=reader,
            block=block,
            start=index,
        )

    def _open(self, block: Block, index: int) -> Window:
        self.mode = _mode(block.bootstrap)
        window = Window(self.decoding, self.mode, block, index)
        if not block.bootstrap:
            end = block.window_end(index)
            if end >= 0 and block.scns[end] == window.scn:
                window.ended_by(block, end)
        return window

    def _close(self, window: Window) -> Due:
        """The next step in closing a window: its source first, then itself."""
        if self._source_id is not None:
            return self._end_source(window)
        return Due(Call.END_SEQUENCE, window=window)

    def _end_source(self, window: Window) -> Due:
        return Due(Call.END_SOURCE, window=window, source=self._source, schema=self._schema)

    def _control(self, block: Block, index: int) -> Due | None:
        """The call that a control frame makes due; None if it makes none."""
        op, window = block.ops[index], self._window
        if op == Op.TABLE_STATE:
            return self._table_state(block, index)
        if block.bootstrap:
            if op == Op.CHECKPOINT:
                return self._bootstrap_checkpoint(block, index)
            self._buffer.advance(1)
        elif op == Op.END_OF_WINDOW:
            if window is not None:
                if not window.has_end and window.scn == block.scns[index]:
                    window.ended_by(block, index)
                return self._close(window)
            self._buffer.advance(1)
            self._passed(block.position(index), is_progress_only=False)
        elif op == Op.HEARTBEAT:
            if window is None:
                self._buffer.advance(1)
                self._passed(block.position(index), is_progress_only=True)
            elif block.scns[index] > window.scn:
                return self._close(window)
            else:
                self._buffer.advance(1)
        else:
            self._buffer.advance(1)
        return None

    def _table_state(self, block: Block, index: int) -> Due | None:
        if self._window is not None:
            return self._close(self._window)
        state = decode_table_state(bytes(block.frame(index).after or b""))
        if self._states.get(state.source) == state:
            self._buffer.advance(1)
            return None
        return Due(Call.TABLE_STATE, table_state=state, block=block)

    def _compare_reported(self, reported: Sequence[TableState]) -> None:
        """A server has reported the tables that are not followed: queue what has changed."""
        named = {state.source for state in reported}
        self._unreported.extend(s for s in reported if self._states.get(s.source) != s)
        self._unreported.extend(
            TableState(source, CaptureState.FOLLOWED)
            for source, state in self._states.items()
            if source not in named and state.state != CaptureState.FOLLOWED
        )

    def _pass_end(self) -> None:
        """Skip the end of the window that was closed: a stop now includes its checkpoint."""
        here = None if self._buffer.is_cut else self._buffer.here()
        if here is not None and not here[0].bootstrap and here[0].ops[here[1]] == Op.END_OF_WINDOW:
            self._control(*here)

    def _bootstrap_checkpoint(self, block: Block, index: int) -> Due | None:
        if self._window is not None:
            return self._close(self._window)
        checkpoint = decode(bytes(block.frame(index).after or b""))
        before = self._bootstrap_at
        if before is not None and _goes_back(before, checkpoint):
            # A merge has replaced the server's runs, and the server restarts at the position
            # where our state was consistent.  Rows delivered until here stay.  They are made
            # durable before ``onRollback`` announces that older states may follow.
            if self._candidate is not None and not self._forced:
                self._forced = True
                return None
            self._buffer.advance(1)
            self._bootstrap_at = checkpoint
            self.mark = DispatchMark(self._buffer.cursor, checkpoint)
            return self._roll_back(None)
        self._bootstrap_at = checkpoint
        self._buffer.advance(1)
        # The deletions before another base come at the checkpoint that the reader has.
        if checkpoint != self.mark.checkpoint or self._has_events:
            self._passed(checkpoint.position, is_progress_only=False, checkpoint=checkpoint)
            self._forced = self._forced or isinstance(checkpoint, OnlineCheckpoint)
        return None

    def _passed(
        self, position: Position, *, is_progress_only: bool, checkpoint: Checkpoint | None = None
    ) -> None:
        """Everything up to ``position`` has been delivered."""
        self.position = position
        # A filter may leave a heartbeat as the only end of a window.
        is_progress_only = is_progress_only and not self._has_events
        self._has_events = False
        if self._skipped:
            self._skipped = False
            self._candidate = None
            return
        if is_progress_only:
            if self._candidate is None:
                self._is_progress_only = True
        else:
            self._is_progress_only = False
            self._windows_since += 1
        self._candidate = (self._buffer.cursor, position, checkpoint)

    def _due_mark(self) -> Due:
        """The checkpoint that is due."""
        assert self._candidate is not None
        cursor, position, checkpoint = self._candidate
        if checkpoint is None:
            checkpoint = OnlineCheckpoint(self.decoding.database, self._clock_of(), position)
        return Due(Call.CHECKPOINT, mark=DispatchMark(cursor, checkpoint))

    def _is_due(self, now_s: float, *, idle: bool) -> bool:
        if self._window is not None:
            return False
        if self._forced or self.mark.checkpoint is None:
            return True
        options = self._options
        waited_s = now_s - self._last_checkpoint_s
        if self._is_progress_only:
            return waited_s >= options.idle_checkpoint_s
        enough = idle or self._windows_since >= options.checkpoint_every_windows
        return enough and waited_s >= options.checkpoint_every_s

    def _checkpoint_done(self, due: Due, now_s: float, result: Result) -> None:
        assert due.mark is not None
        self._checkpoint_taken(now_s)
        if result is not Result.SKIP_CHECKPOINT:
            self.accept(due.mark)

    def _checkpoint_taken(self, now_s: float) -> None:
        self._candidate = None
        self._forced = False
        self._windows_since = 0
        self._last_checkpoint_s = now_s

    def final_checkpoint(self) -> Due | None:
        """The checkpoint that may still be taken when consumption stops."""
        if self._failure is None and self._window is None and self._candidate is not None:
            return self._due_mark()
        return None


def _mode(bootstrap: bool) -> Mode:
    return "bootstrap" if bootstrap else "online"


def _goes_back(before: Checkpoint, after: Checkpoint) -> bool:
    """Whether a bootstrap that was at ``before`` has restarted at ``after``."""
    if not isinstance(before, BootstrapCheckpoint) or not isinstance(after, BootstrapCheckpoint):
        return False
    if after.position != before.position:
        return False
    return after.row < before.row if after.run == before.run else before.row > 0
