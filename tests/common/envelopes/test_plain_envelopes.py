"""The envelopes databus, cloudevents, maxwell and flat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.named_envelopes import ENVELOPES, make_envelope
from databus.common.envelopes.row_change import EndedWindow, RowChange
from databus.common.errors import ConfigError
from databus.common.schema.source_schema import SourceSchema
from tests.support.envelope_records import documents_of
from tests.support.schemas import columns_of

ITEMS = SourceSchema("shop.items", columns_of("id INT!, name STRING, n INT"), ("id",))
OPTIONS = EnvelopeOptions(database="shop", prefix="cdc", product="mariadb")
UPDATED = RowChange(
    schema=ITEMS,
    op="u",
    scn=9,
    seq=1,
    commit_us=1_700_000_000_500_000,
    key={"id": 1},
    before={"id": 1, "name": "a", "n": 2},
    after={"id": 1, "name": "b", "n": 2},
    txid="0-1-9",
)


def records(name: str, change: RowChange) -> list[Any]:
    return documents_of(make_envelope(name, OPTIONS), change)


def test_databus_is_the_object_of_the_relays_ndjson() -> None:
    assert records("databus", UPDATED) == [
        [
            "cdc.shop.items",
            {"id": 1},
            {
                "database": "shop",
                "source": "shop.items",
                "op": "u",
                "scn": 9,
                "seq": 1,
                "ts_us": 1_700_000_000_500_000,
                "txid": "0-1-9",
                "key": {"id": 1},
                "before": {"id": 1, "name": "a", "n": 2},
                "after": {"id": 1, "name": "b", "n": 2},
            },
        ]
    ]


def test_cloudevents_has_a_stable_id_and_the_databus_object() -> None:
    ((_, key, value),) = records("cloudevents", UPDATED)
    data = value.pop("data")
    assert key == {"id": 1}
    assert value == {
        "specversion": "1.0",
        "id": "9:1",
        "source": "/databus/shop/shop.items",
        "type": "databus.change.u",
        "time": "2023-11-14T22:13:20.500000Z",
        "datacontenttype": "application/json",
        "subject": "[1]",
    }
    assert data["after"]["name"] == "b"
    (record,) = make_envelope("cloudevents", OPTIONS).records(UPDATED)
    assert record.headers == (("content-type", "application/cloudevents+json; charset=UTF-8"),)


def test_maxwell_has_the_old_values_of_the_columns_that_changed() -> None:
    assert records("maxwell", UPDATED) == [
        [
            "cdc.shop.items",
            {"database": "shop", "table": "items", "pk.id": 1},
            {
                "database": "shop",
                "table": "items",
                "type": "update",
                "ts": 1_700_000_000,
                "xid": 9,
                "xoffset": 1,
                "gtid": "0-1-9",
                "data": {"id": 1, "name": "b", "n": 2},
                "old": {"name": "a"},
            },
        ]
    ]
    ((_, _, value),) = records("maxwell", replace(UPDATED, op="d", after=None))
    assert value["type"] == "delete" and value["data"]["name"] == "a"


def test_flat_is_the_row_with_its_position_and_a_tombstone_after_a_delete() -> None:
    ((_, key, value),) = records("flat", UPDATED)
    assert key == {"id": 1}
    assert value == {
        "id": 1,
        "name": "b",
        "n": 2,
        "__op": "u",
        "__scn": 9,
        "__seq": 1,
        "__commit_us": 1_700_000_000_500_000,
        "__txid": "0-1-9",
    }
    deleted, tombstone = records("flat", replace(UPDATED, op="d", after=None))
    assert deleted[2]["name"] == "a" and tombstone[2] is None


@pytest.mark.parametrize("name", ENVELOPES)
def test_every_envelope_takes_every_operation(name: str) -> None:
    envelope = make_envelope(name, OPTIONS)
    for op, before, after in (
        ("c", None, UPDATED.after),
        ("r", None, UPDATED.after),
        ("u", None, UPDATED.after),
        ("d", None, None),
    ):
        change = replace(UPDATED, op=op, before=before, after=after, txid=None)
        assert envelope.records(change)[0].key
    truncated = replace(UPDATED, op="t", key=None, before=None, after=None)
    assert len(envelope.records(truncated)) == (name not in ("maxwell", "flat"))
    window = EndedWindow(9, 0, "0-1-9", {"shop.items": 1})
    assert envelope.begin(window) == envelope.end(window) == []


def test_an_unknown_envelope_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"avro.*databus, debezium"):
        make_envelope("avro", OPTIONS)
