"""A column's type and value in an envelope, by the database's name for the type."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from databus.common import json_text
from databus.common.envelopes.column_types import ValueModes, by_kind
from databus.common.envelopes.connect_types import BYTES, FLOAT64, INT64, STRING, struct
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_types import Product, column_type
from databus.common.schema.source_schema import Column, Kind

DEFAULT = ValueModes()
DECIMAL = Column("n", Kind.DECIMAL, precision=12, scale=2)


def written(column: Column, product: Product, value: Any, modes: ValueModes = DEFAULT) -> Any:
    kind, convert = column_type(column, product, modes)
    return JsonEncoding().text(kind, value if convert is None else convert(value))


@pytest.mark.parametrize(
    ("modes", "kind", "text"),
    [
        (DEFAULT, "bytes", '"/wA="'),
        (ValueModes(decimals="double"), "float64", "-2.56"),
        (ValueModes(decimals="string"), "string", '"-2.56"'),
    ],
)
def test_a_decimal_has_the_form_of_its_mode(modes: ValueModes, kind: str, text: str) -> None:
    assert column_type(DECIMAL, "mariadb", modes)[0].type == kind
    assert written(DECIMAL, "mariadb", Decimal("-2.56"), modes) == text


def test_an_unsigned_bigint_wraps_as_debeziums_does_unless_it_is_to_be_precise() -> None:
    column = Column("n", Kind.UINT64, type_name="bigint unsigned")
    assert written(column, "mysql", 2**64 - 1) == "-1"
    assert written(column, "mysql", 2**63 - 1) == str(2**63 - 1)
    precise = ValueModes(unsigned_bigints="precise")
    assert written(column, "mysql", 2**64 - 1, precise) == '"AP//////////"'


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_has_a_name_as_text_and_is_null_when_precise(text: str) -> None:
    column = Column("n", Kind.NUMERIC, type_name="numeric")
    names = {"NaN": "NAN", "Infinity": "POSITIVE_INFINITY", "-Infinity": "NEGATIVE_INFINITY"}
    modes = ValueModes(decimals="string")
    assert written(column, "postgresql", Decimal(text), modes) == f'"{names[text]}"'
    assert written(column, "postgresql", Decimal(text)) == "null"


@pytest.mark.parametrize(
    ("name", "kind", "value", "text"),
    [
        ("datetime(3)", Kind.TIMESTAMP, dt.datetime(1970, 1, 1, 0, 0, 1), "1000"),
        ("datetime(6)", Kind.TIMESTAMP, dt.datetime(1970, 1, 1, 0, 0, 1), "1000000"),
        ("datetime(3)", Kind.STRING, "0000-00-00 00:00:00.000", '"0000-00-00 00:00:00.000"'),
        ("bit(1)", Kind.INT, 1, "true"),
        ("bit(9)", Kind.INT, 1, '"AQA="'),
        ("float", Kind.FLOAT, 0.10000000149011612, "0.1"),
        ("set('a','b''c')", Kind.STRING, "a", '"a"'),
        ("json", Kind.JSON, '{"a, b": [1, "c: \\" d"]}', r'"{\"a, b\":[1,\"c: \\\" d\"]}"'),
        ("hmac-sha256", Kind.STRING, "00ff", '"00ff"'),
    ],
)
def test_a_mysql_value_is_written_by_its_type(name: str, kind: Kind, value: Any, text: str) -> None:
    assert written(Column("c", kind, type_name=name), "mysql", value) == text


@pytest.mark.parametrize(
    ("name", "kind", "value", "text"),
    [
        ("time(3) without time zone", Kind.TIME, dt.time(0, 0, 1), "1000"),
        ("time without time zone", Kind.TIME, dt.time(0, 0, 1), "1000000"),
        ("timestamp with time zone", Kind.STRING, "infinity", '"infinity"'),
        ("interval", Kind.STRING, "-1 years -2 mons +3 days -00:00:01", "-36558001000000"),
        ("money", Kind.STRING, "-$1,234.50", '"/h3G"'),
        ("bit varying", Kind.STRING, "", '""'),
        ("integer[]", Kind.STRING, "{{1,2},{3,4}}", "null"),
        ("integer[]", Kind.STRING, "[2:3]={1,2}", "null"),
        ("box[]", Kind.STRING, "{(1,1),(0,0)}", '"{(1,1),(0,0)}"'),
        (
            "hstore",
            Kind.STRING,
            '"a\\"b"=>NULL, "c"=>"d, e"',
            r'"{\"a\\\"b\":null,\"c\":\"d, e\"}"',
        ),
        ("posint", Kind.INT, 7, "7"),
        ("unheard", Kind.STRING, "x", '"x"'),
    ],
)
def test_a_postgresql_value_is_written_by_its_type(
    name: str, kind: Kind, value: Any, text: str
) -> None:
    assert written(Column("c", kind, type_name=name), "postgresql", value) == text


def test_every_kind_has_a_type_without_a_known_name() -> None:
    for kind in Kind:
        assert by_kind(Column("c", kind, precision=5, scale=2), DEFAULT)[0].type


def test_json_is_the_same_without_the_faster_library(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = struct("t", ("a", STRING), ("f", FLOAT64), ("b", BYTES.as_optional()), ("n", INT64))
    value = {"a": 'ż"\n', "f": 0.1, "b": b"\xff", "n": -(2**63)}
    fast = JsonEncoding(with_schemas=True).encode("", kind, value)
    monkeypatch.setattr(json_text, "_fast", None)
    assert JsonEncoding(with_schemas=True).encode("", kind, value) == fast
