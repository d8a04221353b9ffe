"""``/bootstrap`` from a commit time: what a relay's ``start_time`` would have sent, made net."""

from __future__ import annotations

import pytest

from databus.common.checkpoint import ORIGIN, SEQ_END, OnlineCheckpoint, Position
from tests.bootstrap.bench import Bench, checkpoints_in, rows_in
from tests.bootstrap.model import CLOCK, START, State, compact, frames_between

FIRST_US = 1_700_000_000_000_000
"""The commit time of scn 0 in the model's histories."""


def time_of(scn: int) -> str:
    return str(FIRST_US + scn)


async def test_a_time_begins_with_the_first_window_that_is_not_earlier(bench: Bench) -> None:
    bench.bind_sealed()
    bench.write()
    end = bench.history.position
    scns = sorted({one.scn for one in frames_between(bench.blocks, START, end)})
    for scn in (scns[1], scns[2] - 1, scns[len(scns) // 2], scns[-1]):
        data = await bench.frames(start_time=time_of(scn))
        wanted = frames_between(bench.blocks, Position(scn - 1, SEQ_END), end)
        assert rows_in(data) == [bytes(one.bytes) for one in wanted]
        assert checkpoints_in(data)[-1] == OnlineCheckpoint("shop", CLOCK, end)


async def test_a_time_inside_what_was_merged_gives_the_net_changes_since(bench: Bench) -> None:
    bench.bind()
    for _ in range(3):
        bench.write()
        bench.seal()
    scn = frames_between(bench.blocks[1:], START, bench.history.position)[0].scn
    wanted = frames_between(bench.blocks, Position(scn - 1, SEQ_END), bench.history.position)
    bench.merge(START)
    data = await bench.frames(start_time=time_of(scn))
    assert rows_in(data) == [bytes(one.bytes) for one in compact(wanted, base=False)]


async def test_a_time_ahead_of_the_log_begins_at_its_end(bench: Bench) -> None:
    bench.bind()
    bench.write()
    data = await bench.frames(start_time="2100-01-01T00:00:00+02:00")
    assert rows_in(data) == []
    assert checkpoints_in(data) == [OnlineCheckpoint("shop", CLOCK, bench.history.position)]


async def test_a_log_that_begins_with_its_clock_has_every_time(bench: Bench) -> None:
    bench.log.bind("shop", CLOCK, ORIGIN)
    bench.seed()
    bench.write()
    bench.seal()
    bench.rebase()
    bench.write()
    data = await bench.frames(start_time="0")
    assert State().apply_all([data]).rows == bench.truth().rows


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ({"start_time": "2001-01-01"}, 410, "log_too_young"),
        ({"start_time": "soon"}, 400, "bad_request"),
        ({"start_time": "2023-11-14", "scn": "11"}, 400, "bad_request"),
    ],
)
async def test_times_that_cannot_be_answered_are_refused_by_code(
    bench: Bench, query: dict[str, str], status: int, code: str
) -> None:
    bench.bind()
    bench.write()
    got, document = await bench.get("/v1/shop/bootstrap", **query)
    assert (got, document["code"]) == (status, code)


async def test_an_empty_log_does_not_guess_what_lies_before_it(bench: Bench) -> None:
    bench.bind()
    status, document = await bench.get("/v1/shop/bootstrap", start_time=time_of(START.scn))
    assert (status, document["code"]) == (410, "log_too_young")
    assert document["oldest"] == START.to_json()
