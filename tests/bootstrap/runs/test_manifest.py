"""The manifest: total reading, atomic switching, leases, orphans."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.bootstrap.runs.manifest import Manifest, Retired, Store
from databus.bootstrap.runs.open_run import OpenRun
from databus.bootstrap.runs.parquet_runs import Run, RunFile, RunKind
from databus.bootstrap.runs.run_ids import new_run_id, stop_of
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import FormatError, StoreBusy, StoreError
from tests.bootstrap.model import START, History, frames_between, write_run


def a_run(run_id: str, start: int, stop: int, kind: RunKind = RunKind.DELTA) -> Run:
    first = ORIGIN if kind is RunKind.BASE else Position(start, 0)
    file = RunFile("part-0.parquet", 3, 900, 300, Position(start, 1), Position(stop, 0))
    return Run(run_id, kind, first, Position(stop, 0), (file,), 5, 1, ((7, Position(stop, 0)),))


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    manifest = Manifest(
        version=3,
        runs=(a_run("c-b", 0, 9, RunKind.BASE), a_run("s-1", 5, 9), a_run("s-2", 9, 12)),
        retired=(Retired(a_run("s-0", 1, 5), 77),),
        applies=({"run": "c-b", "seconds": 1.5},),
    )
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.base is manifest.runs[0]
    assert manifest.stop == Position(12, 0)
    assert manifest.find("s-0") == manifest.retired[0].run


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_a_format_error(content: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(content)


@given(st.data())
def test_any_damage_is_found(data: st.DataObject) -> None:
    content = bytearray(Manifest(version=3, runs=(a_run("s-1", 5, 9),)).encode())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError):
        Manifest.decode(bytes(content))


def test_a_newer_format_is_refused_by_name() -> None:
    body = json.dumps({"v": 4}).encode()
    import google_crc32c

    with pytest.raises(FormatError, match="format 4, this program reads 1, 2, 3"):
        Manifest.decode(body + f"\n{google_crc32c.value(body):08x}\n".encode())


@pytest.mark.parametrize(
    ("runs", "invariant"),
    [
        ((a_run("s-1", 1, 5), a_run("s-2", 6, 9)), "I1"),
        ((a_run("s-1", 5, 5),), "I1"),
        ((a_run("c-1", 0, 5, RunKind.BASE), a_run("c-2", 0, 6, RunKind.BASE)), "I2"),
        ((a_run("c-1", 0, 50, RunKind.BASE), a_run("s-2", 6, 9)), "I2"),
        ((a_run("s-1", 1, 5), a_run("s-1", 5, 9)), "I3"),
    ],
)
def test_a_manifest_that_breaks_an_invariant_is_neither_read_nor_written(
    store: Store, runs: tuple[Run, ...], invariant: str
) -> None:
    broken = Manifest(runs=runs)
    with pytest.raises(FormatError, match=invariant):
        Manifest.decode(broken.encode())
    with pytest.raises(StoreError, match=invariant):
        store.switch(lambda manifest: replace(manifest, runs=runs))
    assert store.read() == Manifest()


def test_only_one_process_has_a_lease(store: Store) -> None:
    with store.lease("applier"):
        with pytest.raises(StoreBusy, match=f"process {os.getpid()} is the applier"):
            with store.lease("applier"):
                pass
        with store.lease("writer"):
            pass
    with store.lease("applier"):
        pass


def test_switches_are_numbered(store: Store) -> None:
    assert store.switch(lambda manifest: manifest).version == 1
    assert store.switch(lambda manifest: manifest).version == 2


def make_runs(store: Store, count: int = 3) -> list[Run]:
    history = History(1)
    made = []
    at = START
    for _ in range(count):
        block = history.block(4)
        frames = frames_between([block], at, history.position)
        run = write_run(store, RunKind.SEGMENT, at, history.position, frames)
        store.switch(lambda manifest, run=run: manifest.with_changes(add=run, now_us=1))
        made.append(run)
        at = history.position
    return made


def test_runs_that_retired_are_retained_for_their_grace_and_then_deleted(store: Store) -> None:
    first, second, third = make_runs(store)
    both = write_run(store, RunKind.DELTA, first.start, second.stop, [])
    store.switch(lambda manifest: manifest.with_changes(add=both, drop=(first, second), now_us=100))
    assert store.collect(50, "cs", now_us=149) == []
    assert store.read().find(first.id) == first
    assert sorted(store.collect(50, "cs", now_us=150)) == sorted([first.id, second.id])
    assert store.read().find(first.id) is None
    assert {path.name for path in store.runs_folder.iterdir()} == {both.id, third.id}


def test_what_was_merged_of_runs_that_have_retired_meanwhile_is_not_named(store: Store) -> None:
    """The first base retires nothing, and would be alone before a log that restarted."""
    chain = tuple(make_runs(store))
    base = write_run(store, RunKind.BASE, ORIGIN, chain[-1].stop, [])
    store.switch(lambda manifest: manifest.without(chain, 1))
    with pytest.raises(StoreError, match="not all in manifest 4"):
        store.switch(lambda manifest: manifest.with_changes(add=base, made_of=chain, now_us=1))
    assert store.read().runs == ()


def test_only_orphans_of_the_own_role_are_swept(store: Store) -> None:
    make_runs(store)
    for name in ("s-1-1-aa", "c-1-1-aa", "keep-me"):
        (store.runs_folder / name).mkdir()
    assert store.sweep("c") == ["c-1-1-aa"]
    assert store.sweep("s") == ["s-1-1-aa"]
    assert (store.runs_folder / "keep-me").exists()
    assert len(list(store.runs_folder.iterdir())) == 4


def test_a_segment_that_is_just_being_written_is_not_collected(store: Store) -> None:
    first, second = make_runs(store, 2)
    store.switch(lambda manifest: manifest.without((first,), 100))
    being_written = write_run(store, RunKind.SEGMENT, second.stop, Position(10**6, 0), [])
    assert store.collect(50, "cs", now_us=149) == []
    assert store.collect(50, "cs", now_us=150) == [first.id]
    assert store.run_folder(being_written).exists()


def test_damage_to_a_run_is_named_with_run_and_file(store: Store) -> None:
    run = make_runs(store, 1)[0]
    path = store.run_folder(run) / run.files[0].name
    whole = path.read_bytes()

    path.write_bytes(whole[:-5])
    with pytest.raises(StoreError, match=rf"{run.id}.*the manifest states {len(whole)}"):
        list(OpenRun(run, store.run_folder(run)).row_groups())

    path.write_bytes(whole[:-4] + b"torn")
    with pytest.raises(StoreError, match=rf"{run.id}.*(cannot be read|another CRC)"):
        list(OpenRun(run, store.run_folder(run)).row_groups())

    path.unlink()
    with pytest.raises(StoreError, match=rf"{run.id}.*No such file"):
        list(OpenRun(run, store.run_folder(run)).row_groups())
    assert len(store.check()) == 1

    middle = bytearray(whole)
    middle[len(whole) // 3] ^= 0xFF
    path.write_bytes(middle)
    assert len(store.check()) == 1, "a flipped bit inside a page is found"
    path.write_bytes(whole)


def test_run_ids_contain_where_the_run_ends() -> None:
    rng = random.Random(1)
    run_id = new_run_id(RunKind.BASE, Position(77, 2**32 - 1), rng.randbytes)
    assert run_id.startswith("c-")
    assert stop_of(run_id) == Position(77, 2**32 - 1)
    assert stop_of("log") is None
    assert stop_of("c-1-2-3") is None
