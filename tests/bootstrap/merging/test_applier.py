"""The applier with real Spark, against the model's compaction."""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import applier as applier_module
from databus.bootstrap.merging import run_planner, spark_merges
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.bucket_runs import WrittenFile
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.merging.spark_merges import SparkMerges, start_spark
from databus.bootstrap.processes.bootstrap_processes import apply_round, run_applier
from databus.bootstrap.reading.frame_ranges import (
    FrameRange,
    Starts,
    at_time,
    changes_from,
    state_from,
)
from databus.bootstrap.reading.net_changes import NetChanges
from databus.bootstrap.runs.apply_progress import applier_document
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.common.checkpoint import ORIGIN, Position
from databus.common.config import BootstrapConfig
from databus.common.errors import BucketError, MissingDependency, StoreBusy, StoreError
from databus.common.frame.frame_format import FrameView, Op, iter_frames, read_frame
from databus.common.frame.window_builder import WindowBuilder
from tests.bootstrap.model import (
    CLOCK,
    START,
    History,
    clustered,
    compact,
    frames_between,
    frames_of,
)
from tests.support.spark_session import spark_session
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One session for all tests of this file: the Java machine takes seconds to start."""
    with spark_session(tmp_path_factory.mktemp("scratch")) as session:
        yield session


class Bench:
    """A store with sealed segments of a random history."""

    def __init__(self, store: Store, log: HotLog, seed: int) -> None:
        self.store = store
        self.log = log
        self.history = History(seed)
        self.blocks: list[bytes] = []

    def segment(self, windows: int = 12) -> None:
        self.blocks.append(self.history.block(windows))
        self.log.append(self.blocks[-1], 1)
        segments.seal(self.log, self.store, 1)

    def truth(self, *, base: bool) -> list[bytes]:
        frames = frames_between(self.blocks, START, self.history.position)
        return as_bytes(clustered(compact(frames, base=base)))


def as_bytes(frames: list[FrameView]) -> list[bytes]:
    return [bytes(one.bytes) for one in frames]


@pytest.fixture
def bench(store: Store, log: HotLog) -> Bench:
    return Bench(store, log, 11)


def test_segments_become_a_base_and_a_delta_as_in_the_model(bench: Bench, spark: object) -> None:
    for _ in range(5):
        bench.segment()
    records = Applier(bench.store, SparkMerges(spark)).apply()
    manifest = bench.store.read()
    assert [record["kind"] for record in records] == ["base", "delta"]
    assert manifest.base is not None
    assert as_bytes(frames_of(bench.store, manifest.base)) == bench.truth(base=True)
    (delta,) = manifest.chain
    assert as_bytes(frames_of(bench.store, delta)) == bench.truth(base=False)
    assert manifest.applies == tuple(records)
    assert records[1]["rows_in"] > records[1]["rows_out"] == delta.rows
    assert records[0]["bytes_out"] == manifest.base.file_bytes > 0
    assert not [path for path in bench.store.runs_folder.rglob("*") if "crc" in path.name]


def test_a_round_ends_though_segments_come_as_fast_as_they_are_merged(
    bench: Bench, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Applier._write

    def overtaken(applier: Applier, *arguments: Any) -> list[WrittenFile]:
        """A merge in which the log writer seals the next segment."""
        assert len(bench.blocks) < 6, "the round never ends"
        bench.segment(2)
        return write(applier, *arguments)

    monkeypatch.setattr(Applier, "_write", overtaken)
    bench.segment(2)
    for segments_then in (2, 3):
        (record,) = Applier(bench.store, SparkMerges(spark)).apply()
        manifest = bench.store.read()
        assert record["kind"] == "base" and len(manifest.chain) == segments_then
        assert manifest.snapshot == manifest.chain[-2].stop, "what came meanwhile is left"


def test_many_applies_give_what_one_compaction_of_everything_gives(
    bench: Bench, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables grow from one file to many while they are merged."""
    monkeypatch.setattr(applier_module, "FILE_BYTES", 600)
    bench.history = History(11, keys=60)
    applier = Applier(bench.store, SparkMerges(spark), grace_us=0)
    files = []
    for count in (2, 1, 3, 1):
        for _ in range(count):
            bench.segment(6)
        applier.apply()
        base = bench.store.read().base
        assert base is not None and base.is_clustered
        assert as_bytes(frames_of(bench.store, base)) == bench.truth(base=True)
        assert bench.store.check() == []
        files.append(len(base.files))
    assert files[0] < files[-1]
    named = {folder for run in bench.store.read().runs for folder in folders_of(run)}
    assert {path.name for path in bench.store.runs_folder.iterdir()} == named


