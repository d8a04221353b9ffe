"""Applies of bounded work: a base is brought up bucket by bucket, over several of them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import applier as applier_module
from databus.bootstrap.merging import run_planner
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.processes.bootstrap_processes import apply_round
from databus.bootstrap.processes.log_restore import copy_store
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream
from databus.bootstrap.reading.frame_ranges import FrameRange, state_from
from databus.bootstrap.reading.range_stream import RangeContent
from databus.bootstrap.reading.split_planner import SplitRequest, plan_splits
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.bootstrap.runs.unfinished_merge import UnfinishedMerge
from databus.common.checkpoint import ORIGIN, BootstrapCheckpoint, Position
from databus.common.config import BootstrapConfig
from databus.common.errors import FormatError, LogTooYoung, StoreError
from databus.common.filters.stream_filter import StreamFilter
from tests.bootstrap.merging.test_run_planner import run_of
from tests.bootstrap.model import (
    CLOCK,
    SOURCES,
    START,
    History,
    State,
    clustered,
    compact,
    frames_between,
    frames_of,
    state_of,
    whole_stream,
)
from tests.bootstrap.random_bench import RandomBench, over_histories
from tests.bootstrap.reading.test_range_stream import answer, positions, raw

GOLDEN = Path(__file__).parents[2] / "golden"
FILE_BYTES = 600
APPLY_BYTES = 2500


class Parts:
    """A store with a base of many buckets, and clustered changes after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder)
        self.store.create()
        self.log = HotLog(folder / "log")
        self.log.bind("shop", CLOCK, START)
        self.history = History(40, keys=200)
        self.blocks: list[bytes] = []
        self.segment(60)
        self.applier(1 << 30).apply(full=True)

    def segment(self, windows: int = 6) -> None:
        self.blocks.append(self.history.block(windows))
        self.log.append(self.blocks[-1], 1)
        segments.seal(self.log, self.store, 1)

    def applier(self, apply_bytes: int = APPLY_BYTES, grace_us: int = 0) -> Applier:
        return Applier(self.store, ProcessMerges(), grace_us=grace_us, apply_bytes=apply_bytes)

    def begin(self) -> UnfinishedMerge:
        """A part of a new base is done."""
        self.segment()
        for _ in range(3):
            self.applier().apply()
            if found := self.store.read().unfinished:
                return found
        raise AssertionError("the merge has not been divided")

    def truth(self, upto: Position | None = None) -> State:
        frames = frames_between(self.blocks, ORIGIN, upto or self.history.position)
        return State().apply_all(bytes(one.bytes) for one in frames)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    monkeypatch.setattr(applier_module, "FILE_BYTES", FILE_BYTES)
    found = Parts(tmp_path / "shop")
    yield found
    assert found.store.check() == []
    found.log.close()


def files_on_disk(store: Store) -> set[tuple[str, str]]:
    return {(path.parent.name, path.name) for path in store.runs_folder.glob("*/*")}


def files_of(manifest: Manifest) -> set[tuple[str, str]]:
    runs = [*manifest.runs, *(one.run for one in manifest.retired)]
    found = {(file.folder or run.id, file.name) for run in runs for file in run.files}
    unfinished = manifest.unfinished
    return found | {(file.folder, file.name) for file in (unfinished.files if unfinished else ())}


