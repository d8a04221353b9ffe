"""A manifest that lacks what the log has dropped: every process refuses it and deletes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import log_gaps, log_handover, segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.reading.frame_ranges import FrameRange, at_time, state_from
from databus.bootstrap.runs.manifest import DROPPED, Manifest, Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.bootstrap.runs.run_storage import MANIFEST
from databus.bootstrap.runs.s3_storage import S3Storage
from databus.common.checkpoint import Position
from databus.common.errors import StoreError
from databus.common.storage.bucket import open_bucket
from tests.bootstrap.model import CLOCK, START, History, State, state_of
from tests.bootstrap.runs.test_s3_store import merged

NO_SPARK: Any = None
"""Replaces Spark: an applier that refuses does not come to it."""


class Bench:
    """A log, and a store of two merged segments and one that came after them."""

    def __init__(self, folder: Path, store: Store, elsewhere: Store) -> None:
        self.store, self.elsewhere = store, elsewhere
        for one in (store, elsewhere):
            one.create()
        self.log = HotLog(folder / "log")
        self.log.bind("shop", CLOCK, START)
        self.history = History(3)
        self.blocks: list[bytes] = []
        self.older: bytes | None = None
        for number in range(3):
            self.write()
            segments.seal(self.log, store, 1)
            if number == 1:
                chain = store.read().chain
                run = merged(store, Merge(chain, RunKind.DELTA))
                store.switch(
                    lambda m, run=run, gone=chain: m.with_changes(add=run, drop=gone, now_us=1)
                )
                self.older = manifest_of(store)
        self.write()

    def write(self) -> None:
        """Some windows come from the relay."""
        self.blocks.append(self.history.block(5))
        self.log.append(self.blocks[-1], 1)

    def stream(self, store: Store) -> State:
        """What a new reader ends with."""
        return state_of(store, self.log)

    def range(self, store: Store) -> None:
        """The state now is opened."""
        until = self.log.state().window
        FrameRange(store, self.log, state_from(until, None), until, every_change=False).close()


def manifest_of(store: Store) -> bytes | None:
    """The manifest's bytes."""
    found = store.storage.read_manifest()
    return found.content if found else None


def put_manifest(store: Store, content: bytes | None) -> None:
    """What an operator does to it."""
    storage = store.storage
    if isinstance(storage, S3Storage):
        key = storage.prefix + MANIFEST
        storage.bucket.replace(key, content) if content else storage.bucket.delete([key])
    elif content:
        store.manifest_path.write_bytes(content)
    else:
        store.manifest_path.unlink()


