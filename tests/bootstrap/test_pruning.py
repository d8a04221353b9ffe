"""Row groups that a reader cannot want are not read: by position, source, op and key hash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from databus.bootstrap import segments
from databus.bootstrap.log import HotLog
from databus.bootstrap.manifest import Store
from databus.bootstrap.runs import RunKind, blocks_of
from databus.bootstrap.stream import BootstrapStream, may_hold
from databus.common import frame
from databus.common.checkpoint import ORIGIN, Position
from databus.common.filters import ModPartition, RangePartition, StreamFilter
from databus.common.frame import FrameView, Op, iter_frames
from tests.bootstrap.model import SOURCES, START, History, State, compact, frames_between, write_run

GROUP_ROWS = 8


class Shop:
    """A base of many small row groups."""

    def __init__(self, store: Store, log: HotLog) -> None:
        self.store, self.log = store, log
        history = History(9, keys=60)
        self.blocks = [history.block(120)]
        log.append(self.blocks[0], 1)
        segments.seal(log, store, 1)
        self.stop = history.position
        rows = self.rows = compact(frames_between(self.blocks, START, self.stop), base=True)
        base = write_run(
            store, RunKind.BASE, START, self.stop, rows, rows_per_group=GROUP_ROWS, rows_per_file=64
        )
        store.switch(lambda m: m.with_changes(add=base, now_us=1))
        self.groups = -(-len(rows) // GROUP_ROWS)

    def read(self, chosen: StreamFilter, since: Position = ORIGIN) -> tuple[BootstrapStream, State]:
        """All that a reader with a filter gets."""
        names = [name for name in SOURCES if chosen.takes_source(name)]
        stream = BootstrapStream(
            store=self.store,
            log=self.log,
            since=since,
            target=self.stop,
            stream_filter=chosen,
            source_ids=np.sort(np.array([frame.source_id(n) for n in names], dtype=np.uint32)),
        )
        return stream, State().apply_all(piece.frames for piece in stream.pieces())


def taken(shop: Shop, chosen: StreamFilter) -> set[tuple[int, bytes]]:
    ids = {frame.source_id(name) for name in SOURCES if chosen.takes_source(name)}

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
    for name in SOURCES:
        chosen = StreamFilter(sources=(name,))
        assert shop.read(chosen)[1].rows.keys() == taken(shop, chosen)

    hashes = {one.key_hash for one in shop.rows}
    count = 2**61 - 1
    absent = next(b for b in range(count) if b not in {h % count for h in hashes})
    partition = ModPartition(count, frozenset({absent}))
    stream, state = shop.read(StreamFilter(partition=partition))
    assert not state.rows


def test_of_a_segment_only_the_groups_after_the_readers_position_are_read(
    store: Store, log: HotLog
) -> None:
    shop = Shop(store, log)
    last = list(iter_frames(shop.blocks[0]))[-1].position
    history = History(10)
    history.position = last
    frames = frames_between([history.block(200)], last, Position(2**40, 0))
    run = write_run(
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
    groups = len(opened.row_groups)
    assert groups > 20
    middle = opened.row_groups[groups // 2].last
    due = sum(group.last > middle for group in opened.row_groups)
    opened.close()
    stream = BootstrapStream(
        store=store,
        log=log,
        since=middle,
        target=history.position,
        stream_filter=StreamFilter(),
        source_ids=np.empty(0, dtype=np.uint32),
    )
    log.drop_until(history.position, 1)
    log.restart_at(history.position, {})
    state = State().apply_all(piece.frames for piece in stream.pieces())
    assert (stream.groups_read, stream.groups_skipped) == (due, groups - due)
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


def test_what_goes_to_the_socket_is_the_column_where_parquet_decoded_it(
    store: Store, log: HotLog, tmp_path: Path
) -> None:
    shop = Shop(store, log)
    base = store.read().base
    assert base is not None
    opened = store.open_run(base)
    group = opened.row_groups[0]
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
