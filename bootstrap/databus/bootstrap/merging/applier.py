"""The applier: merges runs with Spark.  The only module that imports pyspark.

A merge goes bucket by bucket (``bucket_tasks``).  Changes in segments are shuffled once, to the
worker that merges their bucket, and sorted there.  Clustered files are read where they are needed,
in order, by that worker (``spark_tasks``, ``bucket_merge``).  Nothing of the old run is shuffled or
sorted, and a file of a bucket in which nothing changed is taken over by name.  Runs of format 1 are
in commit order: their rows are shuffled as changes are.

Executors need nothing of this package, but Python with pyarrow: the functions that they run are
sent to them by value.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
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
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StructField,
    StructType,
)

from databus.bootstrap.merging import (
    bucket_merge,
    bucket_tasks,
    partial_rows,
    run_planner,
    spark_tasks,
)
from databus.bootstrap.merging.bucket_runs import (
    WrittenFile,
    merged_run,
    plain_bytes,
    worker_tasks,
)
from databus.bootstrap.merging.bucket_tasks import FILE_BYTES, BucketPlan
from databus.bootstrap.merging.run_planner import Merge, Retention
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.apply_progress import ApplyProgress
from databus.bootstrap.runs.manifest import Store, new_run_id
from databus.bootstrap.runs.open_readers import held
from databus.bootstrap.runs.parquet_runs import (
    COLUMNS,
    PARQUET,
    ROW_GROUP_BYTES,
    Run,
    RunKind,
)
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.bootstrap.runs.s3_storage import S3Storage
from databus.bootstrap.runs.schema_note import noted_schemas
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import BucketError, MissingDependency, StoreError
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Op
from databus.common.private import UMASK
from databus.common.processes.parent_process import end_with

_LOG = logging.getLogger("databus.bootstrap.merging.applier")

SMALL_BYTES = 8 << 20
"""Frame bytes for which another worker is started, as long as there are cores."""

GRACE_US = 600 * 10**6
"""How long a replaced run stays on disk, for readers inside it."""

_TYPES: Mapping[str, DataType] = {
    "op": IntegerType(),
    "flags": IntegerType(),
    "key": BinaryType(),
    "frame": BinaryType(),
}
_SCHEMA = StructType([StructField(name, _TYPES.get(name, LongType())) for name in COLUMNS])
_LEAST = -(2**63)
"""Added to a hash as Spark has it, signed, it gives the order of unsigned numbers."""

# Workers need not have this package, and a namespace package does not import from a zip.
for _module in (bucket_merge, partial_rows, spark_tasks):
    # PySpark's copy of cloudpickle has no types.
    cloudpickle.register_pickle_by_value(_module)  # type: ignore[no-untyped-call]


def start_spark(
    master: str = "local[*]", driver_memory: str = "1g", *, scratch: Path | None = None
) -> SparkSession:
    """A quiet session; with a local master it listens on the loopback interface only.

    The driver's memory holds the names of files; with a ``local`` master, the tasks' as well.
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
                plan = bucket_tasks.plan(merge, plain_bytes(self.store, merge), FILE_BYTES)
                if isinstance(files, LocalFiles):
                    files.folder.mkdir()
                written = self._write(merge, plan, run_id)
        except StoreError:
            self._drop(run_id)
            raise
        failpoints.reach("merge.rows_written")
        run = merged_run(self.store, merge, run_id, plan, written, self._now_us())
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

    def _write(self, merge: Merge, plan: BucketPlan, run_id: str) -> list[WrittenFile]:
        """Do the tasks of a merge; the files of it."""
        if not plan.tasks:
            return []
        plain = tuple(run for run in merge.inputs if not run.is_clustered and run.rows)
        read_bytes = sum(run.frame_bytes for run in plain)
        read_bytes += sum(one.file.frame_bytes for task in plan.tasks for one in task.inputs)
        workers = min(
            plan.units,
            max(1 + read_bytes // FILE_BYTES, min(1 + read_bytes // SMALL_BYTES, self._cores)),
        )
        files = self.store.files(run_id)
        merging = spark_tasks.merger(
            self._place,
            worker_tasks(self.store, plan, workers),
            spark_tasks.Output(
                f"{files.location('').rstrip('/')}/",
                PARQUET,
                ROW_GROUP_BYTES,
                self._layouts(merge),
            ),
            base=merge.kind is RunKind.BASE,
            has_changes=bool(plain),
        )
        if plain:
            base = tuple(run for run in plain if run.kind is RunKind.BASE)
            newer = tuple(run for run in plain if run.kind is not RunKind.BASE)
            first = merge.inputs[0]
            changes = self._read(newer, first.stop if first.kind is RunKind.BASE else ORIGIN)
            rows = self._read(base, ORIGIN).union(changes) if base else changes
            rows = _bucketed(rows, plan, workers)
        else:
            rows = self.spark.range(0, workers, 1, workers)
        found = _mapped(rows, merging, spark_tasks.RESULT).collect()
        return [WrittenFile(one["task"], one["name"], one["bucket"]) for one in found]

    def _layouts(self, merge: Merge) -> partial_rows.Layouts:
        """The layouts of rows, where PARTIAL ones may be folded."""
        if merge.kind is not RunKind.BASE or not any(run.partial_rows for run in merge.inputs):
            return {}
        return partial_rows.layouts_of(noted_schemas(self.store.storage))

    @property
    def _cores(self) -> int:
        return int(self.spark.sparkContext.defaultParallelism)

    @property
    def _place(self) -> spark_tasks.Place:
        storage = self.store.storage
        if storage.folder is not None:
            return spark_tasks.Place(None, UMASK)
        if not isinstance(storage, S3Storage):
            raise StoreError(f"{self.store.url} is neither a folder nor on S3")
        return spark_tasks.Place(storage.bucket.settings, UMASK)

    def _read(self, runs: tuple[Run, ...], after: Position) -> DataFrame:
        paths = [
            self.store.files(run).location(file.name)
            for run in runs
            for file in run.files
            if file.last > after
        ]
        if not paths:
            return self.spark.createDataFrame([], _SCHEMA)
        if self.store.storage.folder is None:
            read = spark_tasks.reader(
                self._place, paths, COLUMNS, (after.scn, after.seq), FIRST_CONTROL_OP
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


def _bucketed(rows: DataFrame, plan: BucketPlan, workers: int) -> DataFrame:
    """The rows at the workers that merge their buckets, in the order of clustered files."""
    # A TRUNCATE precedes all rows of its source.
    place = F.when(F.col("op") == int(Op.TRUNCATE), F.lit(0)).otherwise(F.col("key_hash"))
    units: dict[int, list[int]] = {}
    for source, bits in plan.unit_bits.items():
        units.setdefault(bits, []).append(source)
    prefix = F.lit(0).cast("long")
    for bits, sources in units.items():
        if bits:
            leading = F.shiftrightunsigned(place, bucket_merge.HASH_BITS - bits)
            prefix = F.when(F.col("source_id").isin(sources), leading).otherwise(prefix)
    worker = F.pmod(F.col("source_id") + prefix, F.lit(workers)).cast("int")
    is_row = F.col("op") != int(Op.TRUNCATE)
    return rows.repartitionById(workers, worker).sortWithinPartitions(
        "source_id", place.bitwiseXOR(F.lit(_LEAST)), is_row, "key", "scn", "seq"
    )


def _is_after(position: Position) -> Any:
    scn, seq = F.col("scn"), F.col("seq")
    return (scn > position.scn) | ((scn == position.scn) & (seq > position.seq))


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
    """The first line of an error; for Java, where it names only the call, the first cause; for a
    Python worker, the last line of its traceback."""
    lines = str(error).strip().splitlines() or [repr(error)]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Invalid): ", line)]
    if raised and any(line.endswith("from the Python worker:") for line in lines):
        return raised[-1][:500]
    causes = [line.partition(":")[2].strip() for line in lines if line.startswith("Caused by:")]
    return (causes[-1] if causes else lines[0])[:500]
