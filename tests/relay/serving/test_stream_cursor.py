"""The cut of the stream: which bytes of a ring answer a request, against a plain model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.checkpoint import SEQ_END, After, Latest, Oldest, Position
from databus.common.errors import ClockMismatch, ScnTooOld
from databus.common.filters.stream_filter import StreamFilter, matching_ids, parse_partition
from databus.common.frame.frame_format import FrameView, Op, iter_frames
from databus.relay.ring.ring_format import EMPTY_STATE, RingState
from databus.relay.serving.stream_cursor import StreamCursor, is_ahead, start_position
from tests.support.live_relay import ITEMS, ORDERS, window

SCHEMAS = {ORDERS.source_id: ORDERS, ITEMS.source_id: ITEMS}


def state_of(prev: Position, oldest: Position, newest: Position) -> RingState:
    return EMPTY_STATE._replace(prev=prev, min=oldest, max=newest, tail=1000)


STATE = state_of(Position(10, 2), Position(12, 0), Position(20, 3))


# ---- the serving rule ----


@pytest.mark.parametrize(
    ("position", "served"),
    [
        (Position(9, SEQ_END), False),
        (Position(10, 1), False),
        (Position(10, 2), True),
        (Position(10, 3), True),
        (Position(10, SEQ_END), True),
        (Position(11, 0), True),
        (Position(12, 0), True),
        (Position(15, 7), True),
        (Position(20, 3), True),
        (Position(20, 4), True),
        (Position(99, 0), True),
    ],
)
def test_a_position_is_served_if_and_only_if_it_is_not_before_prev(
    position: Position, served: bool
) -> None:
    if served:
        assert start_position(After(position), STATE, "c", "shop") == position
    else:
        with pytest.raises(ScnTooOld) as caught:
            start_position(After(position), STATE, "c", "shop")
        assert caught.value.details["prev"] == {"scn": 10, "seq": 2}
        assert caught.value.details["max"] == {"scn": 20, "seq": 3}
        assert "database=shop" in caught.value.message


def test_the_oldest_start_is_prev_and_the_latest_is_the_newest_frame() -> None:
    assert start_position(Oldest(), STATE, "c", "shop") == Position(10, 2)
    assert start_position(Latest(), STATE, "c", "shop") == Position(20, 3)


def test_another_clock_is_refused_even_where_the_position_is_too_old() -> None:
    with pytest.raises(ClockMismatch) as caught:
        start_position(After(Position(1), "other"), STATE, "c", "shop")
    assert caught.value.details == {"expected": "c", "got": "other"}
    assert start_position(After(Position(15), "c"), STATE, "c", "shop") == Position(15)


@pytest.mark.parametrize(
    ("position", "ahead"),
    [
        (Position(20, 2), False),
        (Position(20, 3), False),
        (Position(20, 4), True),
        (Position(20, SEQ_END), False),
        (Position(21, 0), True),
    ],
)
def test_a_reader_is_ahead_beyond_the_newest_frame_but_not_at_its_whole_scn(
    position: Position, ahead: bool
) -> None:
    assert is_ahead(position, STATE) is ahead


# ---- cutting blocks ----


def frames_of(data: bytes | memoryview) -> list[FrameView]:
    return list(iter_frames(bytes(data)))


def positions(frames: list[FrameView]) -> list[tuple[int, int]]:
    return [tuple(frame.position) for frame in frames]


def cursor_at(
    position: Position,
    stream_filter: StreamFilter | None = None,
    *,
    max_bytes: int | None = None,
    may_be_inside: bool = False,
) -> StreamCursor:
    wanted = stream_filter or StreamFilter()
    cursor = StreamCursor(position, wanted, max_bytes=max_bytes, may_be_inside=may_be_inside)
    cursor.set_sources(matching_ids([schema.source for schema in SCHEMAS.values()], wanted))
    return cursor


def test_an_unfiltered_block_goes_out_as_it_is() -> None:
    block = window(1, [(Op.INSERT, ORDERS, 1)]) + window(2, [(Op.DELETE, ITEMS, 2)])
    cursor = cursor_at(Position(0, 0))
    part = cursor.take(block)
    assert part.data is block
    assert part.used_bytes == len(block)
    assert cursor.position == cursor.sent_position == Position(2, 1)
    assert cursor.sent_events == 2
    assert cursor.commit_us == 2_000_000
    assert not cursor.owes_heartbeat


def test_a_window_of_which_nothing_matches_leaves_no_byte_but_moves_the_position() -> None:
    cursor = cursor_at(Position(0, 0), StreamFilter(sources=("shop.items",)))
    part = cursor.take(window(1, [(Op.INSERT, ORDERS, 1)]))
    assert len(part.data) == 0
    assert cursor.position == Position(1, 1)
    assert cursor.owes_heartbeat
    (beat,) = frames_of(cursor.heartbeat())
    assert (beat.op, beat.position, beat.commit_us) == (Op.HEARTBEAT, Position(1, 1), 1_000_000)
    assert not cursor.owes_heartbeat


def test_the_end_of_a_window_follows_its_last_match_into_a_later_block() -> None:
    block = window(
        1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ITEMS, 2), (Op.INSERT, ITEMS, 3)]
    ) + window(2, [(Op.INSERT, ITEMS, 4)])
    cuts = [frame.offset for frame in iter_frames(block)]
    cursor = cursor_at(Position(0, 0), StreamFilter(sources=("shop.orders",)))
    assert positions(frames_of(cursor.take(block[: cuts[1]]).data)) == [(1, 0)]
    assert len(cursor.take(block[cuts[1] : cuts[3]]).data) == 0
    assert positions(frames_of(cursor.take(block[cuts[3] :]).data)) == [(1, 3)]
    assert cursor.position == Position(2, 1)


def test_one_frame_is_sent_however_small_the_limit_is() -> None:
    block = window(1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ORDERS, 2)])
    cursor = cursor_at(Position(0, 0), max_bytes=1)
    part = cursor.take(block)
    assert positions(frames_of(part.data)) == [(1, 0)]
    assert cursor.is_full
    assert part.used_bytes == len(part.data)


@pytest.mark.parametrize("wanted", [StreamFilter(), StreamFilter(ops=frozenset({Op.INSERT}))])
def test_a_limit_that_fits_exactly_is_no_limit(wanted: StreamFilter) -> None:
    block = window(1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ORDERS, 2)])
    exact = cursor_at(Position(0, 0), wanted, max_bytes=len(block))
    assert len(exact.take(block).data) == len(block)
    assert not exact.is_full
    short = cursor_at(Position(0, 0), wanted, max_bytes=len(block) - 1)
    assert positions(frames_of(short.take(block).data)) == [(1, 0), (1, 1)]
    assert short.is_full


def test_a_reader_that_began_inside_a_window_gets_its_end_and_no_other() -> None:
    block = window(5, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ITEMS, 2)]) + window(
        6, [(Op.INSERT, ITEMS, 3)]
    )
    rest = block[next(frame.length for frame in iter_frames(block)) :]
    orders = StreamFilter(sources=("shop.orders",))
    inside = cursor_at(Position(5, 0), orders, may_be_inside=True)
    assert positions(frames_of(inside.take(rest).data)) == [(5, 2)]
    after = cursor_at(Position(4, 0), orders, may_be_inside=True)
    assert len(after.take(rest).data) == 0


def test_a_dump_window_at_the_same_scn_is_a_window_of_its_own() -> None:
    block = window(5, [(Op.INSERT, ORDERS, 1)]) + window(
        5, [(Op.READ, ITEMS, 1)], first_seq=2, dump=True
    )
    cursor = cursor_at(Position(4), StreamFilter(sources=("shop.items",)))
    assert positions(frames_of(cursor.take(block).data)) == [(5, 2), (5, 3)]


# ---- any filter, any limits, any cuts ----


@dataclass(frozen=True)
class Case:
    block: bytes
    stream_filter: StreamFilter
    limits: list[int]
    read_bytes: list[int]


events = st.lists(
    st.tuples(
        st.sampled_from([Op.INSERT, Op.UPDATE, Op.DELETE]),
        st.sampled_from([ORDERS, ITEMS]),
        st.integers(-5, 40),
    ),
    max_size=6,
)
filters = st.builds(
    StreamFilter,
    sources=st.sampled_from([(), ("shop.*",), ("shop.orders",), ("shop.i*",), ("none",)]),
    ops=st.sampled_from([frozenset(), frozenset({Op.INSERT}), frozenset({Op.UPDATE, Op.DELETE})]),
    partition=st.sampled_from(
        [None, *map(parse_partition, ("mod:4:1,2", "mod:1:0", "range:10:0-1", "range:10:-1"))]
    ),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block, scn = b"", 0
    for kind, rows in draw(st.lists(st.tuples(st.integers(0, 3), events), max_size=12)):
        if kind == 0 and scn:  # a dump window behind the one before
            seq = max(f.seq for f in iter_frames(block) if f.scn == scn) + 1
            block += window(scn, rows, first_seq=seq, dump=True)
        else:
            scn += kind or 1
            block += window(scn, rows)
    return Case(
        block,
        draw(filters),
        draw(st.lists(st.integers(1, 900), min_size=1, max_size=8)),
        draw(st.lists(st.integers(1, 1500), min_size=1, max_size=8)),
    )


def takes(stream_filter: StreamFilter, frame: FrameView) -> bool:
    """The filter by definition, one event at a time."""
    schema = SCHEMAS[frame.source_id]
    partition = stream_filter.partition
    number = schema.decode_key(frame.key)["id"]
    return (
        stream_filter.takes_source(schema.source)
        and (not stream_filter.ops or frame.op in stream_filter.ops)
        and (
            partition is None
            or (
                frame.key_hash % partition.count in partition.buckets
                if hasattr(partition, "buckets")
                else partition.first <= number // partition.size <= partition.last
            )
        )
    )


def windows_of(block: bytes) -> list[list[FrameView]]:
    windows: list[list[FrameView]] = [[]]
    for frame in iter_frames(block):
        windows[-1].append(frame)
        if frame.op == Op.END_OF_WINDOW:
            windows.append([])
    return windows[:-1]


def answer(case: Case, position: Position, limit: int, read_bytes: int) -> list[FrameView]:
    """One poll over a ring that holds the case's block and reads it in pieces."""
    frames = list(iter_frames(case.block))
    at = [frame for frame in frames if frame.position == position]
    cursor = cursor_at(
        position,
        case.stream_filter,
        max_bytes=limit,
        may_be_inside=bool(at) and at[0].op != Op.END_OF_WINDOW,
    )
    left = [frame for frame in frames if frame.position > position]
    sent: list[FrameView] = []
    while left and not cursor.is_full:
        count, size = 1, left[0].length
        while count < len(left) and size + left[count].length <= read_bytes:
            size += left[count].length
            count += 1
        start = left[0].offset
        part = cursor.take(case.block[start : start + size])
        assert part.used_bytes == size or cursor.is_full
        sent += frames_of(part.data)
        left = left[count:]
    if sum(frame.length for frame in sent) > limit:
        assert len(sent) == 1
    if not cursor.is_full and cursor.owes_heartbeat:
        sent += frames_of(cursor.heartbeat())
    return sent


