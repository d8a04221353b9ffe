"""Where a reader starts, at each boundary and one on either side of it, over HTTP.

The letters are the cases of Databus's own resolution: (a) nothing is there, or all was read;
(b) between what is gone and the oldest window; (c) older; (d) between two windows;
(e) overwritten while it was looked up, in test_ring.py; (f) wherever the ring begins; (g) ahead.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from databus.common.checkpoint import SEQ_END, OnlineCheckpoint, Position, StartPoint, encode
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.relay.ring.ring_format import RingState
from databus.relay.ring.ring_reader import RingReader
from databus.relay.serving import stream_sender
from tests.support.live_relay import CLOCK, ITEMS, ORDERS, LiveRelay, window
from tests.support.relay_http import END, INSERT, frames, ops_and_positions, problem

TOO_OLD = "scn_too_old"
S = 1_000_000  # a window's commit time is its scn in seconds
# Windows 20 to 50, two events each; 20 is gone.  So prev is 20:2 and max is 50:2.
TABLE: list[tuple[str, dict[str, str], str]] = [
    ("c", {"scn": "0:0"}, TOO_OLD),
    ("c", {"scn": "19"}, TOO_OLD),
    ("c", {"scn": "20:0"}, TOO_OLD),
    ("c", {"scn": "20:1"}, TOO_OLD),
    ("b", {"scn": "20:2"}, "30:0"),
    ("b", {"scn": "20:3"}, "30:0"),
    ("b", {"scn": "20"}, "30:0"),
    ("b", {"scn": "21"}, "30:0"),
    ("b", {"scn": "29"}, "30:0"),
    ("b", {"scn": "29:7"}, "30:0"),
    ("d", {"scn": "30:0"}, "30:1"),
    ("d", {"scn": "30:1"}, "30:2"),
    ("d", {"scn": "30:2"}, "40:0"),
    ("d", {"scn": "30:3"}, "40:0"),
    ("d", {"scn": "30"}, "40:0"),
    ("d", {"scn": "31"}, "40:0"),
    ("d", {"scn": "39"}, "40:0"),
    ("d", {"scn": "49"}, "50:0"),
    ("d", {"scn": "50:1"}, "50:2"),
    ("a", {"scn": "50:2"}, "at 50:2"),
    ("a", {"scn": "50"}, f"at 50:{SEQ_END}"),
    ("g", {"scn": "50:3"}, "ahead 50:3"),
    ("g", {"scn": "51"}, f"ahead 51:{SEQ_END}"),
    ("g", {"scn": str(2**64 - 1)}, f"ahead {2**64 - 1}:{SEQ_END}"),
    ("f", {"start": "oldest"}, "30:0"),
    ("f", {}, "30:0"),
    ("f", {"start": "latest"}, "at 50:2"),
    ("c", {"start_time": "0"}, TOO_OLD),
    ("c", {"start_time": str(20 * S)}, TOO_OLD),
    ("c", {"start_time": str(20 * S + 1)}, TOO_OLD),  # 30 may not be the first after it
    ("c", {"start_time": str(30 * S)}, TOO_OLD),
    ("d", {"start_time": str(30 * S + 1)}, "40:0"),
    ("d", {"start_time": str(40 * S - 1)}, "40:0"),
    ("d", {"start_time": str(40 * S)}, "40:0"),
    ("d", {"start_time": str(40 * S + 1)}, "50:0"),
    ("d", {"start_time": str(50 * S)}, "50:0"),
    ("g", {"start_time": str(50 * S + 1)}, "at 50:2"),
]
# The same ring when all of it has gone.
EMPTIED: list[tuple[str, dict[str, str], str]] = [
    ("c", {"scn": "50:1"}, TOO_OLD),
    ("a", {"scn": "50:2"}, "at 50:2"),
    ("a", {"scn": "50"}, f"at 50:{SEQ_END}"),
    ("g", {"scn": "51:0"}, "ahead 51:0"),
    ("f", {"start": "oldest"}, "at 50:2"),
    ("f", {"start": "latest"}, "at 50:2"),
    ("c", {"start_time": str(50 * S)}, TOO_OLD),
    ("g", {"start_time": str(50 * S + 1)}, "at 50:2"),
]
# A ring that begins behind 20:2 and has never had a frame.
FRESH: list[tuple[str, dict[str, str], str]] = [
    ("c", {"scn": "20:1"}, TOO_OLD),
    ("a", {"scn": "20:2"}, "at 20:2"),
    ("a", {"scn": "20"}, f"at 20:{SEQ_END}"),
    ("g", {"scn": "21"}, f"ahead 21:{SEQ_END}"),
    ("f", {"start": "oldest"}, "at 20:2"),
    ("f", {"start": "latest"}, "at 20:2"),
    ("g", {"start_time": "0"}, "at 20:2"),
]


async def outcome(http: aiohttp.ClientSession, url: str, query: dict[str, str]) -> str:
    async with http.get(url, params={**query, "max_bytes": "1"}) as answer:
        if answer.status != 200:
            return str((await answer.json(content_type=None))["code"])
        (first,) = iter_frames(await answer.read())
        position = f"{first.scn}:{first.seq}"
        is_ahead = "Databus-Ahead" in answer.headers
        if first.op != Op.HEARTBEAT:
            assert not is_ahead
            return position
        return f"ahead {position}" if is_ahead else f"at {position}"


@pytest.mark.parametrize(
    ("before_us", "table"), [(30 * S, TABLE), (60 * S, EMPTIED), (None, FRESH)]
)
async def test_every_start_point_is_exact_at_its_boundary(
    tmp_path: Path, before_us: int | None, table: list[tuple[str, dict[str, str], str]]
) -> None:
    live = LiveRelay(tmp_path, start=Position(20, 2) if before_us is None else Position(0))
    if before_us is not None:
        for scn in (20, 30, 40, 50):
            live.append(window(scn, [(Op.INSERT, ORDERS, n) for n in (1, 2)]))
        assert live.writer.expire(before_us)
    headers = {"Accept": FRAMES_TYPE}
    async with live.served(), aiohttp.ClientSession(headers=headers) as http:
        url = f"{live.url}/v1/shop/stream"
        for case, query, expected in table:
            found = await outcome(http, url, query)
            assert found == expected, f"case {case}, {query}"
            if "scn" in query:
                # A checkpoint is the same position, and is refused for another clock.
                scn, _, seq = query["scn"].partition(":")
                position = Position(int(scn), int(seq) if seq else SEQ_END)
                for clock, then in ((CLOCK, expected), ("other", "clock_mismatch")):
                    text = encode(OnlineCheckpoint("shop", clock, position))
                    assert await outcome(http, url, {"checkpoint": text}) == then, query
    live.close()


LOOKED_UP, FOUND = "looked up", "found"
each_moment = pytest.mark.parametrize("moment", [LOOKED_UP, FOUND])


class OverwrittenRing:
    """A small ring that is overwritten, as often as the test sets, behind a moment of a start."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, times: int, moment: str
    ) -> None:
        self.live = LiveRelay(folder, ring_bytes=64 << 10)
        self.scn = 0
        self.left = times
        self.overwrite()
        self.overwrite()
        look_up, find = stream_sender.start_position, RingReader.find

        def look_up_slowly(
            start: StartPoint, state: RingState, clock: str, database: str
        ) -> Position:
            position = look_up(start, state, clock, database)
            self.overwrite_if_left()
            return position

        def find_slowly(ring: RingReader, position: Position) -> int:
            found = find(ring, position)
            self.overwrite_if_left()
            return found

        if moment == LOOKED_UP:
            monkeypatch.setattr(stream_sender, "start_position", look_up_slowly)
        else:
            monkeypatch.setattr(RingReader, "find", find_slowly)

    def overwrite_if_left(self) -> None:
        """Overwrite it, unless that has been done as often as it was to be."""
        if self.left:
            self.left -= 1
            self.overwrite()

    def overwrite(self) -> None:
        """Evict all that is there."""
        newest = self.live.writer.last
        while self.live.writer.state.prev <= newest:
            self.scn += 1
            self.live.append(window(self.scn, [(Op.INSERT, ORDERS, 1)], text="t" * 3000))


