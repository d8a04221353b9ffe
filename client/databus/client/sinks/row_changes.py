"""The rows of a sink as what an envelope takes, and as its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from databus.client.application.events import Decoding, Window
from databus.client.sinks.sink import SinkContext
from databus.client.sinks.sink_batch import SinkRow
from databus.client.tables.data_batch import DataBatch
from databus.client.tables.row_shapes import ShapedRows
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.frame_changes import product_of
from databus.common.envelopes.named_envelopes import make_envelope
from databus.common.envelopes.row_change import Envelope, EnvelopeRecord, RowChange
from databus.common.envelopes.value_columns import column_of
from databus.common.schema.source_schema import SourceSchema


class RowChanges:
    """Makes changes of rows, in the version of the table that each row was written with.

    Owner: one sink.
    """

    def __init__(self) -> None:
        self._schemas: dict[tuple[int, frozenset[str]], SourceSchema] = {}
        self._names: dict[int, list[str]] = {}
        self._window: Window | None = None
        self._times: tuple[int, str | None] = (0, None)

    def change(self, row: SinkRow) -> RowChange:
        """The change of a row, after routes and transform."""
        event, window = row.event, row.event.window
        schema = self._schema(event.schema, row.columns)
        value = None if row.op in ("d", "t") else row.value
        absent: tuple[str, ...] = ()
        if value is not None and len(value) < len(schema.columns):
            left_out = event.absent
            absent = tuple(
                one.name for one in schema.columns if one.name in left_out and one.name not in value
            )
        if window is not self._window:
            self._window = window
            self._times = (window.commit_us, window.txid)
        commit_us, txid = self._times
        if window.mode == "bootstrap":  # Its rows have times of their own.
            commit_us = event.commit_us
        return RowChange(
            schema=schema,
            op=row.op,
            scn=event.scn,
            seq=event.seq,
            commit_us=commit_us,
            key=None if row.op == "t" else row.key,
            before=self._whole(schema, row.before),
            after=self._whole(schema, value),
            absent=absent,
            txid=txid,
        )

    def columns(self, rows: ShapedRows, decoding: Decoding, chosen: frozenset[str]) -> RowChange:
        """The changes of rows of one shape, with their values in columns.

        Raises:
            FormatError: the bytes of a row are not of their schema.
        """
        schema = self._schema(rows.schema, chosen)
        headers = rows.block.columns

        def column(numbers: Any) -> Any:
            return column_of(numbers[rows.rows].tolist())

        before = None if rows.op in ("c", "r") else rows.before(decoding)
        after = None if rows.op == "d" else rows.after(decoding)
        return RowChange(
            schema=schema,
            op=rows.op,
            scn=column(headers.scn),
            seq=column(headers.seq),
            commit_us=column(headers.commit_us),
            key=rows.key(decoding) if after is None else {one: after[one] for one in schema.key},
            before=self._whole(schema, before),
            after=self._whole(schema, after),
            txid=cast(Any, column_of(rows.txids)),
        )

    def _schema(self, schema: SourceSchema, columns: frozenset[str]) -> SourceSchema:
        if not columns:
            return schema
        key = (schema.fingerprint, columns)
        found = self._schemas.get(key)
        if found is None:
            wanted = columns | set(schema.key)
            chosen = tuple(one for one in schema.columns if one.name in wanted)
            found = self._schemas[key] = replace(schema, columns=chosen)
        return found

    def _whole(
        self, schema: SourceSchema, row: Mapping[str, Any] | None
    ) -> Mapping[str, Any] | None:
        """The row with exactly the columns of the schema; absent ones are None.

        The client may give a row in the columns of a later version.
        """
        if row is None:
            return None
        names = self._names.get(schema.fingerprint)
        if names is None:
            names = self._names[schema.fingerprint] = [one.name for one in schema.columns]
        return row if list(row) == names else {name: row.get(name) for name in names}


class RowRecords:
    """Makes the records of an envelope, such as ``debezium``.

    Owner: one sink.
    """

    def __init__(
        self, envelope: str, *, prefix: str = "", catalogue: str = "", tombstones: bool = True
    ) -> None:
        self._name, self._prefix = envelope, prefix
        self._catalogue, self._tombstones = catalogue, tombstones
        self._changes = RowChanges()
        self._envelope: Envelope | None = None

    def of(self, row: SinkRow, context: SinkContext) -> list[EnvelopeRecord]:
        """The records of a row, in order."""
        envelope = self._envelope or self._made(context)
        return envelope.records(self._changes.change(row))

    def of_columns(
        self, rows: ShapedRows, data: DataBatch, chosen: frozenset[str], context: SinkContext
    ) -> list[EnvelopeRecord]:
        """The records of rows of one shape, each with the values of all rows in columns; none if
        only ``of`` can make them.

        Raises:
            FormatError: the bytes of a row are not of their schema.
        """
        envelope = self._envelope or self._made(context)
        if not envelope.takes_columns or not rows.take_columns(data.decoding, data.mode):
            return []
        return envelope.records(self._changes.columns(rows, data.decoding, chosen))

    def _made(self, context: SinkContext) -> Envelope:
        """The envelope; its options need the clock of the stream, which the first row brings."""
        options = EnvelopeOptions(
            database=context.database,
            prefix=self._prefix or context.database,
            product=product_of(context.clock()),
            catalogue=self._catalogue,
            tombstones=self._tombstones,
        )
        self._envelope = make_envelope(self._name, options)
        return self._envelope
