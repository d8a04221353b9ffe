"""Checkpoints: one codec, nothing misread."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common import checkpoint as cp
from databus.common.checkpoint import SEQ_END, BootstrapCheckpoint, OnlineCheckpoint, Position
from databus.common.errors import BadCheckpoint

positions = st.builds(Position, st.integers(0, 2**64 - 1), st.integers(0, SEQ_END))
checkpoints = st.one_of(
    st.builds(OnlineCheckpoint, st.text(), st.text(), positions),
    st.builds(
        BootstrapCheckpoint,
        st.text(),
        st.text(),
        since=positions,
        target=positions,
        run=st.text(),
        row=st.integers(0, 2**64 - 1),
        position=positions,
    ),
)


@given(checkpoints)
def test_a_checkpoint_comes_back_equal(checkpoint: cp.Checkpoint) -> None:
    assert cp.decode(cp.encode(checkpoint)) == checkpoint


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_a_checkpoint_or_bad_checkpoint(text: str) -> None:
    with pytest.raises(BadCheckpoint):
        cp.decode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": 2}, "version 2"),
        ({"db": 5}, "db is 5"),
        ({"clock": None}, "clock is None"),
        ({"mode": "offline"}, "mode is 'offline'"),
        ({"scn": -1}, "scn is -1"),
        ({"scn": 2**64}, "scn is 18446744073709551616"),
        ({"scn": True}, "scn is True"),
        ({"seq": 2**32}, "seq is 4294967296"),
        ({"seq": 1.5}, "seq is 1.5"),
    ],
)
def test_a_damaged_field_is_named_with_its_value(change: dict[str, Any], message: str) -> None:
    good = json.loads(cp.encode(OnlineCheckpoint("shop", "c", Position(8, 3))))
    with pytest.raises(BadCheckpoint, match=message):
        cp.decode(json.dumps(good | change))


def test_without_seq_a_position_means_all_of_the_scn() -> None:
    found = cp.decode('{"v":1,"db":"shop","clock":"c","mode":"online","scn":812}')
    assert found == OnlineCheckpoint("shop", "c", Position(812, SEQ_END))
    assert '"seq"' not in cp.encode(found)


@given(positions, positions)
def test_positions_are_ordered_by_scn_and_then_seq(one: Position, other: Position) -> None:
    assert (one < other) == ((one.scn, one.seq) < (other.scn, other.seq))
    assert one <= Position(one.scn)
