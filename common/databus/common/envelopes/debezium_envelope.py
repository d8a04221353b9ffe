"""Debezium's envelope: the records of its connectors for MariaDB, MySQL and PostgreSQL.

What differs from Debezium's own records is listed in docs/envelopes.md, and a test compares the
two.  A frame has no binlog file and no LSN of a single row, so the source block has the event's
position instead: ``pos`` or ``lsn`` is the scn, ``row`` the seq.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from databus.common.envelopes.connect_types import (
    INT32,
    INT64,
    OPTIONAL_INT64,
    OPTIONAL_STRING,
    STRING,
    ConnectType,
    array,
    struct,
)
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.row_change import EndedWindow, EnvelopeRecord, RecordTypes, RowChange
from databus.common.envelopes.row_types import RowTypes, legal_topic
from databus.common.envelopes.value_columns import each
from databus.common.extras import version
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import SourceSchema

_SNAPSHOT = ConnectType(
    "string",
    name="io.debezium.data.Enum",
    version=1,
    parameters=(
        (
            "allowed",
            "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental",
        ),
    ),
    optional=True,
    default="false",
)
_COMMON = (
    ("version", STRING),
    ("connector", STRING),
    ("name", STRING),
    ("ts_ms", INT64),
    ("snapshot", _SNAPSHOT),
    ("db", STRING),
    ("sequence", OPTIONAL_STRING),
    ("ts_us", OPTIONAL_INT64),
    ("ts_ns", OPTIONAL_INT64),
)
_BINLOG = (
    ("table", OPTIONAL_STRING),
    ("server_id", INT64),
    ("gtid", OPTIONAL_STRING),
    ("file", STRING),
    ("pos", INT64),
    ("row", INT32),
    ("thread", OPTIONAL_INT64),
    ("query", OPTIONAL_STRING),
)
_WAL = (
    ("schema", STRING),
    ("table", STRING),
    ("txId", OPTIONAL_INT64),
    ("lsn", OPTIONAL_INT64),
    ("xmin", OPTIONAL_INT64),
    ("origin", OPTIONAL_STRING),
    ("origin_lsn", OPTIONAL_INT64),
)
_BLOCK = struct(
    "event.block",
    ("id", STRING),
    ("total_order", INT64),
    ("data_collection_order", INT64),
    version=1,
).as_optional()
_METADATA = "io.debezium.connector.common.TransactionMetadata"
_TRANSACTION_KEY = struct(f"{_METADATA}Key", ("id", STRING), version=1)
_COLLECTION = struct(
    "event.collection", ("data_collection", STRING), ("event_count", INT64), version=1
)
_TRANSACTION_VALUE = struct(
    f"{_METADATA}Value",
    ("status", STRING),
    ("id", STRING),
    ("event_count", OPTIONAL_INT64),
    ("data_collections", array(_COLLECTION).as_optional()),
    ("ts_ms", INT64),
    version=1,
)


class DebeziumEnvelope:
    """The records of Debezium.

    Owner: one task; it retains the types of each table version.
    """

    def __init__(
        self, options: EnvelopeOptions, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._options = options
        self._clock_ns = clock_ns
        self._version = f"databus {version()}"
        self._tables: dict[int, _Table] = {}

    @property
    def takes_columns(self) -> bool:
        """Unless there are transaction records: the block of an event depends on its values."""
        return not self._options.transactions

    def records(self, change: RowChange) -> list[EnvelopeRecord]:
        """The event, and after a delete the tombstone."""
        table = self._table(change.schema)
        now_ns = self._clock_ns()
        types = table.types
        key = None if change.key is None else types.key_value(change.key)
        key_type = None if key is None else types.key
        before = None
        if change.before is not None:
            before = types.row_value(change.before)
        elif change.op == "d" and change.key is not None:
            before = types.row_of_key(change.key)
        value = {
            "before": before,
            "after": None if change.after is None else types.row_value(change.after, change.absent),
            "source": self._source(change, table),
            "transaction": self._transaction(change),
            "op": change.op,
            "ts_ms": now_ns // 1_000_000,
            "ts_us": now_ns // 1000,
            "ts_ns": now_ns,
        }
        record = EnvelopeRecord(table.topic, key_type, key, table.value, value)
        if change.op == "d" and self._options.tombstones:
            return [record, EnvelopeRecord(table.topic, key_type, key, None, None)]
        return [record]

    def types_of(self, schema: SourceSchema) -> RecordTypes:
        """The types of the records of a version of a table."""
        table = self._table(schema)
        return RecordTypes(table.topic, table.types.key, table.value)

    def _table(self, schema: SourceSchema) -> _Table:
        table = self._tables.get(schema.fingerprint)
        if table is None:
            table = self._tables[schema.fingerprint] = _Table(schema, self._options)
        return table

    def begin(self, window: EndedWindow) -> list[EnvelopeRecord]:
        """The BEGIN of the transaction topic, with ``transactions`` alone."""
        return self._marker(window, "BEGIN", None, None)

    def end(self, window: EndedWindow) -> list[EnvelopeRecord]:
        """The END of the transaction topic, with ``transactions`` alone."""
        counts = [
            {"data_collection": ".".join(split_source(source)), "event_count": count}
            for source, count in window.event_counts.items()
        ]
        return self._marker(window, "END", sum(window.event_counts.values()), counts)

    def _marker(
        self, window: EndedWindow, status: str, event_count: int | None, counts: Any
    ) -> list[EnvelopeRecord]:
        if not self._options.transactions or not window.txid:
            return []
        txid = self._transaction_id(window.txid, window.scn)
        value = {
            "status": status,
            "id": txid,
            "event_count": event_count,
            "data_collections": counts,
            "ts_ms": window.commit_us // 1000,
        }
        topic = f"{self._options.prefix}.transaction"
        return [EnvelopeRecord(topic, _TRANSACTION_KEY, {"id": txid}, _TRANSACTION_VALUE, value)]

    def _transaction(self, change: RowChange) -> dict[str, Any] | None:
        if not self._options.transactions or not change.txid or change.op == "r":
            return None
        return {
            "id": self._transaction_id(change.txid, change.scn),
            "total_order": change.seq + 1,
            "data_collection_order": change.source_order,
        }

    def _transaction_id(self, txid: str, scn: int) -> str:
        return f"{txid}:{scn}" if self._options.product == "postgresql" else txid

    def _source(self, change: RowChange, table: _Table) -> dict[str, Any]:
        commit_us, txid = change.commit_us, change.txid
        found = {
            "version": self._version,
            "connector": self._options.product,
            "name": self._options.prefix,
            "ts_ms": each(_milliseconds, commit_us),
            "snapshot": "incremental" if change.op == "r" else "false",
            "db": table.database,
            "sequence": None,
            "ts_us": commit_us,
            "ts_ns": each(_nanoseconds, commit_us),
        }
        if table.is_binlog:
            is_row = change.op != "r"
            found |= {
                "table": table.name,
                "server_id": each(_server_id, txid) if table.is_mariadb and is_row else 0,
                "gtid": txid if is_row else None,
                "file": "",
                "pos": change.scn,
                "row": change.seq,
                "thread": None,
                "query": None,
            }
        else:
            found["sequence"] = each('[null,"{}"]'.format, change.scn)
            found |= {
                "schema": table.schema,
                "table": table.name,
                "txId": each(_transaction_number, txid),
                "lsn": change.scn,
                "xmin": None,
                "origin": None,
                "origin_lsn": None,
            }
        return found


def _milliseconds(microseconds: int) -> int:
    return microseconds // 1000


def _nanoseconds(microseconds: int) -> int:
    return microseconds * 1000


def _transaction_number(txid: str | None) -> int | None:
    return int(txid) if txid and txid.isdecimal() else None


def _server_id(gtid: str | None) -> int:
    """The server in MariaDB's ``domain-server-sequence``."""
    parts = (gtid or "").split("-")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0


class _Table:
    """What the records of one version of a table share."""

    def __init__(self, schema: SourceSchema, options: EnvelopeOptions) -> None:
        self.schema, self.name = split_source(schema.source)
        self.is_mariadb = options.product == "mariadb"
        self.is_binlog = options.product in ("mariadb", "mysql")
        self.database = self.schema if self.is_binlog else options.catalogue or options.database
        self.topic = legal_topic(f"{options.prefix}.{self.schema}.{self.name}")
        self.types = RowTypes(schema, self.topic, options.product, options.modes)
        source = struct(
            f"io.debezium.connector.{options.product}.Source",
            *_COMMON,
            *(_BINLOG if self.is_binlog else _WAL),
            version=1,
        )
        self.value = struct(
            f"{self.topic}.Envelope",
            ("before", self.types.row),
            ("after", self.types.row),
            ("source", source),
            ("transaction", _BLOCK),
            ("op", STRING),
            ("ts_ms", OPTIONAL_INT64),
            ("ts_us", OPTIONAL_INT64),
            ("ts_ns", OPTIONAL_INT64),
            version=2,
        )