@pytest.fixture(params=["folder", "s3"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The same in a folder and on S3; whole again when its test ends."""
    stores = [Store(tmp_path / "shop"), Store(tmp_path / "elsewhere")]
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        buckets = [open_bucket(server.empty_prefix(), server.options()) for _ in stores]
        stores = [Store(S3Storage(*bucket)) for bucket in buckets]
    bench = Bench(tmp_path / "shop", *stores)
    yield bench
    segments.finish(bench.log, bench.store, 1)
    assert bench.stream(bench.store).rows == State().apply_all(bench.blocks).rows
    assert bench.store.check() == []
    bench.log.check()
    bench.log.close()


@pytest.mark.parametrize("what", ["deleted", "older", "elsewhere"])
def test_writer_server_and_applier_refuse_by_name_and_resume_when_it_is_put_back(
    bench: Bench, what: str
) -> None:
    newest, ids = manifest_of(bench.store), bench.store.storage.run_ids()
    store = bench.elsewhere if what == "elsewhere" else bench.store
    if what != "elsewhere":
        put_manifest(store, bench.older if what == "older" else None)
    before = bench.log.state()
    requests: list[Callable[[], Any]] = [
        lambda: segments.finish(bench.log, store, 9),
        lambda: segments.seal(bench.log, store, 9),
        lambda: bench.stream(store),
        lambda: bench.range(store),
        lambda: at_time(store, bench.log, 1),
    ]
    if what != "elsewhere":  # Without the log there is nothing to see, and nothing to delete.
        requests.append(lambda: Applier(store, NO_SPARK).apply())
        requests.append(lambda: store.sweep("cs"))
        assert any("Restore the newest" in one for one in store.check())
    upto = str(before.start)
    for request in requests:
        with pytest.raises(StoreError, match="Restore the newest manifest") as error:
            request()
        assert f"everything up to {upto}" in error.value.message
        assert f"{store.url}/manifest.json" in error.value.message
        assert ("is not there" in error.value.message) == (what != "older")
    assert log_handover.problems(bench.log.folder / "nothing", store) == []
    assert set(bench.store.storage.run_ids()) >= set(ids)
    assert bench.log.state() == before
    put_manifest(bench.store, newest)


def test_an_older_manifest_whose_runs_are_gone_deletes_none_of_the_newer(bench: Bench) -> None:
    """It reaches as far as the newest: the log cannot distinguish them."""
    segments.seal(bench.log, bench.store, 1)
    older, chain = manifest_of(bench.store), bench.store.read().chain
    run = merged(bench.store, Merge(chain, RunKind.DELTA))
    bench.store.switch(lambda m: m.with_changes(add=run, drop=chain, now_us=1))
    assert len(bench.store.collect(0, "cs", now_us=2)) == 5
    newest = manifest_of(bench.store)
    put_manifest(bench.store, older)
    with pytest.raises(StoreError, match=rf"names {chain[0].id}.*1 runs that it does not name"):
        Applier(bench.store, NO_SPARK).apply()
    assert bench.store.storage.run_ids() == [run.id]
    put_manifest(bench.store, newest)
    assert bench.store.sweep("c") == []


def test_merged_runs_without_a_manifest_are_retained_though_nothing_was_noted(bench: Bench) -> None:
    newest, ids = manifest_of(bench.store), bench.store.storage.run_ids()
    put_manifest(bench.store, None)
    bench.store.storage.delete_note(DROPPED)
    with pytest.raises(StoreError, match="is missing, while there are 1 runs"):
        Applier(bench.store, NO_SPARK).apply()
    assert bench.store.storage.run_ids() == ids
    put_manifest(bench.store, newest)


def test_a_log_that_begins_anywhere_needs_no_run(log: HotLog, store: Store) -> None:
    assert segments.finish(log, store, 1) == Manifest()
    assert store.dropped() is None
    assert log_handover.read(log, store) == (START, Manifest())
    log.append(History(1).block(3), 1)
    orphan = segments._write_segment(log, store, START, log.state().window, 1)
    assert orphan is not None
    segments.finish(log, store, 1)
    assert not store.run_folder(orphan).exists(), "the first seal of all was interrupted"


@pytest.mark.parametrize("ahead", [0, 50])
def test_behind_a_gap_the_runs_retire_and_the_log_needs_them_no_more(
    log: HotLog, store: Store, ahead: int
) -> None:
    log.append(History(1).block(3), 1)
    run = segments.seal(log, store, 1)
    assert run is not None
    assert store.dropped() == run.stop
    last = log.state().last
    log_gaps.restart_behind(log, last, Position(last.scn + ahead, last.seq), 1)
    assert log_handover.read(log, store)[1].runs == (run,), "until the writer has finished"
    assert segments.finish(log, store, 2).runs == ()
    assert store.dropped() is None
    assert log_handover.read(log, store)[1].runs == ()
    assert store.collect(0, "cs", now_us=3) == [run.id]
    assert store.sweep("cs") == []


def test_a_log_without_a_noted_origin_continues_and_is_guarded_by_what_it_has(
    log: HotLog, store: Store
) -> None:
    log.put_note("origin", None)
    history = History(1)
    log.append(history.block(3), 1)
    assert segments.finish(log, store, 1).runs == ()
    older = Manifest()
    for _ in range(2):
        older = store.read()
        assert segments.seal(log, store, 1) is not None
        log.append(history.block(3), 1)
        assert segments.finish(log, store, 1).stop == log.state().start
    newest = store.manifest_path.read_bytes()
    store.manifest_path.write_bytes(older.encode())
    with pytest.raises(StoreError, match=f"whose runs end at {older.stop}"):
        segments.finish(log, store, 1)
    store.manifest_path.unlink()
    with pytest.raises(StoreError, match="is not there"):
        segments.finish(log, store, 1)
    store.storage.delete_note(DROPPED)
    log.put_note("seeding", {"shop.orders": {"state": "seeded", "end": START.to_json()}})
    with pytest.raises(StoreError, match="is not there"):
        segments.finish(log, store, 1)
    store.manifest_path.write_bytes(newest)
    assert segments.finish(log, store, 1).stop == log.state().start


def test_sealing_between_two_looks_is_no_loss(log: HotLog, store: Store) -> None:
    history = History(1)

    class Sealing(Store):
        """Another process seals after each look at the manifest, twice."""

        left = 2

        def read(self) -> Manifest:
            found = super().read()
            if self.left:
                self.left -= 1
                log.append(history.block(3), 1)
                segments.seal(log, store, 1)
            return found

    assert log_handover.read(log, Sealing(store.folder))[0] == log.state().start
    assert Sealing(store.folder).sweep("cs") == []


@pytest.mark.parametrize("content", [b"", b"\0" * 16, b"[]", b'{"upto": [1]}', b'{"upto": "x"}'])
def test_a_note_that_a_power_loss_tore_stops_nothing(store: Store, content: bytes) -> None:
    store.storage.write_note(DROPPED, content)
    assert store.dropped() is None
    assert store.sweep("cs") == []
