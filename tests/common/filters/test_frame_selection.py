"""Choosing frames out of a block: sets of numbers, window ends, the gathering copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.filters.frame_selection import HeaderFilter, close_windows, gather
from databus.common.filters.stream_filter import (
    HashPartition,
    ModPartition,
    Partition,
    RangePartition,
    StreamFilter,
    is_among,
)
from databus.common.frame.frame_format import Op, scan
from databus.common.frame.window_builder import WindowBuilder

numbers = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(numbers, st.sets(st.integers(0, 2**32 - 1), max_size=5), st.booleans())
def test_is_among_gives_what_isin_gives(values: list[int], wanted: set[int], overlap: bool) -> None:
    chosen = wanted | set(values[::2]) if overlap else wanted
    found = np.array(values, dtype=np.uint32)
    ascending = np.array(sorted(chosen), dtype=np.uint32)
    assert is_among(found, ascending).tolist() == np.isin(found, ascending).tolist()


def block_of(*event_counts: int) -> bytes:
    out = b""
    for scn, count in enumerate(event_counts, 1):
        builder = WindowBuilder(scn, 0)
        for number in range(count):
            builder.event(Op.INSERT, 1, 0, b"k" * number)
        out += builder.end()
    return out


@pytest.mark.parametrize(
    ("taken", "in_window", "closed", "still_in_window"),
    [
        # frames: event, event, end | end | event, (the rest comes later)
        ([1, 0, 0, 0, 0], False, [1, 0, 1, 0, 0], False),
        ([0, 0, 0, 0, 0], False, [0, 0, 0, 0, 0], False),
        ([0, 0, 0, 0, 0], True, [0, 0, 1, 0, 0], False),
        ([0, 0, 0, 0, 1], False, [0, 0, 0, 0, 1], True),
        ([1, 1, 0, 0, 1], True, [1, 1, 1, 0, 1], True),
    ],
)
def test_a_window_is_closed_if_anything_of_it_was_taken(
    taken: list[int], in_window: bool, closed: list[int], still_in_window: bool
) -> None:
    columns = scan(block_of(2, 0, 1)[: -(72 + 8)])
    assert len(columns) == 5
    mask, after = close_windows(columns, np.array(taken, dtype=bool), in_window=in_window)
    assert mask.tolist() == [bool(one) for one in closed]
    assert after is still_in_window


def test_a_block_without_an_end_leaves_its_window_open_once_anything_was_taken() -> None:
    columns = scan(block_of(2)[: -(72 + 8)])
    nothing = np.zeros(2, dtype=bool)
    assert close_windows(columns, nothing, in_window=False)[1] is False
    assert close_windows(columns, nothing, in_window=True)[1] is True
    assert close_windows(columns, np.array([False, True]), in_window=False)[1] is True


@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_gathered_frames_are_the_chosen_ones_back_to_back(chosen: list[bool]) -> None:
    block = block_of(3, 0, 2)
    columns = scan(block)
    assert len(columns) == 8
    raw = np.frombuffer(block, dtype=np.uint8)
    indexes = np.flatnonzero(chosen)
    found = gather(raw, columns.offset[indexes], columns.length[indexes].astype(np.int64))
    offsets = [*columns.offset.tolist(), len(block)]
    wanted = b"".join(block[offsets[at] : offsets[at + 1]] for at in indexes)
    assert bytes(found) == wanted


OPS = [Op.INSERT, Op.UPDATE, Op.DELETE, Op.READ, Op.TRUNCATE]
events = st.lists(
    st.lists(st.tuples(st.sampled_from(OPS), st.integers(1, 4), st.binary(max_size=3)), max_size=4),
    min_size=1,
    max_size=6,
)
partitions = st.builds(
    lambda count, buckets: ModPartition(count, frozenset(one % count for one in buckets)),
    st.sampled_from([1, 2, 3, 7, 16, 40, 999_999_999]),
    st.sets(st.integers(0, 40), min_size=1, max_size=5),
)


@given(
    events,
    st.sets(st.integers(1, 5)),
    st.booleans(),
    st.sets(st.sampled_from(OPS)),
    st.none() | partitions,
    st.booleans(),
    st.booleans(),
)
def test_one_pass_over_headers_takes_what_the_filter_takes_with_the_ends_of_windows(
    windows: list[list[tuple[Op, int, bytes]]],
    sources: set[int],
    is_every_source: bool,
    ops: set[Op],
    partition: ModPartition | None,
    in_window: bool,
    is_cut: bool,
) -> None:
    data = b""
    for scn, rows in enumerate(windows, 1):
        builder = WindowBuilder(scn, 0)
        for op, source, key in rows:
            builder.event(op, source, 0, key)
        data += builder.end()
    columns = scan(data[: -(72 + 8)] if is_cut else data)
    raw = np.frombuffer(data, dtype=np.uint8)
    ids = np.array(sorted(sources), dtype=np.uint32)
    wanted = StreamFilter(() if is_every_source else ("some",), frozenset(ops), partition)
    taken = wanted.mask(columns, raw, ids)
    expected, after = close_windows(columns, taken, in_window=in_window)
    mask, count, open_after = HeaderFilter(wanted).choose(
        raw, columns.offset, ids, in_window=in_window
    )
    assert mask.tolist() == expected.tolist()
    assert (count, open_after) == (int(expected.sum()), after)


@pytest.mark.parametrize("partition", [RangePartition(1, 0, 1), HashPartition(2, frozenset({1}))])
def test_a_partition_that_needs_a_mask_is_none_of_headers(partition: Partition) -> None:
    with pytest.raises(TypeError, match="needs the mask"):
        HeaderFilter(StreamFilter(partition=partition))
