"""Does the tasks of merges: on Spark's Python workers, which also read stores on S3, or without
Spark (``process_merges``).

The JVM reads segments from folders, and shuffles.  Clustered files are read (``clustered_files``)
and written here.  Changes pass from the JVM to Python as Arrow batches; the rows of the old run
never enter the JVM.

This module is shipped by value: it imports nothing of this package but ``bucket_merge``,
``clustered_files`` and ``partial_rows``, which are shipped with it, and workers need none.
Everything else that a function uses is an argument, or imported inside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from databus.client.splits.bucket_merge import HASH_BITS, bucket_range, merged, places
from databus.client.splits.clustered_files import InputFile, Place, rows_of_file
from databus.client.splits.partial_rows import Layouts

Batches = Callable[[Iterator[Any]], Iterator[Any]]

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20

RESULT = "task long, name string, bucket string"
"""What a merge yields for each file: the number of its task, and name and bucket of a new file.
Without a name the task's old file is taken over."""


@dataclass(frozen=True)
class Task:
    """A bucket to merge; see ``bucket_tasks.BucketTask``."""

    number: int
    source_id: int
    bucket: str
    files: tuple[InputFile, ...]
    cut: tuple[int, int] | None
    split_bits: int


@dataclass(frozen=True)
class Output:
    """How files are written, and the layouts by which PARTIAL rows are folded."""

    prefix: str
    options: Mapping[str, Any]
    group_bytes: int
    layouts: Layouts = field(default_factory=dict)


def reader(
    place: Place,
    paths: Sequence[str],
    names: Sequence[str],
    after: tuple[int, int],
    first_control_op: int,
) -> Batches:
    """For ``spark.range(len(paths))``: the rows of ``paths[id]`` after a position, as batches.

    Row groups that end before it are not read.  Control frames are left out.
    """

    def read(ids: Iterator[Any]) -> Iterator[Any]:
        files = place.filesystem()
        for batch in ids:
            for index in batch.column(0).to_pylist():
                yield from rows_of(files, paths[index], names, after, first_control_op)

    return read


def rows_of(
    files: Any, path: str, names: Sequence[str], after: tuple[int, int], first_control_op: int
) -> Iterator[Any]:
    """The rows of one file after a position, as batches, without control frames."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    scn, seq = after
    with (
        files.open_input_file(path) as source,
        pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True) as file,
    ):
        for number in range(file.metadata.num_row_groups):
            bounds = file.metadata.row_group(number).column(0).statistics
            if bounds is not None and bounds.has_min_max and bounds.max < scn:
                continue
            table = file.read_row_group(number, columns=list(names))
            wanted = pc.less(table["op"], pa.scalar(first_control_op, pa.int32()))
            later = pc.or_(
                pc.greater(table["scn"], scn),
                pc.and_(pc.equal(table["scn"], scn), pc.greater(table["seq"], seq)),
            )
            table = table.filter(pc.and_(wanted, later))
            mean = max(1, table.nbytes // max(1, table.num_rows))
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES // mean))
            yield from table.to_batches(max_chunksize=rows)


def merger(
    place: Place,
    workers: Sequence[Sequence[Task]],
    output: Output,
    *,
    base: bool,
    has_changes: bool,
) -> Batches:
    """For a DataFrame whose partitions have the changes of ``workers[partition]``, in order.

    Each task's bucket is merged on its own, one after the other.  A file's name is used once: no
    manifest names the file of an attempt that failed.  Without ``has_changes`` the rows of the
    DataFrame mean nothing.
    """

    def merge(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        files = place.filesystem()
        context = TaskContext.get()
        changes = Changes(batches if has_changes else iter(()))
        for task in workers[context.partitionId() if context else 0]:
            found = list(merge_bucket(files, task, [changes.of(task)], output, base=base))
            yield pa.RecordBatch.from_pydict(
                {
                    "task": pa.array([task.number] * len(found), pa.int64()),
                    "name": pa.array([name for name, _ in found], pa.string()),
                    "bucket": pa.array([bucket for _, bucket in found], pa.string()),
                }
            )
        changes.require_end()
        for _ in batches:
            pass

    return merge


class Changes:
    """A stream of rows in order, that is cut into those of each task.

    Owner: one worker; the rows of a task must be taken before those of the next one.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._table: Any = None

    def of(self, task: Task) -> Iterator[Any]:
        """The rows of a task's bucket.

        Raises:
            ValueError: a row before them belongs to no task.
        """
        import numpy as np

        low, high = bucket_range(task.bucket)
        while self._fill():
            sources = self._table.column("source_id").to_numpy()
            count = int(np.searchsorted(sources, task.source_id, side="right"))
            at = places(self._table.slice(0, count))
            if count and (sources[0] != task.source_id or int(at[0]) < low):
                raise ValueError(f"a row of source {sources[0]} at {at[0]} belongs to no bucket")
            count = int(np.searchsorted(at, np.uint64(high), side="right"))
            if count:
                yield self._table.slice(0, count)
            self._table = self._table.slice(count)
            if self._table.num_rows:
                return

    def _fill(self) -> bool:
        import pyarrow as pa

        while self._table is None or not self._table.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                return False
            self._table = pa.Table.from_batches([batch])
        return True

    def require_end(self) -> None:
        """Refuse to end before every row has been taken.

        Raises:
            ValueError: a row belongs to no task.
        """
        if self._fill():
            raise ValueError(f"{self._table.num_rows} rows or more belong to no bucket")


