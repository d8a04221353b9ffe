"""JSON documents and PostgreSQL's arrays in ``event.value``."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import pytest

from databus.client import DatabusClient
from databus.client.application.json_documents import converters, parse_array, parse_document
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.client.conftest import StartServer
from tests.support.read_windows import aup_to

TABLE = SourceSchema(
    "public.t",
    (
        Column("id", Kind.INT, nullable=False),
        Column("doc", Kind.JSON, type_name="jsonb"),
        Column("tags", Kind.STRING, type_name="text[]"),
        Column("grid", Kind.STRING, type_name="numeric(10,2)[]"),
        Column("span", Kind.STRING, type_name="int4range"),
        Column("braces", Kind.STRING, type_name="text"),
    ),
    ("id",),
)


@pytest.mark.parametrize(
    ("text", "element", "expected"),
    [
        ("{}", int, []),
        ("{1,NULL,-3}", int, [1, None, -3]),
        ("{{1,2},{3,4}}", int, [[1, 2], [3, 4]]),
        (r'{"a,\"b\\",NULL,"NULL",x y,""}', str, ['a,"b\\', None, "NULL", "x y", ""]),
        ("{1.50,NaN}", str, ["1.50", "NaN"]),
        (r'{"{\"a\": 1.50}"}', parse_document, [{"a": Decimal("1.50")}]),
        ("[2:3]={1,2}", int, "[2:3]={1,2}"),
        ("{1,2", int, "{1,2"),
        ("{1,,2}", int, "{1,,2}"),
        ("{x}", int, "{x}"),
    ],
)
def test_arrays_become_lists_and_what_is_none_stays_text(
    text: str, element: Any, expected: Any
) -> None:
    assert parse_array(text, element) == expected


def test_a_document_keeps_every_digit() -> None:
    assert parse_document("1e400") == Decimal("1e400")
    assert str(parse_document("[1.50]")[0]) == "1.50"
    assert parse_document("12345678901234567890123") == 12345678901234567890123
    assert parse_document("not json") == "not json"
    assert [name for name, _ in converters(TABLE)] == ["doc", "tags", "grid"]
    (_, convert), *_ = converters(
        SourceSchema(
            "s.t", (TABLE.columns[0], Column("u", Kind.STRING, type_name="uuid[]")), ("id",)
        )
    )
    one = "6c84fb90-12c4-11e1-840d-7b25c5ee775a"
    assert convert(f"{{{one}}}") == [uuid.UUID(one)]


async def test_values_come_as_objects_or_with_objects_off_as_their_text(
    scripted: StartServer,
) -> None:
    texts = ('{"a":[1.50,null]}', "{x,NULL}", "{{1.00},{2.50}}", "[1,5)", "{a}")
    builder = WindowBuilder(1, 1)
    builder.event(
        Op.INSERT, TABLE.source_id, TABLE.fingerprint, TABLE.encode_key((1,)),
        after=TABLE.encode_row((1, *texts)),
    )  # fmt: skip
    server = await scripted(builder.end("tx1"), schemas=[TABLE])
    objects = ({"a": [Decimal("1.50"), None]}, ["x", None], [[Decimal("1.00")], [Decimal("2.50")]])
    for switch, expected in ((True, (*objects, "[1,5)", "{a}")), (False, texts)):
        client = DatabusClient(database="shop", relays=[server.url], start="oldest", objects=switch)
        found = [event.value async for one in aup_to(1, client) async for event in one]
        assert [tuple(row.values())[1:] for row in found if row] == [expected]
