"""``columns=``: a part of each row, in NDJSON, SSE and the Avro of frames."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from databus.common.frame.frame_format import FrameView, Op, iter_frames, pack_bitmap
from databus.common.frame.window_builder import WindowBuilder
from databus.common.http.json_rendering import Renderer
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window
from tests.support.relay_http import BEAT, FRAMES, Follower

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
        ({"columns": "titel", "format": "frames"}, r"unknown column 'titel' (did you mean title?)"),
    ],
)
async def test_unknown_columns_are_refused(
    tmp_path: Path, query: dict[str, str], message: str
) -> None:
    live = LiveRelay(tmp_path, schemas=(ITEMS, PAGES))
    live.append(window(1, [(Op.INSERT, ITEMS, 1)]))
    async with live.served(), aiohttp.ClientSession() as http:
        async with http.get(f"{live.url}/v1/shop/stream", params=query) as answer:
            document = await answer.json(content_type=None)
        query.pop("format", None)
        async with http.get(f"{live.url}/v1/shop/register", params=query) as answer:
            assert await answer.json(content_type=None) == document
    live.close()
    assert (answer.status, document["code"]) == (400, "bad_request")
    assert message in document["detail"]


# ---- frames ----

NOTED = SourceSchema("shop.pages", (*PAGES.columns, Column("note", Kind.STRING)), ("id",))


def noted(scn: int, *, absent: tuple[int, ...] = ()) -> bytes:
    """A window with every kind of change to a page of the newer version, and one of an order."""
    builder = WindowBuilder(scn, scn)
    rows = [NOTED.encode_row((f"body {n}" * 50, scn * 10 + n, f"t{n}", None)) for n in range(2)]
    key = NOTED.encode_key((scn * 10,))
    of_pages = (NOTED.source_id, NOTED.fingerprint, key)
    builder.event(Op.INSERT, *of_pages, after=rows[0])
    bitmap = pack_bitmap(absent, len(NOTED.columns)) if absent else b""
    builder.event(Op.UPDATE, *of_pages, before=rows[0], after=rows[1], absent=bitmap)
    builder.event(Op.DELETE, *of_pages, before=rows[1])
    builder.event(
        Op.READ,
        ORDERS.source_id,
        ORDERS.fingerprint,
        ORDERS.encode_key((scn,)),
        after=ORDERS.encode_row((scn, "x" * 100)),
    )
    return builder.end(f"t{scn}")


async def schemas_of(http: aiohttp.ClientSession, live: LiveRelay, **query: str) -> SchemaSet:
    async with http.get(f"{live.url}/v1/shop/register", params=query) as answer:
        document = await answer.json()
    found = SchemaSet(SourceSchema.from_json(item["schema"]) for item in document["schemas"])
    for item in document["schemas"]:
        assert int(item["fingerprint"], 16) in found
    return found


async def stream_of(
    http: aiohttp.ClientSession, live: LiveRelay, **query: str | int
) -> list[FrameView]:
    async with http.get(f"{live.url}/v1/shop/stream", params=query, headers=FRAMES) as answer:
        assert answer.status == 200, await answer.text()
        return list(iter_frames(await answer.read()))  # every CRC is checked


def shown(frames: list[FrameView], schemas: SchemaSet) -> list[object]:
    """The frames as NDJSON shows them."""
    block = b"".join(bytes(frame.bytes) for frame in frames)
    return [document for _, document in Renderer("shop", schemas.by_fingerprint).objects(block)]


@pytest.mark.parametrize("columns", ["title", "note,item", ""])
@pytest.mark.parametrize("more", [{}, {"partition": "mod:2:0"}, {"where": "id > 30"}])
async def test_frames_hold_the_columns_wanted_and_are_otherwise_the_same(
    tmp_path: Path, http: aiohttp.ClientSession, columns: str, more: dict[str, str]
) -> None:
    live = LiveRelay(tmp_path, schemas=(ORDERS, PAGES, NOTED))
    live.append(page(1, "a", "b"), *(noted(scn, absent=(0, 3)) for scn in range(2, 9)))
    async with live.served():
        whole = await stream_of(http, live, **more)
        part = await stream_of(http, live, columns=columns, **more)
        schemas = await schemas_of(http, live, columns=columns)
        url = f"{live.url}/v1/shop/stream"
        query = {**more, "columns": columns, "format": "ndjson"}
        async with http.get(url, params=query) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
        pieces: list[FrameView] = []
        while not pieces or pieces[-1].position < part[-1].position:
            at = f"{pieces[-1].scn}:{pieces[-1].seq}" if pieces else "0:0"
            pieces += await stream_of(http, live, columns=columns, scn=at, max_bytes=900, **more)
    live.close()
    assert shown(part, schemas) == lines
    assert len(part) > 8
    for one, other in zip(whole, part, strict=True):
        assert (one.position, one.op, one.commit_us) == (other.position, other.op, other.commit_us)
        assert (one.key, one.key_hash, one.source_id) == (
            other.key,
            other.key_hash,
            other.source_id,
        )
    assert sum(f.length for f in part) < sum(f.length for f in whole)
    changes = [bytes(f.bytes) for f in part if not f.is_control]
    assert [bytes(f.bytes) for f in pieces if not f.is_control] == changes


async def test_versions_that_differ_elsewhere_are_one_to_a_reader_of_some_columns(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, schemas=(PAGES, NOTED))
    async with live.served():
        assert len(await schemas_of(http, live)) == 2
        (one,) = await schemas_of(http, live, columns="title")
        assert [column.name for column in one.columns] == ["id", "title"]
        assert len(await schemas_of(http, live, columns="note,title")) == 2
        both = await schemas_of(http, live, columns="body,id,note,title")
        assert {s.fingerprint for s in both} == {PAGES.fingerprint, NOTED.fingerprint}
    live.close()


async def test_the_version_that_is_current_comes_last_for_a_reader_of_some_columns(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    columns = PAGES.columns
    wider = SourceSchema("shop.pages", (*columns, Column("number", Kind.INT)), ("id",))
    other = SourceSchema("shop.pages", (*columns, Column("colour", Kind.STRING)), ("id",))
    live = LiveRelay(tmp_path, schemas=())
    # To a reader of the title and the number, the last one is the first one again.
    live.registry.announce([PAGES, wider, other])
    async with live.served():
        url = f"{live.url}/v1/shop/register"
        async with http.get(url, params={"columns": "title,number"}) as answer:
            found = (await answer.json())["schemas"]
    live.close()
    shown = [[column["name"] for column in one["schema"]["columns"]] for one in found]
    assert shown == [["id", "title", "number"], ["id", "title"]]
    assert [one["version"] for one in found] == [2, 1]


async def test_ends_of_windows_state_the_window_before_to_readers_of_some_columns(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, schemas=(ORDERS,))
    after = live.writer.last
    for scn in range(1, 5):
        after = live.writer.append(window(scn, [(Op.INSERT, ORDERS, scn)]), after)
    async with live.served():
        url = f"{live.url}/v1/shop/stream?start=oldest&columns=id"
        async with http.get(url, headers=FRAMES) as answer:
            found = list(iter_frames(await answer.read()))
        async with http.get(url, headers={"Accept": "application/x-ndjson"}) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    live.close()
    ends = [view for view in found if view.op == Op.END_OF_WINDOW]
    assert [(view.key_hash, view.schema_fp) for view in ends] == [(0, 0), (1, 1), (2, 1), (3, 1)]
    previous = [one.get("prev") for one in lines if one.get("control") == "end_of_window"]
    assert previous == [None, *({"scn": scn, "seq": 1} for scn in (1, 2, 3))]


async def test_a_follower_of_some_columns_learns_of_a_version_that_comes_meanwhile(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.registry.add([PAGES])
    relay.append(page(1, "a", "b"))
    query = {"columns": "title", "follow": "true", "sources": "shop.pages"}
    url = f"{relay.url}/v1/shop/stream"
    async with http.get(url, params=query, headers=FRAMES) as answer:
        follower = Follower(answer)
        first = await follower.next_but(BEAT)
        relay.registry.add([NOTED])
        relay.append(noted(2))
        while (frame := await follower.next()) is not None and frame.scn < 2:
            continue
    (schema,) = await schemas_of(http, relay, columns="title", sources="shop.pages")
    assert first is not None
    assert frame is not None
    assert first.schema_fp == frame.schema_fp == schema.fingerprint
    assert schema.decode_row(frame.after or b"") == {"id": 20, "title": "t0"}
