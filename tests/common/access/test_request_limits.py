"""Limits of each caller."""

from __future__ import annotations

import contextlib

import pytest

from databus.common.access.authority import Principal
from databus.common.access.request_limits import RequestLimits
from databus.common.errors import TooManyRequests


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_caller_has_as_many_streams_as_it_may_and_another_caller_its_own() -> None:
    limits = RequestLimits(Clock())
    app, other = Principal("app", (), max_streams=2), Principal("other", (), max_streams=1)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limits.counted(app, is_stream=True))
        with pytest.raises(TooManyRequests, match="2 open streams") as refused:
            stack.enter_context(limits.counted(app, is_stream=True))
        assert refused.value.details["retry_after_s"] > 0
        stack.enter_context(limits.counted(other, is_stream=True))
        stack.enter_context(limits.counted(app, is_stream=False))
    with limits.counted(app, is_stream=True):
        pass


def test_requests_are_admitted_at_the_callers_rate() -> None:
    clock = Clock()
    limits = RequestLimits(clock)
    app = Principal("app", (), max_requests_per_s=4.0)
    admitted = 0
    for tick in range(1000):
        clock.now_s = tick / 100
        with contextlib.suppress(TooManyRequests), limits.counted(app, is_stream=False):
            admitted += 1
    assert 39 <= admitted <= 44
    with pytest.raises(TooManyRequests) as refused:
        for _ in range(5):
            with limits.counted(app, is_stream=False):
                pass
    clock.now_s += refused.value.details["retry_after_s"]
    with limits.counted(app, is_stream=False):
        pass


def test_a_rate_below_one_a_second_admits_one_request_at_a_time() -> None:
    clock = Clock()
    limits = RequestLimits(clock)
    app = Principal("app", (), max_requests_per_s=0.1)
    for _ in range(3):
        with limits.counted(app, is_stream=False):
            pass
        with pytest.raises(TooManyRequests), limits.counted(app, is_stream=False):
            pass
        clock.now_s += 10.0


def test_without_limits_nothing_is_counted() -> None:
    limits = RequestLimits(Clock())
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(limits.counted(Principal("app", ()), is_stream=True))
