"""Typed values as Avro: read back by their schema, they are the same."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import fastavro
import pytest

from databus.common.envelopes.avro_encoding import AvroEncoding, avro_schema
from databus.common.envelopes.connect_types import (
    INT16,
    INT32,
    OPTIONAL_STRING,
    STRING,
    array,
    struct,
)
from databus.common.envelopes.named_envelopes import ENVELOPES, make_envelope
from databus.common.envelopes.plain_envelopes import ANY
from databus.common.envelopes.row_types import Product
from databus.common.errors import FormatError
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.common.sink_config import TYPED_ENVELOPES
from tests.common.envelopes.test_debezium_envelope import CREATED, MARIADB
from tests.support.mysql_types import TYPES, value_rows

ORDER = struct("shop.orders.Value", ("id", INT32), ("note", OPTIONAL_STRING))


class Registry:
    """Numbers the schemas that it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Any]] = []

    def __call__(self, subject: str, schema: dict[str, Any]) -> int:
        self.given.append((subject, schema))
        return len(self.given)

    def read(self, data: bytes) -> Any:
        """The record, by the schema of its id."""
        assert data[0] == 0
        schema = self.given[int.from_bytes(data[1:5], "big") - 1][1]
        plain = fastavro.parse_schema(_plain(schema))
        source = io.BytesIO(data[5:])
        record = fastavro.schemaless_reader(source, plain, None)
        assert not source.read()
        return record


def _plain(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if isinstance(schema, dict):
        return {key: _plain(one) for key, one in schema.items() if key != "logicalType"}
    return schema


def test_a_schema_is_registered_once_for_each_subject() -> None:
    registry = Registry()
    encoding = AvroEncoding(registry)
    first = encoding.encode("a-value", ORDER, {"id": 7, "note": None})
    assert encoding.encode("a-value", ORDER, {"id": 8, "note": "x"})[:5] == first[:5]
    assert encoding.encode("b-value", ORDER, {"id": 7, "note": None})[:5] != first[:5]
    assert [subject for subject, _ in registry.given] == ["a-value", "b-value"]
    assert first == b"\0\0\0\0\1" + b"\x0e\0"


def test_the_schema_is_that_of_confluents_converter() -> None:
    small = struct("b.shop.t.Value", ("n", INT16), ("s", OPTIONAL_STRING), ("l", array(STRING)))
    assert avro_schema(struct("b.shop.t.Envelope", ("before", small), ("after", small))) == {
        "type": "record",
        "name": "Envelope",
        "namespace": "b.shop.t",
        "fields": [
            {
                "name": "before",
                "type": {
                    "type": "record",
                    "name": "Value",
                    "namespace": "b.shop.t",
                    "fields": [
                        {"name": "n", "type": {"type": "int", "connect.type": "int16"}},
                        {"name": "s", "type": ["null", "string"], "default": None},
                        {"name": "l", "type": {"type": "array", "items": ["null", "string"]}},
                    ],
                    "connect.name": "b.shop.t.Value",
                },
            },
            {"name": "after", "type": "b.shop.t.Value"},
        ],
        "connect.name": "b.shop.t.Envelope",
    }


@pytest.mark.parametrize("name", TYPED_ENVELOPES)
def test_a_record_of_a_typed_envelope_is_read_back(name: str) -> None:
    registry = Registry()
    encoding = AvroEncoding(registry)
    (record,) = make_envelope(name, MARIADB).records(CREATED)
    assert record.value_type is not None and record.key_type is not None
    data = encoding.encode(f"{record.topic}-value", record.value_type, record.value)
    assert registry.read(data) == record.value
    key = encoding.encode(f"{record.topic}-key", record.key_type, record.key)
    assert registry.read(key) == {"id": 7}


@pytest.mark.parametrize("product", ["mariadb", "postgresql"])
def test_a_value_of_every_type_is_read_back(product: Product) -> None:
    kinds = [
        (type_, values)
        for type_, values in TYPES
        if not type_.startswith(("json", "inet")) and values[0][1] is not None
    ]
    columns = [Column("id", Kind.INT, nullable=False)]
    rows: list[dict[str, Any]] = [{"id": n} for n, _ in enumerate(value_rows(kinds))]
    for number, (type_, _) in enumerate(kinds):
        columns.append(_column(f"c{number}", type_, kinds[number][1][0][1]))
    for row, values in zip(rows, value_rows(kinds), strict=True):
        row |= {f"c{number}": value for number, (_, value) in enumerate(values)}
    schema = SourceSchema("shop.t", tuple(columns), ("id",))
    envelope = make_envelope("debezium", replace(MARIADB, product=product))
    registry = Registry()
    encoding = AvroEncoding(registry)
    for row in rows:
        change = replace(CREATED, schema=schema, key={"id": row["id"]}, after=row, txid=None)
        (record,) = envelope.records(change)
        assert record.value_type is not None
        found = registry.read(encoding.encode("t-value", record.value_type, record.value))
        for name, value in record.value["after"].items():
            is_float = isinstance(value, float)
            assert found["after"][name] == (pytest.approx(value) if is_float else value), name
    assert len(registry.given) == 1


def _column(name: str, type_: str, value: Any) -> Column:
    """A column of the kind that the value has."""
    kinds = {bool: Kind.BOOL, int: Kind.UINT64, float: Kind.FLOAT, str: Kind.STRING}
    kinds |= {bytes: Kind.BYTES}
    word = type(value).__name__
    by_word = {
        "Decimal": Kind.DECIMAL,
        "date": Kind.DATE,
        "timedelta": Kind.TIME_SPAN,
        "datetime": Kind.TIMESTAMP if type_.startswith("datetime") else Kind.TIMESTAMPTZ,
        "UUID": Kind.UUID,
    }
    kind = kinds.get(type(value)) or by_word[word]
    if kind is Kind.UINT64 and value < 2**63:
        kind = Kind.INT
    return Column(name, kind, precision=65, scale=30, type_name=type_.removesuffix(" null"))


def test_names_that_avro_does_not_allow_are_replaced_in_schema_and_value() -> None:
    inner = struct("größe.Value", ("a b", INT32), ("a-b", INT32), ("1", OPTIONAL_STRING))
    outer = struct("x.Envelope", ("rows", array(inner)), ("after", inner.as_optional()))
    registry = Registry()
    value = {"rows": [{"a b": 1, "a-b": 2, "1": "x"}, None], "after": None}
    record = registry.read(AvroEncoding(registry).encode("s", outer, value))
    assert record == {"rows": [{"a_b": 1, "a_b_2": 2, "_1": "x"}, None], "after": None}


def test_what_has_no_types_has_no_avro_form() -> None:
    with pytest.raises(FormatError, match="no Avro form"):
        AvroEncoding(Registry()).encode("s", ANY, {})
    untyped = set(ENVELOPES) - set(TYPED_ENVELOPES)
    for name in untyped:
        (record,) = make_envelope(name, MARIADB).records(CREATED)
        assert record.value_type is ANY


def test_a_value_that_does_not_fit_is_a_format_error() -> None:
    with pytest.raises(FormatError, match=r"shop\.orders\.Value"):
        AvroEncoding(Registry()).encode("s", ORDER, {"id": "seven", "note": None})
