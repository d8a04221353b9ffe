"""Everything that the store holds between two positions, planned so that it stays readable.

It gets the frames of a range from the runs and the hot log.  ``net_changes`` and
``range_stream`` process them.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from databus.bootstrap.log import log_handover
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import run_planner
from databus.bootstrap.merging.run_planner import PlanPart
from databus.bootstrap.reading.retained_runs import Retain, are_retained
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.open_run import FileSlot, OpenRun, Wanted
from databus.bootstrap.runs.parquet_runs import RowGroup, Run, RunFile, RunKind
from databus.client.splits.frame_tables import FrameBlock, as_table, blocks_of
from databus.common.checkpoint import ORIGIN, SEQ_END, Position
from databus.common.errors import LogTooYoung, StoreError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op

SPOOL_BYTES = 4 << 20
"""How much of the hot log is read at once."""

PLAN_ATTEMPTS = 5
"""Attempts: the log may be sealed between planning and reading it."""

Mask = npt.NDArray[np.bool_]
Starts = Callable[[Manifest, Position], Mapping[Position, tuple[PlanPart, ...]]]


class _Content(Protocol):
    """The origin of the rows of a unit."""

    def table(self, names: list[str]) -> Any:
        """These columns, as an Arrow table."""


@dataclass(frozen=True, slots=True)
class _OfRun:
    opened: OpenRun
    group: RowGroup

    def table(self, names: list[str]) -> Any:
        """These columns of the row group."""
        return self.opened.table(self.group, names)


@dataclass(frozen=True, slots=True)
class _OfSpool:
    file: Any
    offset: int
    length: int

    def table(self, names: list[str]) -> Any:
        """These columns, made of the frames."""
        self.file.seek(self.offset)
        data = self.file.read(self.length)
        return as_table(data, frame_format.scan(data, verify=False)).select(names)


@dataclass(frozen=True, slots=True)
class Unit:
    """Some rows in order, read at once; those in (``after``, ``upto``] are selected."""

    content: _Content
    rows: int
    after: Position
    upto: Position

    @property
    def group(self) -> RowGroup | None:
        """The row group of the rows, with its statistics; None for rows of the log."""
        return self.content.group if isinstance(self.content, _OfRun) else None

    def table(self, names: list[str]) -> Any:
        """These columns of all rows, as an Arrow table."""
        return self.content.table(names)

    def blocks(self) -> list[FrameBlock]:
        """The frames of all rows."""
        return blocks_of(self.table(["frame"]))

    def is_wanted(self, scn: npt.NDArray[Any], seq: npt.NDArray[Any]) -> Mask:
        """Which positions lie in (``after``, ``upto``]."""
        return _is_after(scn, seq, self.after) & ~_is_after(scn, seq, self.upto)


class FrameRange:
    """The frames in (``start``, ``until``], to be read.

    Invariants:
        I1. The units do not overlap and ascend, those of a clustered run by source and key: of each
            key, newer rows follow older ones.  Together they hold every frame of the range that
            the retained runs have.  They are chosen by position alone: windows are cut at ends
            that no filter selects.  A reader with a filter calls ``row_group_pruning`` before it
            reads a unit; files that ``may_open`` excludes are not opened.
        I2. Other processes cannot take anything away from an open range whose reader has entered
            ``OpenReaders`` before: the note there retains its runs, and with ``retain`` also those
            that retired earlier.  Its part of the hot log is copied to a temporary file (at most
            ``segment_bytes`` and one window).
        I3. At most one file of a run is open: the one whose units are being read.

    Owner: one reader; any thread, one at a time.
    Raises: LogTooYoung, StoreError.
    """

    def __init__(
        self,
        store: Store,
        log: HotLog,
        starts: Starts,
        until: Position,
        *,
        every_change: bool,
        may_open: Wanted | None = None,
        retain: Retain | None = None,
    ) -> None:
        self.until = until
        self._retain = retain
        self._may_open = may_open or (lambda file: True)
        self._parts: tuple[tuple[PlanPart, OpenRun], ...] = ()
        self._hot: tuple[Unit, ...] = ()
        self._slot = FileSlot()
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._store, self._log = store, log
        try:
            self._plan(starts, every_change)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._slot.close()
        self._spool.close()

    def _plan(self, starts: Starts, every_change: bool) -> None:
        for _ in range(PLAN_ATTEMPTS):
            log_start, manifest = log_handover.read(self._log, self._store)
            cover = run_planner.cover(
                manifest,
                starts(manifest, log_start),
                self.until,
                log_start,
                every_change=every_change,
            )
            used = {part.run.id for part in cover.parts}
            if not are_retained(self._store, manifest, used, self._retain):
                continue
            hot = self._of_log(max(cover.stop, min(log_start, self.until)))
            if hot is not None:
                self.start = cover.start
                self._parts = tuple((part, self._opened(part)) for part in cover.parts)
                self._hot = tuple(hot)
                return
        raise StoreError(
            "the log was sealed, or runs deleted, faster than they could be read; retry"
        )

    def _opened(self, part: PlanPart) -> OpenRun:
        def is_wanted(file: RunFile) -> bool:
            return _is_within(file, part) and self._may_open(file)

        return self._store.open_run(part.run, is_wanted, self._slot)

    @property
    def parts(self) -> tuple[tuple[PlanPart, tuple[RunFile, ...]], ...]:
        """The runs of the range in order, each with the files that would be opened."""
        return tuple((part, opened.files) for part, opened in self._parts)

    @property
    def unopened(self) -> int:
        """Files with rows of the range that ``may_open`` excludes."""
        within = sum(_is_within(file, part) for part, _ in self._parts for file in part.run.files)
        return within - sum(opened.file_count for _, opened in self._parts)

    @property
    def rows(self) -> int:
        """Rows of all units, at most."""
        of_runs = sum(opened.rows for _, opened in self._parts)
        return of_runs + sum(unit.rows for unit in self._hot)

    @property
    def is_reduced(self) -> bool:
        """Whether all units are of one merged run, which has the last state of each key alone."""
        read = [opened for _, opened in self._parts if opened.file_count]
        return not self._hot and len(read) == 1 and read[0].run.is_compacted

    def units(self) -> Iterator[Unit]:
        """All units in order; each file is opened when its first unit comes up."""
        for part, opened in self._parts:
            if part.after < self.until:
                for group in opened.row_groups():
                    yield from self._unit(part, opened, group)
        for unit in self._hot:
            if unit.after < self.until:
                yield replace(unit, upto=min(unit.upto, self.until))

    def _unit(self, part: PlanPart, opened: OpenRun, group: RowGroup) -> Iterator[Unit]:
        """The unit of a row group, if it has rows of the range."""
        upto = min(part.upto, self.until)
        if group.last > part.after and group.first <= upto:
            yield Unit(_OfRun(opened, group), group.rows, part.after, upto)

    def _of_log(self, after: Position) -> list[Unit] | None:
        """Units over a copy of the log's part; None if it was sealed meanwhile."""
        units: list[Unit] = []
        at = after
        # The log returns whole values, so all of them are read and not a part.
        window = max(self.until, self._log.state().window)
        self._spool.seek(0)
        while at < self.until:
            part = self._log.read(at, window, SPOOL_BYTES)
            if part is None:
                return None
            if part.data:
                rows = len(frame_format.scan(part.data, verify=False))
                content = _OfSpool(self._spool, self._spool.tell(), len(part.data))
                units.append(Unit(content, rows, after, self.until))
                self._spool.write(part.data)
            at = part.stop
        self._spool.flush()
        return units

    def cut_at_window(self) -> None:
        """Move ``until`` back to where the last whole window ends, so that no window is cut."""
        if self._hot:
            self.until = self._last_end(reversed(self._hot), self._hot[-1].after)
            return
        for part, opened in reversed(self._parts):
            if part.run.is_compacted:  # It has no window ends, but ends with a window.
                self.until = min(self.until, part.run.stop)
                return
            groups = opened.row_groups_backwards()
            units = (unit for group in groups for unit in self._unit(part, opened, group))
            first = next(units, None)
            if first is not None:
                self.until = self._last_end(itertools.chain((first,), units), part.after)
                return

    def _last_end(self, units: Iterable[Unit], otherwise: Position) -> Position:
        """The last window's end in some units, the newest of which comes first."""
        for unit in units:
            table = unit.table(["scn", "seq", "op"])
            scn, seq = (table.column(name).to_numpy() for name in ("scn", "seq"))
            ends = (table.column("op").to_numpy() == Op.END_OF_WINDOW) & unit.is_wanted(scn, seq)
            if ends.any():
                row = int(np.flatnonzero(ends)[-1])
                return Position(int(scn[row]), int(seq[row]))
        return otherwise


