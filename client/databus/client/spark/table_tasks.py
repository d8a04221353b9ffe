"""What a task of ``spark.read`` or ``spark.readStream`` does, and what the driver gives it.

A part of a state or of net changes is a split where the store has files of it: the task opens them
itself.  If it cannot, and for all other parts, it reads the same rows over HTTP.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from databus.client.spark.read_options import FileUse, ReadOptions
from databus.client.splits.split_planning import PlannedSplit, planned_splits
from databus.client.splits.split_reader import SplitReader
from databus.client.tables.arrow_rows import METADATA, RowDecoder
from databus.client.tables.table_reader import Range, TableReader
from databus.common.errors import DatabusError, FormatError, StoreError

SOURCE = pa.field("_source", pa.string())
"""The column with the name of the table, where a read has several."""

_log = logging.getLogger("databus.client.spark")


@dataclass
class SparkPartition(InputPartition):
    """What one task reads of one table: a range at the servers, or the same rows as a split."""

    source: str
    range: Range
    split: PlannedSplit | None

    def __init__(self, source: str, range: Range, split: PlannedSplit | None = None) -> None:
        super().__init__(range)
        self.source = source
        self.range = range
        self.split = split


class TableTasks:
    """A task's work for both readers: frames of a part, as Arrow batches of Spark's schema."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    def batches(self, part: SparkPartition) -> Iterator[Any]:
        """The rows of a part."""
        reader = TableReader(replace(self.options.address, source=part.source))
        wanted = to_arrow_schema(self.schema, timezone="UTC")
        table = reader.schema()
        own = {column.name for column in table.columns}
        names = [name for name in wanted.names if name in own]
        metadata = [name for name in wanted.names if name not in own and name in METADATA.names]
        if not names and not metadata:
            metadata = ["_scn"]  # A batch without a column has no rows.
        decoder = RowDecoder(table, reader.schema_of, names=names, metadata=metadata)
        for batch in self._of_part(reader, part, decoder):
            yield _as_spark_batch(batch, wanted, part.source)

    def _of_part(
        self, reader: TableReader, part: SparkPartition, decoder: RowDecoder
    ) -> Iterator[Any]:
        if part.split is None:
            yield from reader.batches(part.range, decoder)
            return
        found = SplitReader(reader, part.split).batches(decoder)
        try:
            first = next(found, None)
        except StoreError as error:
            if self.options.files is FileUse.ALWAYS:
                raise
            _log.warning("%s; the rows are read over HTTP", error.message)
            yield from reader.batches(part.range, decoder)
            return
        # Rows are out: a failure from here on is the task's, and Spark repeats it.
        if first is not None:
            yield from itertools.chain((first,), found)


def _as_spark_batch(batch: Any, wanted: Any, source: str) -> Any:
    columns = []
    for field in wanted:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            value = pa.scalar(source if field.name == SOURCE.name else None, field.type)
            columns.append(pa.repeat(value, batch.num_rows))
            continue
        try:
            columns.append(batch.column(at).cast(field.type))
        except pa.ArrowException as error:
            raise FormatError(f"column {field.name} as {field.type}: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def parts_of(options: ReadOptions, reader: TableReader, whole: Range) -> list[InputPartition]:
    """The parts of a range for the tasks: splits, or as many parts of the keys as the options say.

    ``reader`` has the schemas already.
    """
    splits = _splits_of(options, reader, whole)
    if splits:
        return [SparkPartition(one.split.source, one.range, one) for one in splits]
    names = [table.source for table in reader.tables()]
    count = max(1, options.partitions // len(names))
    parts = [whole] if whole.partition else _key_parts(whole, count)
    return [SparkPartition(name, part) for name in names for part in parts]


def _splits_of(options: ReadOptions, reader: TableReader, whole: Range) -> list[PlannedSplit]:
    may_split = whole.mode in ("state", "net") and whole.partition is None and whole.ops is None
    if options.files is FileUse.NEVER or not may_split or not options.address.bootstraps:
        return []
    try:
        return planned_splits(reader, whole, options.partitions)
    except DatabusError as error:
        if options.files is FileUse.ALWAYS:
            raise
        _log.warning("no splits: %s; the rows are read over HTTP", error.message)
        return []


def _key_parts(whole: Range, count: int) -> list[Range]:
    if count == 1:
        return [whole]
    # The files of a state are ranges of hashes: each task has its own opened.
    kind = "hash" if whole.mode == "state" else "mod"
    return [replace(whole, partition=f"{kind}:{count}:{n}", truncates=n == 0) for n in range(count)]