def test_of_a_table_only_the_buckets_that_changed_are_written_and_of_others_nothing_is_read(
    bench: Bench, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "FILE_BYTES", 4000)
    applier = Applier(bench.store, SparkMerges(spark), grace_us=0)

    def write(scn: int, source: int, keys: range) -> None:
        builder = WindowBuilder(scn, 1)
        for number in keys:
            builder.event(Op.UPDATE, source, 1, b"%d" % number, after=b"at %d" % scn)
        bench.blocks.append(builder.end(f"t{scn}"))
        bench.log.append(bench.blocks[-1], 1)
        segments.seal(bench.log, bench.store, 1)
        bench.history.position = Position(scn, len(keys))

    write(START.scn + 1, 5, range(300))
    write(START.scn + 2, 6, range(300))
    applier.apply()
    first = bench.store.read().base
    assert first is not None and len(first.files) > 8
    untouched = [file for file in first.files if file.source_id == 6]
    held = {file.name: bench.store.run_folder(first) / file.name for file in untouched}
    for name, path in held.items():  # A merge that read one of them would fail.
        path.rename(bench.store.folder / name)
    write(START.scn + 3, 5, range(3))
    applier.apply()
    for name, path in held.items():
        (bench.store.folder / name).rename(path)
    second = bench.store.read().base
    assert second is not None
    own = [file for file in second.files if not file.folder]
    assert 1 <= len(own) <= 3 and {file.source_id for file in own} == {5}
    assert {file.name for file in second.files if file.folder} < {f.name for f in first.files}
    assert as_bytes(frames_of(bench.store, second)) == bench.truth(base=True)


def folders_of(run: Run) -> set[str]:
    return {run.id, *(file.folder for file in run.files if file.folder)}


def test_row_groups_are_bounded_however_well_frames_compress(
    bench: Bench, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "ROW_GROUP_BYTES", 1 << 14)
    builder = WindowBuilder(START.scn + 1, 1)
    for number in range(400):
        builder.event(Op.INSERT, 5, 1, b"%d" % number, after=bytes(2000))
    bench.log.append(builder.end("t"), 1)
    segments.seal(bench.log, bench.store, 1)
    Applier(bench.store, SparkMerges(spark)).apply()
    for run in bench.store.read().runs:
        opened = bench.store.open_run(run)
        sizes = [
            sum(len(block.data) for block in opened.frames(group)) for group in opened.row_groups()
        ]
        opened.close()
        if run.is_compacted:
            assert len(sizes) > 10 and sum(sizes) > 400 * 2000
            assert max(sizes) <= 1 << 14


def test_large_runs_are_cut_into_buckets(
    bench: Bench, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "FILE_BYTES", 400)
    for _ in range(2):
        bench.segment(40)
    applier = Applier(bench.store, SparkMerges(spark), grace_us=0)
    merged, _ = applier._merge(Merge(bench.store.read().chain, RunKind.DELTA), None)
    run = bench.store.read().find(str(merged["run"]))
    assert run is not None
    assert len(run.files) > 2 and any(len(file.bucket) > 0 for file in run.files)
    assert as_bytes(frames_of(bench.store, run)) == bench.truth(base=False)


def test_a_base_is_brought_up_in_parts_by_spark(
    bench: Bench, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "FILE_BYTES", 300)
    bench.segment(40)
    applier = Applier(bench.store, SparkMerges(spark), grace_us=0, apply_bytes=1200)
    applier.apply(full=True)
    bench.segment()
    parts = 0
    while applier.apply():
        parts += bench.store.read().unfinished is not None
        assert bench.store.check() == []
    base = bench.store.read().base
    assert parts > 1 and base is not None and base.stop == bench.history.position
    assert as_bytes(frames_of(bench.store, base)) == bench.truth(base=True)