def merge_bucket(
    files: Any, task: Task, changes: Sequence[Iterator[Any]], output: Output, *, base: bool
) -> Iterator[tuple[str, str]]:
    """Merge one bucket; yields names and buckets of the files that were written.

    An empty name says that nothing but the old file has rows: nothing was read of it.
    """
    inputs = [rows_of_file(files, file, task.bucket) for file in task.files if not file.is_taken]
    old = [rows_of_file(files, file, task.bucket) for file in task.files if file.is_taken]
    started = [_started(one) for one in [*changes, *inputs]]
    found = [one for one in started if one is not None]
    if old and not found:
        yield "", task.bucket
        return
    rows = merged([*old, *found], base=base, cut=task.cut, layouts=output.layouts)
    yield from _write(files, rows, task, output)


def _started(tables: Iterator[Any]) -> Iterator[Any] | None:
    """The same tables; None if there are no rows in them."""
    for table in tables:
        if table.num_rows:
            return itertools.chain([table], tables)
    return None


def _write(
    files: Any, tables: Iterable[Any], task: Task, output: Output
) -> Iterator[tuple[str, str]]:
    """Write rows in order into a file for each part of the bucket that has any."""
    current: tuple[str, _FileWriter] | None = None
    try:
        for table in tables:
            for bucket, rows in _parts(table, task.bucket, task.split_bits):
                if current is None or current[0] != bucket:
                    if current is not None:
                        yield current[1].close(), current[0]
                    current = bucket, _FileWriter(files, output, rows.schema)
                current[1].write(rows)
    except BaseException:
        if current is not None:
            current[1].abandon()
        raise
    if current is not None:
        yield current[1].close(), current[0]


def _parts(table: Any, bucket: str, bits: int) -> Iterator[tuple[str, Any]]:
    """The rows of a table in order by the parts of their bucket."""
    if not bits:
        yield bucket, table
        return
    import numpy as np

    at = places(table)
    shift = HASH_BITS - len(bucket) - bits
    first, last = int(at[0]) >> shift, int(at[-1]) >> shift
    begin = 0
    for part in range(first, last + 1):
        end = int(np.searchsorted(at, np.uint64(((part + 1) << shift) - 1), side="right"))
        if end > begin:
            yield f"{part:0{len(bucket) + bits}b}", table.slice(begin, end - begin)
        begin = end


class _FileWriter:
    """A new Parquet file with row groups of at most ``group_bytes`` of frames, or of one row."""

    def __init__(self, files: Any, output: Output, schema: Any) -> None:
        import uuid

        import pyarrow.parquet as pq

        self._name = f"part-{uuid.uuid4().hex}.parquet"
        self._stream = files.open_output_stream(output.prefix + self._name)
        self._parquet = pq.ParquetWriter(self._stream, schema, **output.options)
        self._limit = output.group_bytes
        self._waiting: list[Any] = []
        self._size = 0

    def write(self, table: Any) -> None:
        """Write rows, or retain them until there are enough for a row group."""
        import numpy as np
        import pyarrow.compute as pc

        lengths = pc.binary_length(table.column("frame")).to_numpy().astype(np.int64)
        ends = np.cumsum(lengths)
        at = 0
        while at < len(ends):
            before = int(ends[at - 1]) if at else 0
            room = before + self._limit - self._size
            cut = int(np.searchsorted(ends, room, side="right"))
            if cut == at and not self._waiting:
                cut = at + 1
            if cut > at:
                self._waiting.append(table.slice(at, cut - at))
                self._size += int(ends[cut - 1]) - before
                at = cut
            if at < len(ends):
                self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            rows = pa.concat_tables(self._waiting)
            self._parquet.write_table(rows, row_group_size=1 << 40)
            self._waiting, self._size = [], 0

    def close(self) -> str:
        """Complete the file; its name."""
        self._flush()
        self._parquet.close()
        self._stream.close()
        return self._name

    def abandon(self) -> None:
        """Close what is open of a file that no manifest will name."""
        import contextlib

        for one in (self._parquet, self._stream):
            with contextlib.suppress(Exception):
                one.close()
