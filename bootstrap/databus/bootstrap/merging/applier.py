"""The applier: merges runs with Spark.  The only module that imports pyspark.

Two cases, one contract (rows in the order of their positions over files of bounded size):

* Few changes against much data: the old run is only filtered, by a join against the broadcast
  keys of the changes.  Nothing of it is shuffled or sorted; each of its files stays in order,
  and the changes, all of them newer, follow in files of their own.
* Otherwise everything is shuffled by key, reduced, and sorted by position again.

Readers depend on the order: rows are served in it, and row groups whose positions lie
before a client's checkpoint are skipped by their statistics.

Executors need nothing of this package.  On folders they run DataFrame operators only; on S3
they read and write through ``spark_tasks``, whose functions are sent to them by value.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark import cloudpickle, java_gateway
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StructField,
    StructType,
)

from databus.bootstrap.merging import run_planner, spark_tasks
from databus.bootstrap.merging.memory_budget import Budget
from databus.bootstrap.merging.run_planner import Merge, Retention
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.apply_progress import ApplyProgress
from databus.bootstrap.runs.manifest import Store, new_run_id
from databus.bootstrap.runs.open_readers import held
from databus.bootstrap.runs.parquet_runs import (
    COLUMNS,
    COMPRESSION,
    PARQUET,
    ROW_GROUP_BYTES,
    Run,
    RunKind,
    describe,
    in_order,
)
from databus.bootstrap.runs.run_storage import LocalFiles, RunFiles
from databus.bootstrap.runs.s3_storage import S3Storage
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import BucketError, MissingDependency, StoreError
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Flag, Op
from databus.common.private import UMASK
from databus.common.processes.parent_process import end_with

_LOG = logging.getLogger("databus.bootstrap.merging.applier")

FILE_BYTES = 128 << 20
"""Bytes of frames in one file, approximately."""

BROADCAST_ROWS = 1_000_000
"""Up to this many changed rows, their keys are broadcast instead of shuffling the old run."""

BROADCAST_KEY_BYTES = 64 << 20
"""Broadcast keys are limited to this: driver and executors hold them in memory, twice."""

_BROADCASTS = Budget()
"""The broadcasts of all merges of this process stay within these two limits as well."""

GRACE_US = 600 * 10**6
"""How long a replaced run stays on disk, for readers inside it."""

_TYPES: Mapping[str, DataType] = {
    "op": IntegerType(),
    "flags": IntegerType(),
    "key": BinaryType(),
    "frame": BinaryType(),
}
_SCHEMA = StructType([StructField(name, _TYPES.get(name, LongType())) for name in COLUMNS])
_KEY = ["source_id", "key"]

# Workers need not have this package, and a namespace package does not import from a zip.
# PySpark's copy of cloudpickle has no types.
cloudpickle.register_pickle_by_value(spark_tasks)  # type: ignore[no-untyped-call]


def start_spark(
    master: str = "local[*]", driver_memory: str = "1g", *, scratch: Path | None = None
) -> SparkSession:
    """A quiet session; with a local master it listens on the loopback interface only.

    The driver's memory holds the keys of a broadcast (at most BROADCAST_KEY_BYTES, and what
    the JVM adds) and the names of files; with a ``local`` master the tasks' as well.
    ``scratch`` is the folder for temporary files of the driver, and so of a ``local`` master's
    tasks, unless Spark's configuration names another; without it, that of the system.

    Raises:
        MissingDependency: there is no Java.
    """
    java = os.environ.get("JAVA_HOME")
    if not (java and (Path(java) / "bin/java").exists()) and shutil.which("java") is None:
        raise MissingDependency(
            "Spark needs Java 17 or newer and there is none; on Debian: "
            "apt install openjdk-17-jre-headless"
        )
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    java_options = "-Djava.net.preferIPv4Stack=true -XX:+UseSerialGC"
    if scratch is not None and "," not in str(scratch):  # Spark would read two folders
        java_options += f" -Djava.io.tmpdir={_quoted(scratch)}"
    settings = {
        "spark.driver.memory": driver_memory,
        "spark.scheduler.mode": "FAIR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": java_options,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(spark_tasks.BATCH_ROWS),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(spark_tasks.BATCH_BYTES),
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.autoBroadcastJoinThreshold": "-1",
        "spark.sql.files.maxPartitionBytes": str(1 << 40),
        "spark.sql.files.openCostInBytes": str(1 << 40),
        "spark.sql.parquet.enableVectorizedReader": "true",
        "spark.sql.parquet.columnarReaderBatchSize": "1024",
        "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        # Hadoop sets the mode of each file itself, whatever the umask of the process.
        "spark.hadoop.fs.permissions.umask-mode": f"{UMASK:03o}",
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    }
    if master.startswith("local") or "//127." in master or "//localhost" in master:
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    if master.startswith("local"):
        # Spark makes a secret for each session; on a cluster the operator configures both.
        settings["spark.authenticate"] = "true"
    builder = SparkSession.builder.master(master).appName("databus-applier")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _temporary_files_in(scratch), _java_ends_with_us():
        return builder.getOrCreate()


def _quoted(path: Path) -> str:
    """The path as one word of Java's options, which Spark splits."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextlib.contextmanager
