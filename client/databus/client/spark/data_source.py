"""``spark.read`` and ``spark.readStream`` of the format ``databus``.

    from databus.client.spark import register
    register(spark)
    orders = (spark.read.format("databus").option("database", "shop")
        .option("source", "shop.orders").option("bootstraps", "http://bootstrap:8701").load())

The driver requests the position where a read ends.  Every task then pulls its own part of the
keys over HTTP, all parts up to that position.  docs/spark.md lists the options and the types.
Executors need this package with its extra ``spark``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
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
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from databus.client.tables.arrow_rows import METADATA, RowDecoder, table_schema
from databus.client.tables.table_reader import Range, TableAddress, TableReader
from databus.common.checkpoint import ORIGIN, SEQ_END, Position, decode_position
from databus.common.errors import BadRequest, FormatError
from databus.common.frame.frame_format import key_hash
from databus.common.http.request_parameters import parse_position
from databus.common.private import HiddenUrl
from databus.common.schema.source_schema import Kind, SourceSchema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT = "databus"
PARTITIONS = 4
MAX_KEYS = 256
"""Most keys that become a request's filter; for more, Spark filters alone."""

_HASH_BUCKETS = 999_999_937
_OPTIONS = frozenset(
    (
        *("database", "source", "relays", "bootstraps", "columns", "metadata", "partitions"),
        *("scn", "timestamp", "since", "until", "mode", "start", "give_up_s", "path"),
        "pushdown",
    )
)
_KEY_KINDS = frozenset({Kind.INT, Kind.UINT64, Kind.STRING, Kind.BYTES, Kind.DATE})
_KEY_KINDS_OF_RANGE = frozenset({Kind.INT})