def test_a_base_is_brought_up_over_several_applies_of_which_each_reads_a_bounded_part(
    parts: Parts,
) -> None:
    before = parts.store.read().base
    assert before is not None and len(before.files) > 12
    parts.begin()
    parts.applier().apply()
    done = [0]
    while unfinished := parts.store.read().unfinished:
        assert unfinished.kind is RunKind.BASE and unfinished.inputs[0] == before.id
        assert parts.store.read().base == before, "readers have the old base until the last part"
        assert files_on_disk(parts.store) == files_of(parts.store.read())
        done.append(unfinished.tasks_done)
        record = parts.applier().apply()[0]
        assert record["kind"] == "base" and record["tasks"] == unfinished.tasks
        made = [f for f in parts.store.read().runs[0].files if f.folder == record["run"]]
        assert sum(file.frame_bytes for file in made) <= APPLY_BYTES
    assert len(done) > 3 and done == sorted(set(done))
    base = parts.store.read().base
    assert base is not None and base.stop == parts.history.position
    assert len({file.folder for file in base.files}) > 3, "the files of each part have a folder"
    frames = frames_between(parts.blocks, ORIGIN, base.stop)
    expected = clustered(compact(frames, base=True))
    assert raw(frames_of(parts.store, base)) == raw(expected)
    assert files_on_disk(parts.store) == files_of(parts.store.read()), "nothing is left behind"


