"""Limits of each caller."""

from __future__ import annotations

import contextlib

import pytest

from databus.common.access.authority import Principal
from databus.common.access.request_limits import RequestLimits
from databus.common.access_config import TokenConfig
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


def test_answers_of_a_caller_have_its_bytes_a_second_together_and_a_second_in_advance() -> None:
    clock = Clock()
    limits = RequestLimits(clock)
    app = Principal("app", (), max_bytes_per_s=1000)
    one, two = limits.pace_of(app), limits.pace_of(app)
    assert one is not None and two is not None
    assert (one.pause_s(600), two.pause_s(400)) == (0.0, 0.0)
    assert two.pause_s(500) == pytest.approx(0.5)
    assert one.pause_s(1000) == pytest.approx(1.5)
    clock.now_s = 100.0
    assert one.pause_s(1000) == 0.0, "what was not used for long is one second's worth"
    assert one.pause_s(1) == pytest.approx(0.001)
    other = limits.pace_of(Principal("other", (), max_bytes_per_s=1000))
    assert other is not None and other.pause_s(1000) == 0.0
    assert limits.pace_of(Principal("free", ())) is None


def test_a_limit_of_bytes_is_at_least_a_mebibyte() -> None:
    one = {"name": "app", "hashes": ["sha256:" + "0" * 64]}
    assert TokenConfig.model_validate(one | {"max_bytes_per_s": "1MiB"}).max_bytes_per_s == 1 << 20
    with pytest.raises(ValueError, match="max_bytes_per_s is 2048: give at least 1MiB"):
        TokenConfig.model_validate(one | {"max_bytes_per_s": "2KiB"})
