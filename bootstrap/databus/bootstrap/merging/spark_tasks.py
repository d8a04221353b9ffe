"""What Spark's Python workers run for a store on S3, where the JVM has no file system.

The s3a file system of Hadoop comes as jars from Maven; ``pyarrow.fs`` is on every worker that
PySpark can run Python on.  So tasks read and write Parquet through it, and rows pass between
Python and the JVM as Arrow batches.

This module is shipped by value: it imports nothing of this package, and workers need none.
Everything that a function uses is an argument, or imported inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Batches = Callable[[Iterator[Any]], Iterator[Any]]

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20


def filesystem(settings: Mapping[str, Any]) -> Any:
    """The file system of ``arrow_settings``, as ``Bucket`` opens it; that module is not here."""
    from pyarrow import fs

    given = dict(settings)
    retry = fs.AwsStandardS3RetryStrategy(max_attempts=given.pop("attempts"))
    # An upload that fits into one part needs one request instead of three.
    return fs.S3FileSystem(retry_strategy=retry, allow_delayed_open=True, **given)


def reader(
    settings: Mapping[str, Any],
    paths: Sequence[str],
    names: Sequence[str],
    after: tuple[int, int],
    first_control_op: int,
) -> Batches:
    """For ``spark.range(len(paths))``: the rows of ``paths[id]`` after a position, as batches.

    Row groups that end before it are not read.  Control frames are left out.
    """

    def read(ids: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        s3 = filesystem(settings)
        scn, seq = after
        for batch in ids:
            for index in batch.column(0).to_pylist():
                with (
                    s3.open_input_file(paths[index]) as source,
                    pq.ParquetFile(
                        source, pre_buffer=True, page_checksum_verification=True
                    ) as file,
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

    return read


def writer(
    settings: Mapping[str, Any], prefix: str, options: Mapping[str, Any], group_bytes: int
) -> Batches:
    """Write each partition's rows, in order, to a file of its own; yields the names of the files.

    A name is used once: nothing names the file of an attempt that failed.
    """

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import uuid

        import pyarrow as pa
        import pyarrow.parquet as pq

        s3 = filesystem(settings)
        name = f"part-{uuid.uuid4().hex}.parquet"
        output: Any = None
        parquet: Any = None
        waiting: list[Any] = []
        size = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            if parquet is None:
                output = s3.open_output_stream(prefix + name)
                parquet = pq.ParquetWriter(output, batch.schema, **options)
            waiting.append(batch)
            size += batch.nbytes
            if size >= group_bytes:
                parquet.write_table(pa.Table.from_batches(waiting), row_group_size=1 << 40)
                waiting, size = [], 0
        if parquet is not None:
            if waiting:
                parquet.write_table(pa.Table.from_batches(waiting), row_group_size=1 << 40)
            parquet.close()
            output.close()
            yield pa.RecordBatch.from_pydict({"name": [name]})

    return write
