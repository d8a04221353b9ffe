"""The relay's worker over real HTTP on loopback, on a real ring."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.checkpoint import (
    BootstrapCheckpoint,
    OnlineCheckpoint,
    Position,
    encode,
)
from databus.common.formats import FRAMES_TYPE, NDJSON_TYPE, SSE_TYPE
from databus.common.frame import FrameSplitter, FrameView, Op, iter_frames
from databus.common.schema import Column, Kind, SourceSchema
from tests.support.live_relay import CLOCK, ITEMS, ORDERS, LiveRelay, window
from tests.support.waiting import eventually

FRAMES = {"Accept": FRAMES_TYPE}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[LiveRelay]:
    live = LiveRelay(tmp_path)
    async with live.served():
        yield live
    live.close()


async def frames(http: aiohttp.ClientSession, url: str, **query: str | int) -> list[FrameView]:
    async with http.get(url, params=query, headers=FRAMES) as answer:
        assert answer.status == 200, await answer.text()
        return list(iter_frames(await answer.read()))


async def problem(
    http: aiohttp.ClientSession, method: str, url: str, **query: str | int
) -> tuple[int, dict[str, Any]]:
    async with http.request(method, url, params=query) as answer:
        assert answer.content_type == "application/problem+json"
        document = await answer.json(content_type=None)
        assert document["status"] == answer.status
        return answer.status, document


def places(found: list[FrameView]) -> list[tuple[int, int, int]]:
    return [(frame.op, frame.scn, frame.seq) for frame in found]


def insert(scn: int, schema: SourceSchema = ORDERS, number: int = 1) -> bytes:
    return window(scn, [(Op.INSERT, schema, number)])


END, BEAT, INSERT = Op.END_OF_WINDOW, Op.HEARTBEAT, Op.INSERT


# ---- what is served ----


async def test_databases_and_sources_tell_the_range_and_the_clock(
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
    assert places(await frames(http, url)) == [(BEAT, 0, 0)]
    relay.append(insert(1), insert(2))
    everything = [(INSERT, 1, 0), (END, 1, 1), (INSERT, 2, 0), (END, 2, 1)]
    assert places(await frames(http, url)) == everything
    assert places(await frames(http, url, start="oldest")) == everything
    assert places(await frames(http, url, start="latest")) == [(BEAT, 2, 1)]


async def test_the_answer_tells_range_and_clock_in_its_headers(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(3), insert(9))
    async with http.get(f"{relay.url}/v1/shop/stream", headers=FRAMES) as answer:
        told = {name: value for name, value in answer.headers.items() if "Databus" in name}
    assert told == {
        "Databus-Clock": CLOCK,
        "Databus-Prev": "0:0",
        "Databus-Min": "3:0",
        "Databus-Max": "9:1",
    }


async def test_a_reader_ahead_of_the_stream_is_told_and_waits_for_what_is_new_to_it(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1))
    url = f"{relay.url}/v1/shop/stream"
    async with http.get(url, params={"scn": "3:0", "wait_ms": 10_000}, headers=FRAMES) as answer:
        assert answer.headers["Databus-Ahead"] == "true"
        relay.append(insert(2))
        relay.append(insert(3), insert(4))
        body = await answer.read()
    assert places(list(iter_frames(body))) == [(END, 3, 1), (INSERT, 4, 0), (END, 4, 1)]
    async with http.get(f"{relay.url}/v1/status") as answer:
        assert (await answer.json())["databases"][0]["served"]["ahead"] == 1


async def test_a_checkpoint_is_taken_if_database_and_clock_are_right(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2))
    url = f"{relay.url}/v1/shop/stream"
    place = Position(1, 1)
    good = encode(OnlineCheckpoint("shop", CLOCK, place))
    assert places(await frames(http, url, checkpoint=good)) == [(INSERT, 2, 0), (END, 2, 1)]
    foreign = encode(OnlineCheckpoint("shop", "test:2", place))
    assert (await problem(http, "GET", url, checkpoint=foreign))[1]["code"] == "clock_mismatch"
    elsewhere = encode(OnlineCheckpoint("other", CLOCK, place))
    assert (await problem(http, "GET", url, checkpoint=elsewhere))[1]["code"] == "bad_checkpoint"
    halfway = encode(BootstrapCheckpoint("shop", CLOCK, place, place, "r", 1, place))
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


# ---- polls ----


async def test_filters_and_limits_over_http_resume_without_gap_or_repetition(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    for scn in range(1, 40):
        rows = [(Op.INSERT, (ORDERS, ITEMS)[n % 2], scn * 10 + n) for n in range(scn % 7)]
        relay.append(window(scn, rows))
    url = f"{relay.url}/v1/shop/stream"
    query = {"sources": "shop.orders", "partition": "mod:3:0,1", "ops": "c"}
    whole = [f for f in await frames(http, url, **query) if f.op != BEAT]
    assert len([f for f in whole if f.op == INSERT]) > 20
    got: list[FrameView] = []
    at = "0:0"
    while True:
        found = await frames(http, url, **query, scn=at, max_bytes=200)
        got += [frame for frame in found if frame.op != BEAT]
        if found[-1].op == BEAT:
            break
        at = f"{found[-1].scn}:{found[-1].seq}"
    assert found[-1].position == Position(39, 4)
    assert places(got) == places(whole)
    assert [bytes(a.bytes) for a in got] == [bytes(a.bytes) for a in whole]


@pytest.mark.parametrize("scn", [0, 7])
async def test_a_reader_that_resumes_inside_a_window_gets_its_end_and_after_it_no_other(
    relay: LiveRelay, http: aiohttp.ClientSession, scn: int
) -> None:
    rows = [(Op.READ, ORDERS, 1), (Op.READ, ITEMS, 2), (Op.READ, ITEMS, 3)]
    relay.append(window(scn, rows, first_seq=1), window(scn, rows[1:], first_seq=5, dump=True))
    url = f"{relay.url}/v1/shop/stream"
    for seq in (1, 2, 3):
        found = await frames(http, url, scn=f"{scn}:{seq}", sources="shop.orders")
        assert places(found) == [(END, scn, 4), (BEAT, scn, 7)]
    found = await frames(http, url, scn=f"{scn}:4", sources="shop.orders")
    assert places(found) == [(BEAT, scn, 7)]


async def test_a_plain_poll_of_an_idle_stream_returns_at_once_with_its_position(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(5))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    found = await frames(http, f"{relay.url}/v1/shop/stream", scn=5)
    assert places(found) == [(BEAT, 5, 2**32 - 1)]
    assert loop.time() - began_s < 5


async def test_a_long_poll_is_woken_by_the_commit_and_not_by_a_timer(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, heartbeat="1h")
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        await frames(http, url)
        loop = asyncio.get_running_loop()
        for scn in range(1, 6):
            async with http.get(
                url, params={"scn": scn - 1, "wait_ms": 30_000}, headers=FRAMES
            ) as answer:
                appended_s = loop.time()
                live.append(insert(scn))
                assert places(list(iter_frames(await answer.read())))[0] == (INSERT, scn, 0)
                assert loop.time() - appended_s < 5
    live.close()


async def test_a_long_poll_goes_on_waiting_through_windows_that_do_not_match(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"
    query = {"sources": "shop.items", "wait_ms": 20_000}
    async with http.get(url, params=query, headers=FRAMES) as answer:
        relay.append(insert(1))
        relay.append(insert(2))
        relay.append(insert(3, ITEMS))
        body = await answer.read()
    assert places(list(iter_frames(body))) == [(INSERT, 3, 0), (END, 3, 1)]


async def test_a_long_poll_without_a_match_ends_with_the_position_it_has_reached(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2))
    url = f"{relay.url}/v1/shop/stream"
    found = await frames(http, url, sources="shop.items", wait_ms=50)
    assert places(found) == [(BEAT, 2, 1)]


# ---- following ----


class Follower:
    """The frames of an open answer, one after the other."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self._splitter = FrameSplitter()
        self._frames: list[FrameView] = []

    async def next(self) -> FrameView | None:
        """The next frame, None at the end of the answer."""
        while not self._frames:
            chunk = await self.answer.content.readany()
            if not chunk:
                return None
            self._frames = list(iter_frames(self._splitter.feed(chunk)))
        return self._frames.pop(0)

    async def next_but(self, op: Op) -> FrameView | None:
        """The next frame with another op."""
        while (frame := await self.next()) is not None and frame.op == op:
            continue
        return frame