def test_a_base_is_renewed_from_a_run_that_crosses_its_end(bench: Bench, spark: object) -> None:
    applier = Applier(bench.store, SparkMerges(spark), grace_us=0)
    bench.segment()
    applier.apply()
    bench.segment()
    applier._merge(Merge(bench.store.read().chain, RunKind.DELTA), None)
    (crossing,) = bench.store.read().chain
    base = bench.store.read().base
    assert base is not None
    assert crossing.start < base.stop < crossing.stop
    applier.apply()
    base = bench.store.read().base
    assert base is not None
    assert as_bytes(frames_of(bench.store, base)) == bench.truth(base=True)


def test_nothing_to_do_writes_nothing(bench: Bench, spark: object) -> None:
    applier = Applier(bench.store, SparkMerges(spark))
    assert applier.apply() == []
    bench.segment()
    applier.apply()
    version = bench.store.read().version
    assert applier.apply(full=True) == []
    assert bench.store.read().version == version


def test_a_store_without_events_makes_an_empty_run(
    store: Store, log: HotLog, spark: object
) -> None:
    history = History(1)
    log.append(history.window(0) + history.window(0), 1)
    segments.seal(log, store, 1)
    Applier(store, SparkMerges(spark)).apply()
    base = store.read().base
    assert base is not None
    assert (base.files, base.start, base.stop) == ((), ORIGIN, history.position)


def test_a_second_applier_is_refused(bench: Bench, spark: object) -> None:
    with bench.store.lease("applier"), pytest.raises(StoreBusy, match="is the applier of"):
        Applier(bench.store, SparkMerges(spark)).apply()


async def test_a_second_applier_waits_and_takes_over_when_the_first_is_killed(
    bench: Bench,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench.segment()
    before = bench.store.read()
    monkeypatch.setattr(spark, "stop", lambda: None)
    monkeypatch.setattr(spark_merges, "start_spark", lambda *_, scratch: spark)
    code = (
        "import sys, pathlib\n"
        "from databus.bootstrap.runs.manifest import Store\n"
        "with Store(pathlib.Path(sys.argv[1])).lease('applier'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()"
    )
    first = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        str(bench.store.folder),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert first.stdout is not None
    assert await first.stdout.readline() == b"held\n"

    class FirstMerge(Exception):
        """Ends an applier that otherwise runs for ever."""

    def report(name: str, record: object) -> None:
        raise FirstMerge

    config = BootstrapConfig(data_dir=tmp_path)
    second = asyncio.create_task(
        asyncio.to_thread(run_applier, config, every_s=0.05, report=report)
    )
    refused = f"process {first.pid} is the applier of"
    try:
        await eventually(lambda: sum(refused in one for one in caplog.messages) > 2)
        assert not second.done()
        assert bench.store.read() == before
    finally:
        first.kill()
        await first.wait()
    with pytest.raises(FirstMerge):
        await asyncio.wait_for(second, 60 * PATIENCE)
    base = bench.store.read().base
    assert base is not None
    assert as_bytes(frames_of(bench.store, base)) == bench.truth(base=True)


def test_a_damaged_input_stops_the_merge_and_changes_nothing(bench: Bench, spark: object) -> None:
    bench.segment()
    (run,) = bench.store.read().chain
    path = bench.store.run_folder(run) / run.files[0].name
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], None):
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        with pytest.raises(StoreError, match=f"merging .*{run.id}.* failed"):
            Applier(bench.store, SparkMerges(spark)).apply()
        assert bench.store.read().runs == (run,)
        assert [one.name for one in bench.store.runs_folder.iterdir()] == [run.id]
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (OSError("When uploading part: AWS Error ACCESS_DENIED during PutObject"), BucketError),
        (BucketError("s3://lake/shop/manifest.json: SlowDown"), BucketError),
        (RuntimeError("Caused by: java.io.IOException: No space left on device"), StoreError),
    ],
)
def test_a_merge_that_s3_refuses_is_reported_with_what_to_do_about_s3(
    cause: Exception, error: type[StoreError]
) -> None:
    naming = applier_module._naming_runs(Merge((), RunKind.DELTA))
    with pytest.raises(StoreError, match=r"merging .* failed") as refused, naming:
        raise cause
    assert type(refused.value) is error


