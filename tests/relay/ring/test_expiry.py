"""Windows that are older than the retention: no longer served, exactly at the boundary."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.common.checkpoint import ORIGIN, Position
from databus.common.config import parse
from databus.common.errors import ConfigError, ReaderOvertaken, ScnTooOld
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.relay.processes.fetcher import Fetcher, Pace
from databus.relay.ring.ring import Ring, RingReader
from databus.relay.ring.ring_check import check
from tests.support.waiting import eventually
from tests.support.windows import without_end

BASE_US = 1_700_000_000_000_000


def window(scn: int, commit_us: int, events: int = 2, size: int = 10) -> bytes:
    builder = WindowBuilder(scn, commit_us=commit_us)
    for _ in range(events):
        builder.event(Op.INSERT, 7, 1, b"key", after=bytes(size))
    return builder.end("t")


def served(reader: RingReader) -> list[int]:
    """The scn that the whole ring serves."""
    state = reader.snapshot()
    found, ring_position = [], state.head
    while ring_position < state.tail:
        frames, ring_position = reader.read(ring_position, 1)
        found.append(int.from_bytes(frames[16:24], "little"))
    return sorted(set(found))


@pytest.mark.parametrize("origin_us", [BASE_US, 0, -BASE_US, 2**61])
@pytest.mark.parametrize(
    ("before_us", "retained"),
    [(-1, [1, 2, 3]), (0, [1, 2, 3]), (1, [2, 3]), (10, [2, 3]), (11, [3]), (20, [3]), (21, [])],
)
def test_a_window_goes_one_microsecond_after_its_time_and_not_before(
    tmp_path: Path, before_us: int, retained: list[int], origin_us: int
) -> None:
    with Ring.create(tmp_path, 1 << 16) as writer, Ring.open_reader(tmp_path) as reader:
        for at in range(3):
            writer.append(window(at + 1, origin_us + 10 * at))
        assert writer.expire(origin_us + before_us) == (len(retained) < 3)
        state = reader.snapshot()
        assert served(reader) == retained
        gone = 3 - len(retained)
        assert state.prev == (Position(gone, 2) if gone else ORIGIN)
        assert state.windows - state.evicted_windows == len(retained)
        assert state.frames - state.evicted_frames == 3 * len(retained)
        assert reader.find(state.prev) == state.head
        if gone:
            with pytest.raises(ScnTooOld):
                reader.find(Position(gone, 1))
        writer.append(window(9, origin_us + 90))
        assert served(reader) == [*retained, 9]
    assert check(tmp_path) == []


def test_a_reader_inside_what_expires_is_notified(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 1 << 16) as writer, Ring.open_reader(tmp_path) as reader:
        writer.append(window(1, 5) + window(2, 6))
        ring_position = reader.find(Position(1, 0))
        assert writer.expire(6)
        with pytest.raises(ReaderOvertaken):
            reader.read(ring_position, 1000)


def test_a_window_that_has_not_ended_stays_and_so_does_what_is_not_released(
    tmp_path: Path,
) -> None:
    with Ring.create(tmp_path / "a", 4096) as writer:
        large = window(2, 2, events=9, size=100)
        writer.append(window(1, 1) + without_end(large))
        assert not writer.state.max.scn < 2, "a part of it is served"
        assert writer.expire(10**9)
        assert writer.state.prev == Position(1, 2)
        assert not writer.expire(10**9)
    with Ring.create(tmp_path / "b", 4096, block=True) as writer:
        writer.append(window(1, 1) + window(2, 2))
        assert not writer.expire(10)
        with Ring.open_reader(tmp_path / "b") as reader:
            writer.release(reader.find(Position(1, 2)))
        assert writer.expire(10)
        assert writer.state.prev == Position(1, 2)


def test_what_is_older_behind_something_newer_waits_for_it(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 1 << 16) as writer:
        writer.append(window(1, 30) + window(2, 10) + window(3, 40))
        assert not writer.expire(20)
        assert writer.expire(31)
        assert writer.state.prev == Position(2, 2)


def test_what_has_expired_stays_gone_after_a_restart_and_a_resize(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 1 << 16) as writer:
        writer.append(window(1, 1) + window(2, 2) + window(3, 3))
        writer.expire(3)
    with Ring.open_writer(tmp_path, 1 << 17) as writer, Ring.open_reader(tmp_path) as reader:
        assert writer.state.prev == Position(2, 2)
        assert served(reader) == [3]
        writer.expire(4)
        assert writer.state.is_empty
    with Ring.open_writer(tmp_path) as writer:
        assert (writer.state.prev, writer.last) == (Position(3, 2), Position(3, 2))
        writer.append(window(4, 4))
    assert check(tmp_path) == []


@pytest.mark.parametrize(("retention", "goes"), [("1h", True), ("36500d", False)])
async def test_a_fetcher_lets_go_of_what_is_older_than_the_retention(
    tmp_path: Path, retention: str, goes: bool
) -> None:
    # The generator's commits are of the year 2024.
    text = f"""
[relay]
[[database]]
name = "gen"
url = "generator://?events_per_second=1000&events_per_window=2&events=200"
sync_every = "20ms"
retention = "{retention}"
"""
    fetcher = Fetcher(parse(text).database[0], tmp_path, pace=Pace(status_s=0.02))
    running = asyncio.create_task(fetcher.run())
    await eventually(lambda: fetcher.intake is not None and fetcher.intake.complete.scn == 100, 60)
    assert fetcher.intake is not None
    ring = fetcher.intake.ring
    with Ring.open_reader(fetcher.folder.path) as reader:
        await eventually(lambda: reader.file.newest_control().state.max.scn == 100, 60)
    if goes:
        await eventually(lambda: ring.state.is_empty, 60)
        assert ring.state.evicted_windows == 100
    else:
        assert ring.state.prev == ORIGIN
    fetcher.stop()
    await running


@pytest.mark.parametrize("value", ["0s", "-1h", "soon"])
def test_a_retention_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="retention"):
        parse(f'[relay]\n[[database]]\nname="a"\nurl="generator://"\nretention="{value}"')
