"""Merges without Java: in the applier's process, with the files and rows that Spark makes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import applier as applier_module
from databus.bootstrap.merging import process_merges
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.processes.bootstrap_processes import run_applier
from databus.bootstrap.reading.frame_ranges import FrameRange, state_from
from databus.bootstrap.reading.split_planner import SplitRequest, plan_splits
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.bootstrap.runs.run_storage import LocalStorage
from databus.client.splits.split_planning import PlannedSplit
from databus.client.splits.split_reader import SplitReader
from databus.client.tables.table_reader import Range, TableAddress, TableReader
from databus.common import config as configuration
from databus.common.checkpoint import Position
from databus.common.config import BootstrapConfig
from databus.common.errors import MissingDependency, StoreError
from databus.common.frame.frame_format import iter_frames
from tests.bootstrap.model import (
    CLOCK,
    SOURCES,
    START,
    History,
    State,
    clustered,
    compact,
    state_of,
)
from tests.support.s3_server import S3Server
from tests.support.spark_session import spark_session
from tests.support.waiting import PATIENCE, eventually_sync

PROGRAM = "from databus.cli.main import app; app()"
NO_JAVA = "there is no Java: the applier merges in its own process"
S3_CONFIG = """
[bootstrap]
data_dir = "{folder}/data"
store = "{store_url}"

[bootstrap.s3]
endpoint = "{endpoint}"
region = "us-east-1"
access_key = "test"
secret_key = "not-a-secret"
"""


def filled(folder: Path, store: Store, seed: int, count: int = 5) -> tuple[HotLog, list[bytes]]:
    """The log of a store with ``count`` segments, and their blocks."""
    log = HotLog(folder / "log")
    log.bind("shop", CLOCK, START)
    history = History(seed, keys=60)
    blocks = [history.block(12) for _ in range(count)]
    for block in blocks:
        log.append(block, 1)
        segments.seal(log, store, 1)
    return log, blocks


def rows_of(store: Store) -> list[tuple[Any, ...]]:
    """Of each file of the compacted runs what it has, rows included."""
    found = []
    for run in store.read().runs:
        for file in run.files if run.is_compacted else ():
            files = store.files(file.folder or run.id)
            with files.open(file.name) as source:
                table = pq.ParquetFile(source).read()
            found.append((run.kind, run.start, run.stop, file.source_id, file.bucket, table))
    return found


def read_from_files(store: Store, log: HotLog, at: Position) -> Iterator[bytes]:
    """The frames of the state at the base's end, as readers get them that open its files."""
    request = SplitRequest(clock=CLOCK, since=None, is_state=True, names=SOURCES, least=4)
    plan = plan_splits(
        store,
        request,
        lambda may_open: FrameRange(
            store, log, state_from(at, None), at, every_change=False, may_open=may_open
        ),
    )
    assert plan.files_end == plan.until == at
    for split in plan.splits:
        whole = Range("state", None, at, CLOCK)
        planned = PlannedSplit(
            split, whole, plan.storage, plan.lease, plan.lease_s, whole, b"", None
        )
        for table in SplitReader(TableReader(TableAddress("shop", split.source)), planned).tables():
            yield from table.column("frame").to_pylist()


@pytest.mark.parametrize("storage", ["folder", pytest.param("s3", marks=pytest.mark.slow)])
def test_applies_give_what_one_compaction_of_everything_gives(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "FILE_BYTES", 600)
    monkeypatch.setattr(process_merges, "PIECE_BYTES", 700)
    monkeypatch.setattr(process_merges, "BATCH_BYTES", 300)
    store = Store(tmp_path / "data" / "shop")
    if storage == "s3":
        s3: S3Server = request.getfixturevalue("s3")
        file = tmp_path / "databus.toml"
        url = s3.empty_prefix()
        file.write_text(S3_CONFIG.format(folder=tmp_path, store_url=url, endpoint=s3.url))
        section = configuration.load(file).bootstrap
        assert section is not None
        store = Stores(section).store("shop")
    store.create()
    log, blocks = filled(tmp_path / "data" / "shop", store, 11, 0)
    history = History(12, keys=60)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    applier = Applier(store, ProcessMerges(scratch), grace_us=0)
    kinds: set[str] = set()
    for count in (2, 1, 5, 1):
        for _ in range(count):
            blocks.append(history.block(8))
            log.append(blocks[-1], 1)
            segments.seal(log, store, 1)
        kinds |= {str(record["kind"]) for record in applier.apply()}
        base = store.read().base
        assert base is not None and base.is_clustered
        frames = [one for block in blocks for one in iter_frames(block)]
        expected = [bytes(one.bytes) for one in clustered(compact(frames, base=True))]
        bases = [row[-1] for row in rows_of(store) if row[0] is RunKind.BASE]
        assert [value for one in bases for value in one["frame"].to_pylist()] == expected
        assert store.check() == []
    assert kinds == {"base", "delta"} and len(bases) > 4
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")
    assert sorted(read_from_files(store, log, base.stop)) == sorted(expected)
    assert state_of(store, log).rows == State().apply_all(blocks).rows
    assert list(scratch.iterdir()) == []
    log.close()