def register(spark: SparkSession) -> None:
    """Add the format ``databus`` to a session, and let Spark push filters down to it."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(DatabusDataSource)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one read, parsed."""

    address: TableAddress
    mode: str
    since: str | None
    until: str | None
    start: str
    columns: tuple[str, ...]
    metadata: bool
    partitions: int
    pushdown: bool


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """The options as values.

    Raises:
        BadRequest: one is missing, unknown, malformed, or two exclude one another.
    """
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(set(given) - _OPTIONS):
        raise BadRequest(f"unknown options {unknown}; known are {sorted(_OPTIONS - {'path'})}")
    for name in ("database", "source"):
        if not given.get(name):
            raise BadRequest(f"the option {name} is missing", parameter=name)
    relays, bootstraps = (
        tuple(map(HiddenUrl, _listed(given.get(name, "")))) for name in ("relays", "bootstraps")
    )
    if not relays and not bootstraps:
        raise BadRequest("give the option bootstraps, relays, or both: URLs, comma separated")
    as_of = [name for name in ("scn", "timestamp") if name in given]
    ranged = [name for name in ("since", "until", "mode") if name in given]
    if len(as_of) > 1 or (as_of and ranged):
        raise BadRequest(f"the options {as_of + ranged} do not go together")
    mode = given.get("mode", "net") if ranged else "state"
    if mode not in ("net", "all", "state"):
        raise BadRequest(f"mode {mode!r} is neither net nor all", parameter="mode")
    try:
        partitions = int(given.get("partitions", PARTITIONS))
        give_up_s = float(given.get("give_up_s", 60))
    except ValueError as error:
        raise BadRequest(f"partitions and give_up_s are numbers: {error}") from None
    if partitions < 1:
        raise BadRequest("partitions is 1 or more", parameter="partitions")
    return ReadOptions(
        TableAddress(given["database"], given["source"], relays, bootstraps, give_up_s),
        mode,
        given.get("since"),
        given.get(as_of[0]) if as_of else given.get("until"),
        given.get("start", "snapshot" if bootstraps else "oldest"),
        _listed(given.get("columns", "")),
        given.get("metadata", "false").lower() == "true" or bool(ranged),
        partitions,
        given.get("pushdown", "false").lower() == "true",
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass
class SparkPartition(InputPartition):
    """What one task reads."""

    range: Range

    def __init__(self, range: Range) -> None:
        super().__init__(range)
        self.range = range


class DatabusDataSource(DataSource):
    """One table of a Databus stream, typed by its Avro schema."""

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
        schema = TableReader(options.address).schema()
        if missing := set(options.columns) - {c.name for c in schema.columns} - set(METADATA.names):
            raise BadRequest(f"{schema.source} has no columns {sorted(missing)}")
        rows = table_schema(schema)
        fields = [*rows, *(METADATA if options.metadata else [])]
        if options.columns:
            every = {f.name: f for f in (*METADATA, *rows)}
            fields = [every[name] for name in options.columns]
        return from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=True)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        kind = PushingReader if self._read_options.pushdown else DatabusReader
        return kind(self._read_options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""
        return DatabusStreamReader(self._read_options, schema)


class _Rows:
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


class DatabusReader(DataSourceReader):
    """A read of a state or of changes; Spark evaluates the filters."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._rows = _Rows(options, schema)
        self._read_options = options
        self._keys: str | None = None
        self._ops: str | None = None
        self._low: Position | None = None
        self._high: Position | None = None

    def partitions(self) -> Sequence[InputPartition]:
        """One part a task, all up to the same position."""
        options = self._read_options
        reader = TableReader(options.address)
        reader.schema()
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
        return [SparkPartition(whole)] if self._keys else _parts(whole, options.partitions)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, in a task."""
        assert isinstance(partition, SparkPartition)
        return self._rows.batches(partition.range)


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
            table = TableReader(self._read_options.address).schema()
            self._keys = _key_partition(table, filters)
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


class DatabusStreamReader(DataSourceStreamReader):
    """Micro-batches between SCNs.

    Invariants:
        I1. An offset is a position of the stream with its clock; a batch is (start, end] and is
            the same at each read, as long as all its changes are retained.
        I2. If they are not (relay and log have dropped them), the batch holds the last state of
            each key instead; a key that changed again after ``end`` comes with a later batch.
            So a sink that replaces rows by key ends with the source's state.

    Owner: the driver plans, tasks read.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.until is not None:
            raise BadRequest("a stream has no end: leave until, scn and timestamp out")
        self._read_options = options
        self._rows = _Rows(options, schema)

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query begins, by the option ``start``."""
        reader = TableReader(self._read_options.address)
        reader.schema()
        start = self._read_options.start
        if start == "snapshot":
            if not self._read_options.address.bootstraps:
                raise BadRequest("start=snapshot needs the option bootstraps")
            return _offset(ORIGIN, reader.clock)
        if start == "oldest":
            return _offset(reader.oldest(), reader.clock)
        if start == "latest":
            return _offset(reader.newest(), reader.clock)
        return _offset(parse_position(start), reader.clock)

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """The newest position; for a first batch that is a snapshot, the bootstrap's."""
        reader = TableReader(self._read_options.address)
        reader.schema()
        is_first = start is not None and decode_position(start) == ORIGIN
        newest = reader.target() if is_first else reader.newest()
        if start is not None:
            newest = max(newest, decode_position(start))
        return _offset(newest, reader.clock)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One part of the keys a task."""
        since, until = decode_position(start), decode_position(end)
        if since >= until:
            return []
        options = self._read_options
        mode = "state" if since == ORIGIN else "auto" if options.mode == "state" else options.mode
        whole = Range(mode, since, until, str(end["clock"]), later=mode != "all")
        return _parts(whole, options.partitions)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, in a task."""
        assert isinstance(partition, SparkPartition)
        return self._rows.batches(partition.range)


def _offset(position: Position, clock: str) -> dict[str, Any]:
    return {"scn": position.scn, "seq": position.seq, "clock": clock}


def _parts(whole: Range, count: int) -> list[InputPartition]:
    if count == 1:
        return [SparkPartition(whole)]
    # The files of a state are ranges of hashes: each task opens its own.
    kind = "hash" if whole.mode == "state" else "mod"
    return [SparkPartition(replace(whole, partition=f"{kind}:{count}:{n}")) for n in range(count)]


def _key_partition(table: SourceSchema, filters: Sequence[Filter]) -> str | None:
    """A partition filter for the servers that includes every key the filters allow, or None."""
    allowed: dict[str, list[Any]] = {}
    bounds: dict[str, list[int | None]] = {}
    for one in filters:
        name = ".".join(getattr(one, "attribute", ()))
        value = getattr(one, "value", None)
        if name not in table.key or value is None:
            continue
        if isinstance(one, EqualTo | In):
            values = list(value) if isinstance(one, In) else [value]
            allowed[name] = [v for v in values if v is not None]
        elif isinstance(value, int):
            low_high = bounds.setdefault(name, [None, None])
            match one:
                case GreaterThan():
                    low_high[0] = value + 1
                case GreaterThanOrEqual():
                    low_high[0] = value
                case LessThan():
                    low_high[1] = value - 1
                case LessThanOrEqual():
                    low_high[1] = value
    return _of_keys(table, allowed) or _of_range(table, bounds)


def _of_keys(table: SourceSchema, allowed: Mapping[str, list[Any]]) -> str | None:
    if set(allowed) != set(table.key):
        return None
    if any(column.kind not in _KEY_KINDS for column in table.key_columns):
        return None
    keys: list[tuple[Any, ...]] = [()]
    for name in table.key:
        keys = [(*key, value) for key in keys for value in allowed[name]]
        if len(keys) > MAX_KEYS:
            return None
    try:
        hashes = {key_hash(table.encode_key(_as_key(table, key))) for key in keys}
    except FormatError:
        return None
    return f"mod:{_HASH_BUCKETS}:" + ",".join(
        str(bucket) for bucket in sorted({one % _HASH_BUCKETS for one in hashes})
    )


def _as_key(table: SourceSchema, key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        int(value) if column.kind is Kind.UINT64 else value
        for column, value in zip(table.key_columns, key, strict=True)
    )


def _of_range(table: SourceSchema, bounds: Mapping[str, list[int | None]]) -> str | None:
    first = table.key_columns[0]
    low, high = bounds.get(first.name, [None, None])
    if first.kind not in _KEY_KINDS_OF_RANGE or first.nullable or low is None or high is None:
        return None
    if abs(low) >= 10**17 or abs(high) >= 10**17 or high < low:
        return None
    return f"range:1:{low}-{high}"
