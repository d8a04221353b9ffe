"""From a plan of buckets to a run: what tasks read of a store, and what becomes of their files.

``spark_merges`` and ``process_merges`` do the tasks; nothing here depends on Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from databus.bootstrap.merging import bucket_tasks, spark_tasks
from databus.bootstrap.merging.bucket_tasks import BucketPlan
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunFile, RunKind, describe, in_order
from databus.bootstrap.runs.s3_storage import S3Storage
from databus.client.splits.clustered_files import InputFile, Place
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import StoreError
from databus.common.frame.frame_format import FIRST_CONTROL_OP
from databus.common.private import UMASK


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What a task made: a file of a bucket, or, without a name, its old file as it was."""

    task: int
    name: str
    bucket: str


def plain_bytes(store: Store, merge: Merge) -> Mapping[int, int]:
    """By source, the frame bytes in runs that are not clustered, approximately.

    Raises:
        StoreError: a file is missing, cut or damaged.
    """
    found: dict[int, int] = {}
    for run in merge.inputs:
        if run.is_clustered or not run.rows:
            continue
        opened = store.open_run(run)
        try:
            for group in opened.row_groups():
                table = opened.table(group, ["source_id", "op"])
                sources, ops = (column.to_numpy() for column in table.columns)
                ids, counts = np.unique(sources[ops < FIRST_CONTROL_OP], return_counts=True)
                for source, count in zip(ids.tolist(), counts.tolist(), strict=True):
                    size = 1 + count * run.frame_bytes // run.rows
                    found[source] = found.get(source, 0) + size
        finally:
            opened.close()
    return found


def plain_files(store: Store, merge: Merge) -> list[tuple[list[str], Position]]:
    """Paths of files that are not clustered, and the position after which their rows count."""
    first = merge.inputs[0]
    found: list[tuple[list[str], Position]] = []
    for is_base in (True, False):
        after = first.stop if first.kind is RunKind.BASE and not is_base else ORIGIN
        paths = [
            store.files(run).location(file.name)
            for run in merge.inputs
            if not run.is_clustered and (run.kind is RunKind.BASE) is is_base
            for file in run.files
            if file.last > after
        ]
        if paths:
            found.append((paths, after))
    return found


def place_of(store: Store) -> Place:
    """Where the files of a store lie.

    Raises:
        StoreError: in none of the places that tasks can reach.
    """
    storage = store.storage
    if storage.folder is not None:
        return Place(None, UMASK)
    if not isinstance(storage, S3Storage):
        raise StoreError(f"{store.url} is neither a folder nor on S3")
    return Place(storage.bucket.settings, UMASK)


def worker_tasks(store: Store, plan: BucketPlan, workers: int) -> list[list[spark_tasks.Task]]:
    """The tasks of each worker, in the order of their rows."""
    found: list[list[spark_tasks.Task]] = [[] for _ in range(workers)]
    for number, task in enumerate(plan.tasks):
        inputs = tuple(
            InputFile(
                path=store.files(one.file.folder or one.run).location(one.file.name),
                after=(one.after.scn, one.after.seq),
                is_part=not one.file.bucket.startswith(task.bucket),
                is_taken=bucket_tasks.taken_over(one.run, one.file) == task.taken,
            )
            for one in task.inputs
        )
        cut = (task.cut.scn, task.cut.seq) if task.cut else None
        found[plan.worker(task, workers)].append(
            spark_tasks.Task(number, task.source_id, task.bucket, inputs, cut, task.split_bits)
        )
    return found


def finished_files(
    store: Store, run_id: str, plan: BucketPlan, written: Iterable[WrittenFile]
) -> list[RunFile]:
    """The files of a plan's tasks: they are durable, others in the run's folder are deleted.

    Raises:
        StoreError: a file is not whole.
    """
    files = store.files(run_id)
    found: list[RunFile] = []
    for one in written:
        task = plan.tasks[one.task]
        if one.name:
            found.append(describe(files, one.name, task.source_id, one.bucket))
        elif task.taken is not None:
            found.append(task.taken)
    used = [file.name for file in in_order(found) if not file.folder]
    for name in files.names():
        if name not in used:
            files.delete(name)
    files.settle(used)
    return found


def are_there(store: Store, files: Iterable[RunFile]) -> bool:
    """Whether the files of an unfinished merge exist: a copied store may lack some."""
    folders: dict[str, set[str]] = {}
    for file in files:
        folders.setdefault(file.folder, set()).add(file.name)
    known = set(store.storage.run_ids())
    return folders.keys() <= known and all(
        names <= set(store.files(folder).names()) for folder, names in folders.items()
    )


def run_of(merge: Merge, run_id: str, files: list[RunFile], now_us: int) -> Run:
    """The run that a merge has made of its files, which are durable."""
    is_base = merge.kind is RunKind.BASE
    ordered = in_order(files)
    rows = sum(file.rows for file in ordered)
    cuts = bucket_tasks.truncates(merge.inputs)
    return Run(
        id=run_id,
        kind=merge.kind,
        start=ORIGIN if is_base else merge.inputs[0].start,
        stop=merge.inputs[-1].stop,
        files=ordered,
        created_us=now_us,
        partial_rows=min(rows, sum(run.partial_rows for run in merge.inputs)),
        truncates=() if is_base else tuple(sorted(cuts.items())),
        last_commit_us=max(run.newest_us for run in merge.inputs),
    )
