"""Row groups that a reader cannot need are not read: by position, source, op and key hash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream
from databus.bootstrap.reading.frame_ranges import FrameRange, changes_from, state_from
from databus.bootstrap.reading.range_stream import RangeContent, RangeStream
from databus.bootstrap.reading.row_group_pruning import may_hold
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.open_run import OpenRun
from databus.bootstrap.runs.parquet_runs import RowGroup, RunKind
from databus.client.splits.frame_tables import blocks_of
from databus.common.checkpoint import ORIGIN, Position
from databus.common.filters.stream_filter import (
    HashPartition,
    ModPartition,
    RangePartition,
    StreamFilter,
    matching_ids,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView, Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder
from tests.bootstrap import model

GROUP_ROWS = 8
ORDERS, LINES, NOTES = model.SOURCES


class Shop:
    """A base of many small row groups."""

    def __init__(self, store: Store, log: HotLog) -> None:
        self.store, self.log = store, log
        history = model.History(9, keys=60)
        self.blocks = [history.block(120)]
        log.append(self.blocks[0], 1)
        segments.seal(log, store, 1)
        self.stop = history.position
        rows = self.rows = model.compact(
            model.frames_between(self.blocks, model.START, self.stop), base=True
        )
        base = model.write_run(
            store,
            RunKind.BASE,
            model.START,
            self.stop,
            rows,
            rows_per_group=GROUP_ROWS,
            rows_per_file=64,
        )
        store.switch(lambda m: m.with_changes(add=base, now_us=1))
        self.groups = -(-len(rows) // GROUP_ROWS)

    def read(
        self, chosen: StreamFilter, since: Position = ORIGIN
    ) -> tuple[BootstrapStream, model.State]:
        """All that a reader with a filter gets."""
        names = [name for name in model.SOURCES if chosen.takes_source(name)]
        stream = BootstrapStream(
            store=self.store,
            log=self.log,
            since=since,
            target=self.stop,
            stream_filter=chosen,
            source_ids=np.sort(
                np.array([frame_format.source_id(n) for n in names], dtype=np.uint32)
            ),
        )
        return stream, model.State().apply_all(piece.frames for piece in stream.pieces())


def taken(shop: Shop, chosen: StreamFilter) -> set[tuple[int, bytes]]:
    ids = {frame_format.source_id(name) for name in model.SOURCES if chosen.takes_source(name)}

    def wanted(one: FrameView) -> bool:
        partition = chosen.partition
        in_partition = (
            not isinstance(partition, ModPartition)
            or one.key_hash % partition.count in partition.buckets
        )
        return one.source_id in ids and in_partition and (not chosen.ops or one.op in chosen.ops)

    return {(one.source_id, bytes(one.key)) for one in shop.rows if wanted(one)}


def test_without_a_filter_every_group_is_read_and_with_one_only_those_that_may_match(
    store: Store, log: HotLog
) -> None:
    shop = Shop(store, log)
    stream, state = shop.read(StreamFilter())
    assert (stream.groups_read, stream.groups_skipped) == (shop.groups, 0)
    assert state.rows.keys() == taken(shop, StreamFilter())

    chosen = StreamFilter(ops=frozenset({Op.DELETE}))
    stream, state = shop.read(chosen)
    assert stream.groups_skipped > 0 and not state.rows

    stream, state = shop.read(StreamFilter(sources=("shop.absent",)))
    assert (stream.groups_read, stream.groups_skipped) == (0, shop.groups)
    for name in model.SOURCES:
        chosen = StreamFilter(sources=(name,))
        assert shop.read(chosen)[1].rows.keys() == taken(shop, chosen)

    hashes = {one.key_hash for one in shop.rows}
    count = 2**61 - 1
    absent = next(b for b in range(count) if b not in {h % count for h in hashes})
    partition = ModPartition(count, frozenset({absent}))
    stream, state = shop.read(StreamFilter(partition=partition))
    # Of eight keys each: their hashes lie further apart than the buckets are many.
    assert (stream.groups_read, stream.groups_skipped) == (shop.groups, 0)
    assert not state.rows


def test_of_a_segment_only_the_groups_after_the_readers_position_are_read(
    store: Store, log: HotLog
) -> None:
    shop = Shop(store, log)
    last = list(iter_frames(shop.blocks[0]))[-1].position
    history = model.History(10)
    history.position = last
    frames = model.frames_between([history.block(200)], last, Position(2**40, 0))
    run = model.write_run(
        store,
        RunKind.SEGMENT,
        last,
        history.position,
        frames,
        rows_per_group=GROUP_ROWS,
        rows_per_file=64,
    )
    store.switch(lambda m: m.with_changes(add=run, now_us=1))
    opened = store.open_run(run)
    groups = list(opened.row_groups())
    assert len(groups) > 20
    middle = groups[len(groups) // 2].last
    due = sum(group.last > middle for group in groups)
    unopened = [number for number, file in enumerate(run.files) if file.last <= middle]
    assert unopened
    skipped = len(unopened) + sum(
        group.last <= middle and group.file not in unopened for group in groups
    )
    opened.close()
    stream = model.whole_stream(store, log, middle, history.position)
    log.drop_until(history.position, 1)
    log.restart_at(history.position, {})
    state = model.State().apply_all(piece.frames for piece in stream.pieces())
    assert (stream.groups_read, stream.groups_skipped) == (due, skipped)
    assert state.newest


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [
        ((5, 5), True),
        ((6, 9), False),
        ((6, 15), True),
        ((0, 100), True),
        ((-(2**63), 2**63 - 1), True),
        ((-1, 1), True),
        ((-10, -10), False),
        ((-11, -11), True),
        (None, True),
    ],
)
def test_a_range_of_hashes_may_hold_a_remainder_or_cannot(
    hashes: tuple[int, int] | None, expected: bool
) -> None:
    assert may_hold(ModPartition(10, frozenset({5})), hashes) is expected
    assert may_hold(None, hashes)
    assert may_hold(RangePartition(10, 1, 2), hashes)
    if hashes is not None and hashes[1] - hashes[0] < 100:
        numbers = range(hashes[0], hashes[1] + 1)
        truth = any(number % 2**64 % 10 == 5 for number in numbers)
        assert may_hold(ModPartition(10, frozenset({5})), hashes) or not truth


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [
        ((0, 2**62 - 1), False),
        ((0, 2**62), True),
        ((2**62, 2**63 - 1), True),
        ((2**63, 2**64 - 1), False),
        ((-(2**63), -1), False),
        ((-1, 0), True),
        (None, True),
    ],
)
def test_a_range_of_hashes_lies_in_a_partition_by_ranges_or_does_not(
    hashes: tuple[int, int] | None, expected: bool
) -> None:
    assert may_hold(HashPartition(4, frozenset({1})), hashes) is expected


def test_what_goes_to_the_socket_is_the_column_where_parquet_decoded_it(
    store: Store, log: HotLog, tmp_path: Path
) -> None:
    shop = Shop(store, log)
    base = store.read().base
    assert base is not None
    opened = store.open_run(base)
    group = next(opened.row_groups())
    table = opened.table(group, ["frame"])
    (block,) = blocks_of(table)
    column = np.frombuffer(table.column(0).chunks[0].buffers()[2], dtype=np.uint8)
    assert np.shares_memory(block.data, column)
    assert np.shares_memory(block.slice(1, 3).data, column)
    stream, _ = shop.read(StreamFilter())
    whole = np.frombuffer(block.data.data, dtype=np.uint8)
    assert np.shares_memory(
        np.frombuffer(stream._selected(block.columns(), block.data, ORIGIN), dtype=np.uint8),
        whole,
    ), "no filter: no copy"
    opened.close()


class Ranges:
    """Runs that ranges are read from, and which row groups of them were."""

    def __init__(self, store: Store, log: HotLog) -> None:
        self.store, self.log = store, log
        self.blocks: list[bytes] = []
        self.at = model.START
        self.read_groups: set[tuple[str, int, int]] = set()

    def window(self, op: Op, source: str, keys: list[bytes]) -> None:
        """One window of changes of one kind."""
        builder = WindowBuilder(self.at.scn + 1, 1)
        for key in keys:
            after = None if op == Op.DELETE else b"row"
            builder.event(op, frame_format.source_id(source), 1, key, after=after)
        self.at = Position(self.at.scn + 1, builder.seq)
        self.blocks.append(builder.end("t"))

    def random(self, history: model.History, windows: int) -> None:
        """Windows of a random history."""
        history.position = self.at
        self.blocks.append(history.block(windows))
        self.at = history.position

    def run(self, kind: RunKind, start: Position, rows_per_group: int) -> Position:
        """What was added after ``start`` as a run; its end."""
        rows = model.frames_between(self.blocks, start, self.at)
        if kind is not RunKind.SEGMENT:
            rows = model.compact(rows, base=kind is RunKind.BASE)
        run = model.write_run(
            self.store,
            kind,
            start,
            self.at,
            rows,
            rows_per_group=rows_per_group,
            rows_per_file=1000,
        )
        self.store.switch(lambda m: m.with_changes(add=run, now_us=1))
        self.log.restart_at(self.at, {})
        return self.at

    def answer(
        self, content: RangeContent, chosen: StreamFilter, since: Position = model.START
    ) -> tuple[RangeStream, list[bytes]]:
        """A range's frames, once it is sure that nothing of a skipped group was read."""
        every = content is RangeContent.ALL
        changes = changes_from(since, every_change=every)
        starts = state_from(self.at, model.START) if content is RangeContent.STATE else changes
        stream = RangeStream(
            database="shop",
            clock=model.CLOCK,
            since=since,
            until=self.at,
            content=content,
            opening=lambda may_open: FrameRange(
                self.store, self.log, starts, self.at, every_change=every, may_open=may_open
            ),
            stream_filter=chosen,
            source_ids=matching_ids(model.SOURCES, chosen),
            piece_bytes=1 << 20,
        )
        self.read_groups.clear()
        found = [bytes(one.bytes) for p in stream.pieces() for one in iter_frames(bytes(p.frames))]
        if content is not RangeContent.STATE:  # which reads the last ones for the end of a window
            assert len(self.read_groups) == stream.groups_read
        return stream, found

    def expected(self, content: RangeContent, chosen: StreamFilter) -> list[bytes]:
        """The same from START by the model, row by row."""
        frames = model.frames_between(self.blocks, model.START, self.at)
        if content is not RangeContent.ALL:
            retained = model.compact(frames, base=content is RangeContent.STATE)
            return [bytes(one.bytes) for one in retained if is_taken(one, chosen)]
        found: list[bytes] = []
        window: list[bytes] = []
        for one in frames:
            if one.op == Op.END_OF_WINDOW:
                found += [*window, bytes(one.bytes)] if window or chosen.is_empty else []
                window = []
            elif is_taken(one, chosen):
                window.append(bytes(one.bytes))
        return found


