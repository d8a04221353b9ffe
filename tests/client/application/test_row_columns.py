"""Values of rows that are decoded together, against the decoder that goes row by row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.client.application.events import Decoding, Event, Window
from databus.client.application.frame_blocks import Block
from databus.client.application.row_columns import RowColumns
from databus.common.errors import FormatError
from databus.common.frame.frame_format import Op, pack_bitmap
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.client.tables.test_arrow_rows import EVERY, rows

ITEMS = SourceSchema(
    "shop.items",
    (
        Column("id", Kind.INT, nullable=False),
        Column("name", Kind.STRING),
        Column("doc", Kind.JSON, type_name="jsonb"),
    ),
    ("id",),
)
WIDER = SourceSchema("shop.items", (*ITEMS.columns, Column("more", Kind.INT)), ("id",))

_NAME_ABSENT = pack_bitmap([1], len(ITEMS.columns))


def item(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"näme {number}", "doc": f'{{"n":{number}}}'}


def expected(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"näme {number}", "doc": {"n": number}}


def events_of(
    *frames: tuple[Op, int, dict[str, Any]], schemas: SchemaSet, schema: SourceSchema = ITEMS
) -> list[Event]:
    """The events of one window; a frame is (op, id, other parts)."""
    builder = WindowBuilder(1, 1000, 0)
    for op, number, parts in frames:
        key = schema.encode_key((number,))
        builder.event(op, schema.source_id, schema.fingerprint, key, **parts)
    block = Block(builder.end("tx1"), first=0, bootstrap=False)
    window = Window(Decoding("shop", schemas), "online", block, 0)
    return [Event(block, index, window) for index in range(len(frames))]


def inserted(count: int) -> list[tuple[Op, int, dict[str, Any]]]:
    return [(Op.INSERT, n, {"after": ITEMS.encode_row(item(n))}) for n in range(count)]


@settings(max_examples=60, deadline=None)
@given(rows)
def test_every_kind_has_the_value_that_a_row_alone_has(found: list[dict[str, Any]]) -> None:
    encoded = [EVERY.encode_row(row) for row in found]
    builder = WindowBuilder(1, 1000, 0)
    for row, after in zip(found, encoded, strict=True):
        key = EVERY.encode_key(row)
        builder.event(Op.INSERT, EVERY.source_id, EVERY.fingerprint, key, after=after)
    block = Block(builder.end("tx1"), first=0, bootstrap=False)
    indices, starts, stops = block.whole_rows(0, 100)
    assert indices.tolist() == list(range(len(found)))
    values = RowColumns(EVERY.source, EVERY.columns).rows(block.data, starts, stops)
    # The representations: 1.0 and 1.00 are equal decimals, and True equals 1.
    assert repr(values) == repr([EVERY.decode_row(data) for data in encoded])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=400))
def test_any_order_of_access_gives_every_row_its_value(order: list[int]) -> None:
    events = events_of(*inserted(300), schemas=SchemaSet([ITEMS]))
    for index in [*order, *range(300)]:
        assert events[index].value == expected(index)


def test_a_value_is_decoded_once_and_the_applications_to_change() -> None:
    schemas = SchemaSet([ITEMS])
    events = events_of(*inserted(100), schemas=schemas)
    for number, event in enumerate(events):
        value = event.value
        assert value == expected(number)
        assert event.value is value
        value["doc"]["n"] = value["name"] = None
    # A replay makes new events of the same bytes.
    again = [Event(event._block, event._index, event.window) for event in events]
    assert [event.value for event in again] == [expected(number) for number in range(100)]


def test_deletes_and_partial_rows_between_the_others_have_their_own_values() -> None:
    frames = inserted(60)
    for number in range(0, 60, 7):
        frames[number] = (Op.DELETE, number, {"before": ITEMS.encode_row(item(number))})
    for number in range(1, 60, 7):
        frames[number] = (
            Op.UPDATE, number, {"after": ITEMS.encode_row(item(number)), "absent": _NAME_ABSENT}
        )  # fmt: skip
    for number, event in enumerate(events_of(*frames, schemas=SchemaSet([ITEMS]))):
        whole = expected(number)
        if number % 7 == 0:
            assert event.value is None
            assert event.before == whole
        else:
            absent = {"name"} if number % 7 == 1 else set()
            assert event.value == {k: v for k, v in whole.items() if k not in absent}


def test_rows_that_were_decoded_before_a_new_version_came_have_its_columns() -> None:
    schemas = SchemaSet([ITEMS])
    events = events_of(*inserted(100), schemas=schemas)
    for number in range(50):
        assert events[number].value == expected(number)
    schemas.announce(WIDER)
    for number in range(50, 100):
        assert events[number].value == expected(number) | {"more": None}


def test_only_the_damaged_row_has_an_error() -> None:
    frames = inserted(100)
    frames[70] = (Op.INSERT, 70, {"after": b"\x02\x02\x06\xff\xff"})
    for number, event in enumerate(events_of(*frames, schemas=SchemaSet([ITEMS]))):
        if number == 70:
            with pytest.raises(FormatError, match="items"):
                _ = event.value
        else:
            assert event.value == expected(number)
