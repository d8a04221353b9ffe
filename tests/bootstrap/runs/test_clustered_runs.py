"""Stores of both formats, and files that several runs name."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import run_planner
from databus.bootstrap.merging.bucket_tasks import taken_over
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import StoreError
from databus.common.filters.stream_filter import HashPartition, StreamFilter, matching_ids
from databus.common.frame import frame_format
from databus.common.frame.frame_format import iter_frames, read_frame
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
    write_run,
)
from tests.bootstrap.random_bench import RandomBench, in_process

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_a_store_of_an_earlier_release_is_read_and_becomes_clustered_by_its_next_merges(
    tmp_path: Path, version: str
) -> None:
    shutil.copytree(GOLDEN / version / "store", tmp_path / "shop")
    blocks = [(tmp_path / "shop" / "frames.bin").read_bytes()]
    store = Store(tmp_path / "shop")
    before = store.read()
    assert [run.kind.value for run in before.runs][:3] == ["base", "delta", "segment"]
    assert [run.is_clustered for run in before.runs[:2]] == [version != "v1"] * 2
    assert store.check() == []
    log = HotLog(tmp_path / "shop" / "log")
    stop = before.stop
    assert stop is not None
    log.bind("shop", CLOCK, stop)
    truth = State().apply_all(blocks)
    assert state_of(store, log).rows == truth.rows

    base = run_planner.next_merge(before, 1 << 30, full=True)
    assert base is not None
    rng = random.Random(1)
    for merge in (base, Merge(before.chain, RunKind.DELTA)):
        run = in_process(store, merge, rng)
        drop = merge.retired
        store.switch(lambda m, run=run, drop=drop: m.with_changes(add=run, drop=drop, now_us=1))
        store.collect(0, "cs", now_us=2)
    assert [run.kind.value for run in store.read().runs] == ["base", "delta"]
    assert all(run.is_clustered for run in store.read().runs if run.is_compacted)
    assert store.check() == []
    assert state_of(store, log).rows == truth.rows
    log.close()


def two_bases(store: Store) -> tuple[Run, Run]:
    """A base, and a later one that has taken over one of its files and has another of its own."""
    history = History(3)
    blocks = [history.block(20)]
    rows = compact(frames_between(blocks, START, history.position), base=True)
    old = write_run(store, RunKind.BASE, ORIGIN, history.position, rows, bits=0)
    assert len(old.files) > 1
    store.switch(lambda m: m.with_changes(add=old, now_us=1))
    stop = Position(history.position.scn + 1, 0)
    rows = [one for one in rows if one.source_id != old.files[0].source_id]
    made = write_run(store, RunKind.BASE, ORIGIN, stop, rows[-2:], bits=0)
    kept = [taken_over(old, old.files[0]), *(f for f in made.files)]
    kept.sort(key=lambda file: file.source_id or 0)
    new = Run(made.id, made.kind, ORIGIN, stop, tuple(kept), 1)
    store.switch(lambda m: m.with_changes(add=new, drop=(old,), now_us=1))
    return old, new


def names(store: Store, run: Run) -> set[str]:
    return {path.name for path in store.run_folder(run).iterdir()}


def test_a_file_that_a_later_run_has_taken_over_outlives_its_run(store: Store) -> None:
    old, new = two_bases(store)
    before = frames_of(store, new)
    assert store.collect(0, "cs", now_us=2) == [old.id]
    assert names(store, old) == {old.files[0].name}
    assert [bytes(one.bytes) for one in frames_of(store, new)] == [
        bytes(one.bytes) for one in before
    ]
    assert store.sweep("c") == []
    (store.run_folder(old) / "left-by-a-killed-process").touch()
    assert store.sweep("c") == []
    assert names(store, old) == {old.files[0].name}, "the rest is an orphan"

    store.switch(lambda m: m.without((new,), 3))
    assert store.collect(0, "cs", now_us=4) == [new.id]
    assert store.storage.run_ids() == []


def test_a_process_that_was_killed_between_switch_and_deletion_leaves_orphans(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = two_bases(store)
    monkeypatch.setattr(type(store), "_delete_unshared", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        store.collect(0, "cs", now_us=2)
    monkeypatch.undo()
    assert len(names(store, old)) == len(old.files)
    store.sweep("c")
    assert names(store, old) == {old.files[0].name}
    assert names(store, new) == {file.name for file in new.files if not file.folder}


def test_a_store_whose_base_has_no_file_of_its_own_is_not_taken_for_an_old_one(
    store: Store,
) -> None:
    _, new = two_bases(store)
    taken = Run("c-1-1-aa", RunKind.BASE, ORIGIN, new.stop, (new.files[0],), 1)
    store.switch(lambda m: m.with_changes(add=taken, drop=(new,), now_us=1))
    store.collect(0, "cs", now_us=2)
    (store.runs_folder / "c-2-2-bb").mkdir()
    assert store.sweep("c") == ["c-2-2-bb"]
    assert store.storage.run_ids() == [new.files[0].folder or new.id]


def test_damage_to_a_file_that_was_taken_over_is_named_with_its_place(store: Store) -> None:
    old, new = two_bases(store)
    path = store.run_folder(old) / old.files[0].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(StoreError, match=f"run {new.id}: .*{old.id}/{path.name} has"):
        list(store.open_run(new).row_groups())
    path.write_bytes(whole)


def test_a_row_of_another_source_or_bucket_and_rows_out_of_order_are_found(store: Store) -> None:
    history = History(3)
    rows = compact(frames_between([history.block(30)], START, history.position), base=True)
    run = write_run(store, RunKind.BASE, ORIGIN, history.position, rows, bits=1)
    first, *others = run.files
    wrong = {
        "source": (type(first)(**{**fields(first), "source_id": 1}), *others),
        "bucket": (type(first)(**{**fields(first), "bucket": "01010101"}), *others),
        "follows": (*others, first),
    }
    for message, files in wrong.items():
        opened = store.open_run(Run(run.id, run.kind, ORIGIN, run.stop, files, 1))
        with pytest.raises(StoreError, match=message):
            opened.check()
        opened.close()


def fields(file: object) -> dict[str, object]:
    return {name: getattr(file, name) for name in type(file).__slots__}


def test_a_reader_of_one_table_opens_the_files_of_that_table_alone(tmp_path: Path) -> None:
    bench = RandomBench(tmp_path / "shop", 5)
    bench.write(30)
    segments.seal(bench.log, bench.store, 1)
    chain = bench.store.read().chain
    run = in_process(bench.store, Merge(chain, RunKind.BASE), bench.rng)
    bench.store.switch(lambda m: m.with_changes(add=run, now_us=1))
    chosen = StreamFilter(sources=("shop.orders",))
    wanted = frame_format.source_id("shop.orders")
    others = [file for file in run.files if file.source_id != wanted]
    assert others and len(others) < len(run.files)
    for file in others:
        (bench.store.run_folder(run) / file.name).rename(tmp_path / file.name)
    stream = BootstrapStream(
        store=bench.store,
        log=bench.log,
        since=ORIGIN,
        target=run.stop,
        stream_filter=chosen,
        source_ids=matching_ids(SOURCES, chosen),
    )
    state = State().apply_all(piece.frames for piece in stream.pieces())
    expected = bench.truth(run.stop)
    assert state.rows == {key: row for key, row in expected.rows.items() if key[0] == wanted}
    assert stream.groups_skipped >= len(others)
    for file in others:
        (tmp_path / file.name).rename(bench.store.run_folder(run) / file.name)
    bench.close()


def test_readers_of_parts_of_the_hashes_open_the_files_of_their_buckets_alone(
    store: Store, log: HotLog
) -> None:
    history = History(3, keys=80)
    rows = compact(frames_between([history.block(120)], START, history.position), base=True)
    run = write_run(store, RunKind.BASE, ORIGIN, history.position, rows, bits=3)
    store.switch(lambda m: m.with_changes(add=run, now_us=1))
    log.restart_at(run.stop, {})
    found: list[bytes] = []
    for number in range(4):
        chosen = StreamFilter(partition=HashPartition(4, frozenset({number})))
        stream = BootstrapStream(
            store=store,
            log=log,
            since=ORIGIN,
            target=run.stop,
            stream_filter=chosen,
            source_ids=matching_ids(SOURCES, chosen),
        )
        others = [f for f in run.files if int(f.bucket[:2], 2) != number and int(f.bucket, 2)]
        paths = [store.run_folder(run) / file.name for file in others]
        for path in paths:
            path.rename(path.with_suffix(".away"))
        got = [bytes(one.bytes) for p in stream.pieces() for one in iter_frames(bytes(p.frames))]
        for path in paths:
            path.with_suffix(".away").rename(path)
        got = [one for one in got if not read_frame(one).is_control]
        assert got == [bytes(one.bytes) for one in clustered(rows) if one.key_hash >> 62 == number]
        assert stream.groups_skipped >= len(others) > 0
        found += got
    assert sorted(found) == sorted(bytes(one.bytes) for one in rows)


def test_a_checkpoint_inside_a_clustered_run_resumes_at_its_row(tmp_path: Path) -> None:
    bench = RandomBench(tmp_path / "shop", 6)
    bench.write(30)
    segments.seal(bench.log, bench.store, 1)
    run = in_process(bench.store, Merge(bench.store.read().chain, RunKind.BASE), bench.rng)
    bench.store.switch(lambda m: m.with_changes(add=run, now_us=1))
    rows = [bytes(one.bytes) for one in frames_of(bench.store, run)]
    pieces = list(bench.stream(ORIGIN).pieces())
    seen = 0
    for piece in pieces[:-1]:
        seen += len(list(iter_frames(bytes(piece.frames))))
        if piece.checkpoint is None or getattr(piece.checkpoint, "run", "") != run.id:
            continue
        rest = [
            bytes(one.bytes)
            for found in bench.stream(piece.checkpoint).pieces()
            for one in iter_frames(bytes(found.frames))
        ]
        assert rest == rows[seen:]
    assert seen == len(rows)
    bench.close()
