"""Reads the clustered files of merged runs: in folders, or on S3 through ``pyarrow.fs``.

The s3a file system of Hadoop comes as jars from Maven, and ``pyarrow.fs`` is on every worker that
PySpark can run Python on.  Merges ship this module to Spark's workers by value, as
``bucket_merge``: it imports nothing of this package but that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from databus.client.splits.bucket_merge import HASH_BITS, bucket_range, within

WHOLE_BYTES = 1 << 20
"""A file of at most this size is read at once: its footer alone would take two reads."""


@dataclass(frozen=True)
class Place:
    """Where files lie: on S3 with the settings of Arrow's file system, else in folders."""

    settings: Mapping[str, Any] | None
    umask: int

    def filesystem(self) -> Any:
        """The file system; a store in folders makes files for its user alone."""
        import os

        from pyarrow import fs

        if self.settings is None:
            os.umask(self.umask)
            return fs.LocalFileSystem()
        given = dict(self.settings)
        retry = fs.AwsStandardS3RetryStrategy(max_attempts=given.pop("attempts"))
        # An upload that fits into one part needs one request instead of three.
        return fs.S3FileSystem(retry_strategy=retry, allow_delayed_open=True, **given)


@dataclass(frozen=True)
class InputFile:
    """A clustered file; ``is_part`` if it has rows of other buckets too.

    With ``file_bytes``, size and footer are compared with these values before anything is read.
    """

    path: str
    after: tuple[int, int]
    is_part: bool
    is_taken: bool = False
    file_bytes: int = 0
    footer_crc: int = 0


def rows_of_file(files: Any, file: InputFile, bucket: str) -> Iterator[Any]:
    """The rows of a clustered file that lie in a bucket, a row group at once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        _opened(files, file) as source,
        # What is in memory would only wait for another thread.
        pq.ParquetFile(
            source,
            pre_buffer=not isinstance(source, pa.BufferReader),
            page_checksum_verification=True,
        ) as stored,
    ):
        for number in range(stored.metadata.num_row_groups):
            group = stored.metadata.row_group(number)
            if file.is_part and not _may_hold(group, bucket):
                continue
            table = stored.read_row_group(number, use_threads=False)
            if table.num_rows != group.num_rows:  # the headers of pages have no CRC
                raise pa.ArrowInvalid(f"{table.num_rows} rows of {group.num_rows}: {file.path}")
            yield within(table, bucket if file.is_part else "", file.after)


def _opened(files: Any, file: InputFile) -> Any:
    source = files.open_input_file(file.path)
    if not file.file_bytes:
        return _in_memory(source) if source.size() <= WHOLE_BYTES else source
    from databus.client.splits.frame_tables import footer_crc
    from databus.common.errors import StoreError

    size = source.size()
    if size == file.file_bytes and size <= WHOLE_BYTES:
        source = _in_memory(source)
    if size != file.file_bytes or (file.footer_crc and footer_crc(source, size) != file.footer_crc):
        source.close()
        raise StoreError(f"{file.path} is another file than the one in the manifest")
    return source


def _in_memory(source: Any) -> Any:
    import pyarrow as pa

    with source:
        return pa.BufferReader(source.read_buffer())


def _may_hold(group: Any, bucket: str) -> bool:
    """Whether a row group may have rows of a bucket, by the statistics of ops and hashes."""
    statistics = {}
    for number in range(group.num_columns):
        column = group.column(number)
        if column.statistics is not None and column.statistics.has_min_max:
            statistics[column.path_in_schema] = (column.statistics.min, column.statistics.max)
    if not bucket or "key_hash" not in statistics or statistics.get("op", (0, 5))[1] >= 5:
        return True  # a TRUNCATE is not where its hash is
    low, high = (limit - (limit >> (HASH_BITS - 1) << HASH_BITS) for limit in bucket_range(bucket))
    return bool(low <= statistics["key_hash"][1] and statistics["key_hash"][0] <= high)
