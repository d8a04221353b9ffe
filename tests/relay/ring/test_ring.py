"""The ring: what it serves, what it refuses, and what it lets go of."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from databus.common.checkpoint import ORIGIN, SEQ_END, Position
from databus.common.errors import (
    FormatError,
    FrameTooLarge,
    ReaderOvertaken,
    RingFull,
    ScnTooOld,
    StoreError,
)
from databus.common.frame import frame_format as frames_module
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check
from tests.support.windows import (
    endless_windows,
    make_window,
    positions,
    read_from,
    split_frames,
    without_end,
)

RING_BYTES = 16384


# ---- the serving rule, test 18 of the inventory and its boundaries ----


def test_an_empty_ring_serves_nothing_after_its_start_and_refuses_what_is_older(
    tmp_path: Path,
) -> None:
    with Ring.create(tmp_path, RING_BYTES, start=Position(50)) as writer:
        with Ring.open_reader(tmp_path) as reader:
            state = reader.snapshot()
            assert state.prev == state.min == state.max == writer.last == Position(50, SEQ_END)
            assert state.is_empty
            for position in (Position(50), Position(51, 3)):
                assert read_from(reader, position) == b""
            with pytest.raises(ScnTooOld, match="50:end"):
                reader.find(Position(50, 4))
            with pytest.raises(ScnTooOld):
                reader.find(Position(49))


def test_each_position_class_around_the_window_boundaries(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES, start=Position(9)) as writer:
        windows = {scn: make_window(scn, [20, 20]) for scn in (10, 20, 30)}
        for window in windows.values():
            writer.append(window)
        with Ring.open_reader(tmp_path) as reader:
            everything = b"".join(windows.values())
            assert read_from(reader, Position(9)) == everything
            assert read_from(reader, Position(10, 2)) == windows[20] + windows[30]
            assert read_from(reader, Position(10)) == windows[20] + windows[30]
            assert read_from(reader, Position(15, 0)) == windows[20] + windows[30]
            assert positions(read_from(reader, Position(20, 0)))[0] == Position(20, 1)
            assert positions(read_from(reader, Position(20, 1)))[0] == Position(20, 2)
            assert read_from(reader, Position(29)) == windows[30]
            assert read_from(reader, Position(30, 2)) == b""
            assert read_from(reader, Position(30, 3)) == b""
            assert read_from(reader, Position(2**64 - 1)) == b""
            with pytest.raises(ScnTooOld, match=r"serves after 9:end .frames 10:0 to 30:2"):
                reader.find(Position(8))


def test_two_windows_of_one_scn_follow_each_other(tmp_path: Path) -> None:
    commit, dump = make_window(7, [5, 5]), make_window(7, [5], first_seq=3)
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        writer.append(commit)
        assert writer.state.max == Position(7, 2)
        writer.append(dump)
        assert writer.state.max == Position(7, 4)
        assert writer.state.windows == 2
        assert read_from(reader, Position(7, 2)) == dump
        assert read_from(reader, Position(7, 3))[11] == frames_module.Op.END_OF_WINDOW
        assert read_from(reader, Position(7)) == b""


def test_scns_beyond_63_bits_stay_in_order(tmp_path: Path) -> None:
    scns = [2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        for scn in scns:
            writer.append(make_window(scn, [1]))
        for scn, following in itertools.pairwise(scns):
            assert positions(read_from(reader, Position(scn)))[0] == Position(following, 0)
        with pytest.raises(FormatError, match="not after"):
            writer.append(make_window(2**63, [1]))


def test_a_state_is_read_once_until_something_is_published_or_the_ring_replaced(
    tmp_path: Path,
) -> None:
    with Ring.create(tmp_path, 4096) as writer, Ring.open_reader(tmp_path) as reader:
        states = [reader.snapshot()]
        for scn in range(1, 200):
            writer.append(make_window(scn, [20]))
            states.append(reader.snapshot())
            assert reader.snapshot() is states[-1]
            assert states[-1] == writer.state
        writer.resize(8192)
        assert reader.snapshot().max == states[-1].max
        assert len({state.max for state in states}) == 200


def test_prev_is_the_position_just_before_the_oldest_frame_after_each_eviction(
    tmp_path: Path,
) -> None:
    with Ring.create(tmp_path, 4096) as writer, Ring.open_reader(tmp_path) as reader:
        ends = [ORIGIN]
        for scn in range(1, 200):
            writer.append(make_window(scn, [scn % 60] * (scn % 3)))
            ends.append(writer.last)
            state = reader.snapshot()
            assert state.prev in ends
            assert state.min == Position(state.prev.scn + 1, 0)
            assert positions(read_from(reader, state.prev))[0] == state.min
            index = writer._index
            assert 0 <= index.position(index.first) - state.head < index.step_bytes + 160
            for ring_position in (state.prev, ends[-2], writer.last):
                exact = state.tail - reader.find(ring_position)
                assert 0 <= writer.bytes_after(ring_position) - exact < index.step_bytes + 320
            assert writer.bytes_after(ORIGIN) == state.tail - state.head
            if state.prev != ORIGIN:
                with pytest.raises(ScnTooOld):
                    reader.find(state.prev._replace(seq=state.prev.seq - 1) if state.prev.seq
                                else Position(state.prev.scn - 1))  # fmt: skip
        assert state.evicted_windows > 100


# ---- what is visible, and what is refused ----


def test_a_window_is_visible_with_its_end_and_not_before(tmp_path: Path) -> None:
    frames = [frame for _, frame in split_frames(make_window(5, [10, 10, 10]))]
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        epoch = reader.epoch
        for frame in frames[:-1]:
            writer.append(frame)
            assert reader.snapshot().is_empty
        assert reader.epoch == epoch
        assert writer.last == Position(5, 2)
        writer.append(frames[-1])
        assert reader.epoch != epoch
        assert read_from(reader, ORIGIN) == b"".join(frames)


def test_a_discarded_window_leaves_no_trace_and_can_come_again(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        writer.append(make_window(1, [10]))
        state = writer.state
        again = make_window(2, [400, 400, 400])
        for _ in range(20):
            writer.append(without_end(again))
            assert writer.open_bytes > 0
            writer.discard_open()
            assert writer.state == state
            assert writer.last == Position(1, 1)
            assert check(tmp_path) == []
        writer.append(again)
        assert read_from(reader, Position(1)) == again


def test_a_closed_ring_takes_nothing_and_retains_whole_windows(tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, RING_BYTES)
    writer.append(make_window(1, [10]) + without_end(make_window(2, [10, 10])))
    writer.close()
    with pytest.raises(StoreError, match="has been closed"):
        writer.append(make_window(3, [10]))
    writer.close()
    with Ring.open_writer(tmp_path) as again, Ring.open_reader(tmp_path) as reader:
        assert again.last == Position(1, 1)
        assert read_from(reader, ORIGIN) == make_window(1, [10])


def test_an_open_window_is_dropped_by_close(tmp_path: Path) -> None:
    window = make_window(2, [10, 10])
    with Ring.create(tmp_path, RING_BYTES) as writer:
        writer.append(make_window(1, [10]) + without_end(window))
        assert writer.last == Position(2, 1)
    with Ring.open_writer(tmp_path) as writer:
        assert writer.last == Position(1, 1)


@pytest.mark.parametrize("share", [0.2, 0.5, 1, 3])
def test_a_window_larger_than_the_threshold_is_published_in_parts(
    tmp_path: Path, share: float
) -> None:
    window = make_window(2, [200] * int(RING_BYTES * share / 272))
    frames = split_frames(window)
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        writer.append(make_window(1, [10]))
        got, ring_position = bytearray(), reader.find(Position(1))
        parts = 0
        for _, frame in frames:
            writer.append(frame)
            assert writer.open_bytes <= writer.part_bytes
            while True:
                block, ring_position = reader.read(ring_position, 1 << 20)
                if not block:
                    break
                got += block
                parts += 1
        assert bytes(got) == window
        assert parts > 1
        assert writer.state.max == Position(2, len(frames) - 1)
        assert check(tmp_path) == []


def test_a_frame_of_a_quarter_of_the_ring_fits_and_the_next_larger_is_refused(
    tmp_path: Path,
) -> None:
    payload = RING_BYTES // 4 - 72 - 8
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        for scn in range(1, 30):
            window = make_window(scn, [payload, payload])
            writer.append(window)
            assert (
                bytes(reader.read(reader.find(Position(scn, 0)), 1)[0])
                == split_frames(window)[1][1]
            )
        before = writer.state
        with pytest.raises(FrameTooLarge, match=r"4104 bytes.*ring_bytes=16384, 4096 bytes"):
            writer.append(make_window(100, [10]) + make_window(101, [payload + 8]))
        assert writer.state == before
        assert writer.open_bytes == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda block: block[:-8], "cut off"),
        (lambda block: block[:40], "cut off"),
        (lambda block: block + bytes(80), "is no frame"),
        (lambda block: block[:8] + b"\0" + block[9:], "offset 0 of the block's"),
        (lambda block: block + block, r"position 5:0, which is not after"),
        (
            lambda block: make_window(4, [1]),
            r"position 4:0, which is not after .*last of the ring 4:9",
        ),
    ],
)
def test_a_bad_block_is_refused_as_a_whole(tmp_path: Path, spoil: object, message: str) -> None:
    with Ring.create(tmp_path, RING_BYTES, start=Position(4, 9)) as writer:
        with pytest.raises(FormatError, match=message):
            writer.append(spoil(make_window(5, [10, 10])))
        assert writer.state.is_empty
        assert writer.last == Position(4, 9)
        writer.append(make_window(5, [10, 10]))
        assert writer.last == Position(5, 2)


def test_an_empty_block_changes_nothing(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer:
        assert writer.append(b"") == ORIGIN
        assert writer.append(bytearray(make_window(1, []))) == Position(1, 0)
        assert writer.append(memoryview(make_window(2, []))) == Position(2, 0)


# ---- geometry ----


@pytest.mark.parametrize("ring_bytes", [4096, 8192, 20480])
@pytest.mark.parametrize("size", [0, 8, 100, 440, 944])
@pytest.mark.parametrize("per_block", [1, 3, 50])
def test_every_geometry_leaves_the_bytes_intact(
    tmp_path: Path, ring_bytes: int, size: int, per_block: int
) -> None:
    windows = [make_window(scn, [size] * (scn % 4)) for scn in range(1, 151)]
    with Ring.create(tmp_path, ring_bytes) as writer, Ring.open_reader(tmp_path) as reader:
        stream = b"".join(windows)
        for at in range(0, len(windows), per_block):
            writer.append(b"".join(windows[at : at + per_block]))
            retained = read_from(reader, reader.snapshot().prev, max_bytes=700)
            done = b"".join(windows[: at + per_block])
            assert done.endswith(retained)
            largest = max(map(len, windows)) + ring_bytes // 4
            assert len(retained) >= min(len(done), ring_bytes - ring_bytes // 8 - largest)
        assert stream.endswith(retained)
    assert check(tmp_path) == []


def test_a_read_ends_at_max_bytes_but_always_has_one_frame(tmp_path: Path) -> None:
    window = make_window(1, [100] * 10)
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        writer.append(window)
        frame_bytes = len(split_frames(window)[0][1])
        for max_bytes, expected in ((0, 1), (1, 1), (frame_bytes * 2 - 1, 1), (frame_bytes * 2, 2)):
            block, ring_position = reader.read(0, max_bytes)
            assert len(split_frames(block)) == expected
            assert ring_position == len(block)
        assert reader.read(reader.snapshot().tail, 100) == (b"", reader.snapshot().tail)


def test_a_reader_that_was_overtaken_is_notified_and_finds_out_what_is_left(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 4096) as writer, Ring.open_reader(tmp_path) as reader:
        writer.append(make_window(1, [100]))
        ring_position = reader.find(ORIGIN)
        for scn in range(2, 60):
            writer.append(make_window(scn, [100]))
        with pytest.raises(ReaderOvertaken, match="ring position 0 was overwritten"):
            reader.read(ring_position, 1000)
        with pytest.raises(ScnTooOld, match="position 1:1 is older"):
            reader.find(Position(1, 1))


# ---- block mode ----


def test_in_block_mode_nothing_is_evicted_that_was_not_released(tmp_path: Path) -> None:
    windows = endless_windows(3, most_bytes=500)
    with Ring.create(tmp_path, RING_BYTES, block=True) as writer:
        with Ring.open_reader(tmp_path) as reader:
            ring_position, got, sent, full = 0, bytearray(), bytearray(), 0
            for window in itertools.islice(windows, 300):
                for _, frame in split_frames(window):
                    while True:
                        try:
                            writer.append(frame)
                            break
                        except RingFull as error:
                            assert "ring_bytes=16384" in str(error)
                            full += 1
                            block, ring_position = reader.read(ring_position, 4000)
                            assert block
                            got += block
                            writer.release(ring_position)
                sent += window
            while len(got) < len(sent):
                block, ring_position = reader.read(ring_position, 4000)
                got += block
            assert got == sent
            assert full > 10


def test_block_mode_outlives_a_restart(tmp_path: Path) -> None:
    Ring.create(tmp_path, 4096, block=True).close()
    with Ring.open_writer(tmp_path) as writer:
        assert writer.blocks
        writer.append(make_window(1, [900, 900, 900]))
        with pytest.raises(RingFull, match="append at most 512 bytes"):
            writer.append(make_window(2, [900, 900]))
        assert writer.last == Position(1, 3)
