"""Changes between two positions and states as of one, against the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st

from databus.bootstrap.log import segments
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.reading.frame_ranges import FrameRange, at_time, changes_from, state_from
from databus.bootstrap.reading.range_stream import Opening, RangeContent, RangeStream
from databus.bootstrap.runs.open_readers import OpenReaders
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.common.checkpoint import ORIGIN, SEQ_END, OnlineCheckpoint, Position
from databus.common.errors import LogTooYoung
from databus.common.filters.stream_filter import (
    StreamFilter,
    matching_ids,
    parse_ops,
    parse_partition,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView, Op, iter_frames
from tests.bootstrap.model import CLOCK, SOURCES, START, State, compact, frames_between, frames_of
from tests.bootstrap.random_bench import RandomBench, over_histories

FIRST_US = 1_700_000_000_000_000


def opened(
    bench: RandomBench, content: RangeContent, since: Position | None, until: Position
) -> Opening:
    every_change = content is RangeContent.ALL
    if content is RangeContent.STATE:
        starts = state_from(until, START)
    else:
        starts = changes_from(since, every_change=every_change)
    return lambda may_open: FrameRange(
        bench.store, bench.log, starts, until, every_change=every_change, may_open=may_open
    )


def stream_of(
    bench: RandomBench,
    content: RangeContent,
    since: Position | None,
    until: Position,
    chosen: StreamFilter | None = None,
) -> RangeStream:
    chosen = chosen or StreamFilter()
    return RangeStream(
        database="shop",
        clock=CLOCK,
        since=since or ORIGIN,
        until=until,
        content=content,
        opening=opened(bench, content, since, until),
        stream_filter=chosen,
        source_ids=matching_ids(SOURCES, chosen),
        piece_bytes=bench.rng.choice((1, 300, 1 << 20)),
        pass_rows=bench.rng.choice((3, 20, 1 << 20)),
    )


def answer(
    bench: RandomBench,
    content: RangeContent,
    since: Position | None,
    until: Position,
    chosen: StreamFilter | None = None,
) -> tuple[list[FrameView], Position]:
    """The frames, and where they end by the answer; or LogTooYoung."""
    pieces = list(stream_of(bench, content, since, until, chosen).pieces())
    *_, last = pieces
    assert isinstance(last.checkpoint, OnlineCheckpoint)
    assert all(piece.checkpoint is None for piece in pieces[:-1])
    return [one for p in pieces for one in iter_frames(bytes(p.frames))], last.checkpoint.position


def raw(frames: list[FrameView]) -> list[bytes]:
    return [bytes(one.bytes) for one in frames]


def is_by_key(frames: list[FrameView]) -> bool:
    """Whether the frames of each key ascend."""
    newest: dict[tuple[int, bytes], Position] = {}
    for one in frames:
        key = one.source_id, bytes(one.key)
        if one.position <= newest.get(key, ORIGIN):
            return False
        newest[key] = one.position
    return True


def random_bench(folder: Path, seed: int, steps: int = 20) -> RandomBench:
    bench = RandomBench(folder, seed)
    bench.write(2)
    for _ in range(steps):
        bench.step()
    return bench


def positions(bench: RandomBench) -> list[Position]:
    window = bench.log.state().window
    return [START, *(one.position for one in frames_between(bench.blocks, START, window))]


@pytest.mark.slow
@over_histories()
def test_net_changes_are_the_compaction_of_the_range_or_are_refused(
    memory_folder: Callable[[], Path], seed: int
) -> None:
    bench = random_bench(memory_folder(), seed)
    every = positions(bench)
    answered = 0
    for _ in range(12):
        since, until = sorted(bench.rng.choices(every, k=2))
        until = bench.rng.choice((until, every[-1]))
        expected = compact(frames_between(bench.blocks, since, until), base=False)
        try:
            found, end = answer(bench, RangeContent.NET, since, until)
        except LogTooYoung:
            assert any(r.is_compacted and r.start < until < r.stop for r in _runs(bench))
            continue
        assert sorted(raw(found)) == sorted(raw(expected))
        assert is_by_key(found)
        assert end == until
        answered += 1
    everything = compact(frames_between(bench.blocks, START, every[-1]), base=False)
    found, _ = answer(bench, RangeContent.NET, None, every[-1])
    assert sorted(raw(found)) == sorted(raw(everything))
    bench.close()


@over_histories()
def test_all_changes_are_every_frame_of_the_range_or_are_refused(
    memory_folder: Callable[[], Path], seed: int
) -> None:
    bench = random_bench(memory_folder(), seed)
    every = positions(bench)
    for _ in range(12):
        since, until = sorted(bench.rng.choices(every, k=2))
        try:
            found, end = answer(bench, RangeContent.ALL, since, until)
        except LogTooYoung:
            deltas = [run for run in _runs(bench) if run.is_compacted and run.start != ORIGIN]
            assert any(run.stop > since and run.start < until for run in deltas)
            continue
        assert raw(found) == raw(frames_between(bench.blocks, since, until))
        assert end == until
    bench.close()


@pytest.mark.slow
@over_histories()
@example(seed=11380376)  # everything was deleted before the first merge
def test_a_snapshot_is_the_state_at_the_last_whole_window(
    memory_folder: Callable[[], Path], seed: int
) -> None:
    bench = random_bench(memory_folder(), seed)
    every = positions(bench)
    ends = [START]
    for one in frames_between(bench.blocks, START, every[-1]):
        if one.op == Op.END_OF_WINDOW:
            ends.append(one.position)
    # "Everything at an scn" lies between a run that ends there and the next one.
    at_stops = [Position(run.stop.scn, SEQ_END) for run in _runs(bench)]
    for at in [*bench.rng.choices(every, k=8), every[-1], *at_stops]:
        whole = max(end for end in ends if end <= at)
        expected = compact(frames_between(bench.blocks, START, whole), base=True)
        try:
            found, end = answer(bench, RangeContent.STATE, None, at)
        except LogTooYoung:
            assert at != every[-1]
            assert any(r.is_compacted and r.start < at < r.stop for r in _runs(bench))
            continue
        assert sorted(raw(found)) == sorted(raw(expected))
        assert end == whole
        assert State().apply_all(raw(found)).rows == bench.truth(whole).rows
    bench.close()


def _runs(bench: RandomBench) -> list[Run]:
    return list(bench.store.read().runs)


@over_histories(bucket=st.integers(0, 2))
def test_filters_choose_from_a_range_what_they_choose_from_the_model(
    memory_folder: Callable[[], Path], seed: int, bucket: int
) -> None:
    bench = random_bench(memory_folder(), seed)
    every = positions(bench)
    chosen = StreamFilter(
        sources=("shop.orders", "shop.n*"),
        partition=parse_partition(f"mod:3:{bucket}"),
        ops=parse_ops("u,d"),
    )
    ids = {frame_format.source_id("shop.orders"), frame_format.source_id("shop.notes")}

    def is_wanted(one: FrameView) -> bool:
        by_key = one.source_id in ids and one.key_hash % 3 == bucket
        return by_key and one.op in (Op.UPDATE, Op.DELETE)

    since = bench.rng.choice(every)
    retained = compact(frames_between(bench.blocks, since, every[-1]), base=False)
    found, _ = answer(bench, RangeContent.NET, since, every[-1], chosen)
    assert sorted(raw(found)) == sorted(raw([one for one in retained if is_wanted(one)]))
    bench.close()


@pytest.mark.slow
@over_histories()
def test_commit_times_cut_the_log_where_positions_do(
    memory_folder: Callable[[], Path], seed: int
) -> None:
    bench = random_bench(memory_folder(), seed)
    every = positions(bench)
    last = max(one.scn for one in every)
    all_frames = frames_between(bench.blocks, START, every[-1])
    rows = [one.position for one in all_frames if one.op != Op.END_OF_WINDOW]
    for _ in range(8):
        scn = bench.rng.randrange(START.scn, last + 3)
        later = [one for one in every if one.scn > scn]
        try:
            found = at_time(bench.store, bench.log, FIRST_US + scn, exact=False)
        except LogTooYoung:
            chain = bench.store.read().chain
            retained = frames_of(bench.store, chain[0]) if chain else []
            assert scn < min((one.scn for one in retained), default=every[1].scn)
            continue
        expected = frames_between(bench.blocks, Position(scn, SEQ_END), every[-1])
        left, _ = answer(bench, RangeContent.NET, found, every[-1])
        assert sorted(raw(left)) == sorted(raw(compact(expected, base=False)))
        assert later or found == every[-1]
        try:
            found = at_time(bench.store, bench.log, FIRST_US + scn)
        except LogTooYoung:
            assert any(run.is_compacted and run.start.scn <= scn for run in _runs(bench))
        else:
            # Windows without rows leave no trace in merged runs.
            assert [one for one in rows if one > found] == [one for one in rows if one.scn > scn]
    bench.close()


@pytest.fixture
def bench(tmp_path: Path) -> RandomBench:
    """Twelve windows in three segments, four more in the hot log."""
    bench = RandomBench(tmp_path / "shop", 4)
    for _ in range(3):
        bench.write(4)
        segments.seal(bench.log, bench.store, 1)
    bench.write(4)
    return bench


def test_a_merged_range_is_refused_with_the_positions_that_can_be_requested(
    bench: RandomBench,
) -> None:
    first, second, third = bench.store.read().chain
    bench._replace(
        Merge((first, second), RunKind.DELTA),
        compact(_frames(bench, START, second.stop), base=False),
        False,
    )
    window = bench.log.state().window
    with pytest.raises(LogTooYoung) as young:
        answer(bench, RangeContent.ALL, START, window)
    assert young.value.details["oldest"] == second.stop.to_json()
    with pytest.raises(LogTooYoung) as young:
        answer(bench, RangeContent.NET, START, first.stop)
    assert young.value.details["before"] == START.to_json()
    assert young.value.details["after"] == second.stop.to_json()
    assert raw(answer(bench, RangeContent.ALL, None, window)[0]) == raw(
        _frames(bench, second.stop, window)
    )
    assert answer(bench, RangeContent.NET, START, third.stop)[0]
    bench.close()


def test_a_state_before_the_base_is_refused_with_the_base_if_the_changes_up_to_it_are_retained(
    bench: RandomBench,
) -> None:
    first, second, _ = bench.store.read().chain
    bench.rebase()
    base = bench.store.read().snapshot
    bench.store.switch(lambda m: m.without((first,), 1))
    bench.store.collect(0, "cs", now_us=2)
    for until, more in ((second.stop, {"after": base.to_json()}), (START, {})):
        with pytest.raises(LogTooYoung, match=f"state at {until} is gone") as young:
            answer(bench, RangeContent.STATE, None, until)
        assert young.value.details == {"oldest": base.to_json(), **more}
    assert answer(bench, RangeContent.STATE, None, base)[1] == base
    bench.close()


def test_a_range_that_is_open_survives_sealing_merging_and_retention(bench: RandomBench) -> None:
    window = bench.log.state().window
    expected = raw(_frames(bench, START, window))
    stream = stream_of(bench, RangeContent.ALL, START, window)
    readers = OpenReaders(bench.store.storage, lambda: 0.0)
    readers.enter(stream)
    pieces = stream.pieces()
    first = next(pieces)
    segments.seal(bench.log, bench.store, 1)
    bench.rebase()
    chain = bench.store.read().chain
    bench.store.switch(lambda m: m.without(chain[:-1], 1))
    assert bench.store.collect(0, "cs", now_us=2) == []
    data = bytes(first.frames) + b"".join(bytes(piece.frames) for piece in pieces)
    assert raw(list(iter_frames(data))) == expected
    readers.leave(stream)
    assert len(bench.store.collect(0, "cs", now_us=2)) == len(chain) - 1
    bench.close()


def test_a_window_without_a_match_leaves_nothing_in_all_changes(bench: RandomBench) -> None:
    chosen = StreamFilter(sources=("shop.orders",))
    window = bench.log.state().window
    expected: list[FrameView] = []
    pending: list[FrameView] = []
    for one in _frames(bench, START, window):
        if one.op == Op.END_OF_WINDOW:
            expected += [*pending, one] if pending else []
            pending = []
        elif one.source_id == frame_format.source_id("shop.orders"):
            pending.append(one)
    assert raw(answer(bench, RangeContent.ALL, START, window, chosen)[0]) == raw(expected)
    nothing = StreamFilter(sources=("nothing.*",))
    assert answer(bench, RangeContent.NET, START, window, nothing) == ([], window)
    assert np.array_equal(matching_ids(SOURCES, nothing), [])
    bench.close()


def _frames(bench: RandomBench, after: Position, upto: Position) -> list[FrameView]:
    return frames_between(bench.blocks, after, upto)
