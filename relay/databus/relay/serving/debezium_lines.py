"""The stream as records of Debezium, one JSON object a line: ``format=debezium``.

A line is ``{"topic","key","value"}``; a tombstone has the value null.  Control frames come as in
NDJSON, so that a reader has a position to resume at.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from databus.common.envelopes.debezium_envelope import DebeziumEnvelope
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.frame_changes import FrameChanges, product_of
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_change import EnvelopeRecord
from databus.common.frame.frame_format import Buffer
from databus.common.http.json_rendering import Renderer
from databus.common.http.stream_formats import NDJSON_TYPE, RENDERED_BLOCK_BYTES
from databus.common.json_text import json_text
from databus.relay.serving.database_view import DatabaseView


class DebeziumLines:
    """A ``Format``: the records of the Debezium envelope.

    Owner: the task of the request.
    Raises: UnknownSchema and FormatError.
    """

    content_type = NDJSON_TYPE
    block_bytes = RENDERED_BLOCK_BYTES

    def __init__(self, database: DatabaseView, clock: str) -> None:
        self._envelope = DebeziumEnvelope(
            EnvelopeOptions(
                database=database.name,
                prefix=database.name,
                product=product_of(clock),
                catalogue=urlsplit(database.config.url.reveal).path.removeprefix("/"),
            )
        )
        self._changes = FrameChanges(database.schema_of)
        self._renderer = Renderer(database.name, database.schema_of)
        self._encoding = JsonEncoding()

    def render(self, block: Buffer) -> Buffer:
        """A line for each record."""
        lines = []
        for frame, change in self._changes.read(block):
            if change is None:
                lines.append(json_text(self._renderer.control(frame)))
            else:
                lines += [self._line(one) for one in self._envelope.records(change)]
        return ("\n".join(lines) + "\n").encode() if lines else b""

    def _line(self, record: EnvelopeRecord) -> str:
        text = self._encoding.text
        key = "null" if record.key_type is None else text(record.key_type, record.key)
        value = "null" if record.value_type is None else text(record.value_type, record.value)
        return f'{{"topic":"{record.topic}","key":{key},"value":{value}}}'