def _is_within(file: RunFile, part: PlanPart) -> bool:
    """Whether a file may have rows of a part, by the manifest."""
    return file.last > part.after and file.first <= part.upto


def changes_from(since: Position | None, *, every_change: bool) -> Starts:
    """For a range that begins at ``since``; None means at the oldest retained change."""

    def starts(manifest: Manifest, log_start: Position) -> Mapping[Position, tuple[PlanPart, ...]]:
        oldest = run_planner.oldest_of(manifest, log_start, every_change=every_change)
        return {oldest if since is None else since: ()}

    return starts


def state_from(until: Position, origin: Position | None, *, prefers_base: bool = False) -> Starts:
    """For the whole state at ``until``: from a base before it, or from the log's beginning.

    ``origin`` is where the log began, None if that is unknown; the chain is a state only if
    no part of it has been dropped since.  ``prefers_base``: not from there if there is a base.
    """

    def starts(manifest: Manifest, log_start: Position) -> Mapping[Position, tuple[PlanPart, ...]]:
        bases = [*manifest.runs, *(retired.run for retired in manifest.retired)]
        found: dict[Position, tuple[PlanPart, ...]] = {
            run.stop: (PlanPart(run, ORIGIN, run.stop),)
            for run in bases
            if run.kind is RunKind.BASE and run.stop <= until
        }
        first = manifest.chain[0].start if manifest.chain else log_start
        is_whole = manifest.base is None or first == origin
        if is_whole and first <= until and not (found and prefers_base):
            found.setdefault(first, ())
        return found

    return starts


