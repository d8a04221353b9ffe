"""When the fetcher rests after a read, and when it must not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from databus.relay.capture.commit_coalescing import (
    COALESCING_DELAY_S,
    LARGE_BYTES,
    MEASURED_S,
    CommitCoalescing,
)


def rests(
    coalescing: CommitCoalescing, rate: float, seconds: float, began_s: float, size: int
) -> set[float]:
    """What it decides while single windows of ``size`` bytes come at ``rate`` a second."""
    count = int(rate * seconds)
    first = int(began_s * rate)
    return {
        coalescing.coalescing_delay_s(first + number, size, began_s + number / rate)
        for number in range(count)
    }


@given(st.floats(1, 1700), st.integers(0, LARGE_BYTES * 2))
def test_no_reader_waits_at_a_moderate_rate(rate: float, size: int) -> None:
    assert rests(CommitCoalescing(), rate, 1.0, 10.0, size) <= {0.0}


def test_above_the_busy_rate_small_batches_are_gathered_and_large_ones_never_wait() -> None:
    coalescing = CommitCoalescing()
    rests(coalescing, 5000, 2 * MEASURED_S + 0.01, 10.0, 300)
    assert coalescing.is_busy
    assert rests(coalescing, 5000, 0.05, 10.3, 300) == {COALESCING_DELAY_S}
    assert rests(coalescing, 5000, 0.05, 10.35, LARGE_BYTES) == {0.0}


def test_between_the_two_rates_it_stays_as_it_was_and_a_calm_stream_is_let_through_again() -> None:
    fresh, coalescing = CommitCoalescing(), CommitCoalescing()
    rests(fresh, 2000, 1.0, 10.0, 300)
    assert not fresh.is_busy
    rests(coalescing, 5000, 0.3, 10.0, 300)
    coalescing.coalescing_delay_s(60_000, 300, 10.35)
    assert coalescing.is_busy
    for number in range(1, 800):
        coalescing.coalescing_delay_s(60_000 + number, 300, 10.35 + number / 2000)
    assert coalescing.is_busy
    for number in range(300):
        coalescing.coalescing_delay_s(60_800 + number, 300, 10.75 + number / 1000)
    assert not coalescing.is_busy
    assert coalescing.coalescing_delay_s(61_100, 300, 11.05) == 0.0


def test_nothing_new_is_not_waited_for() -> None:
    coalescing = CommitCoalescing()
    rests(coalescing, 5000, 0.3, 10.0, 300)
    assert coalescing.coalescing_delay_s(60_000, 0, 10.31) == 0.0
