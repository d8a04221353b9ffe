"""``columns=``: NDJSON and SSE with a part of each row."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from databus.common.frame import Op
from databus.common.schema import Column, Kind, SourceSchema
from databus.common.window import WindowBuilder
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window

PAGES = SourceSchema(
    "shop.pages",
    (
        Column("body", Kind.STRING),
        Column("id", Kind.INT, nullable=False),
        Column("title", Kind.STRING),
    ),
    ("id",),
)


def page(scn: int, before: str, after: str) -> bytes:
    builder = WindowBuilder(scn, scn)
    builder.event(
        Op.UPDATE,
        PAGES.source_id,
        PAGES.fingerprint,
        PAGES.encode_key((7,)),
        before=PAGES.encode_row(("long", 7, before)),
        after=PAGES.encode_row(("longer", 7, after)),
    )
    return builder.end("t1")


@pytest.mark.parametrize(
    ("columns", "before", "after"),
    [
        ("title", {"id": 7, "title": "a"}, {"id": 7, "title": "b"}),
        (
            "title, body",
            {"body": "long", "id": 7, "title": "a"},
            {"body": "longer", "id": 7, "title": "b"},
        ),
        ("item", {"id": 7}, {"id": 7}),
        ("", {"id": 7}, {"id": 7}),
    ],
)
@pytest.mark.parametrize("form", ["ndjson", "sse"])
async def test_the_columns_wanted_and_the_keys_are_shown_and_no_others(
    tmp_path: Path, columns: str, before: object, after: object, form: str
) -> None:
    live = LiveRelay(tmp_path, schemas=(ORDERS, PAGES))
    live.append(page(1, "a", "b"))
    query = {"columns": columns, "format": form, "follow": "false"}
    async with live.served(), aiohttp.ClientSession() as http:
        async with http.get(f"{live.url}/v1/shop/stream", params=query) as answer:
            assert answer.status == 200
            text = await answer.text()
    live.close()
    line = text.splitlines()[0 if form == "ndjson" else 2].removeprefix("data: ")
    document = json.loads(line)
    assert (document["key"], document["before"], document["after"]) == ({"id": 7}, before, after)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"columns": "titel"}, r"unknown column 'titel' (did you mean title?)"),
        ({"columns": "name", "sources": "shop.pages"}, "known are: body, id, title"),
        ({"columns": "title", "format": "frames"}, "columns is for NDJSON and SSE"),
    ],
)
async def test_unknown_columns_and_frames_are_refused(
    tmp_path: Path, query: dict[str, str], message: str
) -> None:
    live = LiveRelay(tmp_path, schemas=(ITEMS, PAGES))
    live.append(window(1, [(Op.INSERT, ITEMS, 1)]))
    async with live.served(), aiohttp.ClientSession() as http:
        async with http.get(f"{live.url}/v1/shop/stream", params=query) as answer:
            document = await answer.json(content_type=None)
    live.close()
    assert (answer.status, document["code"]) == (400, "bad_request")
    assert message in document["detail"]
