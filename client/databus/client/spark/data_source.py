"""``spark.read`` and ``spark.readStream`` of the format ``databus``.

    from databus.client.spark import register
    register(spark)
    orders = (spark.read.format("databus").option("database", "shop")
        .option("source", "shop.orders").option("bootstraps", "http://bootstrap:8701").load())

The driver requests the position where a read ends.  Every task then reads its own part of the
keys, all parts up to that position: from the files of the store, or over HTTP.  docs/spark.md lists
the options and the types.  Executors need this package with its extra ``spark``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from databus.client.spark.micro_batches import DatabusStreamReader
from databus.client.spark.pushed_filters import key_partition
from databus.client.spark.read_options import ReadOptions, parse_options
from databus.client.spark.table_tasks import SOURCE, SparkPartition, TableTasks, parts_of
from databus.client.tables.arrow_rows import METADATA, table_schema
from databus.client.tables.table_reader import Range, TableReader
from databus.common.checkpoint import ORIGIN, SEQ_END, Position
from databus.common.errors import BadRequest
from databus.common.schema.source_schema import SourceSchema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT = "databus"


def register(spark: SparkSession) -> None:
    """Add the format ``databus`` to a session, and let Spark push filters down to it."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(DatabusDataSource)


class DatabusDataSource(DataSource):
    """One table of a Databus stream, or several, typed by their Avro schemas."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._read_options = parse_options(dict(options))

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """The table's present columns, then the stream's own if the options request them."""
        options = self._read_options
        if options.has_globs:
            rows = [
                *_columns_of_all(TableReader(options.address).tables(), options.columns),
                SOURCE,
            ]
        else:
            rows = list(table_schema(TableReader(options.address).schema()))
        fields = [*rows, *(METADATA if options.metadata else [])]
        if options.columns:
            every = {field.name: field for field in (*METADATA, *rows)}
            if missing := sorted(set(options.columns) - set(every)):
                raise BadRequest(f"{options.address.source} has no columns {missing}")
            fields = [every[name] for name in options.columns]
        return from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=True)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        kind = PushingReader if self._read_options.pushdown else DatabusReader
        return kind(self._read_options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""
        return DatabusStreamReader(self._read_options, schema)


def _columns_of_all(tables: Sequence[SourceSchema], names: Sequence[str]) -> list[Any]:
    """The columns of several tables by name, in the order in which they come up.

    With ``names`` these columns alone.

    Raises:
        BadRequest: two tables have a column of one name and different types.
    """
    found: dict[str, Any] = {}
    for table in tables:
        for field in table_schema(table, names or None):
            had = found.setdefault(field.name, field)
            if had.type != field.type:
                raise BadRequest(
                    f"the column {field.name} is {field.type} in {table.source} and {had.type} in "
                    "another of the tables; read them apart, or name other columns in the options"
                )
    return list(found.values())


class DatabusReader(DataSourceReader):
    """A read of a state or of changes; Spark evaluates the filters."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._rows = TableTasks(options, schema)
        self._read_options = options
        self._keys: str | None = None
        self._ops: str | None = None
        self._low: Position | None = None
        self._high: Position | None = None

    def partitions(self) -> Sequence[InputPartition]:
        """One part a task, all up to the same position."""
        options = self._read_options
        reader = TableReader(options.address)
        reader.tables()
        newest = reader.target() if options.address.bootstraps else reader.newest()
        until = reader.position_of(options.until) if options.until else newest
        if until.seq == SEQ_END:
            until = min(until, newest)
        since = reader.position_of(options.since) if options.since else None
        if self._low is not None:
            since = max(since or ORIGIN, self._low)
        if self._high is not None:
            until = min(until, self._high)
        if since is not None and since >= until:
            return []
        whole = Range(options.mode, since, until, reader.clock, self._keys, self._ops)
        return parts_of(options, reader, whole)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, in a task."""
        assert isinstance(partition, SparkPartition)
        return self._rows.batches(partition)


class PushingReader(DatabusReader):
    """A read whose filters become parts of the request.

    Conditions on the whole key become the hash buckets of those keys, a range of a numeric key
    a range partition, and with ``mode=all`` conditions on ``_op`` and ``_scn`` the server's own.
    Spark evaluates all of them again.  Spark stores pushed filters with the DataFrame, and applies
    them to later queries over it.  So this is for DataFrames of one query, and is off by default.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use the filters that make the request smaller; Spark evaluates all of them as well."""
        if filters:
            if not self._read_options.has_globs:
                table = TableReader(self._read_options.address).schema()
                self._keys = key_partition(table, filters)
            if self._read_options.mode == "all":
                self._push_stream_filters(filters)
        return filters

    def _push_stream_filters(self, filters: list[Filter]) -> None:
        for one in filters:
            name = ".".join(getattr(one, "attribute", ()))
            value = getattr(one, "value", None)
            if name == "_op" and isinstance(one, EqualTo | In):
                letters = value if isinstance(value, tuple | list) else [value]
                self._ops = ",".join(sorted({str(v) for v in letters} & set("cudrt"))) or "t"
            if name != "_scn" or not isinstance(value, int) or value < 0:
                continue
            match one:
                case GreaterThan():
                    self._low = Position(value)
                case GreaterThanOrEqual() if value > 0:
                    self._low = Position(value - 1)
                case LessThan() if value > 0:
                    self._high = Position(value - 1)
                case LessThanOrEqual():
                    self._high = Position(value)