def at_time(
    store: Store, log: HotLog, commit_us: int, *, exact: bool = True, slot: FileSlot | None = None
) -> Position:
    """The position before the first window that was committed after ``commit_us``.

    A merged run has lost the windows of which every row has changed again.  Without ``exact`` the
    position may lie behind such windows, which makes no difference to net changes up to the end.

    Raises:
        LogTooYoung: every retained change was committed later; or ``exact`` and merged.
    """
    log_start, manifest = log_handover.read(log, store)
    oldest = manifest.chain[0].start if manifest.chain else log_start
    slot = slot or FileSlot()
    for run in manifest.chain:
        position = _first_later(store, run, commit_us, slot)
        if position is None:
            continue
        if run.is_compacted:
            known = _in_segments(store, _merged_into(manifest, run), run.start, commit_us, slot)
            if known is None and exact:
                raise LogTooYoung(
                    f"the changes after {run.start} up to {run.stop}, among them those of "
                    f"{commit_us} us, have been merged; request one of these two",
                    oldest=oldest.to_json(),
                    before=run.start.to_json(),
                    after=run.stop.to_json(),
                )
            position = known or position
        return _checked(position, oldest, commit_us)
    window = log.state().window
    at = max(manifest.stop or log_start, log_start)
    while at < window:
        part = log.read(at, window, SPOOL_BYTES)
        if part is None:
            return at_time(store, log, commit_us, exact=exact, slot=slot)
        found = frame_format.scan(part.data, verify=False)
        before = _before_first_later(found.scn, found.seq, found.commit_us, commit_us)
        if before is not None:
            return _checked(max(at, before), oldest, commit_us)
        at = part.stop
    return window


