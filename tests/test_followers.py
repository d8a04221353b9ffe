"""The benchmark's readers: what the kernel makes of a body, however the network cuts it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.brokers import resp
from benchmarks.followers import EVENTS, GAPS, KNOWN, LAST_SCN, walk
from benchmarks.paced_peers import DUE, REFUSED, events_of, walk_wrapped
from databus.common.frame.frame_format import HEADER_BYTES, Op
from databus.common.frame.window_builder import WindowBuilder


def body_of(scns: list[int]) -> bytes:
    body = b""
    for scn in scns:
        builder = WindowBuilder(scn, commit_us=scn * 2**33)
        builder.event(Op.UPDATE, 7, 1, b"key", after=bytes(scn % 90))
        body += builder.end()
    return body


def walked(
    body: bytes, cuts: list[int], kernel: Callable[..., int] = walk
) -> tuple[list[int], npt.NDArray[np.int64]]:
    state, head = np.zeros(KNOWN + 7, dtype=np.int64), np.zeros(HEADER_BYTES, dtype=np.uint8)
    out, found, at, turn = np.zeros(len(body) // HEADER_BYTES + 1, dtype=np.int64), [], 0, 0
    while at < len(body):
        piece = np.frombuffer(body[at : at + cuts[turn % len(cuts)]], dtype=np.uint8)
        count = kernel(piece, len(piece), state, head, 10**12, out)
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


def redis_answer(scns: list[int]) -> bytes:
    entries = [
        b"*2\r\n$%d\r\n%d-0\r\n%b" % (len(b"%d-0" % scn), scn, resp(b"d", event))
        for scn, event in events_of(body_of(scns))
    ]
    stream = b"*2\r\n$6\r\nevents\r\n*%d\r\n%b" % (len(entries), b"".join(entries))
    return b"*1\r\n" + stream


def nats_messages(scns: list[int]) -> bytes:
    return b"".join(
        b"MSG push.7.0 1 $JS.ACK.EVENTS.x9.1.%d.%d.99.0 %d\r\n%b\r\n"
        % (scn, scn, len(event), event)
        for scn, event in events_of(body_of(scns))
    )


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_the_same_events_are_found_in_what_redis_answers(cuts: list[int]) -> None:
    body = redis_answer([1, 2, 3]) + redis_answer([4]) + redis_answer([5, 6, 7, 8])
    ages, state = walked(body, cuts, walk_wrapped)
    assert ages == [10**12 - scn * 2**33 for scn in range(1, 9)]
    assert (state[EVENTS], state[LAST_SCN], state[GAPS], state[REFUSED]) == (8, 8, 0, 0)


def test_an_answer_of_redis_is_due_another_question_at_its_last_entry() -> None:
    body = redis_answer([1, 2, 3])
    whole, short = walked(body, [400], walk_wrapped), walked(body[:-3], [400], walk_wrapped)
    assert (whole[1][DUE], short[1][DUE]) == (1, 0)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_the_same_events_are_found_in_what_nats_pushes(cuts: list[int]) -> None:
    body = nats_messages([1, 2, 3]) + nats_messages([5, 6])
    ages, state = walked(body, cuts, walk_wrapped)
    assert ages == [10**12 - scn * 2**33 for scn in (1, 2, 3, 5, 6)]
    assert (state[EVENTS], state[GAPS], state[DUE], state[REFUSED]) == (5, 1, 0, 0)


def test_a_ping_is_due_an_answer_and_an_error_is_seen() -> None:
    body = nats_messages([1])
    assert walked(body + b"PING\r\n" + body, [50], walk_wrapped)[1][DUE]
    assert walked(body + b"-ERR 'Slow Consumer'\r\n", [50], walk_wrapped)[1][REFUSED]
