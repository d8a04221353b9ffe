"""What a task of ``spark.read`` or ``spark.readStream`` does: rows of a part as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from databus.client.spark.read_options import ReadOptions
from databus.client.tables.arrow_rows import METADATA, RowDecoder
from databus.client.tables.table_reader import Range, TableReader
from databus.common.errors import FormatError


@dataclass
class SparkPartition(InputPartition):
    """What one task reads."""

    range: Range

    def __init__(self, range: Range) -> None:
        super().__init__(range)
        self.range = range


class TableTasks:
    """A task's work for both readers: frames of a part, as Arrow batches of Spark's schema."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    def batches(self, part: Range) -> Iterator[Any]:
        """The rows of a part."""
        reader = TableReader(self.options.address)
        wanted = to_arrow_schema(self.schema, timezone="UTC")
        table = reader.schema()
        own = {column.name for column in table.columns}
        decoder = RowDecoder(
            table,
            reader.schema_of,
            names=[name for name in wanted.names if name in own],
            metadata=[name for name in wanted.names if name not in own and name in METADATA.names],
        )
        for batch in reader.batches(part, decoder):
            yield _as_spark_batch(batch, wanted)


def _as_spark_batch(batch: Any, wanted: Any) -> Any:
    columns = []
    for field in wanted:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        try:
            columns.append(batch.column(at).cast(field.type))
        except pa.ArrowException as error:
            raise FormatError(f"column {field.name} as {field.type}: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def parts_of(whole: Range, count: int) -> list[InputPartition]:
    if count == 1:
        return [SparkPartition(whole)]
    # The files of a state are ranges of hashes: each task opens its own.
    kind = "hash" if whole.mode == "state" else "mod"
    return [SparkPartition(replace(whole, partition=f"{kind}:{count}:{n}")) for n in range(count)]
