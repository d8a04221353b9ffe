"""The rows of a batch as records with bytes: by columns where rows have one shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.client.sinks.row_changes import RowRecords
from databus.client.sinks.sink import SinkContext
from databus.client.sinks.sink_batch import SinkBatch, SinkRow
from databus.client.tables.data_batch import DataBatch
from databus.client.tables.row_shapes import FEWEST, ShapedRows
from databus.common.compiled.kernels import I64Array
from databus.common.envelopes.connect_types import ConnectType
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_change import Encoding, EnvelopeRecord
from databus.common.errors import FormatError
from databus.common.json_text import json_cells

Headers = list[tuple[str, str | bytes]]
EncodedRecord = tuple[str, bytes | None, bytes | None, Headers]
"""Topic, key, value, and headers: scn, seq and those of the envelope."""
Makes = Iterator[Iterable[EncodedRecord]]
"""The records of one row after the other."""


class EncodedRecords:
    """Makes the records of batches.

    Invariants:
        I1. The bytes of a record do not depend on the other rows of its batch.

    Owner: one sink.
    """

    def __init__(self, records: RowRecords, encoding: Encoding) -> None:
        self._records = records
        self._encoding = encoding

    def of(self, batch: SinkBatch, context: SinkContext) -> Iterator[EncodedRecord]:
        """The records in commit order; in a bootstrap, in the order in which their rows came.

        Raises:
            RowRefused, FormatError: as ``SinkBatch.rows``.
        """
        encoding = self._encoding
        if len(batch) < FEWEST or not batch.is_whole or not isinstance(encoding, JsonEncoding):
            for row in batch.rows():
                yield from self._of_row(row, context)
            return
        for run in batch.runs():
            makers: list[Makes] = []
            found = [self._makers(data, batch, context, encoding, makers) for data in run]
            numbers = np.concatenate(found)
            if len({data.source for data in run}) > 1:
                scns, seqs = zip(*(data.positions for data in run), strict=True)
                numbers = numbers[np.lexsort((np.concatenate(seqs), np.concatenate(scns)))]
            # One row after the other, so that the collector finds few objects.
            for number in numbers.tolist():
                yield from next(makers[number])

    def _makers(
        self,
        data: DataBatch,
        batch: SinkBatch,
        context: SinkContext,
        encoding: JsonEncoding,
        makers: list[Makes],
    ) -> I64Array:
        """For each row the number of what makes its records, which is added to ``makers``."""
        found = np.full(len(data), len(makers))
        route = batch.routes.of(data.source)
        if route is None:
            makers.append(itertools.repeat(()))
            return found
        alone = np.ones(len(data), dtype=np.bool_)
        makers.append(self._of_events(data, alone, batch, context))
        for rows in () if batch.routes.changes_rows(route) else data.shapes():
            try:
                made = self._records.of_columns(rows, data, route.columns, context)
            except FormatError:
                continue  # Only the access to the damaged row raises the error.
            if made:
                columns = [_columns(rows, encoding, one, route.target) for one in made]
                found[rows.numbers] = len(makers)
                alone[rows.numbers] = False
                makers.append(zip(*columns, strict=True))
        return found

    def _of_events(
        self, data: DataBatch, wanted: npt.NDArray[np.bool_], batch: SinkBatch, context: SinkContext
    ) -> Makes:
        """The records of each of the rows alone."""
        route = batch.routes.of(data.source)
        assert route is not None
        for event in itertools.compress(data.events(), wanted):
            row = batch.routes.row(route, SinkRow(event, route))
            yield () if row is None else self._of_row(row, context)

    def _of_row(self, row: SinkRow, context: SinkContext) -> Iterator[EncodedRecord]:
        encode = self._encoding.encode
        position: Headers = [("scn", b"%d" % row.event.scn), ("seq", b"%d" % row.event.seq)]
        for record in self._records.of(row, context):
            topic = row.target or record.topic
            key = value = None
            if record.key_type is not None:
                key = encode(f"{topic}-key", record.key_type, record.key)
            if record.value_type is not None:
                value = encode(f"{topic}-value", record.value_type, record.value)
            yield topic, key, value, [*position, *record.headers]


def _columns(
    rows: ShapedRows, encoding: JsonEncoding, record: EnvelopeRecord, target: str
) -> Iterator[EncodedRecord]:
    """A record of each of the rows."""
    headers, count = rows.block.columns, len(rows.rows)
    scns = json_cells(headers.scn[rows.rows].tolist())
    seqs = json_cells(headers.seq[rows.rows].tolist())
    further: Headers = [*record.headers]

    def encoded(kind: ConnectType | None, value: Any) -> Iterable[bytes | None]:
        if kind is None:
            return itertools.repeat(None, count)
        return encoding.encode_columns(kind, value, count)

    positions = zip(scns, seqs, strict=True)
    return zip(
        itertools.repeat(target or record.topic, count),
        encoded(record.key_type, record.key),
        encoded(record.value_type, record.value),
        ([("scn", scn), ("seq", seq), *further] for scn, seq in positions),
        strict=True,
    )