@each_moment
@pytest.mark.parametrize("query", [{}, {"ops": "c"}, {"batch_ms": "1"}], ids=str)
@pytest.mark.parametrize("times", [0, 1, stream_sender.OLDEST_ATTEMPTS - 1])
async def test_the_oldest_that_is_evicted_while_it_is_looked_up_is_looked_up_again(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    moment: str,
    query: dict[str, str],
) -> None:
    overwritten = OverwrittenRing(tmp_path, monkeypatch, times, moment)
    async with overwritten.live.served():
        url = f"{overwritten.live.url}/v1/shop/stream"
        found = ops_and_positions(await frames(http, url, start="oldest", **query))
    state = overwritten.live.writer.state
    assert overwritten.left == 0
    assert found == [
        position for scn in range(state.min.scn, overwritten.scn + 1)
        for position in ((INSERT, scn, 0), (END, scn, 1))
    ]  # fmt: skip
    overwritten.live.close()


@each_moment
async def test_a_ring_that_is_overwritten_faster_than_it_can_be_read_is_reported(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    overwritten = OverwrittenRing(tmp_path, monkeypatch, 1000, moment)
    async with overwritten.live.served():
        url = f"{overwritten.live.url}/v1/shop/stream"
        status, document = await problem(http, "GET", url, start="oldest")
        assert (status, document["code"]) == (503, "source_unavailable")
        assert f"enlarge ring_bytes={64 << 10}" in document["detail"]
        assert 1000 - overwritten.left == stream_sender.OLDEST_ATTEMPTS
        # A reader that has read before is not moved on: that would be a gap.
        prev = overwritten.live.writer.state.prev
        status, document = await problem(http, "GET", url, scn=f"{prev.scn}:{prev.seq}")
        assert (status, document["code"]) == (410, TOO_OLD)
    overwritten.live.close()


@pytest.mark.parametrize("rows", [0, 60])
async def test_a_reader_that_starts_where_the_ring_begins_gets_the_end_of_the_window_it_may_be_in(
    tmp_path: Path, http: aiohttp.ClientSession, rows: int
) -> None:
    """``rows``: how many of the large window are still there; without any it has ended."""
    live = LiveRelay(tmp_path, ring_bytes=64 << 10)
    large = window(5, [(Op.INSERT, ORDERS, number) for number in range(100)], text="l" * 900)
    live.append(large)
    live.append(window(6, [(Op.INSERT, ITEMS, 1)]))
    if not rows:
        assert live.writer.expire(6 * S)
    prev = live.writer.state.prev
    if rows:
        assert 0 < prev.seq < 100 - rows // 2, "some of it is gone, and not all"
    else:
        assert prev == Position(5, 100)
    rest = [(INSERT, 5, seq) for seq in range(prev.seq + 1, 100)] + [(END, 5, 100)] * bool(rows)
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        for query in ({"start": "oldest"}, {"scn": f"{prev.scn}:{prev.seq}"}):
            for sources, taken in (
                ("shop.items", [*rest[-1:], (INSERT, 6, 0), (END, 6, 1)]),
                ("shop.orders", rest),
                ("shop.*", [*rest, (INSERT, 6, 0), (END, 6, 1)]),
            ):
                found = ops_and_positions(await frames(http, url, sources=sources, **query))
                assert [position for position in found if position[0] != Op.HEARTBEAT] == taken, (
                    query
                )
    live.close()
