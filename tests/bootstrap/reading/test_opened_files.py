"""Which files of a store a reader opens, when, and how many at once: counted, not timed."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream, Piece
from databus.bootstrap.reading.frame_ranges import FrameRange, at_time, changes_from, state_from
from databus.bootstrap.reading.key_spool import KeySpool
from databus.bootstrap.reading.range_stream import RangeContent, RangeStream
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.common.checkpoint import ORIGIN, BootstrapCheckpoint, Position
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder
from tests.bootstrap import model

pytestmark = pytest.mark.slow  # its store has a thousand files

TABLES = [f"shop.t{number:04d}" for number in range(1000)]
FIRST_US = 1_700_000_000_000_000
KEYS = [b"k%d" % number for number in range(3)]


class Wide:
    """A store with a thousand tables: a base, and a segment in many files after it."""

    def __init__(self, store: Store, log: HotLog) -> None:
        self.store, self.log = store, log
        self.at = model.START
        self.opened: list[str] = []
        self.base = self._run(RunKind.BASE, [self._window(table) for table in TABLES], bits=0)
        self.segment = self._run(
            RunKind.SEGMENT, [self._window(table) for table in TABLES[:200]], rows_per_file=8
        )

    def _window(self, table: str) -> bytes:
        builder = WindowBuilder(self.at.scn + 1, FIRST_US + self.at.scn + 1)
        for key in KEYS:
            builder.event(Op.INSERT, frame_format.source_id(table), 1, key, after=b"row")
        self.at = Position(self.at.scn + 1, builder.seq)
        return builder.end("t")

    def _run(self, kind: RunKind, blocks: list[bytes], **layout: Any) -> Run:
        start = max(self.store.read().snapshot, model.START)
        frames = model.frames_between(blocks, start, self.at)
        if kind is not RunKind.SEGMENT:
            frames = model.compact(frames, base=True)
        written = model.write_run(self.store, kind, start, self.at, frames, **layout)
        run = replace(written, last_commit_us=FIRST_US + self.at.scn)
        self.store.switch(lambda manifest: manifest.with_changes(add=run, now_us=1))
        self.log.restart_at(self.at, {})
        return run

    def bootstrap(
        self, table: str | None = None, since: Position = ORIGIN, **options: Any
    ) -> BootstrapStream:
        """A bootstrap of one table, or of all."""
        chosen, ids = self._filter(table)
        return BootstrapStream(
            store=self.store,
            log=self.log,
            since=since,
            target=self.at,
            stream_filter=chosen,
            source_ids=ids,
            **options,
        )

    def range(
        self, content: RangeContent, table: str | None = None, since: Position | None = None
    ) -> RangeStream:
        """A range of one table, or of all, up to the end."""
        chosen, ids = self._filter(table)
        every = content is RangeContent.ALL
        is_state = content is RangeContent.STATE
        starts = state_from(self.at, None) if is_state else changes_from(since, every_change=every)
        return RangeStream(
            database="shop",
            clock=model.CLOCK,
            since=since or ORIGIN,
            until=self.at,
            content=content,
            opening=lambda may_open: FrameRange(
                self.store, self.log, starts, self.at, every_change=every, may_open=may_open
            ),
            stream_filter=chosen,
            source_ids=ids,
            piece_bytes=1 << 20,
        )

    def _filter(self, table: str | None) -> tuple[StreamFilter, Any]:
        if table is None:
            return StreamFilter(), np.empty(0, dtype=np.uint32)
        ids = np.array([frame_format.source_id(table)], dtype=np.uint32)
        return StreamFilter(sources=(table,)), ids

    def descriptors(self) -> list[str]:
        """The run files that this process has open."""
        return [path for path in open_descriptors() if str(self.store.runs_folder) in path]

    def rows(self, pieces: Iterable[Piece]) -> list[bytes]:
        """All rows; at no piece is more than one file of the store open, and none at the end."""
        found: list[bytes] = []
        for piece in pieces:
            assert len(self.descriptors()) <= 1
            found += [
                bytes(one.bytes) for one in iter_frames(bytes(piece.frames)) if not one.is_control
            ]
        assert self.descriptors() == []
        return found

    def expected(self, *runs: Run, table: str | None = None) -> list[bytes]:
        """The rows of some runs, read with pyarrow alone."""
        number = None if table is None else frame_format.source_id(table)
        return [
            bytes(one.bytes)
            for run in runs
            for one in model.frames_of(self.store, run)
            if not one.is_control and number in (None, one.source_id)
        ]

    def names(self, run: Run, is_chosen: Callable[[Any], bool]) -> list[str]:
        """The paths of some files of a run, in their order."""
        folder = self.store.run_folder(run)
        return [str(folder / file.name) for file in run.files if is_chosen(file)]


def open_descriptors() -> list[str]:
    """What the descriptors of this process are."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            found.append(str(entry.readlink()))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wide]:
    """The store, which no test changes."""
    folder = tmp_path_factory.mktemp("wide") / "shop"
    log = HotLog(folder / "log")
    log.bind("shop", model.CLOCK, model.START)
    store = Store(folder)
    store.create()
    yield Wide(store, log)
    log.close()


@pytest.fixture
def wide(written: Wide, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wide]:
    """The store, with a list of the files that are opened."""
    wide = written
    wide.opened.clear()
    opening = LocalFiles.open

    def noting(files: LocalFiles, name: str) -> Any:
        wide.opened.append(files.location(name))
        return opening(files, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "open", noting)
        yield wide


