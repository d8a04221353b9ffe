"""Answers that stay open: events as they come, heartbeats between, and how they end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import xxhash

from databus.common.checkpoint import (
    Position,
)
from databus.common.frame.frame_format import HEADER_BYTES, FrameView, Op, iter_frames
from databus.common.schema.source_schema import SourceSchema
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window
from tests.support.relay_http import (
    BEAT,
    END,
    FRAMES,
    INSERT,
    Follower,
    frames,
    insert,
    ops_and_positions,
)
from tests.support.waiting import PATIENCE, eventually


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


@pytest.mark.parametrize(
    "more", [{"sources": "shop.items"}, {"where": "id = 0"}, {"partition": "mod:16:0"}]
)
async def test_windows_that_hold_nothing_for_a_follower_cost_a_heartbeat_an_interval_and_no_more(
    tmp_path: Path, http: aiohttp.ClientSession, more: dict[str, str]
) -> None:
    interval_s = 0.1
    live = LiveRelay(tmp_path, heartbeat=f"{interval_s}s")
    key = next(n for n in range(1, 99) if xxhash.xxh3_64_intdigest(ORDERS.encode_key((n,))) % 16)
    loop = asyncio.get_running_loop()
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        began_s = loop.time()
        async with http.get(url, params={"follow": "true", **more}, headers=FRAMES) as answer:
            follower = Follower(answer)
            received: list[FrameView] = []
            for scn in range(1, 401):
                live.append(insert(scn, ORDERS, key))
                await asyncio.sleep(0)
            while not received or received[-1].position < Position(400, 1):
                frame = await follower.next()
                assert frame is not None
                received.append(frame)
            passed_s = loop.time() - began_s
    live.close()
    assert {frame.op for frame in received} == {BEAT}
    assert sum(frame.length for frame in received) <= HEADER_BYTES * (passed_s / interval_s + 1)
    seen = [frame.position for frame in received]
    assert seen == sorted(seen), "the checkpoint moves on"


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
    assert ops_and_positions(found)[:2] == [(INSERT, 1, 0), (END, 1, 1)]
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
            document = json.loads(bytes(last.after or b""))
            assert (document["code"], document["status"]) == ("reader_overtaken", 410)
            assert Position(**document["prev"]) > last.position
            assert str(tmp_path) not in document["detail"]
            assert last.position < live.writer.state.prev

        async def is_counted() -> bool:
            async with http.get(f"{live.url}/v1/status") as answer:
                served = (await answer.json())["databases"][0]["served"]
            return (served["overtaken"], served["readers"]) == (1, 0)

        await eventually(is_counted, 10, "it was overtaken, and is gone")
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
    assert loop.time() - began_s < 1.5 * PATIENCE
    for answer in answers:  # a body that was cut off would raise
        assert ops_and_positions(list(iter_frames(await answer.read()))) == [(BEAT, 0, 0)]
    live.close()


async def test_a_reader_that_has_stopped_reading_does_not_delay_the_shutdown(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, ring_bytes=64 << 20)
    for scn in range(1, 200):
        live.append(window(scn, [(INSERT, ORDERS, scn)], text="z" * 200_000))
    loop = asyncio.get_running_loop()
    async with live.served():
        answer = await http.get(f"{live.url}/v1/shop/stream", headers=FRAMES)
        began_s = loop.time()
    assert loop.time() - began_s < 5 * PATIENCE
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

    async def no_reader() -> bool:
        return await readers() == 0

    await eventually(no_reader)