def is_taken(one: FrameView, chosen: StreamFilter) -> bool:
    """Whether a filter, whose partition is by remainder, takes a row."""
    ids = {frame_format.source_id(name) for name in model.SOURCES if chosen.takes_source(name)}
    in_partition = one.op == Op.TRUNCATE or (
        not isinstance(chosen.partition, ModPartition)
        or one.key_hash % chosen.partition.count in chosen.partition.buckets
    )
    is_of_op = not chosen.ops or one.op in chosen.ops
    return one.source_id in ids and in_partition and is_of_op


@pytest.fixture
def ranges(store: Store, log: HotLog, monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """An empty store; what is read of its row groups is noted."""
    ranges = Ranges(store, log)
    table = OpenRun.table

    def noting(opened: OpenRun, group: RowGroup, names: list[str]) -> Any:
        ranges.read_groups.add((opened.run.id, group.file, group.index))
        return table(opened, group, names)

    monkeypatch.setattr(OpenRun, "table", noting)
    return ranges


KEYS = [b"o%d" % number for number in range(9)]
SAME = frame_format.key_hash(b"same")
WITH_SAME = StreamFilter(partition=ModPartition(16, frozenset({SAME % 16})))
WITHOUT_SAME = StreamFilter(partition=ModPartition(16, frozenset(range(16)) - {SAME % 16}))
BY_NUMBER = StreamFilter(partition=RangePartition(10, 5000, 6000))


@pytest.mark.parametrize(
    ("chosen", "skipped_of_all", "skipped_of_net"),
    [
        (StreamFilter(), 0, 0),
        (StreamFilter(sources=(ORDERS,)), 1, 1),
        (StreamFilter(sources=(LINES,)), 4, 4),
        (StreamFilter(sources=("nothing.*",)), 6, 6),
        (StreamFilter(ops=frozenset({Op.DELETE})), 2, 0),
        (WITH_SAME, 0, 0),
        (WITHOUT_SAME, 1, 1),
        (BY_NUMBER, 0, 0),
    ],
)
def test_of_a_segment_changes_skip_what_has_no_end_of_a_window_and_another_table_op_or_key(
    ranges: Ranges, chosen: StreamFilter, skipped_of_all: int, skipped_of_net: int
) -> None:
    # Each window is a group of five rows, and one of four and the window's end, whose source
    # is 0 and whose op is the greatest.  The number of LINES is the greatest.
    ranges.window(Op.INSERT, ORDERS, KEYS)
    ranges.window(Op.UPDATE, LINES, [b"same"] * 9)
    ranges.window(Op.DELETE, ORDERS, KEYS)
    ranges.run(RunKind.SEGMENT, model.START, 5)
    for content, skipped in (
        (RangeContent.ALL, skipped_of_all),
        (RangeContent.NET, skipped_of_net),
    ):
        stream, found = ranges.answer(content, chosen)
        assert (stream.groups_read, stream.groups_skipped) == (6 - skipped, skipped)
        assert found == ([] if chosen == BY_NUMBER else ranges.expected(content, chosen))


def test_of_merged_runs_changes_and_states_read_the_groups_of_their_keys_alone(
    ranges: Ranges,
) -> None:
    ranges.window(Op.INSERT, ORDERS, KEYS)
    first = ranges.run(RunKind.DELTA, model.START, 1)
    ranges.window(Op.UPDATE, LINES, [b"same"] * 9)
    ranges.window(Op.DELETE, ORDERS, KEYS[:6])
    ranges.run(RunKind.DELTA, first, 1)
    hashes = [frame_format.key_hash(key) for key in (*KEYS, *KEYS[:6])]
    odd = StreamFilter(partition=ModPartition(2, frozenset({1})))
    of_keys = sum(number % 2 for number in (*hashes, SAME))
    inserts = StreamFilter(ops=frozenset({Op.INSERT}))
    groups = 9 + 1 + 6
    assert 0 < of_keys < groups
    for chosen, read in (
        (StreamFilter(sources=(LINES,)), 1),
        (odd, of_keys),
        (WITHOUT_SAME, sum(number % 16 != SAME % 16 for number in hashes)),
        (inserts, groups),  # a deletion takes the place of the insert that is wanted
    ):
        stream, found = ranges.answer(RangeContent.NET, chosen)
        assert (stream.groups_read, stream.groups_skipped) == (read, groups - read)
        assert found == ranges.expected(RangeContent.NET, chosen)
    # Of one merged run the ops decide as well: its rows are last states already.
    stream, found = ranges.answer(RangeContent.NET, StreamFilter(ops=frozenset({Op.UPDATE})), first)
    assert (stream.groups_read, stream.groups_skipped, len(found)) == (1, 6, 1)

    ranges.run(RunKind.BASE, model.START, 1)
    states = 3 + 1
    for chosen, read in ((StreamFilter(sources=(LINES,)), 1), (inserts, 3), (BY_NUMBER, states)):
        stream, found = ranges.answer(RangeContent.STATE, chosen)
        assert (stream.groups_read, stream.groups_skipped) == (read, states - read)
        assert found == ([] if chosen == BY_NUMBER else ranges.expected(RangeContent.STATE, chosen))


@pytest.mark.parametrize("rows_per_group", [1, 3])
def test_whatever_is_skipped_the_answer_is_the_models(ranges: Ranges, rows_per_group: int) -> None:
    history = model.History(31, keys=4)
    filters = [
        StreamFilter(sources=sources, ops=ops, partition=partition)
        for sources in ((), (NOTES,), (LINES, ORDERS))
        for ops in (frozenset[Op](), frozenset({Op.INSERT}), frozenset({Op.UPDATE, Op.DELETE}))
        for partition in (None, ModPartition(3, frozenset({1})))
    ]
    kinds = [RunKind.SEGMENT, RunKind.SEGMENT, RunKind.BASE, RunKind.SEGMENT]
    at, skipped = model.START, 0
    for kind in kinds:
        if kind is RunKind.SEGMENT:
            ranges.random(history, 15)
        at = ranges.run(kind, model.START if kind is RunKind.BASE else at, rows_per_group)
    for content in RangeContent:
        for chosen in filters:
            stream, found = ranges.answer(content, chosen)
            assert found == ranges.expected(content, chosen), (content, chosen)
            skipped += stream.groups_skipped
    assert skipped > 100
