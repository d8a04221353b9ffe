"""The planner, against a plain model over random histories and compactions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from databus.bootstrap.log import segments
from databus.bootstrap.merging import run_planner
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.manifest import Manifest
from databus.bootstrap.runs.parquet_runs import Run, RunFile, RunKind
from databus.bootstrap.runs.unfinished_merge import UnfinishedMerge
from databus.common.checkpoint import (
    ORIGIN,
    Checkpoint,
    OnlineCheckpoint,
    Position,
)
from databus.common.errors import LogTooYoung
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from tests.bootstrap.model import (
    START,
    State,
    frames_between,
)
from tests.bootstrap.random_bench import RandomBench, over_histories


def run_of(
    start: int, stop: int, size: int = 100, kind: RunKind = RunKind.DELTA, name: str = ""
) -> Run:
    first = ORIGIN if kind is RunKind.BASE else Position(start, 0)
    file = RunFile("f", size, size, size, Position(start, 1), Position(stop, 0))
    return Run(name or f"c-{start}-{stop}-{size}", kind, first, Position(stop, 0), (file,), 1)


def spans(steps: tuple[run_planner.PlanStep, ...]) -> list[tuple[int, int, int]]:
    return [(s.run.start.scn, s.run.stop.scn, s.after.scn) for s in steps]


def test_from_the_origin_the_base_is_read_and_what_comes_after_it() -> None:
    manifest = Manifest(
        runs=(run_of(0, 30, 50, RunKind.BASE), run_of(10, 20), run_of(20, 40), run_of(40, 50))
    )
    steps = run_planner.plan(manifest, ORIGIN, Position(50, 0))
    assert spans(steps) == [(0, 30, 0), (20, 40, 30), (40, 50, 40)]


def test_from_elsewhere_the_base_is_never_read() -> None:
    manifest = Manifest(runs=(run_of(0, 40, 1, RunKind.BASE), run_of(10, 20), run_of(20, 40)))
    steps = run_planner.plan(manifest, Position(15, 3), Position(40, 0))
    assert spans(steps) == [(10, 20, 15), (20, 40, 20)]


def test_a_reader_within_the_hot_log_reads_no_run() -> None:
    manifest = Manifest(runs=(run_of(10, 20),))
    assert run_planner.plan(manifest, Position(20, 0), Position(20, 0)) == ()
    assert run_planner.plan(manifest, Position(25, 0), Position(20, 0)) == ()


def test_the_base_is_read_though_the_rest_of_the_chain_costs_less() -> None:
    """Retention has taken the chain's beginning; what is left of it is not the whole state."""
    manifest = Manifest(runs=(run_of(0, 30, 500, RunKind.BASE), run_of(20, 40, 100)))
    steps = run_planner.plan(manifest, ORIGIN, Position(40, 0))
    assert spans(steps) == [(0, 30, 0), (20, 40, 30)]


def test_a_position_before_the_chain_is_too_young_a_log() -> None:
    manifest = Manifest(runs=(run_of(0, 20, 5, RunKind.BASE), run_of(10, 20)))
    with pytest.raises(LogTooYoung, match=r"position 9:0 is older than .* oldest 10:0"):
        run_planner.plan(manifest, Position(9, 0), Position(20, 0))
    with pytest.raises(LogTooYoung):
        run_planner.plan(Manifest(), Position(9, 0), Position(20, 0))


def test_merges_copy_each_row_a_logarithmic_number_of_times() -> None:
    copied = seals = 0
    runs: tuple[Run, ...] = ()
    for number in range(1, 513):
        runs = (*runs, run_of(number, number + 1, 100, RunKind.SEGMENT))
        seals += 100
        while True:
            merge = run_planner.next_merge(Manifest(runs=(*_base(runs), *runs)), 1 << 40)
            if merge is None or merge.kind is RunKind.BASE:
                break
            size = sum(run.frame_bytes for run in merge.inputs)
            copied += size
            first = merge.inputs[0].start.scn
            runs = (
                *(run for run in runs if run.start.scn < first),
                run_of(first, number + 1, size),
            )
    assert copied / seals < 9, "512 segments: log2 is 9"
    assert len(runs) < 12


