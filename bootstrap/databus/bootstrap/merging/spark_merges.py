"""Merges buckets with Spark.  The only module of this room that imports pyspark, but for
``spark_tasks`` within Spark's workers.

Changes in segments are shuffled once, to the worker that merges their bucket, and sorted there.
Clustered files are read where they are needed, in order, by that worker (``spark_tasks``,
``bucket_merge``).

Executors need nothing of this package, but Python with pyarrow: the functions that they run are
sent to them by value.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
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

from databus.bootstrap.merging import spark_tasks
from databus.bootstrap.merging.bucket_runs import (
    WrittenFile,
    place_of,
    plain_files,
    worker_tasks,
)
from databus.bootstrap.merging.bucket_tasks import FILE_BYTES, BucketPlan
from databus.bootstrap.merging.process_merges import has_java
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.client.splits import bucket_merge, clustered_files, partial_rows
from databus.client.splits.frame_tables import COLUMNS
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import MissingDependency
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Op
from databus.common.private import UMASK
from databus.common.processes.parent_process import end_with

SMALL_BYTES = 8 << 20
"""Frame bytes for which another worker is started, as long as there are cores."""

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
for _module in (bucket_merge, clustered_files, partial_rows, spark_tasks):
    cloudpickle.register_pickle_by_value(_module)  # type: ignore[no-untyped-call]  # has no types


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
    if not has_java():
        raise MissingDependency(
            "Spark needs Java 17 or newer and there is none; on Debian: "
            "apt install openjdk-17-jre-headless; or let merges run without it: "
            'merge_with = "process" in [bootstrap]'
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


class SparkMerges:
    """Does the tasks of merges on Spark's workers; see ``applier.Merges``.

    Owner: an applier's process; merges of several stores may run at the same time.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def finished(self, run_id: str) -> tuple[int, int]:
        """The finished tasks of Spark's that a merge has started, and all of them."""
        return _tasks(self._spark.sparkContext, run_id)

    def write(
        self, store: Store, merge: Merge, plan: BucketPlan, output: spark_tasks.Output, run_id: str
    ) -> list[WrittenFile]:
        """Do the tasks of a merge; its files."""
        context = self._spark.sparkContext
        context.setJobGroup(run_id, f"{store.url}: {merge.kind.value}")
        plain = [run for run in merge.inputs if not run.is_clustered and run.rows]
        read_bytes = sum(run.frame_bytes for run in plain)
        read_bytes += sum(one.file.frame_bytes for task in plan.tasks for one in task.inputs)
        cores = int(context.defaultParallelism)
        workers = min(
            plan.units,
            max(1 + read_bytes // FILE_BYTES, min(1 + read_bytes // SMALL_BYTES, cores)),
        )
        merging = spark_tasks.merger(
            place_of(store),
            worker_tasks(store, plan, workers),
            output,
            base=merge.kind is RunKind.BASE,
            has_changes=bool(plain),
        )
        if plain:
            rows = _bucketed(self._changes(store, merge), plan, workers)
        else:
            rows = self._spark.range(0, workers, 1, workers)
        found = _mapped(rows, merging, spark_tasks.RESULT).collect()
        return [WrittenFile(one["task"], one["name"], one["bucket"]) for one in found]

    def _changes(self, store: Store, merge: Merge) -> DataFrame:
        """The rows of the inputs that are not clustered."""
        found = [self._read(store, *files) for files in plain_files(store, merge)]
        if not found:
            return self._spark.createDataFrame([], _SCHEMA)
        return functools.reduce(DataFrame.union, found)

    def _read(self, store: Store, paths: Sequence[str], after: Position) -> DataFrame:
        if store.storage.folder is None:
            read = spark_tasks.reader(
                place_of(store), paths, COLUMNS, (after.scn, after.seq), FIRST_CONTROL_OP
            )
            ids = self._spark.range(0, len(paths), 1, len(paths))
            return _mapped(ids, read, _SCHEMA)
        rows = self._spark.read.schema(_SCHEMA).parquet(*(Path(path).as_uri() for path in paths))
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
