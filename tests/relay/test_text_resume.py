"""Readers of NDJSON and SSE resume at the position in the text: each row comes once."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from databus.common.checkpoint import OnlineCheckpoint, Position, encode
from databus.common.frame.frame_format import Op
from databus.common.http.stream_formats import NDJSON_TYPE, SSE_TYPE
from tests.support.live_relay import CLOCK, ORDERS, LiveRelay, window


def rows_of(objects: list[dict[str, Any]]) -> list[int]:
    return [one["key"]["id"] for one in objects if "op" in one]


def fill(live: LiveRelay) -> None:
    """A commit, then two windows of a dump at the same scn, then another commit."""
    live.append(window(5, [(Op.INSERT, ORDERS, 1)]))
    live.append(window(5, [(Op.READ, ORDERS, 2), (Op.READ, ORDERS, 3)], first_seq=2, dump=True))
    live.append(window(5, [(Op.READ, ORDERS, 4)], first_seq=5, dump=True))
    live.append(window(6, [(Op.INSERT, ORDERS, 5)]))


async def text_of(
    http: aiohttp.ClientSession, url: str, headers: dict[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    """(id of the SSE event or empty, object) of each line of data."""
    found, last_id = [], ""
    async with http.get(url, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        for line in (await answer.text()).splitlines():
            if line.startswith("id: "):
                last_id = line[4:]
            elif line.startswith(("data: ", "{")):
                found.append((last_id, json.loads(line.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("end", [0, 1, 2, 3])
async def test_ndjson_resumes_at_the_scn_and_seq_of_each_end_of_a_window(
    relay: LiveRelay, http: aiohttp.ClientSession, end: int
) -> None:
    fill(relay)
    url = f"{relay.url}/v1/shop/stream"
    headers = {"Accept": NDJSON_TYPE}
    whole = [one for _, one in await text_of(http, f"{url}?start=oldest", headers)]
    assert rows_of(whole) == [1, 2, 3, 4, 5]
    ends = [at for at, one in enumerate(whole) if one.get("control") == "end_of_window"]
    at = whole[ends[end]]
    checkpoint = encode(OnlineCheckpoint("shop", CLOCK, Position(at["scn"], at["seq"])))
    rest = await text_of(http, f"{url}?checkpoint={quote(checkpoint)}", headers)
    assert rows_of([one for _, one in rest]) == rows_of(whole[ends[end] :])


async def test_sse_resumes_at_the_id_of_each_event(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    fill(relay)
    url = f"{relay.url}/v1/shop/stream?start=oldest&follow=false"
    whole = await text_of(http, url, {"Accept": SSE_TYPE})
    assert rows_of([one for _, one in whole]) == [1, 2, 3, 4, 5]
    for at, (last_id, _) in enumerate(whole):
        rest = await text_of(http, url, {"Accept": SSE_TYPE, "Last-Event-ID": last_id})
        assert rows_of([one for _, one in rest]) == rows_of([one for _, one in whole[at + 1 :]])