def before_time(
    store: Store, log: HotLog, commit_us: int, slot: FileSlot | None = None
) -> Position:
    """The position before the first window committed at ``commit_us`` or later.

    For net changes from there to the end; the log's end if all of it was committed earlier.

    Raises:
        LogTooYoung: such windows may be gone: no retained change was committed earlier, and the
            log does not begin with its clock.
    """
    found = at_time(store, log, commit_us - 1, exact=False, slot=slot)
    log_start, manifest = log_handover.read(log, store)
    # An empty log shows nothing about the times of earlier changes.
    oldest = manifest.chain[0].start if manifest.chain else log_start
    return _checked(found, oldest, commit_us - 1)


def _first_later(store: Store, run: Run, commit_us: int, slot: FileSlot) -> Position | None:
    """The position before a run's first row committed later; its start if that is its first."""
    if 0 < run.last_commit_us <= commit_us:
        return None
    opened = store.open_run(run, slot=slot)
    try:
        if run.is_clustered:
            return _least_later(opened, commit_us)
        for group in opened.row_groups():
            if group.last_commit_us > commit_us:
                table = opened.table(group, ["scn", "seq", "commit_us"])
                scn, seq, times = (column.to_numpy() for column in table.columns)
                before = _before_first_later(scn, seq, times, commit_us)
                if before is not None:
                    is_first = group.first_row == 0 and times[0] > commit_us
                    return run.start if is_first else before
    finally:
        opened.close()
    return None


def _least_later(opened: OpenRun, commit_us: int) -> Position | None:
    """The same of a clustered run, whose rows do not ascend by position."""
    if all(group.last_commit_us <= commit_us for group in opened.row_groups()):
        return None
    later: list[Position] = []
    earlier: list[Position] = []
    for group in opened.row_groups():
        table = opened.table(group, ["scn", "seq", "commit_us"])
        scn, seq, times = (column.to_numpy() for column in table.columns)
        for found, rows in ((later, times > commit_us), (earlier, times <= commit_us)):
            if rows.any():
                at = np.lexsort((seq[rows], scn[rows]))[0]
                found.append(Position(int(scn[rows][at]), int(seq[rows][at])))
    if not later:
        return None
    first = min(later)
    return opened.run.start if not earlier or first < min(earlier) else _before(first)


def _merged_into(manifest: Manifest, run: Run) -> list[Run]:
    """The retained segments of a merged run."""
    old = [one.run for one in manifest.retired if one.run.kind is RunKind.SEGMENT]
    within = (one for one in old if run.start <= one.start and one.stop <= run.stop)
    return sorted(within, key=lambda one: one.start)


def _in_segments(
    store: Store, segments: list[Run], start: Position, commit_us: int, slot: FileSlot
) -> Position | None:
    """The same within the segments of a merged run; None if too few of them are retained."""
    at = start
    try:
        for segment in segments:
            found = _first_later(store, segment, commit_us, slot)
            if found is not None:
                return found if found != segment.start or at == found else None
            at = segment.stop
    except StoreError:
        return None  # It was removed meanwhile.
    return None


def _before_first_later(
    scn: npt.NDArray[Any], seq: npt.NDArray[Any], times: npt.NDArray[Any], commit_us: int
) -> Position | None:
    later = np.flatnonzero(times > commit_us)
    if not len(later):
        return None
    return _before(Position(int(scn[later[0]]), int(seq[later[0]])))


def _before(position: Position) -> Position:
    """The greatest position that precedes one."""
    scn, seq = position
    return Position(scn, seq - 1) if seq else Position(scn - 1, SEQ_END)


def _checked(position: Position, oldest: Position, commit_us: int) -> Position:
    if position <= oldest != ORIGIN:
        raise LogTooYoung(
            f"no retained change was committed at {commit_us} us or before; the log reaches back "
            f"to {oldest}",
            oldest=oldest.to_json(),
        )
    return position


def _is_after(scn: npt.NDArray[Any], seq: npt.NDArray[Any], position: Position) -> Mask:
    later: Mask = (scn > position.scn) | ((scn == position.scn) & (seq > position.seq))
    return later