def test_a_bit_that_flipped_in_a_page_is_not_merged(bench: Bench, spark: object) -> None:
    bench.segment(30)
    (run,) = bench.store.read().chain
    path = bench.store.run_folder(run) / run.files[0].name
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) * 2 // 3] ^= 0x10
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match="failed"):
        Applier(bench.store, SparkMerges(spark)).apply()
    path.write_bytes(whole)


def limit_files(size_bytes: int) -> None:
    """Let Java, and the Python workers that it has started, write no larger files."""
    assert SparkContext._gateway is not None
    java = psutil.Process(SparkContext._gateway.proc.pid)
    for process in (java, *java.children(recursive=True)):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("where", ["the old run's rows", "the shuffle"])
def test_a_disk_that_is_full_for_spark_stops_the_merge_and_room_lets_it_continue(
    bench: Bench, spark: object, where: str
) -> None:
    """The same code of the kernel refuses to extend Spark's files (RLIMIT_FSIZE)."""
    rng = random.Random(5)
    builder = WindowBuilder(START.scn + 1, 1)
    for number in range(200):
        builder.event(Op.INSERT, 5, 1, b"%d" % number, after=rng.randbytes(1000))
    bench.log.append(builder.end("t"), 1)
    segments.seal(bench.log, bench.store, 1)
    limit = 100_000
    if where == "the shuffle":
        limit = 20_000
    else:
        Applier(bench.store, SparkMerges(spark)).apply()
        builder = WindowBuilder(START.scn + 2, 1)
        builder.event(Op.UPDATE, 5, 1, b"7", after=b"new")
        bench.log.append(builder.end("u"), 1)
        segments.seal(bench.log, bench.store, 1)
    before = bench.store.read()
    stores, config = {"shop": bench.store}, BootstrapConfig(data_dir=bench.store.folder.parent)
    limit_files(limit)
    try:
        errors = apply_round(config, stores, SparkMerges(spark), report=lambda *_: None)
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert "File too large" in errors["shop"].message
    said = applier_document(bench.store.storage)
    assert (said["state"], said["error"]) == ("failed", errors["shop"].message)
    assert bench.store.read().runs == before.runs
    assert set(bench.store.storage.run_ids()) == {run.id for run in before.runs}
    assert bench.store.check() == []
    assert apply_round(config, stores, SparkMerges(spark), report=lambda *_: None) == {}
    base = bench.store.read().base
    assert base is not None
    assert (base.rows, base.stop) == (200, bench.log.state().start)


