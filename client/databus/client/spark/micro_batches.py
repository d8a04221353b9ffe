"""``spark.readStream``: micro-batches of changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from databus.client.spark.read_options import ReadOptions
from databus.client.spark.table_tasks import SparkPartition, TableTasks, parts_of
from databus.client.tables.batch_limits import BatchLimit
from databus.client.tables.table_reader import Range, TableReader
from databus.common.checkpoint import ORIGIN, Position, decode_position
from databus.common.errors import BadRequest
from databus.common.http.request_parameters import parse_position


class DatabusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches between SCNs.

    Invariants:
        I1. An offset is a position of the stream with its clock; a batch is (start, end] and is
            the same at each read, as long as all its changes are retained.
        I2. If they are not (relay and log have dropped them), the batch holds the last state of
            each key instead; a key that changed again after ``end`` comes with a later batch.
            So a sink that replaces rows by key ends with the source's state.
        I3. A batch ends with a window.  It exceeds the limits only if it is one window, the first
            snapshot, or changes that have been merged: there are no positions inside of these.

    Owner: the driver plans, tasks read.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.until is not None:
            raise BadRequest("a stream has no end: leave until, scn and timestamp out")
        self._read_options = options
        self._rows = TableTasks(options, schema)
        self._last: Position | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query begins, by the option ``start``."""
        reader = TableReader(self._read_options.address)
        reader.tables()
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

    def getDefaultReadLimit(self) -> ReadLimit:
        """The options ``maxEventsPerTrigger`` and ``maxBytesPerTrigger``; the first, if both."""
        limit = self._read_options.limit
        if limit.events is not None:
            return ReadMaxRows(limit.events)
        return ReadAllAvailable() if limit.bytes is None else ReadMaxBytes(limit.bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        """End the query at the newest position of now."""
        self._last = TableReader(self._read_options.address).newest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The newest position, or where a batch after ``start`` has reached ``limit``.

        For a first batch that is a snapshot, the bootstrap's; a snapshot has no limit.
        """
        reader = TableReader(self._read_options.address)
        reader.tables()
        since = decode_position(start)
        newest = reader.target() if since == ORIGIN else reader.newest()
        if self._last is not None:
            newest = min(newest, self._last)
        newest = max(newest, since)
        if since not in (ORIGIN, newest) and not isinstance(limit, ReadAllAvailable):
            whole = Range("all", since, newest, reader.clock)
            newest = reader.end_within(whole, self._bound(limit))
        return _offset(newest, reader.clock)

    def _bound(self, limit: ReadLimit) -> BatchLimit:
        """Spark's limit, and the other one of the options."""
        bound = self._read_options.limit
        if isinstance(limit, ReadMaxRows):
            return replace(bound, events=limit.max_rows)
        return replace(bound, bytes=limit.max_bytes) if isinstance(limit, ReadMaxBytes) else bound

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One part of the keys a task."""
        since, until = decode_position(start), decode_position(end)
        if since >= until:
            return []
        options = self._read_options
        mode = "state" if since == ORIGIN else "auto" if options.mode == "state" else options.mode
        whole = Range(mode, since, until, str(end["clock"]), later=mode != "all")
        reader = TableReader(options.address)
        return parts_of(options, reader, whole)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, in a task."""
        assert isinstance(partition, SparkPartition)
        return self._rows.batches(partition)


def _offset(position: Position, clock: str) -> dict[str, Any]:
    return {"scn": position.scn, "seq": position.seq, "clock": clock}
