"""The rows of a sink as what an envelope takes, and as its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from databus.client.application.events import Window
from databus.client.sinks.sink import SinkContext
from databus.client.sinks.sink_batch import SinkRow
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.frame_changes import product_of
from databus.common.envelopes.named_envelopes import make_envelope
from databus.common.envelopes.row_change import Envelope, EnvelopeRecord, RowChange
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
        event, schema, window = row.event, self._schema(row), row.event.window
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

    def _schema(self, row: SinkRow) -> SourceSchema:
        schema = row.event.schema
        if not row.columns:
            return schema
        key = (schema.fingerprint, row.columns)
        found = self._schemas.get(key)
        if found is None:
            wanted = row.columns | set(schema.key)
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
