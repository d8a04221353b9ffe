"""Batches that end by time or by size, for readers that request them."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.checkpoint import Position
from databus.common.frame.frame_format import iter_frames
from databus.relay.serving.send_batching import PendingBatch
from tests.support.live_relay import LiveRelay
from tests.support.relay_http import BEAT, END, FRAMES, INSERT, Follower, insert, ops_and_positions

LONG_MS = 50_000
WINDOW_BYTES = len(insert(1))


# ---- when a batch ends ----


def test_a_batch_ends_when_its_first_byte_has_waited_long_enough() -> None:
    batch = PendingBatch(2.0, 1000)
    assert not batch.holds(0, 10.0), "nothing to hold"
    assert batch.holds(10, 11.0)
    assert batch.holds(500, 12.9)
    assert not batch.holds(500, 13.0)
    assert not batch.holds(700, 13.0), "what came meanwhile goes with it"
    batch.sent_all()
    assert batch.holds(10, 13.1)


def test_a_batch_that_is_large_enough_goes_at_once_and_whole() -> None:
    batch = PendingBatch(2.0, 1000)
    assert batch.holds(999, 0.0)
    assert not batch.holds(1000, 0.0)
    assert not batch.holds(1, 0.1), "the rest of it goes, too"
    batch.sent_all()
    assert batch.holds(1, 0.2)


@given(
    st.floats(0.001, 100),
    st.integers(1, 10**6),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**5)), max_size=40),
)
def test_nothing_waits_beyond_time_or_size(
    wait_s: float, enough: int, steps: list[tuple[float, int]]
) -> None:
    batch, now_s, waiting, since_s = PendingBatch(wait_s, enough), 0.0, 0, 0.0
    for passed_s, more in steps:
        now_s += passed_s
        if more and not waiting:
            since_s = now_s
        waiting += more
        if batch.holds(waiting, now_s):
            assert 0 < waiting < enough
            assert now_s < since_s + wait_s
            assert 0 <= batch.poll_delay_s(5.0) <= 0.25
        else:
            waiting = 0
            batch.sent_all()


# ---- over HTTP ----


async def test_a_follower_gets_a_batch_when_it_is_large_enough(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    query = {"follow": "true", "batch_ms": LONG_MS, "batch_bytes": 10 * WINDOW_BYTES}
    relay.append(insert(1))
    async with http.get(f"{relay.url}/v1/shop/stream", params=query, headers=FRAMES) as answer:
        follower = Follower(answer)
        for scn in range(2, 10):
            relay.append(insert(scn))
            beat = await follower.next()
            assert beat is not None
            assert (beat.op, beat.position) == (BEAT, Position(0, 0)), "held, with a heartbeat"
        relay.append(insert(10))
        for scn in range(1, 11):
            for op, seq in ((INSERT, 0), (END, 1)):
                frame = await follower.next_but(BEAT)
                assert frame is not None
                assert (frame.op, frame.position) == (op, Position(scn, seq))
        relay.append(insert(11))
        beat = await follower.next()
        assert beat is not None
        assert (beat.op, beat.position) == (BEAT, Position(10, 1))


@pytest.mark.parametrize("more", [{}, {"sources": "shop.orders"}, {"where": "id = 1"}])
async def test_a_follower_gets_a_batch_when_its_time_has_come(
    relay: LiveRelay, http: aiohttp.ClientSession, more: dict[str, str]
) -> None:
    query = {"follow": "true", "batch_ms": 100, **more}
    async with http.get(f"{relay.url}/v1/shop/stream", params=query, headers=FRAMES) as answer:
        follower = Follower(answer)
        for scn in range(1, 4):
            relay.append(insert(scn))
            frame = await follower.next_but(BEAT)
            assert frame is not None
            assert (frame.op, frame.position) == (INSERT, Position(scn, 0))
            frame = await follower.next_but(BEAT)
            assert frame is not None
            assert frame.op == END


async def test_a_long_poll_gathers_until_its_own_time_is_over(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    url = f"{relay.url}/v1/shop/stream"
    relay.append(insert(1))
    query = {"wait_ms": 300, "batch_ms": LONG_MS}
    async with http.get(url, params=query, headers=FRAMES) as answer:
        relay.append(insert(2))
        found = list(iter_frames(await answer.read()))
    expected = [(INSERT, 1, 0), (END, 1, 1), (INSERT, 2, 0), (END, 2, 1)]
    assert ops_and_positions(found) == expected
    async with http.get(url, params={"batch_ms": LONG_MS}, headers=FRAMES) as answer:
        found = list(iter_frames(await answer.read()))
    assert ops_and_positions(found) == expected, "a plain poll waits for nothing"


async def test_a_reader_whose_batch_was_overwritten_is_notified(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path)
    live.append(insert(1))
    query = {"follow": "true", "batch_ms": LONG_MS, "batch_bytes": 8 * WINDOW_BYTES}
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        async with http.get(url, params=query, headers=FRAMES) as answer:
            follower = Follower(answer)
            assert await follower.next() is not None
            live.writer.append(insert(2))
            assert live.writer.expire(10_000_000)
            live.append(*(insert(scn) for scn in range(3, 12)))
            frame = await follower.next_but(BEAT)
            assert frame is not None
            assert b"reader_overtaken" in bytes(frame.after or b"")
    live.close()
