"""``format=debezium`` of a relay's stream."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from databus.common.frame.frame_format import Op
from databus.common.http.stream_formats import NDJSON_TYPE
from tests.support.live_relay import ORDERS, LiveRelay, window


async def _get(relay: LiveRelay, **parameters: str) -> tuple[int, str, list[Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{relay.url}/v1/shop/stream", params={"format": "debezium"} | parameters) as got,
    ):
        return (
            got.status,
            got.content_type,
            [json.loads(one) for one in (await got.text()).split("\n") if one],
        )


async def test_a_change_is_a_line_with_topic_key_and_debeziums_value(relay: LiveRelay) -> None:
    relay.append(
        window(2, [(Op.INSERT, ORDERS, 1), (Op.UPDATE, ORDERS, 1)], txid="tx"),
        window(3, [(Op.DELETE, ORDERS, 1)]),
    )
    status, kind, lines = await _get(relay)
    assert (status, kind) == (200, NDJSON_TYPE)
    changes = [one for one in lines if "topic" in one]
    assert [(one["topic"], one["key"]) for one in changes] == [("shop.shop.orders", {"id": 1})] * 4
    values = [one["value"] for one in changes]
    assert [value and value["op"] for value in values] == ["c", "u", "d", None]
    assert values[0]["after"] == {"id": 1, "item": "x1"} and values[0]["before"] is None
    assert values[2]["before"] == {"id": 1, "item": "x1"} and values[2]["after"] is None
    assert [value["source"]["lsn"] for value in values[:3]] == [2, 2, 3]
    ends = [one for one in lines if one.get("control") == "end_of_window"]
    assert [(one["scn"], one["seq"]) for one in ends] == [(2, 2), (3, 1)]


async def test_a_reader_resumes_at_the_position_of_a_control_line(relay: LiveRelay) -> None:
    relay.append(window(2, [(Op.INSERT, ORDERS, 1)]), window(3, [(Op.INSERT, ORDERS, 2)]))
    _, _, lines = await _get(relay, scn="2:1")
    assert [one["key"] for one in lines if "topic" in one] == [{"id": 2}]


async def test_the_form_has_whole_rows_alone(relay: LiveRelay) -> None:
    status, _, (problem,) = await _get(relay, columns="item")
    assert status == 400
    assert problem["code"] == "bad_request" and "columns" in problem["detail"]
