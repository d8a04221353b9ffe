"""Merges buckets in this process: where there is no Java, or by the setting ``merge_with``.

Plan, tasks and merge are those of Spark (``spark_merges``), so the same rows come into the same
files.  In the place of a shuffle, changes are sorted in pieces, which lie in temporary files, and
the merge of a bucket takes its part of each piece.  Memory is that of one piece while they are
written, and then that of a batch of each piece and of a row group of each input.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from databus.bootstrap.merging import spark_tasks
from databus.bootstrap.merging.bucket_runs import (
    WrittenFile,
    place_of,
    plain_files,
    worker_tasks,
)
from databus.bootstrap.merging.bucket_tasks import BucketPlan
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.client.splits.bucket_merge import places
from databus.client.splits.frame_tables import COLUMNS, SCHEMA
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Op

PIECE_BYTES = 64 << 20
"""Bytes of rows that are sorted at once, approximately."""

BATCH_BYTES = 1 << 20
"""Bytes of rows that are read at once of each piece, approximately."""


def has_java() -> bool:
    """Whether Java is installed where Spark looks for it."""
    home = os.environ.get("JAVA_HOME")
    return bool(home and (Path(home) / "bin/java").exists()) or shutil.which("java") is not None


class ProcessMerges:
    """Does the tasks of merges one after the other; see ``applier.Merges``.

    ``scratch`` is the folder for temporary files; without it, that of the system.

    Owner: an applier's process; merges of several stores may run at the same time.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._finished: dict[str, tuple[int, int]] = {}

    def finished(self, run_id: str) -> tuple[int, int]:
        """The finished tasks of a merge, and all of them."""
        return self._finished.get(run_id, (0, 0))

    def write(
        self, store: Store, merge: Merge, plan: BucketPlan, output: spark_tasks.Output, run_id: str
    ) -> list[WrittenFile]:
        """Do the tasks of a merge; its files."""
        files = place_of(store).filesystem()
        (tasks,) = worker_tasks(store, plan, 1)
        is_base = merge.kind is RunKind.BASE
        found: list[WrittenFile] = []
        try:
            with tempfile.TemporaryDirectory(prefix="merge-", dir=self._scratch) as folder:
                pieces = [
                    spark_tasks.Changes(_stored(path))
                    for path in _sorted_pieces(_changes(store, merge, files), Path(folder))
                ]
                for number, task in enumerate(tasks):
                    self._finished[run_id] = number, len(tasks)
                    changes = [piece.of(task) for piece in pieces]
                    written = spark_tasks.merge_bucket(files, task, changes, output, base=is_base)
                    found += [WrittenFile(task.number, name, bucket) for name, bucket in written]
                for piece in pieces:
                    piece.require_end()
        finally:
            self._finished.pop(run_id, None)
        return found


def _changes(store: Store, merge: Merge, files: Any) -> Iterator[Any]:
    """The rows of the inputs that are not clustered, as batches."""
    for paths, after in plain_files(store, merge):
        for path in paths:
            yield from spark_tasks.rows_of(
                files, path, COLUMNS, (after.scn, after.seq), FIRST_CONTROL_OP
            )


def _sorted_pieces(batches: Iterable[Any], folder: Path) -> list[Path]:
    """Files with the rows in pieces, each in the order of clustered files."""
    paths: list[Path] = []
    waiting: list[Any] = []
    size = 0

    def write() -> None:
        paths.append(folder / f"{len(paths)}.arrow")
        _write_sorted(pa.Table.from_batches(waiting).cast(SCHEMA), paths[-1])
        waiting.clear()

    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= PIECE_BYTES:
            write()
            size = 0
    if waiting:
        write()
    return paths


def _write_sorted(table: Any, path: Path) -> None:
    is_row = pc.not_equal(table["op"], pa.scalar(int(Op.TRUNCATE), pa.int32()))
    order = pc.sort_indices(
        table.select(["source_id", "key", "scn", "seq"])
        .append_column("place", pa.array(places(table)))
        .append_column("is_row", pc.cast(is_row, pa.int8())),
        sort_keys=[
            (name, "ascending") for name in ("source_id", "place", "is_row", "key", "scn", "seq")
        ],
    )
    rows = max(1, BATCH_BYTES * table.num_rows // max(1, table.nbytes))
    with pa.OSFile(str(path), mode="wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table.take(order), max_chunksize=rows)


def _stored(path: Path) -> Iterator[Any]:
    """The batches of a piece."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            yield file.get_batch(number)
