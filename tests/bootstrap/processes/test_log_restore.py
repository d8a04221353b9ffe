"""A log is restored from its runs: it knows what it knew, and continues where they end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import log_gaps, segments
from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.processes.log_restore import Restored, restore_logs
from databus.bootstrap.processes.writer_leases import writer_leases
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.checkpoint import Position
from databus.common.config import BootstrapConfig
from databus.common.errors import StoreBusy, StoreError
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.bootstrap.model import CLOCK, START, History, State, state_of
from tests.bootstrap.runs.test_s3_store import merged

FIRST = SourceSchema("shop.pages", (Column("id", Kind.INT, nullable=False),), ("id",))
OTHER = SourceSchema(
    "shop.pages", (*FIRST.columns, Column("text", Kind.STRING, nullable=True)), ("id",)
)


class Machine:
    """A store of merged runs and segments, the log beside it, and windows that were not sealed."""

    def __init__(self, config: BootstrapConfig) -> None:
        self.config = config
        self.folder = Path(config.data_dir) / "shop"
        self.store = Stores(config).store("shop")
        Store(self.folder).create()
        self.log = HotLog(self.folder / "log")
        self.log.bind("shop", CLOCK, START)
        self.log.add_schemas([FIRST, OTHER])
        self.log.add_schemas([FIRST])  # The table has returned to it.
        self.history = History(3)
        self.blocks: list[bytes] = []
        for number in range(4):
            self.write()
            segments.seal(self.log, self.store, 1)
            if number == 1:
                chain = self.store.read().chain
                run = merged(self.store, Merge(chain, RunKind.DELTA))
                self.store.switch(
                    lambda m, run=run, gone=chain: m.with_changes(add=run, drop=gone, now_us=1)
                )
        self.sealed = self.history.position
        self.write()

    def write(self) -> None:
        """Some windows come from the relay."""
        self.blocks.append(self.history.block(5))
        self.log.append(self.blocks[-1], 1)

    def note(self, **notes: Any) -> None:
        """The log notes something, and its record follows."""
        for name, note in notes.items():
            self.log.put_note(name, note)
        segments.finish(self.log, self.store, 1)

    def lose(self) -> None:
        """Its disk is gone; a store on it has been copied before."""
        self.log.close()
        if not self.config.store:
            shutil.copytree(self.config.data_dir, self.copy, dirs_exist_ok=True)
            shutil.rmtree(self.copy / "shop" / "log")
        shutil.rmtree(self.config.data_dir)

    @property
    def copy(self) -> Path:
        """The folder of the copy."""
        return Path(self.config.data_dir).with_name("copy")

    def restore(self) -> list[Restored]:
        """As ``databus restore`` does it, on an empty disk."""
        return list(restore_logs(self.config, None if self.config.store else self.copy))

    def restored(self) -> HotLog:
        """The log after a restore; its owner closes it."""
        self.restore()
        return HotLog(self.folder / "log")


@pytest.fixture(params=["folder", "s3"])
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The store in a folder, or on S3."""
    config = BootstrapConfig(data_dir=tmp_path / "data")
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        changes = {"store": server.empty_prefix(), "s3": server.options(lease_ttl=60)}
        config = config.model_copy(update=changes)
    machine = Machine(config)
    yield machine
    machine.log.close()
    assert Stores(config).store("shop").check() == []


def test_the_log_begins_where_the_runs_end_and_the_rest_comes_from_the_relay(
    machine: Machine,
) -> None:
    end = machine.sealed.to_json()
    seeded = {"state": "seeded", "dump": "d1", "rows": 7, "end": end}
    machine.note(seeding={"shop.pages": seeded})
    before = machine.store.read()
    machine.lose()
    assert machine.restore() == [Restored("shop", machine.sealed, 3, ())]
    assert machine.restore() == [Restored("shop", machine.sealed, 3, ())], "once more is the same"
    log, store = HotLog(machine.folder / "log"), Stores(machine.config).store("shop")
    try:
        state = log.state()
        assert (state.database, state.clock) == ("shop", CLOCK)
        assert state.start == state.window == state.last == machine.sealed
        assert log.schemas() == [FIRST, OTHER, FIRST]
        assert log.note("seeding") == {"shop.pages": seeded}
        assert log.note("origin") == START.to_json()
        manifest = store.read()
        assert manifest.runs == before.runs and manifest.retired == before.retired
        segments.finish(log, store, 2)
        assert state_of(store, log).rows == State().apply_all(machine.blocks[:-1]).rows
        for block in machine.blocks[-2:]:
            log.append(block, 2)
        assert state_of(store, log).rows == State().apply_all(machine.blocks).rows
        segments.seal(log, store, 2)
        assert state_of(store, log).rows == State().apply_all(machine.blocks).rows
        log.check()
    finally:
        log.close()


