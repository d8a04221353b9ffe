"""Envelopes of the names that other tools use: databus, flat, maxwell, cloudevents.

``databus`` is the object of the relay's NDJSON.  ``flat`` is the row itself with four columns of
its position, for tables of a warehouse.  ``maxwell`` is the JSON of Maxwell's daemon.
``cloudevents`` is a CloudEvent 1.0 in structured mode, whose data is the ``databus`` object.
The values of ``databus``, ``maxwell`` and ``cloudevents`` are those of the relay's JSON; ``flat``
has the types of the Debezium envelope.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from typing import Any

from databus.common.envelopes.column_types import iso_time
from databus.common.envelopes.connect_types import (
    INT32,
    INT64,
    OPTIONAL_STRING,
    STRING,
    ConnectType,
    struct,
)
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.row_change import EndedWindow, EnvelopeRecord, RecordTypes, RowChange
from databus.common.envelopes.row_types import RowTypes, legal_topic
from databus.common.envelopes.value_columns import each, json_record
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import SourceSchema

ANY = ConnectType("any")
"""An object without a schema: JSON alone can encode it."""
_EPOCH = dt.datetime(1970, 1, 1)
_MAXWELL_TYPES = {"c": "insert", "u": "update", "d": "delete", "r": "bootstrap-insert"}
_FLAT_FIELDS = (
    ("__op", STRING),
    ("__scn", INT64),
    ("__seq", INT32),
    ("__commit_us", INT64),
    ("__txid", OPTIONAL_STRING),
)


class _WithoutMarkers:
    """An envelope whose transactions have no records of their own."""

    takes_columns = True

    def begin(self, window: EndedWindow) -> list[EnvelopeRecord]:
        """None."""
        return []

    def end(self, window: EndedWindow) -> list[EnvelopeRecord]:
        """None."""
        return []


class DatabusEnvelope(_WithoutMarkers):
    """The object of the relay's NDJSON, under the key's JSON."""

    def __init__(self, options: EnvelopeOptions) -> None:
        self._options = options

    def records(self, change: RowChange) -> list[EnvelopeRecord]:
        """One record, a delete too."""
        value = databus_object(self._options.database, change)
        return [EnvelopeRecord(_topic(self._options, change.schema), ANY, value["key"], ANY, value)]


class CloudEventsEnvelope(_WithoutMarkers):
    """A CloudEvent of version 1.0 in structured mode."""

    def __init__(self, options: EnvelopeOptions) -> None:
        self._options = options

    def records(self, change: RowChange) -> list[EnvelopeRecord]:
        """One record, a delete too; the id is the same at each delivery."""
        data = databus_object(self._options.database, change)
        value = {
            "specversion": "1.0",
            "id": each("{}:{}".format, change.scn, change.seq),
            "source": f"/databus/{self._options.database}/{change.schema.source}",
            "type": f"databus.change.{change.op}",
            "time": each(_event_time, change.commit_us),
            "datacontenttype": "application/json",
            "subject": None if data["key"] is None else each(_list_text, *data["key"].values()),
            "data": data,
        }
        if value["subject"] is None:
            del value["subject"]
        headers = (("content-type", "application/cloudevents+json; charset=UTF-8"),)
        topic = _topic(self._options, change.schema)
        return [EnvelopeRecord(topic, ANY, data["key"], ANY, value, headers)]


class MaxwellEnvelope(_WithoutMarkers):
    """The JSON of Maxwell's daemon.

    Maxwell has no record of a truncated table, so there is none here.
    """

    takes_columns = False  # The fields of ``old`` depend on the values.

    def __init__(self, options: EnvelopeOptions) -> None:
        self._options = options

    def records(self, change: RowChange) -> list[EnvelopeRecord]:
        """One record; none of a truncate."""
        if change.op not in _MAXWELL_TYPES or change.key is None:
            return []
        database, table = split_source(change.schema.source)
        columns = change.schema.columns
        before = None if change.before is None else json_record(change.before, columns)
        if change.op == "d":
            row = _json_key(change) if before is None else before
        else:
            assert change.after is not None
            row = json_record(change.after, columns, change.absent)
        value: dict[str, Any] = {
            "database": database,
            "table": table,
            "type": _MAXWELL_TYPES[change.op],
            "ts": change.commit_us // 1_000_000,
            "xid": change.scn,
            "xoffset": change.seq,
            "gtid": change.txid,
            "data": row,
        }
        if change.op == "u" and before is not None:
            value["old"] = {
                name: old for name, old in before.items() if name in row and row[name] != old
            }
        key_record: dict[str, Any] = {"database": database, "table": table}
        for name, one in _json_key(change).items():
            key_record[f"pk.{name}"] = one
        return [EnvelopeRecord(_topic(self._options, change.schema), ANY, key_record, ANY, value)]


class FlatEnvelope(_WithoutMarkers):
    """The row after the change, or for a delete the row before, with its position."""

    def __init__(self, options: EnvelopeOptions) -> None:
        self._options = options
        self._tables: dict[int, tuple[RowTypes, ConnectType]] = {}

    def records(self, change: RowChange) -> list[EnvelopeRecord]:
        """One record, and after a delete the tombstone; none of a truncate."""
        if change.key is None:
            return []
        topic = _topic(self._options, change.schema)
        types, kind = self._table(change.schema, topic)
        key = types.key_value(change.key)
        if change.after is not None:
            row = types.row_value(change.after, change.absent)
        elif change.before is not None:
            row = types.row_value(change.before)
        else:
            row = types.row_of_key(change.key)
        value = row | {
            "__op": change.op,
            "__scn": change.scn,
            "__seq": change.seq,
            "__commit_us": change.commit_us,
            "__txid": change.txid,
        }
        record = EnvelopeRecord(topic, types.key, key, kind, value)
        if change.op == "d" and self._options.tombstones:
            return [record, EnvelopeRecord(topic, types.key, key, None, None)]
        return [record]

    def types_of(self, schema: SourceSchema) -> RecordTypes:
        """The types of the records of a version of a table."""
        topic = _topic(self._options, schema)
        types, kind = self._table(schema, topic)
        return RecordTypes(topic, types.key, kind)

    def _table(self, schema: SourceSchema, topic: str) -> tuple[RowTypes, ConnectType]:
        found = self._tables.get(schema.fingerprint)
        if found is None:
            types = RowTypes(schema, topic, self._options.product, self._options.modes)
            kind = struct(f"{topic}.Flat", *types.row.fields, *_FLAT_FIELDS)
            found = self._tables[schema.fingerprint] = (types, kind)
        return found


def databus_object(database: str, change: RowChange) -> dict[str, Any]:
    """The object of a row change in the relay's NDJSON."""
    columns = change.schema.columns
    return {
        "database": database,
        "source": change.schema.source,
        "op": change.op,
        "scn": change.scn,
        "seq": change.seq,
        "ts_us": change.commit_us,
        "txid": change.txid,
        "key": None if change.key is None else _json_key(change),
        "before": None if change.before is None else json_record(change.before, columns),
        "after": None
        if change.after is None
        else json_record(change.after, columns, change.absent),
    }


def _event_time(commit_us: int) -> str:
    return iso_time(_EPOCH + dt.timedelta(microseconds=commit_us), 6)


def _list_text(*values: Any) -> str:
    return json.dumps(values)


def _json_key(change: RowChange) -> dict[str, Any]:
    assert change.key is not None
    return json_record(change.key, change.schema.key_columns)


def _topic(options: EnvelopeOptions, schema: SourceSchema) -> str:
    return _topic_of(options.prefix, schema.source)


@functools.lru_cache(maxsize=10_000)
def _topic_of(prefix: str, source: str) -> str:
    return legal_topic(".".join((prefix, *split_source(source))))