def _base(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    return (replace(run_of(0, runs[-1].stop.scn, 1 << 40, RunKind.BASE), id="c-base"),)


def test_the_base_is_rewritten_when_a_quarter_of_it_has_changed() -> None:
    base = run_of(0, 10, 100 << 20, RunKind.BASE)
    small, large = run_of(10, 20, 24 << 20), run_of(10, 20, 25 << 20)
    assert run_planner.next_merge(Manifest(runs=(base, small)), 1 << 40) is None
    assert run_planner.next_merge(Manifest(runs=(base, large)), 1 << 40) == Merge(
        (base, large), RunKind.BASE
    )
    assert run_planner.next_merge(Manifest(runs=(base, small)), 1 << 40, full=True) is not None


def test_a_merge_stays_below_the_largest_run() -> None:
    chain = tuple(run_of(n, n + 1, 100) for n in range(10, 20))
    base = replace(run_of(0, 20, 1 << 40, RunKind.BASE), id="c-base")
    merge = run_planner.next_merge(Manifest(runs=(base, *chain)), 500)
    assert merge is not None
    assert len(merge.inputs) == 5
    assert run_planner.next_merge(Manifest(runs=(base, *chain)), 250) is None


def test_retention_drops_nothing_that_the_base_or_its_readers_need() -> None:
    base = run_of(0, 30, 5, RunKind.BASE)
    chain = (run_of(10, 20), run_of(20, 30), run_of(30, 40))
    manifest = Manifest(runs=(base, *chain))
    assert run_planner.droppable(manifest, 150) == chain[:2]
    assert run_planner.droppable(manifest, 200) == chain[:1]
    assert run_planner.droppable(manifest, 0) == chain[:2]
    everything = run_planner.Retention(file_bytes=0)
    assert run_planner.droppable(manifest, everything, readers_at=chain[0].stop) == chain[:1]
    assert run_planner.droppable(manifest, everything, readers_at=ORIGIN) == ()
    dated = replace(
        manifest,
        runs=tuple(replace(r, last_commit_us=100 * (1 + n)) for n, r in enumerate(manifest.runs)),
    )
    first = dated.chain[0].last_commit_us
    assert (
        run_planner.droppable(dated, run_planner.Retention(since_us=first + 1)) == dated.chain[:1]
    )
    assert run_planner.droppable(dated, run_planner.Retention(since_us=first)) == ()
    behind = dated.chain[-1].stop.scn - dated.chain[0].stop.scn
    assert run_planner.droppable(dated, run_planner.Retention(scns=behind)) == ()
    assert run_planner.droppable(dated, run_planner.Retention(scns=behind - 1)) == dated.chain[:1]
    old = replace(run_of(0, 20, 5, RunKind.BASE), id="c-old")
    retained = manifest.without((), 1)
    retained = replace(retained, retired=(*retained.retired, _retired(old)))
    assert run_planner.droppable(retained, 0) == chain[:1]


def test_while_a_merge_is_unfinished_only_runs_after_it_are_merged_or_dropped() -> None:
    base = run_of(0, 40, 10**9, RunKind.BASE)
    chain = tuple(run_of(start, start + 10) for start in range(10, 80, 10))
    for kind, inputs in ((RunKind.BASE, (base, chain[3])), (RunKind.DELTA, chain[1:4])):
        merge = UnfinishedMerge(kind, tuple(run.id for run in inputs), "0", 1, 3, ())
        manifest = Manifest(runs=(base, *chain), unfinished=merge)
        continued = run_planner.next_merge(manifest, 1 << 40)
        assert continued == run_planner.unfinished_merge(manifest) == Merge(inputs, kind)
        more = replace(manifest, runs=(*manifest.runs, run_of(80, 90)))
        assert run_planner.next_merge(more, 1 << 40) == Merge(more.chain[4:], RunKind.DELTA)
        dropped = run_planner.droppable(manifest, 0)
        assert dropped == (chain[:3] if kind is RunKind.BASE else chain[:1])


def test_a_base_that_comes_first_ends_an_unfinished_merge_into_another() -> None:
    chain = tuple(run_of(start, start + 10) for start in range(0, 40, 10))
    merge = UnfinishedMerge(RunKind.BASE, tuple(run.id for run in chain[:2]), "0", 1, 3, ())
    manifest = Manifest(runs=chain, unfinished=merge)
    changed = manifest.with_changes(add=run_of(0, 40, kind=RunKind.BASE), now_us=1)
    assert changed.unfinished is None
    assert changed.problems() == []
    delta = manifest.with_changes(add=run_of(40, 50), now_us=1)
    assert delta.unfinished == merge


def _retired(run: Run) -> Any:
    from databus.bootstrap.runs.manifest import Retired

    return Retired(run, 1)


@over_histories()
def test_the_plan_from_any_position_gives_the_state_at_the_end(
    memory_folder: Callable[[], Path], seed: int
) -> None:
    bench = RandomBench(memory_folder(), seed, steps=20)
    target = bench.log.state().window
    every = [one.position for one in frames_between(bench.blocks, START, target)]
    for since in [ORIGIN, START, *bench.rng.sample(every, min(6, len(every)))]:
        state = bench.truth(since)
        pieces = list(bench.stream(since).pieces())
        state.apply_all(piece.frames for piece in pieces)
        assert state.rows == bench.truth(target).rows
        assert state.regressions == []
        last = pieces[-1].checkpoint
        assert isinstance(last, OnlineCheckpoint)
        assert last.position == target
    bench.close()


@over_histories()
def test_a_reader_that_is_cut_off_anywhere_resumes_though_runs_are_merged_away(
    memory_folder: Callable[[], Path], seed: int
) -> None:
    bench = RandomBench(memory_folder(), seed, steps=10)
    every = [one.position for one in frames_between(bench.blocks, START, Position(2**60))]
    since = bench.rng.choice([ORIGIN, START, *every[:5]])
    state = bench.truth(since)
    checkpoint: Checkpoint | Position = since
    saved = state.copy()
    for attempt in range(200):
        pieces = bench.stream(checkpoint).pieces()
        # A checkpoint may lie further than six pieces on.
        for _ in range(bench.rng.randrange(1, 6 + attempt // 10)):
            piece = next(pieces, None)
            if piece is None:
                break
            state.apply_all([piece.frames])
            if piece.checkpoint is not None:
                checkpoint = piece.checkpoint
                saved = state.copy()
        pieces.close()
        if isinstance(checkpoint, OnlineCheckpoint):
            break
        # What came after the last checkpoint is rolled back, and will come again.
        state = saved.copy()
        for _ in range(bench.rng.randrange(3)):
            bench.rng.choice((bench.step, bench.rebase, bench.merge))()
    assert isinstance(checkpoint, OnlineCheckpoint)
    assert state.rows == bench.truth(checkpoint.position).rows
    assert state.regressions == []
    bench.close()


@over_histories(bucket=st.integers(0, 2))
def test_filters_choose_the_same_rows_from_runs_as_from_the_log(
    memory_folder: Callable[[], Path], seed: int, bucket: int
) -> None:
    from databus.common.filters.stream_filter import parse_partition

    bench = RandomBench(memory_folder(), seed, steps=15)
    chosen = StreamFilter(
        sources=("shop.orders", "shop.n*"), partition=parse_partition(f"mod:3:{bucket}")
    )
    ids = {frame_format.source_id("shop.orders"), frame_format.source_id("shop.notes")}
    pieces = list(bench.stream(ORIGIN, chosen).pieces())
    state = State().apply_all(piece.frames for piece in pieces)
    wanted = {
        key: rows
        for key, rows in bench.truth(bench.log.state().window).rows.items()
        if key[0] in ids and frame_format.key_hash(key[1]) % 3 == bucket
    }
    assert state.rows == wanted
    bench.close()


def test_a_window_without_a_match_leaves_nothing_and_one_with_a_match_its_end(
    memory_folder: Callable[[], Path],
) -> None:
    bench = RandomBench(memory_folder(), 5)
    bench.write(30)
    segments.seal(bench.log, bench.store, 1)
    bench.write(30)
    chosen = StreamFilter(sources=("shop.orders",))
    frames = [
        one
        for piece in bench.stream(START, chosen).pieces()
        for one in frame_format.iter_frames(piece.frames)
    ]
    orders = frame_format.source_id("shop.orders")
    expected = []
    window: list[Position] = []
    for one in frames_between(bench.blocks, START, bench.history.position):
        if one.op == Op.END_OF_WINDOW:
            expected += [*window, one.position] if window else []
            window = []
        elif one.source_id == orders:
            window.append(one.position)
    assert [one.position for one in frames] == expected
    bench.close()


def test_reading_since_a_position_never_costs_more_than_the_log(
    memory_folder: Callable[[], Path],
) -> None:
    bench = RandomBench(memory_folder(), 6, steps=60)
    target = bench.log.state().window
    every = [one.position for one in frames_between(bench.blocks, START, target)]
    for since in every[:: max(1, len(every) // 20)]:
        sent = sum(len(piece.frames) for piece in bench.stream(since).pieces())
        alone = sum(one.length for one in frames_between(bench.blocks, since, target))
        assert sent <= alone
    bench.close()


def test_source_ids_of_a_row_group_prune_it(memory_folder: Callable[[], Path]) -> None:
    bench = RandomBench(memory_folder(), 7)
    bench.write(10)
    segments.seal(bench.log, bench.store, 1)
    stream = bench.stream(START, StreamFilter(sources=("nothing.*",)))
    assert all(len(piece.frames) == 0 for piece in stream.pieces())
    assert stream.groups_read == 0 and stream.groups_skipped > 0
    bench.close()
