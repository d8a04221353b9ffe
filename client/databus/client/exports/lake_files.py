"""Data files of a table in the lake: how tasks read and write them, and what a commit names.

A format's library commits files (``delta_files``, ``iceberg_files``).  Tasks on any machine write
them here with pyarrow, so no row passes through the process that commits.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from databus.client.exports.table_export import ExportMark
from databus.common.errors import UnsupportedChange
from databus.common.storage.bucket import filesystem

READ_ROWS = 65_536
_STATS_CHARS = 64
"""Longer texts have no statistics: a shortened maximum would have to be rounded up."""


@dataclass(frozen=True, slots=True)
class LakeFile:
    """One data file of a table; ``low`` and ``high`` bound its first key column, if known."""

    path: str
    row_count: int
    partition: Mapping[str, str | None] = field(default_factory=dict)
    low: Any = None
    high: Any = None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that a task has written; ``stats`` is JSON in the form of Delta."""

    path: str
    size_bytes: int
    row_count: int
    stats: str
    partition: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where and how tasks read and write the files of one table; it travels to them.

    ``root``: a folder, or ``bucket/prefix`` with ``s3`` as arguments of Arrow's file system.
    ``field_ids``: ids of columns that the format wants in its files.  ``in_file``: whether the
    columns of ``partition_by`` are in the files too.
    """

    root: str
    schema: Any
    s3: Mapping[str, Any] | None = None
    folder: str = ""
    field_ids: Mapping[str, int] = field(default_factory=dict)
    partition_by: tuple[str, ...] = ()
    in_file: bool = True

    def filesystem(self) -> Any:
        """Arrow's file system."""
        if self.s3 is None:
            return pafs.LocalFileSystem()
        return filesystem(self.s3)

    def read(self, files: Sequence[LakeFile], names: Sequence[str]) -> Iterator[Any]:
        """The columns named, of all rows; one that a file does not have is null."""
        filesystem = self.filesystem()
        schema = pa.schema([self.schema.field(name) for name in names])
        for one in files:
            with pq.ParquetFile(f"{self.root}/{one.path}", filesystem=filesystem) as opened:
                present = [name for name in names if name in opened.schema_arrow.names]
                for batch in opened.iter_batches(READ_ROWS, columns=present):
                    yield self._shaped(batch, schema, one)

    def _shaped(self, batch: Any, schema: Any, one: LakeFile) -> Any:
        columns = []
        for wanted in schema:
            if wanted.name in one.partition and not self.in_file:
                value = pa.scalar(one.partition[wanted.name], pa.string()).cast(wanted.type)
                columns.append(pa.repeat(value, batch.num_rows))
            elif (at := batch.schema.get_field_index(wanted.name)) >= 0:
                columns.append(batch.column(at).cast(wanted.type))
            else:
                columns.append(pa.nulls(batch.num_rows, wanted.type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def write(self, batches: Iterator[Any], most_rows: int) -> Iterator[NewFile]:
        """Write rows, those of one value of the partition columns one after the other."""
        writing: _FileWriter | None = None
        for batch in batches:
            for values, part in _by_partition(batch, self.partition_by):
                if writing is not None and (
                    writing.values != values or writing.row_count >= most_rows
                ):
                    yield writing.close()
                    writing = None
                writing = writing or _FileWriter(self, values)
                writing.write(part)
        if writing is not None:
            yield writing.close()

    @property
    def file_schema(self) -> Any:
        """The columns of a file."""
        kept = [one for one in self.schema if self.in_file or one.name not in self.partition_by]
        ids = self.field_ids
        return pa.schema(
            [
                one.with_metadata({"PARQUET:field_id": str(ids[one.name])}) if ids else one
                for one in kept
            ]
        )


class _FileWriter:
    """One file that is being written."""

    def __init__(self, place: FilePlace, values: tuple[str | None, ...]) -> None:
        self.values = values
        self.row_count = 0
        self._place = place
        self._schema = place.file_schema
        self._path = f"{place.folder}{uuid.uuid4()}.parquet"
        self._filesystem = place.filesystem()
        if place.s3 is None and place.folder:
            self._filesystem.create_dir(f"{place.root}/{place.folder}")
        self._writer = pq.ParquetWriter(
            f"{place.root}/{self._path}",
            self._schema,
            filesystem=self._filesystem,
            compression="zstd",
        )

    def write(self, batch: Any) -> None:
        arrays = [batch.column(one.name).cast(one.type) for one in self._schema]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self.row_count += batch.num_rows

    def close(self) -> NewFile:
        self._writer.close()
        path = f"{self._place.root}/{self._path}"
        with self._filesystem.open_input_file(path) as file:
            size_bytes, stats = file.size(), delta_stats(pq.read_metadata(file))
        partition = dict(zip(self._place.partition_by, self.values, strict=True))
        return NewFile(self._path, size_bytes, self.row_count, stats, partition)


def _by_partition(batch: Any, names: Sequence[str]) -> Iterator[tuple[tuple[str | None, ...], Any]]:
    """The parts of a batch that have one value of the partition columns each."""
    if not names:
        yield (), batch
        return
    texts = [batch.column(name).cast(pa.string()).to_pylist() for name in names]
    begin = 0
    rows = list(zip(*texts, strict=True))
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[begin]:
            yield rows[begin], batch.slice(begin, at - begin)
            begin = at


def delta_stats(footer: Any) -> str:
    """The statistics of a file in the form of Delta, from those in its footer."""
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for at in range(footer.num_columns):
        name = footer.schema.column(at).path
        found = [footer.row_group(g).column(at).statistics for g in range(footer.num_row_groups)]
        if not all(one is not None and one.has_null_count for one in found):
            continue
        nulls[name] = sum(one.null_count for one in found)
        bounds = [(one.min, one.max) for one in found if one.has_min_max]
        if not bounds or len(bounds) < sum(one.num_values > 0 for one in found):
            continue
        low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
        # Only types whose JSON is exact; a float may hide a NaN.
        if type(low) is int or (type(low) is str and max(len(low), len(high)) <= _STATS_CHARS):
            lows[name], highs[name] = low, high
    found_stats = {
        "numRecords": footer.num_rows,
        "minValues": lows,
        "maxValues": highs,
        "nullCount": nulls,
    }
    return json.dumps(found_stats)


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table's partitions, and of the order of its rows, the key by default."""

    partition_by: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()

    def check(self, source: str, names: Sequence[str]) -> None:
        """Raises UnsupportedChange if a column does not exist."""
        if missing := sorted({*self.partition_by, *self.cluster_by} - set(names)):
            raise UnsupportedChange(
                f"{source} has no columns {missing} to partition or cluster by; "
                f"it has {', '.join(names)}"
            )


class FileCommit(Protocol):
    """One commit that is being prepared.

    Invariants:
        I1. Until ``commit`` returns, readers of the table see none of it.
    """

    place: FilePlace

    def commit(
        self, removed: Sequence[LakeFile] | None, added: Sequence[NewFile], mark: ExportMark
    ) -> None:
        """Replace files and move the mark, in one commit; None removes all files.

        Raises:
            StoreBusy: another writer has changed the table since ``begin``.
        """


def other_rows(table: str) -> UnsupportedChange:
    """The error for a table with rows that no export or mirror of this stream has written."""
    return UnsupportedChange(
        f"{table} has rows and not the position of this stream; a mirror would replace them: "
        "move it away, rename it, or choose another --to"
    )


class FileTable(Protocol):
    """One table of a format, as files.

    Invariants:
        I1. Files and mark change in one commit, or not at all.
    """

    def mark(self) -> ExportMark | None:
        """The table's position; None if there is no table.

        Raises:
            UnsupportedChange: there is one, and it is not of an export or a mirror.
        """

    def schema(self) -> Any:
        """Its Arrow schema."""

    def files(self) -> list[LakeFile]:
        """Its present data files."""

    def begin(self, schema: Any, *, whole: bool) -> FileCommit:
        """Prepare a commit of rows with these columns, a new table if there is none."""