def _java_ends_with_us() -> Iterator[None]:
    """A Java process that is started within the block ends with this process.

    PySpark makes Java end with its stdin, but Java reads stdin only once it has started.  If the
    folder for its port file is gone by then, Java never ends.
    """
    gateway: Any = java_gateway
    start, parent_pid = gateway.Popen, os.getpid()

    def started(command: list[str], **options: Any) -> Any:
        prepare = options.pop("preexec_fn", None)

        def prepared() -> None:
            if prepare is not None:
                prepare()
            if not end_with(parent_pid):
                os._exit(1)

        return start(command, preexec_fn=prepared, **options)

    # The kernel watches the thread: a thread that ends before the process would end Java too.
    is_main = threading.current_thread() is threading.main_thread()
    gateway.Popen = started if is_main else start
    try:
        yield
    finally:
        gateway.Popen = start


@contextlib.contextmanager
def _temporary_files_in(folder: Path | None) -> Iterator[None]:
    """Redirect the temporary files that PySpark itself makes while Java starts."""
    before = tempfile.tempdir
    tempfile.tempdir = before if folder is None else str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _now_us() -> int:
    return time.time_ns() // 1000


class Applier:
    """Brings one store's runs up to date, merge by merge.

    Invariants:
        I1. A merge's files are complete and durable before the manifest names them.
        I2. A replaced run is deleted at the earliest ``grace_us`` after the merge.

    Owner: the process that holds the store's applier lease while ``apply`` runs.
    Durability: every merge that ``apply`` reports is on disk.
    Raises: StoreBusy if another applier is at work; StoreError if files are damaged.
    """

    def __init__(
        self,
        store: Store,
        spark: SparkSession,
        *,
        name: str = "",
        retention_bytes: int = 64 << 30,
        retention_us: int | None = None,
        retention_scns: int | None = None,
        grace_us: int = GRACE_US,
        now_us: Callable[[], int] = _now_us,
    ) -> None:
        self.store = store
        self._now_us = now_us
        # Settings belong to a session: stores are merged at the same time.
        self.spark = spark.newSession()
        self._progress = ApplyProgress(name or store.url, store.storage)
        self.retention_bytes = retention_bytes
        self.retention_us = retention_us
        self.retention_scns = retention_scns
        self.grace_us = grace_us

    def apply(self, *, full: bool = False) -> list[Mapping[str, Any]]:
        """Do every merge that pays; returns their records.  ``full`` always renews the base.

        Only the runs that exist at the start are merged: segments may arrive as fast as they are
        merged, and the work after the merges must be done too.
        """
        records: list[Mapping[str, Any]] = []
        with self.store.lease("applier"):
            self.store.sweep("c")
            largest_bytes = max(self.retention_bytes // 4, FILE_BYTES)
            upto = self.store.read().stop or ORIGIN
            while merge := run_planner.next_merge(
                self.store.read(), largest_bytes, full=full, upto=upto
            ):
                records.append(self._merge(merge))
            readers = held(self.store.storage, self._now_us())
            at = min((one.position for one in readers), default=None)
            self._retire(run_planner.droppable(self.store.read(), self._retention(), at))
            self.store.collect(self.grace_us, "cs", self._now_us())
        return records

    def _retention(self) -> Retention:
        since_us = self._now_us() - self.retention_us if self.retention_us is not None else None
        return Retention(self.retention_bytes, since_us, self.retention_scns)

    def _retire(self, runs: tuple[Run, ...]) -> None:
        if runs:
            self.store.switch(lambda manifest: manifest.without(runs, self._now_us()))

    def _merge(self, merge: Merge) -> Mapping[str, Any]:
        failpoints.reach("merge.begun")
        began_s = time.monotonic()
        run_id = new_run_id(merge.kind, merge.inputs[-1].stop)
        files = self.store.files(run_id)
        what = {
            "kind": merge.kind.value,
            "runs": len(merge.inputs),
            "rows_in": sum(run.rows for run in merge.inputs),
            "bytes_in": sum(run.file_bytes for run in merge.inputs),
        }
        context = self.spark.sparkContext
        context.setJobGroup(run_id, f"{self.store.url}: {merge.kind.value}")
        try:
            with self._progress.merging(what, lambda: _tasks(context, run_id)), _naming_runs(merge):
                with _BROADCASTS.share(self._broadcast_share(merge)):
                    names = self._write(self._rows(merge), files, _group_rows(merge))
        except StoreError:
            self._drop(run_id)
            raise
        failpoints.reach("merge.rows_written")
        run = self._described(merge, run_id, files, names)
        failpoints.reach("merge.files_written")
        record = _record(merge, run, time.monotonic() - began_s)
        self.store.switch(
            lambda manifest: manifest.with_changes(
                add=run, drop=merge.retired, made_of=merge.inputs, now_us=run.created_us
            ).with_apply(record)
        )
        failpoints.reach("merge.manifest_switched")
        _LOG.info("merged %s", record)
        return record

    def _drop(self, run_id: str) -> None:
        """Delete the files of a merge that failed; the next sweep removes what this cannot."""
        with contextlib.suppress(StoreError):
            self.store.storage.delete_run(run_id)

    def _write(self, rows: DataFrame, files: RunFiles, group_rows: int) -> list[str]:
        """Write a file from each partition; the names of all of them."""
        if isinstance(files, LocalFiles):
            files.folder.mkdir()
            rows.write.mode("append").options(
                **{
                    "compression": COMPRESSION + "_raw" if COMPRESSION == "lz4" else COMPRESSION,
                    "parquet.block.size": str(ROW_GROUP_BYTES),
                    # The limit counts compressed pages: frames that compress well would make groups
                    # many times as large.
                    "parquet.block.row.count.limit": str(group_rows),
                    "parquet.enable.dictionary": "false",
                    "parquet.page.size": str(1 << 20),
                    "parquet.page.write-checksum.enabled": "true",
                }
            ).parquet(files.folder.as_uri())
            return [name for name in files.names() if name.endswith(".parquet")]
        write = spark_tasks.writer(
            self._s3_settings(), files.location(""), PARQUET, ROW_GROUP_BYTES
        )
        return [row["name"] for row in _mapped(rows, write, "name string").collect()]

    def _s3_settings(self) -> Mapping[str, Any]:
        storage = self.store.storage
        if not isinstance(storage, S3Storage):
            raise StoreError(f"{self.store.url} is neither a folder nor on S3")
        return storage.bucket.settings

    def _described(self, merge: Merge, run_id: str, files: RunFiles, names: list[str]) -> Run:
        ordered = in_order([describe(files, name) for name in names])
        used = [file.name for file in ordered]
        for name in files.names():
            if name not in used:
                files.delete(name)
        files.settle(used)
        is_base = merge.kind is RunKind.BASE
        return Run(
            id=run_id,
            kind=merge.kind,
            start=ORIGIN if is_base else merge.inputs[0].start,
            stop=merge.inputs[-1].stop,
            files=ordered,
            created_us=self._now_us(),
            partial_rows=sum(run.partial_rows for run in merge.inputs),
            truncates=() if is_base else tuple(sorted(_truncates(merge.inputs).items())),
            last_commit_us=max(run.newest_us for run in merge.inputs),
        )

    def _rows(self, merge: Merge) -> DataFrame:
        """The surviving rows, in partitions that are files in order."""
        old, new = _split(merge)
        after = old.stop if old else ORIGIN
        changes = self._read(new, after)
        cuts = _truncates(merge.inputs)
        reduced = _reduced(_not_truncated(changes, cuts), new)
        if merge.kind is RunKind.BASE:
            reduced = reduced.where(~F.col("op").isin(int(Op.DELETE), int(Op.TRUNCATE)))
        new_bytes = sum(run.bytes_after(after) for run in new)
        if old is None:
            return _sorted(reduced, new_bytes)
        survivors = _not_truncated(self._read((old,), ORIGIN), cuts)
        overwritten = changes.where(F.col("flags").bitwiseAND(int(Flag.PARTIAL)) == 0).select(*_KEY)
        if self._broadcast_share(merge):
            survivors = survivors.join(F.broadcast(overwritten.distinct()), _KEY, "left_anti")
            return survivors.select(*COLUMNS).union(_sorted(reduced, new_bytes))
        survivors = survivors.join(overwritten, _KEY, "left_anti").select(*COLUMNS)
        return _sorted(survivors.union(reduced), old.frame_bytes + new_bytes)

    def _broadcast_share(self, merge: Merge) -> float:
        """The part of the limits that broadcasting a merge's new keys takes; 0 if the old run must
        be shuffled."""
        old, new = _split(merge)
        rows = sum(run.rows for run in new)
        if old is None or _is_scattered(old) or rows > BROADCAST_ROWS:
            return 0.0
        key_bytes = 0
        for run in new:
            opened = self.store.open_run(run)
            key_bytes += opened.column_bytes("key")
            opened.close()
        if key_bytes > BROADCAST_KEY_BYTES:
            return 0.0
        return max(0.001, rows / max(1, BROADCAST_ROWS), key_bytes / BROADCAST_KEY_BYTES)

    def _read(self, runs: tuple[Run, ...], after: Position) -> DataFrame:
        paths = [
            self.store.files(run).location(file.name)
            for run in runs
            for file in run.files
            if file.last > after
        ]
        if not paths:
            return self.spark.createDataFrame([], _SCHEMA)
        self.spark.conf.set(
            "spark.sql.shuffle.partitions",
            str(max(2, sum(run.bytes_after(after) for run in runs) // FILE_BYTES)),
        )
        if self.store.storage.folder is None:
            read = spark_tasks.reader(
                self._s3_settings(), paths, COLUMNS, (after.scn, after.seq), FIRST_CONTROL_OP
            )
            ids = self.spark.range(0, len(paths), 1, len(paths))
            return _mapped(ids, read, _SCHEMA)
        rows = self.spark.read.schema(_SCHEMA).parquet(*(Path(path).as_uri() for path in paths))
        rows = rows.where(F.col("op") < FIRST_CONTROL_OP)
        return rows.where(_is_after(after)) if after != ORIGIN else rows


def _mapped(rows: DataFrame, batches: spark_tasks.Batches, schema: StructType | str) -> DataFrame:
    with warnings.catch_warnings():
        # PySpark checks the version of pandas here and then does not use it.
        warnings.simplefilter("ignore", FutureWarning)
        return rows.mapInArrow(batches, schema)


def _split(merge: Merge) -> tuple[Run | None, tuple[Run, ...]]:
    """The old run that is only filtered, if there is one, and the newer ones."""
    first, *rest = merge.inputs
    newer_bytes = sum(run.frame_bytes for run in rest)
    if (
        first.is_compacted
        and rest
        and (first.kind is RunKind.BASE or first.frame_bytes >= newer_bytes)
    ):
        return first, tuple(rest)
    return None, merge.inputs


def _group_rows(merge: Merge) -> int:
    """Rows whose frames are about ROW_GROUP_BYTES."""
    frame_bytes = sum(run.frame_bytes for run in merge.inputs)
    rows = sum(run.rows for run in merge.inputs)
    return max(1, ROW_GROUP_BYTES * rows // max(1, frame_bytes))


def _is_scattered(run: Run) -> bool:
    """Whether a run has many more files than it needs: each filtering merge adds some."""
    return len(run.files) > 8 + 2 * (run.frame_bytes // FILE_BYTES)


def _position() -> Any:
    return F.struct("scn", "seq")


def _is_after(position: Position) -> Any:
    scn, seq = F.col("scn"), F.col("seq")
    return (scn > position.scn) | ((scn == position.scn) & (seq > position.seq))


def _not_truncated(rows: DataFrame, cuts: Mapping[int, Position]) -> DataFrame:
    for source, position in cuts.items():
        at_cut = (F.col("scn") == position.scn) & (F.col("seq") == position.seq)
        rows = rows.where((F.col("source_id") != source) | at_cut | _is_after(position))
    return rows


def _reduced(rows: DataFrame, runs: tuple[Run, ...]) -> DataFrame:
    """Of each key, its last whole row and the partial rows after it."""
    if len(runs) == 1 and runs[0].is_compacted:
        return rows
    if any(run.partial_rows for run in runs):
        is_whole = F.col("flags").bitwiseAND(int(Flag.PARTIAL)) == 0
        last_whole = F.max(F.when(is_whole, _position())).over(Window.partitionBy(*_KEY))
        marked = rows.withColumn("last_whole", last_whole)
        survivors = marked.where(
            F.col("last_whole").isNull() | (_position() >= F.col("last_whole"))
        )
        return survivors.select(*COLUMNS)
    others = [name for name in COLUMNS if name not in (*_KEY, "scn", "seq")]
    last = F.max(F.struct("scn", "seq", *others)).alias("last")
    return rows.groupBy(*_KEY).agg(last).select(*_KEY, "last.*").select(*COLUMNS)


def _sorted(rows: DataFrame, frame_bytes: int) -> DataFrame:
    """The rows in order, in as many partitions as there will be files of FILE_BYTES."""
    count = 1 + frame_bytes // FILE_BYTES
    if count == 1:
        return rows.coalesce(1).sortWithinPartitions("scn", "seq")
    return rows.repartitionByRange(count, "scn", "seq").sortWithinPartitions("scn", "seq")


def _truncates(runs: tuple[Run, ...]) -> dict[int, Position]:
    cuts: dict[int, Position] = {}
    for run in runs:
        for source, position in run.truncates:
            cuts[source] = max(position, cuts.get(source, ORIGIN))
    return cuts


def _record(merge: Merge, run: Run, seconds: float) -> Mapping[str, Any]:
    return {
        "run": run.id,
        "kind": run.kind.value,
        "tier": len(merge.inputs),
        "start": run.start.to_json(),
        "stop": run.stop.to_json(),
        "rows_in": sum(one.rows for one in merge.inputs),
        "rows_out": run.rows,
        "bytes_in": sum(one.file_bytes for one in merge.inputs),
        "bytes_out": run.file_bytes,
        "seconds": round(seconds, 3),
        "finished_us": run.created_us,
    }


def _tasks(context: Any, group: str) -> tuple[int, int]:
    """Of the stages that a merge's jobs have started: the finished tasks and all tasks."""
    tracker = context.statusTracker()
    done = total = 0
    for job in tracker.getJobIdsForGroup(group):
        found = tracker.getJobInfo(job)
        for stage in map(tracker.getStageInfo, found.stageIds if found else ()):
            if stage is not None:
                done += stage.numCompletedTasks
                total += stage.numTasks
    return done, total


@contextlib.contextmanager
def _naming_runs(merge: Merge) -> Iterator[None]:
    """Raise any error in the block as one that names the runs and the reason."""
    try:
        yield
    except Exception as error:
        # Tasks reach S3 through Arrow, whose errors are recognised only by their text.
        is_s3 = isinstance(error, BucketError) or "AWS Error" in str(error)
        raise (BucketError if is_s3 else StoreError)(
            f"merging {[run.id for run in merge.inputs]} failed: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of an error; for Java, where it names only the call, the first cause."""
    lines = str(error).strip().splitlines() or [repr(error)]
    causes = [line.partition(":")[2].strip() for line in lines if line.startswith("Caused by:")]
    return (causes[-1] if causes else lines[0])[:500]