async def test_a_follower_gets_commits_as_they_come_and_heartbeats_between(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"
    query = {"follow": "true", "sources": "shop.orders"}
    async with http.get(url, params=query, headers=FRAMES) as answer:
        follower = Follower(answer)
        first = await follower.next()
        assert first is not None
        assert (first.op, first.position) == (BEAT, Position(0, 0))
        relay.append(insert(1))
        frame = await follower.next_but(BEAT)
        assert frame is not None
        assert (frame.op, frame.position) == (INSERT, Position(1, 0))
        end = await follower.next()
        assert end is not None
        assert end.op == END
        relay.append(insert(2, ITEMS))
        while frame.position < (2, 1):
            frame = await follower.next()
            assert frame is not None
            assert frame.op == BEAT
        async with http.get(f"{relay.url}/v1/status") as status:
            assert (await status.json())["databases"][0]["served"]["readers"] == 1


async def test_a_table_that_is_born_while_a_glob_is_followed_is_followed_too(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    born = SourceSchema("shop.offers", ITEMS.columns, ("id",))
    url = f"{relay.url}/v1/shop/stream"
    query = {"follow": "1", "sources": "shop.o*", "format": "ndjson"}
    async with http.get(url, params=query) as answer:
        relay.append(insert(1, ITEMS))
        relay.registry.add([born])
        relay.append(insert(2, born, 77))
        async for line in answer.content:
            document = json.loads(line)
            if "control" not in document:
                break
        assert (document["source"], document["key"]) == ("shop.offers", {"id": 77})


async def test_a_follower_ends_at_its_limit(relay: LiveRelay, http: aiohttp.ClientSession) -> None:
    relay.append(*(insert(scn) for scn in range(1, 20)))
    found = await frames(http, f"{relay.url}/v1/shop/stream", follow="true", max_bytes=500)
    assert places(found)[:2] == [(INSERT, 1, 0), (END, 1, 1)]
    assert 300 < sum(frame.length for frame in found) <= 500


async def test_a_window_larger_than_the_ring_streams_through_it(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, ring_bytes=64 << 10)
    big = window(5, [(INSERT, ORDERS, n) for n in range(3000)])
    assert len(big) > 3 * (64 << 10)
    pieces = list(iter_frames(big))
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        query = {"follow": "true", "partition": "mod:2:0"}
        got: list[FrameView] = []
        async with http.get(url, params=query, headers=FRAMES) as answer:
            follower = Follower(answer)
            for start in range(0, len(pieces), 50):
                block = b"".join(bytes(frame.bytes) for frame in pieces[start : start + 50])
                live.append(block)
                published = live.writer.state.max
                while start and (not got or got[-1].position < published):
                    frame = await follower.next()
                    assert frame is not None
                    got.append(frame)
        wanted = [f.position for f in pieces[:-1] if f.key_hash % 2 == 0]
        assert [f.position for f in got if f.op == INSERT] == wanted
        assert [f.position for f in got if f.op == END] == [pieces[-1].position]
    live.close()


async def test_a_reader_that_the_writer_overtakes_gets_an_error_frame_and_the_end(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, ring_bytes=1 << 20)
    text = "z" * 20_000
    for scn in range(1, 40):
        live.append(window(scn, [(INSERT, ORDERS, scn)], text=text))
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        async with http.get(url, params={"follow": "true"}, headers=FRAMES) as answer:
            follower = Follower(answer)
            first = await follower.next()
            assert first is not None
            assert first.position == Position(1, 0)
            for scn in range(40, 4000):  # 80 MB: more than all buffers on the way hold
                live.append(window(scn, [(INSERT, ORDERS, scn)], text=text))
                if not scn % 100:
                    await asyncio.sleep(0)
            last = first
            while (frame := await follower.next()) is not None:
                assert frame.op in (BEAT, Op.ERROR) or frame.position > last.position
                last = frame
            assert last.op == Op.ERROR
            told = json.loads(bytes(last.after or b""))
            assert (told["code"], told["status"]) == ("reader_overtaken", 410)
            assert Position(**told["prev"]) > last.position
            assert str(tmp_path) not in told["detail"]
            assert last.position < live.writer.state.prev
        async with http.get(f"{live.url}/v1/status") as answer:
            served = (await answer.json())["databases"][0]["served"]
        assert (served["overtaken"], served["readers"]) == (1, 0)
    live.close()


async def test_shutting_down_ends_followers_cleanly_within_a_second(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, heartbeat="1h")
    loop = asyncio.get_running_loop()
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        answers = [
            await http.get(url, params=query, headers=FRAMES)
            for query in ({"follow": "true"}, {"follow": "true"}, {"wait_ms": "50000"})
        ]
        began_s = loop.time()
    assert loop.time() - began_s < 1.5
    for answer in answers:  # a body that was cut off would raise
        assert places(list(iter_frames(await answer.read()))) == [(BEAT, 0, 0)]
    live.close()


async def test_a_reader_that_has_stopped_reading_does_not_hold_up_the_shutdown(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, ring_bytes=64 << 20)
    for scn in range(1, 200):
        live.append(window(scn, [(INSERT, ORDERS, scn)], text="z" * 200_000))
    loop = asyncio.get_running_loop()
    async with live.served():
        answer = await http.get(f"{live.url}/v1/shop/stream", headers=FRAMES)
        began_s = loop.time()
    assert loop.time() - began_s < 5
    answer.close()
    live.close()


async def test_a_reader_that_goes_away_is_forgotten(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"

    async def readers() -> int:
        async with http.get(f"{relay.url}/v1/status") as status:
            count: int = (await status.json())["databases"][0]["served"]["readers"]
            return count

    async with http.get(url, params={"follow": "true"}) as answer:
        await answer.content.readany()
        assert await readers() == 1

    async def nobody() -> bool:
        return await readers() == 0

    await eventually(nobody)


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


async def test_a_browser_that_connects_again_goes_on_where_it_was(
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


# ---- operations ----


async def test_metrics_and_status_count_what_was_served(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2))
    url = f"{relay.url}/v1/shop/stream"
    found = await frames(http, url)
    await problem(http, "GET", url, scn="x")
    async with http.get(f"{relay.url}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = await answer.text()
    sent = sum(frame.length for frame in found)
    for line in (
        'databus_relay_requests_total{database="shop"} 2.0',
        'databus_relay_errors_total{database="shop"} 1.0',
        'databus_relay_events_total{database="shop"} 2.0',
        f'databus_relay_bytes_total{{database="shop"}} {float(sent)}',
        'databus_relay_readers{database="shop"} 0.0',
        'databus_relay_ring_scn{database="shop",edge="max"} 2.0',
        'databus_relay_ring_windows_total{database="shop"} 2.0',
    ):
        assert line in text
    async with http.get(f"{relay.url}/v1/status") as answer:
        document = await answer.json()
    (database,) = document["databases"]
    assert database["served"]["events"] == 2
    assert database["ring"]["windows"] == 2
    assert database["ring"]["used_bytes"] == sent
    assert document["workers"] == 1


async def test_the_status_never_shows_a_password(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, url="mariadb://user:hunter2@127.0.0.1:1/shop")
    async with live.served(), http.get(f"{live.url}/v1/status") as answer:
        text = await answer.text()
    assert "user:***@" in text
    assert "hunter2" not in text
    live.close()


async def test_the_status_page_needs_nothing_from_elsewhere(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{relay.url}/status") as answer:
        assert answer.content_type == "text/html"
        page = await answer.text()
    assert "/v1/status" in page
    for foreign in ('src="', "@import", "url(", "<link"):
        assert foreign not in page
