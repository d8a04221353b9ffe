"""The relay's worker over real HTTP on loopback, on a real ring: what is served and refused."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from databus.common.checkpoint import (
    BootstrapCheckpoint,
    OnlineCheckpoint,
    Position,
    encode,
)
from databus.common.frame.frame_format import iter_frames
from databus.common.frame.window_builder import end_of_window
from databus.common.http.stream_formats import FRAMES_TYPE, NDJSON_TYPE, SSE_TYPE
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.support.live_relay import CLOCK, ITEMS, ORDERS, LiveRelay, window
from tests.support.relay_http import (
    BEAT,
    END,
    FRAMES,
    INSERT,
    frames,
    insert,
    ops_and_positions,
    problem,
)

# ---- what is served ----


async def test_databases_and_sources_give_the_range_and_the_clock(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(4), insert(7))
    async with http.get(f"{relay.url}/v1/databases") as answer:
        (database,) = (await answer.json())["databases"]
    assert database["name"] == "shop"
    assert database["clock"] == CLOCK
    assert database["prev"] == {"scn": 0, "seq": 0}
    assert database["min"] == {"scn": 4, "seq": 0}
    assert database["max"] == {"scn": 7, "seq": 1}
    async with http.get(f"{relay.url}/v1/shop/sources") as answer:
        document = await answer.json()
    assert document["max"] == {"scn": 7, "seq": 1}
    assert [(s["name"], s["source_id"], s["fingerprint"]) for s in document["sources"]] == [
        (s.source, s.source_id, f"{s.fingerprint:016x}") for s in (ITEMS, ORDERS)
    ]


async def test_register_gives_every_version_of_the_sources_that_match(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    wider = SourceSchema("shop.orders", (*ORDERS.columns, Column("note", Kind.STRING)), ("id",))
    relay.registry.add([wider])
    async with http.get(f"{relay.url}/v1/shop/register", params={"sources": "*.orders"}) as answer:
        document = await answer.json()
    assert document["clock"] == CLOCK
    assert [(s["source"], s["version"]) for s in document["schemas"]] == [
        ("shop.orders", 1),
        ("shop.orders", 2),
    ]
    read_back = [SourceSchema.from_json(s["schema"]) for s in document["schemas"]]
    assert [s.fingerprint for s in read_back] == [ORDERS.fingerprint, wider.fingerprint]


async def test_a_database_without_a_ring_is_named_and_not_ready(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path)
    live.writer.close()
    ring = live.folder.path / "ring"
    ring.rename(ring.with_name("aside"))
    async with live.served():
        status, document = await problem(http, "GET", f"{live.url}/v1/shop/stream")
        assert (status, document["code"], document["retry"]) == (503, "source_unavailable", True)
        status, document = await problem(http, "GET", f"{live.url}/readyz")
        assert (status, document["code"]) == (503, "server_unavailable")
        assert "shop" in document["reasons"][0]
        async with http.get(f"{live.url}/healthz") as answer:
            assert answer.status == 200
        ring.with_name("aside").rename(ring)
        async with http.get(f"{live.url}/readyz") as answer:
            assert answer.status == 200
    live.registry.close()


# ---- where a stream starts ----


async def small_relay(tmp_path: Path) -> LiveRelay:
    """A ring that has evicted its oldest windows."""
    live = LiveRelay(tmp_path, ring_bytes=64 << 10)
    for scn in range(10, 2000, 10):
        live.append(window(scn, [(INSERT, ORDERS, n) for n in range(4)], text="y" * 60))
    return live


async def test_the_serving_rule_is_exact_at_every_boundary(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = await small_relay(tmp_path)
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        async with http.get(f"{live.url}/v1/databases") as answer:
            (served,) = (await answer.json())["databases"]
        prev, oldest, newest = (Position(**served[name]) for name in ("prev", "min", "max"))
        assert prev.scn + 10 == oldest.scn
        assert oldest.seq == 0
        assert (prev.seq, newest) == (4, Position(1990, 4))

        async def first(at: str) -> tuple[int, int]:
            found = await frames(http, url, scn=at, max_bytes=1)
            return found[0].scn, found[0].seq

        for too_old in (f"{prev.scn}:{prev.seq - 1}", f"{prev.scn}:0", f"{prev.scn - 1}", "0:0"):
            status, document = await problem(http, "GET", url, scn=too_old)
            assert (status, document["code"]) == (410, "scn_too_old")
            assert Position(**document["prev"]) == prev
            assert Position(**document["max"]) == newest
        for at in (f"{prev.scn}:{prev.seq}", f"{prev.scn}", f"{prev.scn + 1}", f"{oldest.scn - 1}"):
            assert await first(at) == (oldest.scn, 0)
        assert await first(f"{oldest.scn}:0") == (oldest.scn, 1)
        assert await first(f"{oldest.scn}:3") == (oldest.scn, 4)
        assert await first(f"{oldest.scn}:4") == (oldest.scn + 10, 0)
        assert await first(f"{oldest.scn + 5}") == (oldest.scn + 10, 0)
        assert await first(f"{newest.scn}:3") == (newest.scn, 4)
        for at in (f"{newest.scn}:4", f"{newest.scn}"):
            (beat,) = await frames(http, url, scn=at)
            assert beat.op == BEAT
    live.close()


async def test_oldest_is_everything_and_latest_is_what_comes_after(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"
    assert ops_and_positions(await frames(http, url)) == [(BEAT, 0, 0)]
    relay.append(insert(1), insert(2))
    everything = [(INSERT, 1, 0), (END, 1, 1), (INSERT, 2, 0), (END, 2, 1)]
    assert ops_and_positions(await frames(http, url)) == everything
    assert ops_and_positions(await frames(http, url, start="oldest")) == everything
    assert ops_and_positions(await frames(http, url, start="latest")) == [(BEAT, 2, 1)]


IN_A_ROW = [
    (INSERT, 1, 0), (END, 1, 1), (END, 1, 2), (END, 2, 0), (END, 2, 1), (INSERT, 3, 0), (END, 3, 1),
    (END, 4, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, IN_A_ROW),
        (
            {"sources": "shop.orders"},
            [(INSERT, 1, 0), (END, 1, 1), (INSERT, 3, 0), (END, 3, 1), (BEAT, 4, 0)],
        ),
        ({"sources": "shop.items"}, [(BEAT, 4, 0)]),
    ],
)
async def test_ends_of_windows_in_a_row_are_served_and_collapse_under_a_filter(
    relay: LiveRelay,
    http: aiohttp.ClientSession,
    more: dict[str, str],
    expected: list[tuple[int, int, int]],
) -> None:
    """A reader with a filter sees one end behind what it gets of a window, and no others."""
    repeated = [end_of_window(scn, seq, 1, 0) for scn, seq in [(1, 2), (2, 0), (2, 1)]]
    relay.append(insert(1), *repeated, insert(3), end_of_window(4, 0, 1, 0))
    url = f"{relay.url}/v1/shop/stream"
    assert ops_and_positions(await frames(http, url, **more)) == expected
    for at in ("1:1", "1:2", "2:0", "2:1"):
        rest = [position for position in expected if position[1:] > tuple(map(int, at.split(":")))]
        assert ops_and_positions(await frames(http, url, scn=at, **more)) == rest


async def test_the_answer_gives_range_and_clock_in_its_headers(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(3), insert(9))
    async with http.get(f"{relay.url}/v1/shop/stream", headers=FRAMES) as answer:
        sent = {name: value for name, value in answer.headers.items() if "Databus" in name}
    assert sent == {
        "Databus-Clock": CLOCK,
        "Databus-Prev": "0:0",
        "Databus-Min": "3:0",
        "Databus-Max": "9:1",
    }


async def test_a_reader_ahead_of_the_stream_is_notified_and_waits_for_what_is_new_to_it(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1))
    url = f"{relay.url}/v1/shop/stream"
    async with http.get(url, params={"scn": "3:0", "wait_ms": 10_000}, headers=FRAMES) as answer:
        assert answer.headers["Databus-Ahead"] == "true"
        relay.append(insert(2))
        relay.append(insert(3), insert(4))
        body = await answer.read()
    assert ops_and_positions(list(iter_frames(body))) == [(END, 3, 1), (INSERT, 4, 0), (END, 4, 1)]
    async with http.get(f"{relay.url}/v1/status") as answer:
        assert (await answer.json())["databases"][0]["served"]["ahead"] == 1


async def test_a_checkpoint_is_taken_if_database_and_clock_are_right(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2))
    url = f"{relay.url}/v1/shop/stream"
    position = Position(1, 1)
    good = encode(OnlineCheckpoint("shop", CLOCK, position))
    assert ops_and_positions(await frames(http, url, checkpoint=good)) == [
        (INSERT, 2, 0),
        (END, 2, 1),
    ]
    foreign = encode(OnlineCheckpoint("shop", "test:2", position))
    assert (await problem(http, "GET", url, checkpoint=foreign))[1]["code"] == "clock_mismatch"
    elsewhere = encode(OnlineCheckpoint("other", CLOCK, position))
    assert (await problem(http, "GET", url, checkpoint=elsewhere))[1]["code"] == "bad_checkpoint"
    halfway = encode(BootstrapCheckpoint("shop", CLOCK, position, position, "r", 1, position))
    status, document = await problem(http, "GET", url, checkpoint=halfway)
    assert (status, document["code"]) == (400, "bad_checkpoint")
    assert "bootstrap server" in document["detail"]


# ---- refusals ----


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "words"),
    [
        ("GET", "/v1/shop/stream?sorces=a", 400, "bad_request", "did you mean sources?"),
        ("GET", "/v1/shop/stream?scn=1&scn=2", 400, "bad_request", "twice"),
        ("GET", "/v1/shop/stream?scn=1&start=latest", 400, "bad_request", "scn and start"),
        ("GET", "/v1/shop/stream?scn=-1", 400, "bad_request", "'-1'"),
        ("GET", "/v1/shop/stream?scn=18446744073709551616", 400, "bad_request", "position"),
        ("GET", "/v1/shop/stream?start=first", 400, "bad_request", "oldest"),
        ("GET", "/v1/shop/stream?wait_ms=1s", 400, "bad_request", "wait_ms"),
        ("GET", "/v1/shop/stream?max_bytes=0", 400, "bad_request", "from 1"),
        ("GET", "/v1/shop/stream?follow=maybe", 400, "bad_request", "follow"),
        ("GET", "/v1/shop/stream?format=xml", 400, "bad_request", "ndjson"),
        ("GET", "/v1/shop/stream?ops=x", 400, "bad_filter", "'x'"),
        ("GET", "/v1/shop/stream?partition=mod:4:4", 400, "bad_filter", "0-3"),
        ("GET", "/v1/shop/stream?sources=,", 400, "bad_filter", "no source"),
        ("GET", "/v1/shop/stream?checkpoint=x", 400, "bad_checkpoint", "JSON"),
        ("GET", "/v1/shop/stream?sources=shop.order", 404, "unknown_source", "shop.orders?"),
        ("GET", "/v1/shop/register?sources=x.*", 404, "unknown_source", "x.*"),
        ("GET", "/v1/shp/stream", 404, "unknown_database", "did you mean shop?"),
        ("GET", "/v1/shop/strem", 404, "not_found", "/v1/shop/strem"),
        ("GET", "/v1/databases?pretty=1", 400, "bad_request", "pretty"),
        ("POST", "/v1/shop/stream", 405, "method_not_allowed", "GET"),
        ("DELETE", "/v1/shop/dumps", 405, "method_not_allowed", "POST"),
        ("GET", "/v1/shop/dumps", 503, "server_unavailable", "fetcher"),
    ],
)
async def test_what_cannot_be_answered_is_a_problem_with_its_code(
    relay: LiveRelay,
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    status: int,
    code: str,
    words: str,
) -> None:
    found, document = await problem(http, method, relay.url + path)
    assert (found, document["code"]) == (status, code)
    assert words in document["detail"]
    assert document["hint"]


async def test_an_accept_header_without_any_of_our_types_is_refused(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"
    async with http.get(url, headers={"Accept": "image/png"}) as answer:
        assert answer.status == 406
        assert (await answer.json(content_type=None))["code"] == "not_acceptable"


async def test_no_counter_is_touched_by_a_database_that_is_not_served(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    await problem(http, "GET", f"{relay.url}/v1/other/stream")
    async with http.get(f"{relay.url}/metrics") as answer:
        text = await answer.text()
    assert 'databus_relay_requests_total{database="shop"} 0.0' in text
    assert "other" not in text


# ---- other formats ----


async def test_curl_gets_ndjson_and_the_library_what_it_names(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"
    for accept, kind in (
        ("*/*", NDJSON_TYPE),
        (FRAMES_TYPE, FRAMES_TYPE),
        (f"{NDJSON_TYPE};q=0.5, {FRAMES_TYPE}", FRAMES_TYPE),
        ("text/html,application/xhtml+xml,*/*;q=0.8", NDJSON_TYPE),
    ):
        async with http.get(url, headers={"Accept": accept}) as answer:
            assert answer.content_type == kind
    async with http.get(url, params={"format": "frames"}, headers={"Accept": "*/*"}) as answer:
        assert answer.content_type == FRAMES_TYPE
    async with http.get(url, headers={"Accept": SSE_TYPE}) as answer:
        assert answer.content_type == SSE_TYPE


async def test_a_browser_that_reconnects_resumes_where_it_was(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2), insert(3))
    url = f"{relay.url}/v1/shop/stream"
    async with http.get(
        url,
        params={"start": "oldest", "follow": "false"},
        headers={"Accept": SSE_TYPE, "Last-Event-ID": "2:0"},
    ) as answer:
        text = await answer.text()
    ids = [line for line in text.splitlines() if line.startswith("id: ")]
    assert ids == ["id: 2:1", "id: 3:0", "id: 3:1"]