def test_databases_are_merged_side_by_side_and_a_torn_file_of_one_stops_no_other(
    tmp_path: Path, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = {}
    logs = []
    benches = []
    for number, name in enumerate(("orders", "people", "stock")):
        store = Store(tmp_path / name)
        store.create()
        log = HotLog(store.folder / "log")
        log.bind(name, CLOCK, START)
        benches.append(Bench(store, log, number))
        benches[-1].segment()
        stores[name] = store
        logs.append(log)
    torn = stores["people"].read().chain[0]
    path = stores["people"].run_folder(torn) / torn.files[0].name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    config = BootstrapConfig(data_dir=tmp_path)
    both = threading.Barrier(2, timeout=30 * PATIENCE)
    write = Applier._write

    def meeting(applier: Applier, *arguments: Any) -> list[WrittenFile]:
        """Inside a merge, which fails unless that of the other whole database is there too."""
        if applier.store is not stores["people"]:
            both.wait()
        return write(applier, *arguments)

    monkeypatch.setattr(Applier, "_write", meeting)
    reported: list[str] = []

    def report(name: str, record: object) -> None:
        reported.append(name)

    errors = apply_round(config, stores, SparkMerges(spark), report=report)
    assert list(errors) == ["people"] and torn.id in errors["people"].message
    assert sorted(reported) == ["orders", "stock"]
    assert applier_document(stores["people"].storage)["state"] == "failed"
    assert applier_document(stores["orders"].storage)["state"] == "idle"
    path.write_bytes(whole)
    assert apply_round(config, stores, SparkMerges(spark), report=report) == {}
    for bench, log in zip(benches, logs, strict=True):
        base = bench.store.read().base
        assert base is not None
        assert as_bytes(frames_of(bench.store, base)) == bench.truth(base=True)
        log.close()


def test_retention_deletes_old_runs_that_the_base_has(bench: Bench, spark: object) -> None:
    applier = Applier(bench.store, SparkMerges(spark), retention_bytes=1, grace_us=0)
    for _ in range(3):
        bench.segment()
        applier.apply()
    manifest = bench.store.read()
    assert len(manifest.chain) == 1, "the newest run is always retained"
    assert manifest.base is not None
    assert run_planner.plan(manifest, ORIGIN, bench.log.state().start)[0].run == manifest.base
    assert as_bytes(frames_of(bench.store, manifest.base)) == bench.truth(base=True)


def test_retention_by_time_drops_runs_that_were_committed_before_it(
    bench: Bench, spark: object
) -> None:
    kept_us = 1000
    for _ in range(3):
        bench.segment()
    chain = bench.store.read().chain
    now_us = chain[0].newest_us + kept_us
    merges = SparkMerges(spark)
    applier = Applier(bench.store, merges, retention_us=kept_us, grace_us=0, now_us=lambda: now_us)
    applier.apply()
    assert bench.store.read().chain == chain, "the oldest is just young enough"
    now_us += 1
    applier.apply()
    assert bench.store.read().chain == chain[1:]
    assert chain[0].id not in bench.store.storage.run_ids(), "its files are gone"
    now_us += 10**12
    applier.apply()
    manifest = bench.store.read()
    assert manifest.chain == chain[-1:], "the newest run is always retained"
    assert manifest.base is not None
    assert as_bytes(frames_of(bench.store, manifest.base)) == bench.truth(base=True)


def test_changes_times_and_states_are_read_from_runs_that_spark_wrote(
    bench: Bench, spark: object
) -> None:
    for _ in range(5):
        bench.segment()
    applier = Applier(bench.store, SparkMerges(spark), grace_us=0)
    applier.apply()
    merged = bench.history.position
    assert [run.kind for run in bench.store.read().runs] == [RunKind.BASE, RunKind.DELTA]
    bench.segment()
    until = bench.history.position
    middle = frames_between(bench.blocks, START, merged)[40].position

    def read(starts: Starts, upto: Position) -> list[bytes]:
        found = FrameRange(bench.store, bench.log, starts, upto, every_change=False)
        net = NetChanges(found.units(), found.rows, pass_rows=50)
        for _ in net.reading():
            continue
        retained = [
            bytes(one.bytes)
            for _, block, mask in net.blocks()
            for one, is_kept in zip(iter_frames(block.data.data), mask, strict=True)
            if is_kept
        ]
        found.close()
        return sorted(retained)

    for since in (START, middle, merged):
        frames = frames_between(bench.blocks, since, until)
        starts = changes_from(since, every_change=False)
        assert read(starts, until) == sorted(as_bytes(compact(frames, base=False)))
    gone = (Op.DELETE, Op.TRUNCATE)
    for upto in (merged, until):
        rows = [b for b in read(state_from(upto, None), upto) if read_frame(b).op not in gone]
        frames = frames_between(bench.blocks, START, upto)
        assert rows == sorted(as_bytes(compact(frames, base=True)))
    assert at_time(bench.store, bench.log, 1_700_000_000_000_000 + merged.scn) >= merged


def test_without_java_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MissingDependency, match="apt install openjdk-17-jre-headless"):
        start_spark()


def test_spark_listens_on_the_loopback_interface_alone_and_wants_its_secret(
    spark: SparkSession,
) -> None:
    context: Any = spark.sparkContext
    assert context.getConf().get("spark.authenticate") == "true"
    java = psutil.Process(context._gateway.proc.pid)
    found = java.net_connections("tcp")
    listening = {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
