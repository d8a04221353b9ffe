"""The benchmark's readers: what the kernel makes of a body, however the network cuts it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.followers import EVENTS, GAPS, walk
from databus.common.frame import HEADER_BYTES, Op
from databus.common.window import WindowBuilder


def body_of(scns: list[int]) -> bytes:
    body = b""
    for scn in scns:
        builder = WindowBuilder(scn, commit_us=scn * 2**33)
        builder.event(Op.UPDATE, 7, 1, b"key", after=bytes(scn % 90))
        body += builder.end()
    return body


def walked(body: bytes, cuts: list[int]) -> tuple[list[int], npt.NDArray[np.int64]]:
    state, head = np.zeros(5, dtype=np.int64), np.zeros(HEADER_BYTES, dtype=np.uint8)
    out, found, at, turn = np.zeros(len(body) // HEADER_BYTES + 1, dtype=np.int64), [], 0, 0
    while at < len(body):
        piece = np.frombuffer(body[at : at + cuts[turn % len(cuts)]], dtype=np.uint8)
        count = walk(piece, len(piece), state, head, 10**12, out)
        found += out[:count].tolist()
        at, turn = at + len(piece), turn + 1
    return found, state


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_every_event_is_counted_with_its_age_wherever_the_body_is_cut(cuts: list[int]) -> None:
    ages, state = walked(body_of(list(range(1, 9))), cuts)
    assert ages == [10**12 - scn * 2**33 for scn in range(1, 9)]
    assert (state[EVENTS], state[GAPS]) == (8, 0)


def test_a_missing_window_is_seen() -> None:
    _, state = walked(body_of([4, 5, 7, 8, 12]), [100])
    assert (state[EVENTS], state[GAPS]) == (5, 2)