def test_a_damaged_input_stops_the_merge_and_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "shop")
    store.create()
    log, _ = filled(tmp_path / "shop", store, 1, 1)
    (run,) = store.read().chain
    path = store.run_folder(run) / run.files[0].name
    whole = path.read_bytes()
    frame = whole.index(b"\x05\xdb")
    for damage in (whole[: len(whole) // 2], whole[:frame] + b"x" + whole[frame + 1 :]):
        path.write_bytes(damage)
        with pytest.raises(StoreError, match=rf"merging .*{run.id}.* failed|{run.id}"):
            Applier(store, ProcessMerges()).apply()
        assert store.read().runs == (run,)
        assert [one.name for one in store.runs_folder.iterdir()] == [run.id]
    path.write_bytes(whole)
    log.close()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_applier_without_java_makes_the_files_that_spark_makes(tmp_path: Path) -> None:
    folder = tmp_path / "here" / "shop"
    store = Store(folder)
    store.create()
    log, blocks = filled(folder, store, 5)
    log.close()
    shutil.copytree(tmp_path / "here", tmp_path / "spark")
    there = Store(LocalStorage(tmp_path / "spark" / "shop"))
    config = tmp_path / "databus.toml"
    config.write_text(f'[bootstrap]\ndata_dir = "{tmp_path}/here"\n')
    (tmp_path / "bin").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    command = [sys.executable, "-c", PROGRAM, "apply", "-c", str(config), "--every", "100ms"]
    errors = tmp_path / "errors"
    leases: set[int] = set()

    def rounds() -> bool:
        leases.add((folder / "applier.lock").stat().st_mtime_ns)
        return len(leases) > 3

    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command, env=environment | {"PATH": str(tmp_path / "bin")}, stderr=stderr
        ) as process,
    ):
        try:
            eventually_sync(lambda: len(store.read().runs) == 2, 60, "base and delta", poll_s=0.05)
            eventually_sync(rounds, 60, "more rounds, in which there is nothing to do")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20 * PATIENCE)
    assert process.returncode == 0
    assert errors.read_text().count(NO_JAVA) == 1
    (tmp_path / "scratch").mkdir()
    with spark_session(tmp_path / "scratch") as session:
        from databus.bootstrap.merging.spark_merges import SparkMerges

        records = Applier(there, SparkMerges(session)).apply()
    assert [record["kind"] for record in records] == ["base", "delta"]
    assert rows_of(store) == rows_of(there)
    assert len(rows_of(store)) == 6
    reopened = HotLog(folder / "log")
    assert state_of(store, reopened).rows == State().apply_all(blocks).rows
    reopened.close()


def test_the_configuration_chooses_what_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "shop")
    store.create()
    filled(tmp_path / "shop", store, 3, 1)[0].close()
    caplog.set_level("INFO")
    run_applier(BootstrapConfig(data_dir=tmp_path, merge_with="process"))
    assert store.read().base is not None
    assert 'merge_with = "process"' in caplog.text and NO_JAVA not in caplog.text
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MissingDependency, match='merge_with = "process"'):
        run_applier(BootstrapConfig(data_dir=tmp_path, merge_with="spark"))
    with pytest.raises(MissingDependency):
        run_applier(BootstrapConfig(data_dir=tmp_path, spark_master="spark://nowhere:7077"))
