"""The lists of large runs in files of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import applier as applier_module
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.processes.log_restore import copy_store
from databus.bootstrap.runs import file_lists
from databus.bootstrap.runs.file_lists import LIST_NAME
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.common.errors import FormatError, StoreError
from tests.bootstrap.model import History, State, compact, frames_between, state_of, write_run


class Listed:
    """A store whose compacted runs have lists of their own."""

    def __init__(self, store: Store, log: HotLog) -> None:
        self.store, self.log = store, log
        self.history = History(40, keys=100)
        self.blocks: list[bytes] = []

    def apply(self, count: int = 1) -> None:
        for _ in range(count):
            self.blocks.append(self.history.block(20))
            self.log.append(self.blocks[-1], 1)
            segments.seal(self.log, self.store, 1)
        Applier(self.store, ProcessMerges(), grace_us=0).apply()

    def lists(self) -> set[str]:
        return {path.parent.name for path in self.store.runs_folder.glob(f"*/{LIST_NAME}")}


@pytest.fixture
def listed(store: Store, log: HotLog, monkeypatch: pytest.MonkeyPatch) -> Listed:
    monkeypatch.setattr(file_lists, "LISTED_APART", 2)
    monkeypatch.setattr(applier_module, "FILE_BYTES", 400)
    return Listed(store, log)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lists that are read, by their folders."""
    found: list[str] = []
    opening = LocalFiles.open

    def noted(files: LocalFiles, name: str) -> Any:
        if name == LIST_NAME:
            found.append(files.folder.name)
        return opening(files, name)

    monkeypatch.setattr(LocalFiles, "open", noted)
    return found


def document_of(store: Store) -> Any:
    return json.loads(store.manifest_path.read_bytes().partition(b"\n")[0])


def test_a_run_with_many_files_has_its_list_apart_and_goes_with_it(listed: Listed) -> None:
    for count in (1, 1, 4, 1):
        listed.apply(count)
        manifest = listed.store.read()
        long = {run.id for run in manifest.runs if len(run.files) > 2}
        assert listed.lists() == long and long
        document = document_of(listed.store)
        assert document["v"] == 3
        assert {run["id"] for run in document["runs"] if "files" not in run} == long
        assert Store(listed.store.folder).read() == manifest
        state = state_of(listed.store, listed.log)
        assert state.rows == State().apply_all(listed.blocks).rows


def test_a_store_of_small_runs_is_one_that_earlier_releases_read(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lists, "LISTED_APART", 256)
    listed.apply()
    assert document_of(listed.store)["v"] == 2 and listed.lists() == set()


def test_a_process_reads_each_list_once_and_a_switch_writes_none_again(
    listed: Listed, opened: list[str]
) -> None:
    listed.apply(5)
    long = listed.lists()
    assert len(long) == 2, "base and delta"
    written = {path: path.stat().st_mtime_ns for path in listed.store.runs_folder.glob("*/*.json")}
    opened.clear()
    other = Store(listed.store.folder)
    for _ in range(3):
        other.read()
        other.switch(lambda manifest: manifest)
    assert sorted(opened) == sorted(long)
    assert written == {path: path.stat().st_mtime_ns for path in written}


def test_a_list_that_is_damaged_or_gone_is_named(listed: Listed) -> None:
    listed.apply()
    (run_id,) = listed.lists()
    path = listed.store.runs_folder / run_id / LIST_NAME
    content = path.read_bytes()
    for damage in (content[:-5], b"x" + content[1:], b""):
        path.write_bytes(damage)
        with pytest.raises(FormatError, match=rf"{run_id}/{LIST_NAME}"):
            Store(listed.store.folder).read()
    path.unlink()
    with pytest.raises(StoreError, match=rf"file list of run {run_id}"):
        Store(listed.store.folder).read()
    path.write_bytes(content)


def test_a_reader_whose_manifest_is_replaced_before_it_has_read_a_list_reads_the_new_one(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed.apply()
    before = listed.store.storage.read_manifest()
    listed.apply()
    reader = Store(listed.store.folder)
    read = reader.storage.read_manifest
    stale = iter([before])
    monkeypatch.setattr(reader.storage, "read_manifest", lambda: next(stale, None) or read())
    assert reader.read() == listed.store.read()


def test_a_copied_store_has_the_lists(listed: Listed, tmp_path: Path) -> None:
    listed.apply(5)
    target = Store(tmp_path / "copy")
    target.create()
    copy_store(listed.store, target, tmp_path / "copy")
    assert Store(tmp_path / "copy").read().runs == listed.store.read().runs
    assert target.check() == []


def test_a_list_is_there_before_the_manifest_names_it(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed.apply()
    stop = listed.store.read().chain[-1].stop
    rows = compact(
        frames_between(listed.blocks, listed.store.read().chain[0].start, stop), base=True
    )
    run = write_run(listed.store, RunKind.BASE, stop, stop, rows, bits=3)
    (base,) = [one for one in listed.store.read().runs if one.kind is RunKind.BASE]
    monkeypatch.setattr(
        listed.store.storage, "replace_manifest", lambda *_: pytest.fail("killed before it")
    )
    with pytest.raises(pytest.fail.Exception):
        listed.store.switch(lambda m: m.with_changes(add=run, drop=(base,), now_us=1))
    assert run.id in listed.lists() and listed.store.read().find(run.id) is None
    monkeypatch.undo()
    assert listed.store.sweep("c") == [run.id]