def test_each_part_reads_at_most_the_bound_and_one_bucket_more(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    merge = Applier._merge

    def measured(self: Applier, one: Merge, most: int | None) -> Any:
        sizes.append(self._part(one, most).frame_bytes)
        return merge(self, one, most)

    monkeypatch.setattr(Applier, "_merge", measured)
    parts.segment()
    for _ in range(50):
        sizes.clear()
        if not parts.applier().apply():
            break
        assert 0 < sum(sizes) <= APPLY_BYTES + 3 * FILE_BYTES
    assert parts.store.read().unfinished is None
    parts.segment()
    sizes.clear()
    parts.applier().apply(full=True)
    assert sum(sizes) > 2 * APPLY_BYTES, "a full apply has no bound"


def test_a_part_that_is_done_is_not_done_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.begin()
    tasks: list[tuple[int, str]] = []
    write = ProcessMerges.write

    def noted(self: ProcessMerges, store: Store, merge: Merge, plan: Any, *rest: Any) -> Any:
        tasks.extend((task.source_id, task.bucket) for task in plan.tasks)
        return write(self, store, merge, plan, *rest)

    monkeypatch.setattr(ProcessMerges, "write", noted)
    unfinished = parts.store.read().unfinished
    assert unfinished is not None
    while parts.store.read().unfinished:
        parts.applier().apply()
    assert len(tasks) == len(set(tasks)) == unfinished.tasks - unfinished.tasks_done


def test_readers_of_a_half_brought_up_base_have_the_state_of_every_position(parts: Parts) -> None:
    parts.begin()
    parts.segment()
    parts.log.append(parts.history.block(3), 1)
    block = list(parts.log.read(parts.store.read().stop, parts.log.state().window, 1 << 20).data)
    parts.blocks.append(bytes(block))
    base = parts.store.read().base
    assert base is not None
    states = 0
    while parts.store.read().unfinished:
        assert state_of(parts.store, parts.log).rows == parts.truth().rows
        end = parts.store.read().stop
        assert end is not None
        request = SplitRequest(clock=CLOCK, since=None, is_state=True, names=SOURCES, least=4)
        for at in (base.stop, end):
            starts = state_from(at, None, prefers_base=True)
            plan = plan_splits(
                parts.store,
                request,
                lambda may_open, starts=starts, at=at: FrameRange(
                    parts.store, parts.log, starts, at, every_change=False, may_open=may_open
                ),
            )
            listed = {Path(file.path).name for split in plan.splits for file in split.files}
            assert listed >= {file.name for file in base.files}
            states += 1
        parts.applier().apply()
    assert states > 2
    assert state_of(parts.store, parts.log).rows == parts.truth().rows


def test_a_checkpoint_inside_a_base_that_is_replaced_stays_valid_and_then_restarts_cleanly(
    parts: Parts,
) -> None:
    state = State()
    saved: list[BootstrapCheckpoint] = []
    pieces = whole_stream(parts.store, parts.log).pieces()
    with closing(pieces):
        for piece in pieces:
            state.apply_all([piece.frames])
            if isinstance(piece.checkpoint, BootstrapCheckpoint) and piece.checkpoint.row > 9:
                saved.append(piece.checkpoint)
                break
    (checkpoint,) = saved
    parts.begin()

    def resumed() -> list[Any]:
        stream = BootstrapStream(
            store=parts.store,
            log=parts.log,
            since=ORIGIN,
            target=parts.log.state().window,
            stream_filter=StreamFilter(),
            source_ids=np.empty(0, dtype=np.uint32),
            resume=checkpoint,
        )
        return list(stream.pieces())

    half = resumed()
    first = half[0].checkpoint
    assert isinstance(first, BootstrapCheckpoint)
    assert (first.run, first.row) == (checkpoint.run, checkpoint.row), "it resumes at the row"
    assert state.copy().apply_all(p.frames for p in half).rows == parts.truth().rows
    while parts.store.read().unfinished:
        parts.applier().apply()
    found = resumed()
    base = parts.store.read().base
    assert base is not None
    shown = [p.checkpoint.run for p in found if isinstance(p.checkpoint, BootstrapCheckpoint)]
    assert base.id in shown, "the new base replaces it"
    again = state.copy().apply_all(p.frames for p in found)
    assert again.rows == parts.truth().rows and again.regressions == []


def test_newer_runs_are_merged_while_a_merge_is_unfinished_and_its_inputs_stay(
    parts: Parts,
) -> None:
    inputs = parts.begin().inputs
    for _ in range(run_planner.MERGE_COUNT):
        parts.segment(1)
    records = parts.applier(APPLY_BYTES).apply()
    assert [one["kind"] for one in records][:1] == ["delta"]
    manifest = parts.store.read()
    assert manifest.unfinished is not None and manifest.unfinished.inputs == inputs
    assert {*inputs} <= {run.id for run in manifest.runs}
    parts.applier(APPLY_BYTES).retention_bytes = 1
    stingy = Applier(parts.store, ProcessMerges(), retention_bytes=1, grace_us=0, apply_bytes=1)
    stingy.apply()
    assert {*inputs} <= {run.id for run in parts.store.read().runs}
    while parts.applier().apply():
        pass
    assert state_of(parts.store, parts.log).rows == parts.truth().rows


def test_a_merge_starts_again_if_a_file_of_a_part_is_not_there(parts: Parts) -> None:
    first = parts.begin()
    (made, *_) = [file for file in first.files if file.folder not in first.inputs]
    shutil.rmtree(parts.store.run_folder(made.folder))
    while parts.store.read().unfinished:
        parts.applier().apply()
        assert parts.store.check() == []
    assert state_of(parts.store, parts.log).rows == parts.truth().rows


def test_a_copy_of_a_store_has_no_unfinished_merge(parts: Parts, tmp_path: Path) -> None:
    parts.begin()
    target = Store(tmp_path / "copy")
    target.create()
    copy_store(parts.store, target, tmp_path / "copy")
    assert target.read().unfinished is None and target.check() == []


def test_a_merge_starts_again_if_an_input_is_gone_or_its_buckets_are_others(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = parts.begin()
    monkeypatch.setattr(applier_module, "FILE_BYTES", 2 * FILE_BYTES)
    parts.applier(1).apply()
    other = parts.store.read().unfinished
    assert other is not None and other.plan != first.plan and other.tasks_done == 1
    assert not {f.name for f in first.files if f.folder not in other.inputs} & {
        f.name for f in other.files
    }
    assert files_on_disk(parts.store) >= files_of(parts.store.read())
    chain = parts.store.read().chain
    base = parts.store.read().base
    assert base is not None
    parts.store.note_dropped(None)  # as after a gap of the log
    parts.store.switch(lambda m: m.without(chain, 1))
    assert parts.store.read().unfinished is None
    parts.applier().apply()
    assert files_on_disk(parts.store) == files_of(parts.store.read()), "its files are swept"
    assert parts.store.read().runs == (base,)


def test_an_applier_that_lost_its_lease_in_a_part_takes_nothing_away_from_its_successor(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.begin()
    write = ProcessMerges.write
    successor: list[Mapping[str, Any]] = []

    def overtaken(self: ProcessMerges, *given: Any) -> Any:
        written = write(self, *given)
        if not successor:
            merge = run_planner.unfinished_merge(parts.store.read())
            assert merge is not None
            successor.append({})
            successor.append(parts.applier()._merge(merge, APPLY_BYTES)[0])
        return written

    monkeypatch.setattr(ProcessMerges, "write", overtaken)
    merge = run_planner.unfinished_merge(parts.store.read())
    assert merge is not None
    monkeypatch.setattr(Store, "switch", _refusing(Store.switch, successor))
    with pytest.raises(StoreError, match="overtaken"):
        parts.applier()._merge(merge, APPLY_BYTES)
    monkeypatch.undo()
    monkeypatch.setattr(applier_module, "FILE_BYTES", FILE_BYTES)
    while parts.store.read().unfinished:
        parts.applier().apply()
    assert parts.store.check() == []
    assert state_of(parts.store, parts.log).rows == parts.truth().rows


def _refusing(switch: Any, successor: list[Any]) -> Any:
    """What a fenced store does: the first switch is the successor's, the next one is refused."""
    count = itertools.count()

    def fenced(self: Store, change: Any) -> Manifest:
        if next(count):
            raise StoreError("overtaken")
        manifest: Manifest = switch(self, change)
        return manifest

    return fenced


def test_what_is_too_large_and_not_clustered_is_clustered_first() -> None:
    base = replace(run_of(0, 10, 10**9, RunKind.BASE), files=(clustered_file(10**9),))
    plain = [replace(run_of(at, at + 1, 400), kind=RunKind.SEGMENT) for at in range(10, 13)]
    manifest = Manifest(runs=(base, *plain))
    assert run_planner.next_merge(manifest, 1 << 40, full=True) == Merge(
        (base, *plain), RunKind.BASE
    )
    bounded = run_planner.next_merge(manifest, 1 << 40, full=True, most_bytes=900)
    assert bounded == Merge(tuple(plain[:2]), RunKind.DELTA)
    plain_base = Manifest(runs=(run_of(0, 10, 10**9, RunKind.BASE), *plain))
    whole = run_planner.next_merge(plain_base, 1 << 40, full=True, most_bytes=900)
    assert whole is not None and whole.kind is RunKind.BASE, "format 1 is rewritten in one merge"
    first = run_planner.next_merge(Manifest(runs=tuple(plain)), 1 << 40, most_bytes=900)
    assert first == Merge(tuple(plain[:2]), RunKind.BASE), "the first base is one of fewer runs"


def clustered_file(size: int) -> Any:
    return replace(run_of(0, 10, size).files[0], source_id=1)


def test_a_manifest_with_an_unfinished_merge_is_read_as_it_was_written() -> None:
    base = replace(run_of(0, 10, 100, RunKind.BASE), files=(clustered_file(100),))
    delta = replace(run_of(10, 20), files=(clustered_file(10),))
    file = replace(clustered_file(5), folder="c-1")
    unfinished = UnfinishedMerge(RunKind.BASE, (base.id, delta.id), "01234567", 1, 3, (file,))
    manifest = Manifest(runs=(base, delta), unfinished=unfinished)
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.unfinished_inputs == (base, delta)
    for wrong in (
        replace(unfinished, inputs=(delta.id, base.id)),
        replace(unfinished, inputs=(base.id, "gone")),
        replace(unfinished, files=(replace(file, folder=""),)),
    ):
        with pytest.raises(FormatError):
            Manifest.decode(replace(manifest, unfinished=wrong).encode())
    with pytest.raises(StoreError, match="gone"):
        manifest.with_unfinished(replace(unfinished, inputs=(base.id, "gone")))
    assert manifest.without((delta,), 1).unfinished is None


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_check_reports_damaged_files_of_an_unfinished_merge(parts: Parts, damage: str) -> None:
    unfinished = parts.begin()
    file = unfinished.files[0]
    path = parts.store.runs_folder / file.folder / file.name
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {"cut": content[:-9], "flipped": content[:middle] + b"\0\0" + content[middle + 2 :]}
    path.unlink() if damage == "missing" else path.write_bytes(damaged[damage])
    (problem,) = parts.store.check()
    assert problem.startswith("run unfinished-base") and file.name in problem
    path.write_bytes(content)
    assert parts.store.check() == []


def test_a_store_with_an_unfinished_merge_of_an_earlier_release_is_read_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "FILE_BYTES", FILE_BYTES)
    shutil.copytree(GOLDEN / "v2" / "unfinished", tmp_path / "shop")
    frames = (tmp_path / "shop" / "frames.bin").read_bytes()
    store = Store(tmp_path / "shop")
    assert store.check() == []
    manifest = store.read()
    before = manifest.unfinished
    assert before is not None and 0 < before.tasks_done < before.tasks
    log = HotLog(tmp_path / "shop" / "log")
    stop = manifest.stop
    assert stop is not None
    log.bind("shop", CLOCK, stop)
    truth = State().apply_all([frames])
    assert state_of(store, log).rows == truth.rows
    merge = run_planner.unfinished_merge(manifest)
    assert merge is not None
    Applier(store, ProcessMerges(), apply_bytes=1 << 20).apply()
    base = store.read().base
    assert base is not None and store.read().unfinished is None
    taken = {(file.folder, file.name) for file in base.files}
    assert {(file.folder, file.name) for file in before.files} <= taken, "it was continued"
    assert state_of(store, log).rows == truth.rows
    log.close()


def test_the_setting_is_the_bound_of_an_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[int] = []

    def apply(self: Applier, *, full: bool = False) -> list[Any]:
        bounds.append(self.apply_bytes)
        return []

    monkeypatch.setattr(Applier, "apply", apply)
    store = Store(tmp_path / "shop")
    store.create()
    for section in (BootstrapConfig(), BootstrapConfig.model_validate({"apply_bytes": "3MiB"})):
        assert apply_round(section, {"shop": store}, ProcessMerges()) == {}
    assert bounds == [applier_module.APPLY_BYTES, 3 << 20]


@over_histories()
def test_bounded_applies_give_what_unbounded_ones_give_at_any_position(
    memory_folder: Callable[[], Path], seed: int
) -> None:
    bench = RandomBench(memory_folder(), seed)
    bench.write(2)
    halves = 0
    for _ in range(12):
        bench.write(bench.rng.randrange(1, 4))
        segments.seal(bench.log, bench.store, 1)
        bench.apply()
        halves += bench.store.read().unfinished is not None
        state = state_of(bench.store, bench.log)
        assert state.rows == bench.truth(bench.history.position).rows
        assert state.regressions == []
        assert bench.store.check() == []
    other = memory_folder() / "unbounded"
    shutil.copytree(bench.store.folder, other)
    whole = Store(other)
    with patch.object(applier_module, "FILE_BYTES", 400):
        Applier(whole, ProcessMerges(), grace_us=0).apply(full=True)
        while Applier(bench.store, ProcessMerges(), grace_us=0, apply_bytes=900).apply():
            pass
    ours, theirs = bench.store.read().base, whole.read().base
    assert ours is not None and theirs is not None and ours.stop == theirs.stop
    assert raw(frames_of(bench.store, ours)) == raw(frames_of(whole, theirs))
    every = positions(bench)
    for _ in range(6):
        since, until = sorted(bench.rng.choices(every, k=2))
        until = bench.rng.choice((until, every[-1]))
        expected = compact(frames_between(bench.blocks, since, until), base=False)
        try:
            found, _ = answer(bench, RangeContent.NET, since, until)
        except LogTooYoung:
            continue
        assert sorted(raw(found)) == sorted(raw(expected))
    bench.close()