def test_a_reader_of_one_table_of_a_thousand_opens_the_files_of_that_table(wide: Wide) -> None:
    table = TABLES[777]  # not in the segment, whose files have mixed tables
    of_table = wide.names(wide.base, lambda f: f.source_id == frame_format.source_id(table))
    assert len(wide.base.files) == len(TABLES) and len(of_table) == 1
    of_segment = wide.names(wide.segment, lambda file: True)
    expected = wide.expected(wide.base, table=table)
    for stream in (wide.bootstrap(table), wide.range(RangeContent.STATE, table)):
        wide.opened.clear()
        assert wide.rows(stream.pieces()) == expected
        assert {*wide.opened} - {*of_segment} == {*of_table}
    assert stream.groups_skipped >= len(TABLES) - 1


def test_a_file_is_opened_when_it_is_reached_and_one_is_open_at_once(wide: Wide) -> None:
    stream = wide.bootstrap(piece_bytes=1)
    pieces = stream.pieces()
    assert next(pieces).checkpoint is not None
    assert wide.opened == [], "the first bytes go out before any file is open"
    order = wide.names(wide.base, lambda file: True)
    for _ in range(4 * len(KEYS)):
        next(pieces)
    assert wide.opened == order[:4]
    pieces.close()
    assert wide.descriptors() == []
    wide.opened.clear()
    everything = wide.expected(wide.base, wide.segment)
    assert wide.rows(wide.bootstrap().pieces()) == everything
    assert wide.opened == order + wide.names(wide.segment, lambda file: True)
    wide.opened.clear()
    pieces = wide.range(RangeContent.ALL, since=wide.base.stop).pieces()
    first = next(pieces)
    assert len(wide.opened) == 1
    assert wide.rows(itertools.chain([first], pieces)) == wide.expected(wide.segment)


def test_files_before_the_readers_position_or_row_are_not_opened(wide: Wide) -> None:
    middle = wide.segment.files[len(wide.segment.files) // 2].last
    later = wide.names(wide.segment, lambda file: file.last > middle)
    assert 10 < len(later) < len(wide.segment.files)
    for stream in (wide.bootstrap(since=middle), wide.range(RangeContent.ALL, since=middle)):
        wide.opened.clear()
        rows = wide.rows(stream.pieces())
        assert rows == [one for one in wide.expected(wide.segment) if _position(one) > middle]
        assert wide.opened == later
    row = 2 * 900 + 1  # in file 600
    resume = BootstrapCheckpoint(
        "shop",
        model.CLOCK,
        since=ORIGIN,
        target=wide.at,
        run=wide.base.id,
        row=row,
        position=ORIGIN,
    )
    wide.opened.clear()
    rows = wide.rows(wide.bootstrap(resume=resume).pieces())
    assert rows == wide.expected(wide.base, wide.segment)[row:]
    assert wide.opened[0] == wide.names(wide.base, lambda file: True)[600]


def _position(frame: bytes) -> Position:
    (one,) = iter_frames(frame)
    return one.position


def test_net_changes_read_each_file_for_its_keys_and_for_its_rows_one_after_the_other(
    wide: Wide,
) -> None:
    since = wide.segment.files[0].last
    later = wide.names(wide.segment, lambda file: file.last > since)
    pieces = wide.range(RangeContent.NET, since=since).pieces()
    for steps, piece in enumerate(pieces, 1):
        assert len(wide.descriptors()) <= 1
        if len(piece.frames):
            break
        assert len(set(wide.opened)) <= steps, "a step reads the keys of one row group"
    assert wide.opened[: len(later)] == later
    first = [bytes(one.bytes) for one in iter_frames(bytes(piece.frames))]
    expected = [one for one in wide.expected(wide.segment) if _position(one) > since]
    assert first + wide.rows(pieces) == expected


def test_a_commit_time_is_searched_one_file_at_a_time_and_not_in_runs_that_end_before(
    wide: Wide,
) -> None:
    files = wide.segment.files
    at = files[len(files) // 2].last
    found = at_time(wide.store, wide.log, FIRST_US + at.scn - 1)
    assert found.scn == at.scn - 1 and wide.descriptors() == []
    order = wide.names(wide.segment, lambda file: True)
    assert wide.opened == order[: len(wide.opened)] and len(wide.opened) < len(order)
    wide.opened.clear()
    assert at_time(wide.store, wide.log, FIRST_US + wide.at.scn) == wide.log.state().window
    assert wide.opened == []


def test_a_hundred_readers_of_a_store_with_more_files_than_descriptors_do_not_run_out_of_them(
    wide: Wide,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = len(open_descriptors()) + 250
    assert room < len(wide.base.files)
    with ExitStack() as open_readers:
        open_readers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, before[1]))
        for _ in range(100):
            pieces = wide.range(RangeContent.STATE).pieces()
            open_readers.callback(pieces.close)
            next(pieces)
        assert len(wide.descriptors()) <= 100


def test_the_keys_of_many_parts_need_one_descriptor() -> None:
    hashes = np.arange(10_000, dtype=np.uint64)
    before = len(open_descriptors())
    with KeySpool(256) as spool:
        for _ in range(3):
            spool.add(pa.table({"hash": hashes}), hashes)
        assert len(open_descriptors()) == before + 1
        assert sum(len(part) for part in spool.parts()) == 3 * len(hashes)
    assert len(open_descriptors()) == before