@given(cases())
def test_any_filter_limits_and_resume_positions_give_the_models_sequence(case: Case) -> None:
    wanted_events, wanted_ends, allowed_ends = [], set(), set()
    last = list(iter_frames(case.block))[-1].position if case.block else Position(0, 0)
    got: list[FrameView] = []
    position, polls = Position(0, 0), 0
    windows = windows_of(case.block)
    while position < last:
        limit = case.limits[polls % len(case.limits)]
        sent = answer(case, position, limit, case.read_bytes[polls % len(case.read_bytes)])
        assert sent, "an answer that leaves the reader where it was"
        assert sent[-1].position > position
        got += [frame for frame in sent if frame.op != Op.HEARTBEAT]
        position = sent[-1].position
        polls += 1
        for frames in windows:
            if frames[0].position <= position < frames[-1].position:
                allowed_ends.add(frames[-1].position)
    for frames in windows:
        matching = [frame for frame in frames[:-1] if takes(case.stream_filter, frame)]
        wanted_events += [bytes(frame.bytes) for frame in matching]
        if matching or case.stream_filter.is_empty:
            wanted_ends.add(frames[-1].position)
    assert [bytes(f.bytes) for f in got if f.op != Op.END_OF_WINDOW] == wanted_events
    assert [f.position for f in got] == sorted({f.position for f in got})
    ends = {f.position for f in got if f.op == Op.END_OF_WINDOW}
    assert wanted_ends <= ends <= wanted_ends | allowed_ends


def test_gathered_frames_of_any_choice_are_those_frames() -> None:
    block = b"".join(window(scn, [(Op.INSERT, ORDERS, scn)] * 3) for scn in range(1, 30))
    cursor = cursor_at(Position(0, 0), StreamFilter(partition=parse_partition("mod:3:1")))
    part = cursor.take(block)
    taken = [f for f in frames_of(part.data) if f.op != Op.END_OF_WINDOW]
    assert taken
    assert all(f.key_hash % 3 == 1 for f in taken)
    assert len({f.scn for f in taken}) * 3 == len(taken)
    assert isinstance(cursor.position.scn, int)
    assert not isinstance(cursor.position.scn, np.integer)
