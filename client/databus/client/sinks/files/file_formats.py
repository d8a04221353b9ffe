"""The formats of files: NDJSON, Avro and Parquet."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import fastavro
import pyarrow as pa
from pyarrow import parquet

from databus.client.sinks.row_changes import RowChanges
from databus.client.sinks.sink_batch import SinkBatch, SinkRow
from databus.common.envelopes.plain_envelopes import databus_object
from databus.common.schema.source_schema import Kind, SourceSchema

_MICROSECOND = dt.timedelta(microseconds=1)
_CHANGE = [
    {"name": "_op", "type": "string"},
    {"name": "_scn", "type": "long"},
    {"name": "_seq", "type": "long"},
    {"name": "_commit_us", "type": "long"},
]


class FilePart(NamedTuple):
    """Changes for one file: of one target, and of one schema version."""

    target: str
    schema: SourceSchema
    first_scn: int
    commit_us: int
    """When the first of them was committed."""
    content: Any
    """What ``encode`` of the format takes, in a list with others of the file."""


class NdjsonFormat:
    """A line for each change: the object of a relay's NDJSON."""

    extension = "ndjson"

    def __init__(self, database: str) -> None:
        self._database = database
        self._changes = RowChanges()

    def parts(self, batch: SinkBatch) -> Iterator[FilePart]:
        """The lines of each target."""
        for row in batch.rows():
            line = json.dumps(
                databus_object(self._database, self._changes.change(row)), separators=(",", ":")
            )
            yield _part(row, line.encode() + b"\n")

    def encode(self, schema: SourceSchema, contents: Sequence[bytes]) -> bytes:
        """The file."""
        return b"".join(contents)


class AvroFormat:
    """A container file: the row, nullable in each column, and ``_op``, ``_scn``, ``_seq``,
    ``_commit_us``.  A delete has the row before it, or its key."""

    extension = "avro"

    def parts(self, batch: SinkBatch) -> Iterator[FilePart]:
        """The records of each target."""
        for row in batch.rows():
            record = row.value if row.value is not None else (row.before or row.key)
            yield _part(
                row,
                record
                | {"_op": row.op, "_scn": row.event.scn, "_seq": row.event.seq}
                | {"_commit_us": row.event.commit_us},
            )

    def encode(self, schema: SourceSchema, contents: Sequence[dict[str, Any]]) -> bytes:
        """The file."""
        avro = dict(schema.row_codec.avro)
        fields = avro["fields"]
        avro["fields"] = [*map(_nullable, fields), *_CHANGE]
        names = [(field["name"], field.get("databus.name", field["name"])) for field in fields]
        kinds = {column.name: column.kind for column in schema.columns}
        records = [
            {field: _avro_value(kinds[name], one.get(name)) for field, name in names}
            | {field["name"]: one[field["name"]] for field in _CHANGE}
            for one in contents
        ]
        out = io.BytesIO()
        fastavro.writer(out, fastavro.parse_schema(avro), records, codec="deflate")
        return out.getvalue()


class ParquetFormat:
    """The columns of the row, and ``_op``, ``_scn``, ``_seq``, ``_commit_time`` and ``_absent``."""

    extension = "parquet"

    def parts(self, batch: SinkBatch) -> Iterator[FilePart]:
        """The columns of each target."""
        for table in batch.tables():
            if table.arrow.num_rows:
                first_us = table.arrow["_commit_time"].cast(pa.int64())[0].as_py()
                first_scn = table.arrow["_scn"][0].as_py()
                yield FilePart(table.target, table.schema, first_scn, first_us, table.arrow)

    def encode(self, schema: SourceSchema, contents: Sequence[Any]) -> bytes:
        """The file."""
        out = io.BytesIO()
        parquet.write_table(pa.Table.from_batches(contents), out, compression="zstd")
        return out.getvalue()


def _part(row: SinkRow, content: Any) -> FilePart:
    event = row.event
    return FilePart(row.target, event.schema, event.scn, event.commit_us, content)


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    if isinstance(field["type"], list):
        return field
    return field | {"type": ["null", field["type"]], "default": None}


def _avro_value(kind: Kind, value: Any) -> Any:
    if kind is Kind.TIME_SPAN and isinstance(value, dt.timedelta):
        return value // _MICROSECOND
    if kind is Kind.NUMERIC and isinstance(value, decimal.Decimal):
        return str(value)
    return decimal.Decimal(value) if kind is Kind.UINT64 and value is not None else value
