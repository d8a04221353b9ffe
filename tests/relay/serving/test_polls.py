"""Polls: answers that end when there is nothing more, at once or after a wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from databus.common.checkpoint import (
    Position,
)
from databus.common.frame.frame_format import FrameView, Op, iter_frames
from databus.relay.serving.stream_sender import MERGED_BYTES
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window
from tests.support.relay_http import (
    BEAT,
    END,
    FRAMES,
    INSERT,
    frames,
    insert,
    ops_and_positions,
)
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize(
    "query",
    [
        {"sources": "shop.orders", "partition": "mod:3:0,1", "ops": "c"},
        {"partition": "range:10:0-29", "ops": "c"},
        {"where": "id % 3 = 1 OR item LIKE 'x3%'", "sources": "shop.orders"},
        {"where": "id % 3 = 1", "columns": "item"},
        {},
    ],
)
async def test_filters_and_limits_over_http_resume_without_gap_or_repetition(
    relay: LiveRelay, http: aiohttp.ClientSession, query: dict[str, str]
) -> None:
    # One of the windows is far larger than an answer.
    for scn in range(1, 40):
        count = 200 if scn == 20 else scn % 7
        rows = [(Op.INSERT, (ORDERS, ITEMS)[n % 2], scn * 10 + n) for n in range(count)]
        relay.append(window(scn, rows))
    url = f"{relay.url}/v1/shop/stream"
    whole = [f for f in await frames(http, url, **query) if f.op != BEAT]
    assert len([f for f in whole if f.op == INSERT]) > 20
    got: list[FrameView] = []
    at = "0:0"
    while True:
        found = await frames(http, url, **query, scn=at, max_bytes=200)
        got += [frame for frame in found if frame.op != BEAT]
        if found[-1].position == Position(39, 4):
            break
        at = f"{found[-1].scn}:{found[-1].seq}"
    assert ops_and_positions(got) == ops_and_positions(whole)
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
        assert ops_and_positions(found) == [(END, scn, 4), (BEAT, scn, 7)]
    found = await frames(http, url, scn=f"{scn}:4", sources="shop.orders")
    assert ops_and_positions(found) == [(BEAT, scn, 7)]


async def test_a_plain_poll_of_an_idle_stream_returns_at_once_with_its_position(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(5))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    found = await frames(http, f"{relay.url}/v1/shop/stream", scn=5)
    assert ops_and_positions(found) == [(BEAT, 5, 2**32 - 1)]
    assert loop.time() - began_s < 5 * PATIENCE


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
                assert ops_and_positions(list(iter_frames(await answer.read())))[0] == (
                    INSERT,
                    scn,
                    0,
                )
                assert loop.time() - appended_s < 5 * PATIENCE
    live.close()


async def test_a_long_poll_continues_to_wait_through_windows_that_do_not_match(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"
    query = {"sources": "shop.items", "wait_ms": 20_000}
    async with http.get(url, params=query, headers=FRAMES) as answer:
        relay.append(insert(1))
        relay.append(insert(2))
        relay.append(insert(3, ITEMS))
        body = await answer.read()
    assert ops_and_positions(list(iter_frames(body))) == [(INSERT, 3, 0), (END, 3, 1)]


async def test_a_long_poll_without_a_match_ends_with_the_position_it_has_reached(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2))
    url = f"{relay.url}/v1/shop/stream"
    found = await frames(http, url, sources="shop.items", wait_ms=50)
    assert ops_and_positions(found) == [(BEAT, 2, 1)]


async def test_a_short_answer_goes_out_with_its_head_and_its_length(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(5), insert(6))
    plain = {**FRAMES, "Accept-Encoding": "identity"}
    answer = await http.get(f"{relay.url}/v1/shop/stream", params={"scn": 4}, headers=plain)
    body = await answer.read()
    assert int(answer.headers["Content-Length"]) == len(body)
    assert ops_and_positions(list(iter_frames(body))) == [
        (INSERT, 5, 0), (END, 5, 1), (INSERT, 6, 0), (END, 6, 1),
    ]  # fmt: skip


async def test_a_longer_answer_goes_out_in_chunks_and_is_whole(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    count = MERGED_BYTES // 40
    relay.append(window(5, [(Op.INSERT, ORDERS, n) for n in range(count)]))
    url = f"{relay.url}/v1/shop/stream"
    for accept in (FRAMES, {"Accept": "application/x-ndjson"}):
        plain = {**accept, "Accept-Encoding": "identity"}
        answer = await http.get(url, params={"scn": 4}, headers=plain)
        body = await answer.read()
        assert len(body) > MERGED_BYTES
        assert "Content-Length" not in answer.headers
    # The rows, and the end of the window.
    assert len(body.splitlines()) == count + 1


async def test_a_commit_while_the_head_of_a_long_poll_goes_out_is_not_missed(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, commits = web.StreamResponse.prepare, [insert(6)]
    live = LiveRelay(tmp_path, heartbeat="1h")

    async def with_a_commit(response: web.StreamResponse, request: web.BaseRequest) -> object:
        prepared = await prepare(response, request)
        if commits and request.path.endswith("/stream"):
            live.append(commits.pop())
            for _ in range(10):  # The wake-up comes and goes.
                await asyncio.sleep(0)
        return prepared

    monkeypatch.setattr(web.StreamResponse, "prepare", with_a_commit)
    async with live.served(), asyncio.timeout(20 * PATIENCE):
        live.append(insert(5))
        found = await frames(http, f"{live.url}/v1/shop/stream", scn=5, wait_ms=3_600_000)
    assert ops_and_positions(found) == [(INSERT, 6, 0), (END, 6, 1)]
    live.close()
