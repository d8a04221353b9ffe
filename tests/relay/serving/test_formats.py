"""NDJSON and server-sent events of the stream, object by object."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import (
    BadRequest,
    NotAcceptable,
    ReaderOvertaken,
    UnknownSchema,
    from_problem,
)
from databus.common.frame.frame_format import Op, iter_frames, pack_bitmap, pack_frame
from databus.common.frame.window_builder import WindowBuilder, heartbeat
from databus.common.http.json_rendering import Renderer
from databus.common.http.stream_formats import (
    FRAMES_TYPE,
    NDJSON_TYPE,
    SSE_TYPE,
    Frames,
    Ndjson,
    ServerSentEvents,
    choose_format,
    error_frame,
)
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from tests.support.live_relay import ITEMS, ORDERS, window
from tests.support.schemas import columns_of

EVERYTHING = SourceSchema(
    "shop.everything",
    columns_of(
        "id INT!, flag BOOL, big UINT64, ratio FLOAT, price DECIMAL(10,2), any NUMERIC, "
        "name STRING, raw BYTES, day DATE, at TIME, span TIME_SPAN, local TIMESTAMP, "
        "instant TIMESTAMPTZ, uid UUID, doc JSON, nothing STRING"
    ),
    ("id",),
)
ROW = {
    "id": -7,
    "flag": True,
    "big": 2**64 - 1,
    "ratio": 0.5,
    "price": decimal.Decimal("12.50"),
    "any": decimal.Decimal("1E+3"),
    "name": "Grüße, 世界",
    "raw": b"\x00\xff",
    "day": dt.date(2024, 2, 29),
    "at": dt.time(23, 59, 59, 1),
    "span": dt.timedelta(hours=-30),
    "local": dt.datetime(2024, 1, 2, 3, 4, 5),
    "instant": dt.datetime(2024, 1, 2, 3, 4, 5, 600000, tzinfo=dt.UTC),
    "uid": uuid.UUID(int=1),
    "doc": '{"a": [1, null]}',
    "nothing": None,
}
SCHEMAS = SchemaSet((ORDERS, ITEMS, EVERYTHING))


def renderer() -> Renderer:
    return Renderer("shop", SCHEMAS.by_fingerprint)


def objects(block: bytes) -> list[dict[str, Any]]:
    text = bytes(Ndjson(renderer()).render(block)).decode()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def one_window(build: Callable[[WindowBuilder], None]) -> bytes:
    builder = WindowBuilder(1004, 1_700_000_000_000_001)
    build(builder)
    return builder.end("0-1-1004")


def test_an_update_is_one_line_with_the_fields_in_their_order() -> None:
    block = window(7, [(Op.UPDATE, ORDERS, 3)], txid="0-1-7")
    text = bytes(Ndjson(renderer()).render(block)).decode()
    assert text == (
        '{"database":"shop","source":"shop.orders","op":"u","scn":7,"seq":0,"ts_us":7000000,'
        '"txid":"0-1-7","key":{"id":3},"before":{"id":3,"item":"x3"},'
        '"after":{"id":3,"item":"x3"}}\n'
        '{"control":"end_of_window","scn":7,"seq":1,"events":1,"ts_us":7000000}\n'
    )


@pytest.mark.parametrize(
    ("op", "letter", "before", "after"),
    [
        (Op.INSERT, "c", False, True),
        (Op.UPDATE, "u", True, True),
        (Op.DELETE, "d", True, False),
        (Op.READ, "r", False, True),
    ],
)
def test_each_op_has_its_letter_and_null_for_the_image_it_lacks(
    op: Op, letter: str, before: bool, after: bool
) -> None:
    event = objects(window(1, [(op, ITEMS, 5)]))[0]
    row = {"id": 5, "name": "x5"}
    assert event["op"] == letter
    assert event["before"] == (row if before else None)
    assert event["after"] == (row if after else None)


def test_values_of_every_kind_take_their_json_form() -> None:
    def build(builder: WindowBuilder) -> None:
        builder.event(
            Op.INSERT,
            EVERYTHING.source_id,
            EVERYTHING.fingerprint,
            EVERYTHING.encode_key(ROW),
            after=EVERYTHING.encode_row(ROW),
        )

    event = objects(one_window(build))[0]
    assert event["key"] == {"id": -7}
    assert event["ts_us"] == 1_700_000_000_000_001
    assert event["after"] == {
        "id": -7,
        "flag": True,
        "big": "18446744073709551615",
        "ratio": 0.5,
        "price": "12.50",
        "any": "1000",
        "name": "Grüße, 世界",
        "raw": "AP8=",
        "day": "2024-02-29",
        "at": "23:59:59.000001",
        "span": "-30:00:00",
        "local": "2024-01-02T03:04:05",
        "instant": "2024-01-02T03:04:05.600000Z",
        "uid": "00000000-0000-0000-0000-000000000001",
        "doc": '{"a": [1, null]}',
        "nothing": None,
    }


def test_columns_that_a_partial_frame_lacks_are_left_out_of_after() -> None:
    def build(builder: WindowBuilder) -> None:
        builder.event(
            Op.UPDATE,
            EVERYTHING.source_id,
            EVERYTHING.fingerprint,
            EVERYTHING.encode_key(ROW),
            after=EVERYTHING.encode_row(ROW),
            absent=pack_bitmap([6, 14], len(EVERYTHING.columns)),
        )

    after = objects(one_window(build))[0]["after"]
    assert set(ROW) - set(after) == {"name", "doc"}
    assert after["price"] == "12.50"


def test_the_txid_is_that_of_the_events_own_window_and_null_where_its_end_is_not_there() -> None:
    first = window(1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ORDERS, 2)], txid="a")
    second = window(2, [(Op.INSERT, ORDERS, 3)], txid="b")
    third = window(3, [(Op.INSERT, ORDERS, 4)], txid="c")
    cut = next(iter_frames(third)).length
    events = [o for o in objects(first + second + third[:cut]) if "op" in o]
    assert [event["txid"] for event in events] == ["a", "a", "b", None]


def test_control_frames_are_control_objects() -> None:
    schema_change = pack_frame(
        op=Op.SCHEMA_CHANGE,
        scn=4,
        seq=1,
        source=ORDERS.source_id,
        schema_fp=ORDERS.fingerprint,
        commit_us=9,
        after=json.dumps(ORDERS.to_json()).encode(),
    )
    checkpoint = pack_frame(op=Op.CHECKPOINT, scn=4, seq=2, after=b'{"v":1}')
    error = error_frame(ReaderOvertaken("gone", prev={"scn": 3}), Position(4, 2))
    found = objects(schema_change + heartbeat(Position(4, 1), 9) + checkpoint + error)
    assert found[0] == {
        "control": "schema_change",
        "source": "shop.orders",
        "scn": 4,
        "seq": 1,
        "ts_us": 9,
        "schema": ORDERS.to_json(),
    }
    assert found[1] == {"control": "heartbeat", "scn": 4, "seq": 1, "ts_us": 9}
    assert found[2] == {"control": "checkpoint", "checkpoint": {"v": 1}}
    assert found[3]["control"] == "error"
    again = from_problem(found[3])
    assert isinstance(again, ReaderOvertaken)
    assert again.details["prev"] == {"scn": 3}


def test_server_sent_events_carry_the_position_as_their_id() -> None:
    block = window(7, [(Op.DELETE, ORDERS, 3)]) + heartbeat(Position(8, 0), 5)
    block += error_frame(ReaderOvertaken("gone"), Position(8, 0))
    text = bytes(ServerSentEvents(renderer()).render(block)).decode()
    parts = [dict(line.split(": ", 1) for line in p.split("\n")) for p in text.split("\n\n")[:-1]]
    assert [(p.get("id"), p["event"]) for p in parts] == [
        ("7:0", "change"),
        ("7:1", "end_of_window"),
        ("8:0", "heartbeat"),
        (None, "error"),
    ]
    ndjson = objects(block)
    assert [json.loads(part["data"]) for part in parts] == ndjson


def test_the_frames_format_hands_the_block_on_untouched() -> None:
    block = window(7, [(Op.DELETE, ORDERS, 3)])
    assert Frames().render(block) is block


def test_a_frame_of_an_unknown_schema_is_refused_and_not_guessed() -> None:
    block = window(7, [(Op.INSERT, SourceSchema("a.b", ORDERS.columns, ("id",)), 3)])
    with pytest.raises(UnknownSchema):
        Ndjson(renderer()).render(block)


@pytest.mark.parametrize(
    ("accept", "wanted", "name"),
    [
        ("", None, "ndjson"),
        ("*/*", None, "ndjson"),
        ("application/*", None, "ndjson"),
        (FRAMES_TYPE, None, "frames"),
        (SSE_TYPE, None, "sse"),
        (f"{SSE_TYPE};q=0.1, {NDJSON_TYPE};q=0.9", None, "ndjson"),
        (f"*/*;q=0.1, {FRAMES_TYPE}", None, "frames"),
        (f"{FRAMES_TYPE};q=0, {SSE_TYPE}", None, "sse"),
        ("image/png", "frames", "frames"),
    ],
)
def test_the_best_type_that_is_accepted_is_chosen(
    accept: str, wanted: str | None, name: str
) -> None:
    assert choose_format(accept, wanted) == name


def test_types_that_we_do_not_have_are_refused_with_what_there_is() -> None:
    with pytest.raises(NotAcceptable) as caught:
        choose_format("image/png, text/html", None)
    assert caught.value.details["offered"] == [FRAMES_TYPE, NDJSON_TYPE, SSE_TYPE]
    with pytest.raises(BadRequest, match="frames, ndjson, sse"):
        choose_format("*/*", "json")


@pytest.mark.parametrize(
    "text",
    ["1e400", "1.50", "12345678901234567890.123", '{"a":1,"a":2}', "null", '"x"', '{\n "a": 1}'],
)
def test_a_document_is_shown_as_the_text_that_it_is(text: str) -> None:
    def build(builder: WindowBuilder) -> None:
        for number, doc in ((1, text), (2, None)):
            row = ROW | {"id": number, "doc": doc}
            builder.event(
                Op.INSERT,
                EVERYTHING.source_id,
                EVERYTHING.fingerprint,
                EVERYTHING.encode_key(row),
                after=EVERYTHING.encode_row(row),
            )

    shown = objects(one_window(build))
    assert [one["after"]["doc"] for one in shown if "op" in one] == [text, None]
