"""The Debezium envelope, field by field; tests/integration/test_debezium_engine.py compares it
with the engine's own records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from databus.common.envelopes.debezium_envelope import DebeziumEnvelope
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.frame_changes import product_of
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_change import EndedWindow, RowChange
from databus.common.envelopes.row_types import UNAVAILABLE
from databus.common.schema.source_schema import SourceSchema
from tests.support.envelope_records import documents_of
from tests.support.schemas import columns_of

ORDERS = SourceSchema(
    "shop.orders", columns_of("id INT!, state STRING!, note STRING, data BYTES"), ("id",)
)
ROW = {"id": 7, "state": "new", "note": None, "data": b"\x00\xff"}
CREATED = RowChange(
    schema=ORDERS,
    op="c",
    scn=812,
    seq=2,
    commit_us=1_700_000_000_000_001,
    key={"id": 7},
    before=None,
    after=ROW,
    txid="0-3-812",
    source_order=2,
)
MARIADB = EnvelopeOptions(database="shop", prefix="b", product="mariadb")
POSTGRES = EnvelopeOptions(database="shop", prefix="b", product="postgresql", catalogue="prod")


def documents(change: RowChange, options: EnvelopeOptions = MARIADB) -> list[Any]:
    """[topic, key, value] of each record."""
    return documents_of(DebeziumEnvelope(options, clock_ns=lambda: 5_000_000_123), change)


def test_an_insert_of_mariadb_has_every_field() -> None:
    ((topic, key, value),) = documents(CREATED)
    assert topic == "b.shop.orders"
    assert key == {"id": 7}
    version = value["source"].pop("version")
    assert version.startswith("databus ")
    assert value == {
        "before": None,
        "after": {"id": 7, "state": "new", "note": None, "data": "AP8="},
        "source": {
            "connector": "mariadb",
            "name": "b",
            "ts_ms": 1_700_000_000_000,
            "snapshot": "false",
            "db": "shop",
            "sequence": None,
            "ts_us": 1_700_000_000_000_001,
            "ts_ns": 1_700_000_000_000_001_000,
            "table": "orders",
            "server_id": 3,
            "gtid": "0-3-812",
            "file": "",
            "pos": 812,
            "row": 2,
            "thread": None,
            "query": None,
        },
        "transaction": None,
        "op": "c",
        "ts_ms": 5000,
        "ts_us": 5_000_000,
        "ts_ns": 5_000_000_123,
    }


def test_a_delete_is_followed_by_a_tombstone_unless_that_is_switched_off() -> None:
    deleted = replace(CREATED, op="d", before=ROW, after=None)
    record, tombstone = documents(deleted)
    assert record[2]["before"]["state"] == "new" and record[2]["after"] is None
    assert tombstone == ["b.shop.orders", {"id": 7}, None]
    assert len(documents(deleted, replace(MARIADB, tombstones=False))) == 1


def test_a_truncate_has_no_key_and_no_rows() -> None:
    ((_, key, value),) = documents(replace(CREATED, op="t", key=None, after=None))
    assert key is None and value["before"] is None and value["after"] is None


def test_a_row_of_a_dump_is_one_of_an_incremental_snapshot() -> None:
    ((_, _, value),) = documents(replace(CREATED, op="r", txid="dump"))
    assert value["op"] == "r"
    assert value["source"]["snapshot"] == "incremental"
    assert value["source"]["gtid"] is None and value["source"]["server_id"] == 0


def test_a_delete_of_which_the_source_gives_the_key_alone_has_zeros_in_other_columns() -> None:
    record, _ = documents(replace(CREATED, op="d", after=None, txid="761"), POSTGRES)
    assert record[2]["before"] == {"id": 7, "state": "", "note": None, "data": None}
    assert record[2]["source"] | {"version": ""} == {
        "version": "",
        "connector": "postgresql",
        "name": "b",
        "ts_ms": 1_700_000_000_000,
        "snapshot": "false",
        "db": "prod",
        "sequence": '[null,"812"]',
        "ts_us": 1_700_000_000_000_001,
        "ts_ns": 1_700_000_000_000_001_000,
        "schema": "shop",
        "table": "orders",
        "txId": 761,
        "lsn": 812,
        "xmin": None,
        "origin": None,
        "origin_lsn": None,
    }


def test_a_column_that_the_source_left_out_has_debeziums_placeholder() -> None:
    changed = replace(CREATED, op="u", absent=("note", "data"), after=ROW | {"data": None})
    ((_, _, value),) = documents(changed, POSTGRES)
    assert value["after"]["note"] == UNAVAILABLE
    assert value["after"]["data"] == "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="


@pytest.mark.parametrize(
    ("options", "txid"), [(MARIADB, "0-3-812"), (POSTGRES, "761:812")], ids=["mariadb", "pg"]
)
def test_transactions_have_records_and_every_event_its_order_when_asked_for(
    options: EnvelopeOptions, txid: str
) -> None:
    options = replace(options, transactions=True)
    change = replace(CREATED, txid=txid.partition(":")[0])
    ((_, _, value),) = documents(change, options)
    assert value["transaction"] == {"id": txid, "total_order": 3, "data_collection_order": 2}
    envelope = DebeziumEnvelope(options)
    window = EndedWindow(812, 1_700_000_000_000_001, change.txid, {"shop.orders": 2, "shop.b": 1})
    (begin,), (end,) = envelope.begin(window), envelope.end(window)
    assert (begin.topic, begin.key) == ("b.transaction", {"id": txid})
    assert begin.value == {
        "status": "BEGIN",
        "id": txid,
        "event_count": None,
        "data_collections": None,
        "ts_ms": 1_700_000_000_000,
    }
    assert end.value["event_count"] == 3
    assert end.value["data_collections"][0] == {"data_collection": "shop.orders", "event_count": 2}
    assert DebeziumEnvelope(MARIADB).begin(window) == []


def test_the_schema_part_names_connects_types() -> None:
    encoding = JsonEncoding(with_schemas=True)
    (record,) = DebeziumEnvelope(MARIADB).records(CREATED)
    assert record.value_type is not None and record.key_type is not None
    key = json.loads(encoding.encode("b.shop.orders-key", record.key_type, record.key))
    assert key == {
        "schema": {
            "type": "struct",
            "fields": [{"type": "int64", "optional": False, "field": "id"}],
            "optional": False,
            "name": "b.shop.orders.Key",
        },
        "payload": {"id": 7},
    }
    value = json.loads(encoding.text(record.value_type, record.value))
    assert value["schema"]["name"] == "b.shop.orders.Envelope"
    assert [field["field"] for field in value["schema"]["fields"]] == list(value["payload"])


def test_a_topic_has_only_characters_that_kafka_allows() -> None:
    odd = replace(ORDERS, source='"shop.eu"."größe 1"')
    assert documents(replace(CREATED, schema=odd))[0][0] == "b.shop.eu.gr__e_1"


def test_the_product_is_known_from_the_streams_clock() -> None:
    assert product_of("mariadb:0:shop") == "mariadb"
    assert product_of("postgresql:1234") == "postgresql"
    assert product_of("g1:5") == "generator"
