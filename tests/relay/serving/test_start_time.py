"""Start points by commit time: in the ring, against a plain list, and over HTTP."""

from __future__ import annotations

import random
from pathlib import Path

import aiohttp
import pytest

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import BadRequest, ScnTooOld
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder
from databus.common.http.request_parameters import parse_time
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.relay.ring.ring import Ring
from tests.support.live_relay import ORDERS, LiveRelay, window


def timed_window(scn: int, commit_us: int, sizes: list[int]) -> bytes:
    builder = WindowBuilder(scn, commit_us)
    for size in sizes:
        builder.event(Op.INSERT, 7, 1, b"key", after=bytes(size))
    return builder.end(f"t{scn}")


def test_any_time_leads_to_the_first_window_that_is_not_earlier(tmp_path: Path) -> None:
    rng, commit_us = random.Random(5), 1000
    retained: list[tuple[int, Position, Position]] = []  # commit time, before the window, its end
    last = ORIGIN
    with Ring.create(tmp_path, 32768) as writer, Ring.open_reader(tmp_path) as reader:
        for scn in range(1, 900):
            commit_us += rng.choice((0, 1, 7))
            block = timed_window(scn, commit_us, [rng.choice((0, 50, 900))] * rng.randint(1, 4))
            writer.append(block)
            end = list(iter_frames(block))[-1].position
            retained.append((commit_us, last, end))
            last = end
            if scn % 40:
                continue
            state = reader.snapshot()
            for wanted_us in range(state.min_commit_us - 3, commit_us + 3):
                if wanted_us <= state.min_commit_us and state.prev != ORIGIN:
                    with pytest.raises(ScnTooOld) as caught:
                        reader.before_time(wanted_us)
                    assert caught.value.details["prev"] == state.prev.to_json()
                    assert caught.value.details["min_commit_us"] == state.min_commit_us
                    continue
                later = [before for time_us, before, _ in retained if time_us >= wanted_us]
                assert reader.before_time(wanted_us) == (later[0] if later else state.max)
        assert reader.snapshot().prev != ORIGIN


def test_in_an_empty_ring_every_time_is_still_to_come(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 32768, start=Position(50)), Ring.open_reader(tmp_path) as reader:
        assert reader.before_time(1) == Position(50)


def test_a_ring_without_an_index_is_searched_from_its_head(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 32768) as writer:
        for scn in range(1, 200):
            writer.append(timed_window(scn, scn, [100]))
        (tmp_path / "ring.index").unlink()
        with Ring.open_reader(tmp_path) as reader:
            assert reader.index is None
            assert reader.before_time(150) == Position(149, 1)


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("0", 0),
        ("1772366400000000", 1_772_366_400_000_000),
        ("2026-03-01T12:00:00Z", 1_772_366_400_000_000),
        ("2026-03-01T13:00:00.000007+01:00", 1_772_366_400_000_007),
        ("2026-03-01T12:00:00", 1_772_366_400_000_000),
        ("2026-03-01", 1_772_323_200_000_000),
    ],
)
def test_a_time_is_iso_or_microseconds_and_utc_where_no_zone_is_named(
    text: str, time_us: int
) -> None:
    assert parse_time(text) == time_us


@pytest.mark.parametrize("text", ["", "yesterday", "-5", "2026-03-01T12:00:00 01:00", "9" * 19])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a time"):
        parse_time(text)


async def test_a_reader_starts_at_a_commit_time_or_gets_the_range(tmp_path: Path) -> None:
    live = LiveRelay(tmp_path, start=Position(3))
    live.append(*(window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in (4, 6, 8)))
    async with live.served(), aiohttp.ClientSession(headers={"Accept": FRAMES_TYPE}) as http:
        url = f"{live.url}/v1/shop/stream"
        for start_time, scns, start in (
            ("1970-01-01T00:00:06Z", [6, 6, 8, 8], "4:1"),
            ("6000001", [8, 8], "6:1"),
            ("1970-01-01T00:01:00Z", [8], "8:1"),  # a heartbeat: the newest is its position
        ):
            async with http.get(url, params={"start_time": start_time}) as answer:
                assert [f.scn for f in iter_frames(await answer.read())] == scns, start_time
                assert answer.headers["Databus-Start"] == start
        async with http.get(url, params={"start_time": "4000000"}) as answer:
            document = await answer.json(content_type=None)
            assert (answer.status, document["code"]) == (410, "scn_too_old")
            assert document["min"] == {"scn": 4, "seq": 0}
        for query in ({"start_time": "soon"}, {"start_time": "6000000", "scn": "6"}):
            async with http.get(url, params=query) as answer:
                assert (answer.status, answer.content_type) == (400, "application/problem+json")
    live.close()
