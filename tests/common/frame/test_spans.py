"""Spans: whatever the writer put over bytes that were being sent is not taken for data."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, ReaderOvertaken
from databus.common.frame.frame_format import FrameSplitter, Op, pack_frame
from databus.common.frame.spans import SpanSplitter, span_frame
from tests.support.windows import make_window, positions, split_frames

OLD = b"".join(make_window(scn, [200, 200]) for scn in range(1, 9))
NEW = b"".join(make_window(scn, [200, 200]) for scn in range(101, 109))
LAST = positions(OLD)[-1]
BEFORE, BEHIND = make_window(0, [40]), make_window(9, [40])


def fed(body: bytes, cuts: Sequence[int] = ()) -> bytes:
    """What a splitter makes of a body that arrives in pieces."""
    splitter, found = SpanSplitter(), b""
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, stop in pairwise(edges):
        found += b"".join(splitter.feed(body[start:stop]))
    assert splitter.pending_bytes == 0
    return found


@given(st.lists(st.integers(0, 1 << 16), max_size=12))
def test_a_body_with_spans_is_the_frames_without_them_wherever_it_is_cut(cuts: list[int]) -> None:
    half = sum(len(frame) for _, frame in split_frames(OLD)[:12])
    middle = positions(OLD[:half])[-1]
    body = (
        BEFORE
        + span_frame(middle, half) + OLD[:half]
        + span_frame(LAST, len(OLD) - half) + OLD[half:]
        + BEHIND
    )  # fmt: skip
    assert fed(body, cuts) == BEFORE + OLD + BEHIND


def test_a_plain_splitter_takes_a_newer_lap_for_data_which_is_why_there_are_spans() -> None:
    assert len(OLD) == len(NEW)
    at = len(b"".join(frame for _, frame in split_frames(OLD)[:7]))
    torn = OLD[:at] + NEW[at:]
    assert FrameSplitter().feed(torn) == torn
    with pytest.raises(ReaderOvertaken, match="a frame at"):
        fed(span_frame(LAST, len(OLD)) + torn)


@given(st.integers(0, len(OLD)), st.integers(0, len(OLD)), st.lists(st.integers(0, 1 << 16)))
def test_bytes_of_a_newer_lap_are_never_handed_out(
    first: int, second: int, cuts: list[int]
) -> None:
    start, stop = sorted((first, second))
    body = OLD[:start] + NEW[start:stop] + OLD[stop:]
    if body == OLD:
        return
    splitter, found = SpanSplitter(), b""
    sent = span_frame(LAST, len(OLD)) + body
    edges = [0, *sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]
    with pytest.raises(ReaderOvertaken):
        for at, end in pairwise(edges):
            found += b"".join(splitter.feed(sent[at:end]))
    assert OLD.startswith(found)


def test_a_newer_frame_that_reaches_beyond_the_span_is_seen() -> None:
    frames = split_frames(OLD)
    longer = make_window(frames[-1][0].scn, [200, 900])
    with pytest.raises(ReaderOvertaken):
        fed(span_frame(LAST, len(OLD)) + OLD[: -len(frames[-1][1])] + longer)


def test_a_span_within_a_span_is_a_sign_of_being_overtaken_as_well() -> None:
    span = span_frame(LAST, len(OLD))
    with pytest.raises(ReaderOvertaken, match="before its end"):
        fed(span + OLD[: len(split_frames(OLD)[0][1])] + span)


def test_damage_outside_of_a_span_is_damage() -> None:
    damaged = bytearray(BEHIND)
    damaged[80] ^= 1
    with pytest.raises(FormatError):
        fed(span_frame(LAST, len(OLD)) + OLD + bytes(damaged))
    with pytest.raises(ReaderOvertaken):
        fed(span_frame(Position(9, 9), len(OLD) + len(BEHIND)) + OLD + bytes(damaged))


@pytest.mark.parametrize("after", [b"", b"1234567", struct.pack("<QQ", 1, 2)])
def test_a_span_frame_without_a_length_is_damaged(after: bytes) -> None:
    with pytest.raises(FormatError, match="SPAN"):
        fed(pack_frame(op=Op.SPAN, scn=1, seq=1, after=after))