def test_sources_whose_last_rows_were_not_sealed_are_not_whole(machine: Machine) -> None:
    later = machine.history.position.to_json()
    gap = {"from": {"scn": 1, "seq": 0}, "to": {"scn": 2, "seq": 0}, "at_us": 1, "bridged": True}
    ahead = {**gap, "from": later, "to": {"scn": 10**6, "seq": 0}}
    machine.note(
        seeding={
            "shop.whole": {"state": "seeded", "dump": "d1", "end": machine.sealed.to_json()},
            "shop.dumped": {"state": "seeded", "dump": "d2", "rows": 5, "end": later},
            "shop.repaired": {"state": "seeded", "end": later},
            "shop.running": {"state": "dumping", "dump": "d3", "rows": 3, "tries": 2},
        },
        gaps=[{**gap, "repaired_us": 4}, ahead],
        name="bootstrap-12345678",
    )
    machine.lose()
    log = machine.restored()
    try:
        assert log.note("seeding") == {
            "shop.whole": {"state": "seeded", "dump": "d1", "end": machine.sealed.to_json()},
            "shop.dumped": {"state": "dumping", "dump": "d2", "rows": 0, "end": later},
            "shop.repaired": {"state": "repairing"},
            "shop.running": {"state": "dumping", "dump": "d3"},
        }
        assert log.note("gaps") == [gap], "what was repaired after the end is repaired again"
        assert log.note("name") == "bootstrap-12345678"
        (found,) = log_gaps.gaps_of(log)
        assert not found.is_repaired
    finally:
        log.close()


def test_a_log_with_content_is_never_overwritten(machine: Machine) -> None:
    before = machine.log.state()
    machine.log.close()
    config = machine.config
    copy = None if config.store else Path(config.data_dir).with_name("copy")
    if copy is not None:
        shutil.copytree(config.data_dir, copy)
        shutil.rmtree(machine.folder / "runs")
        machine.store.manifest_path.unlink()
    with pytest.raises(StoreError, match=r"has runs or a log already|has content: shop up to"):
        list(restore_logs(config, copy))
    log = HotLog(machine.folder / "log")
    assert log.state() == before
    log.close()
    if copy is not None:
        shutil.rmtree(config.data_dir)
        copy.rename(config.data_dir)


def test_a_restored_log_that_has_gone_on_is_content_too(machine: Machine) -> None:
    machine.lose()
    log = machine.restored()
    log.append(machine.blocks[-1], 2)
    log.close()
    with pytest.raises(StoreError, match="has content"):
        machine.restore()


def test_what_cannot_be_restored_is_refused_with_its_reason(machine: Machine) -> None:
    store, manifest = machine.store, machine.store.read()
    with (
        writer_leases(machine.folder, store),
        pytest.raises(StoreBusy, match="is the writer of"),
    ):
        list(restore_logs(machine.config))
    machine.log.close()
    shutil.rmtree(machine.folder / "log")

    def refused(reason: str) -> None:
        with pytest.raises(StoreError, match=reason):
            list(restore_logs(machine.config))
        assert not (machine.folder / "log" / "data.mdb").exists() or is_new()

    def is_new() -> bool:
        log = HotLog(machine.folder / "log")
        try:
            return log.is_new()
        finally:
            log.close()

    store.switch(lambda found: replace(found, record=""))
    refused("names no record of the log: an earlier release wrote it")
    store.switch(lambda found: replace(found, record=manifest.record))
    file = manifest.chain[-1].files[0].name
    files = store.files(manifest.chain[-1])
    with files.open(file) as reader:
        content = reader.read()
    files.delete(file)
    refused(f"lacks 1 files that manifest.json .* names, such as .*/{file}")
    with files.create(file) as writer:
        writer.write(content)
    store.note_dropped(Position(10**6, 0))
    refused("Restore the newest manifest.json")
    store.note_dropped(machine.sealed)
    with pytest.raises(StoreError, match="has no runs of other: nothing was sealed yet"):
        list(restore_logs(machine.config.model_copy(update={"databases": ("other",)})))
    assert [one.stop for one in restore_logs(machine.config)] == [machine.sealed]


def test_one_database_that_cannot_be_restored_does_not_stop_the_others(tmp_path: Path) -> None:
    config = BootstrapConfig(data_dir=tmp_path / "data", databases=("absent", "shop"))
    machine = Machine(config)
    machine.lose()
    done = []
    with pytest.raises(StoreError, match="no runs of absent"):
        for one in restore_logs(config, machine.copy):
            done.append(one.database)
    assert done == ["shop"]
    with pytest.raises(StoreError, match=r"holds no database: no manifest\.json is there"):
        list(restore_logs(BootstrapConfig(data_dir=tmp_path / "nothing")))
