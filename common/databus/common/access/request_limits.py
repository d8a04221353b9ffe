"""Limits of each principal: open streams, requests a second, and bytes a second.

A worker counts its own requests and answers, as it does connections.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from databus.common.access.authority import Principal
from databus.common.errors import TooManyRequests

STREAM_RETRY_S = 1.0
"""When a stream may be tried again: the end of another one cannot be foreseen."""


@dataclass(slots=True)
class _Usage:
    """``credit`` requests may be made now; it grows with time, to one second's worth.

    ``paid_until_s`` is the time at which what was sent is within the limit of bytes.
    """

    credit: float
    at_s: float
    streams: int = 0
    paid_until_s: float = 0.0


class BytePace:
    """The bytes that the answers of one principal have together.

    Invariants:
        I1. If each answer pauses for ``pause_s``, in no time of T seconds more is sent than
            (T + 1) * ``max_bytes_per_s`` and one part of each answer.

    Owner: one event loop.
    """

    def __init__(self, usage: _Usage, per_s: int, clock_s: Callable[[], float]) -> None:
        self._usage = usage
        self._per_s = per_s
        self._clock_s = clock_s

    def pause_s(self, sent_bytes: int) -> float:
        """For how long to send nothing after a part of so many bytes."""
        now_s, usage = self._clock_s(), self._usage
        usage.paid_until_s = max(now_s, usage.paid_until_s) + sent_bytes / self._per_s
        return max(0.0, usage.paid_until_s - now_s - 1.0)


class RequestLimits:
    """Counts the requests of each principal.

    Invariants:
        I1. Of a principal with ``max_streams`` at most so many stream answers are open.
        I2. In no time of T seconds are more than (T + 1) * ``max_requests_per_s`` requests
            admitted, or one more where that is less than one.

    Owner: one event loop.
    Raises: TooManyRequests, with the seconds after which it may be tried again.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._usages: dict[str, _Usage] = {}

    @contextlib.contextmanager
    def counted(self, principal: Principal, *, is_stream: bool) -> Iterator[None]:
        """Around one request."""
        if not (principal.max_streams or principal.max_requests_per_s):
            yield
            return
        now_s = self._clock_s()
        most = max(1.0, principal.max_requests_per_s)
        usage = self._usage_of(principal)
        if principal.max_requests_per_s:
            self._take(principal, usage, most, now_s)
        if not is_stream:
            yield
            return
        if principal.max_streams and usage.streams >= principal.max_streams:
            raise TooManyRequests(
                f"{principal.name} has {usage.streams} open streams at this worker, the most that "
                f"max_streams allows",
                retry_after_s=STREAM_RETRY_S,
            )
        usage.streams += 1
        try:
            yield
        finally:
            usage.streams -= 1

    def pace_of(self, principal: Principal) -> BytePace | None:
        """The pace of its answers; None without a limit."""
        per_s = principal.max_bytes_per_s
        return BytePace(self._usage_of(principal), per_s, self._clock_s) if per_s else None

    def _usage_of(self, principal: Principal) -> _Usage:
        usage = self._usages.get(principal.name)
        if usage is None:
            usage = _Usage(max(1.0, principal.max_requests_per_s), self._clock_s())
            self._usages[principal.name] = usage
        return usage

    def _take(self, principal: Principal, usage: _Usage, most: float, now_s: float) -> None:
        per_s = principal.max_requests_per_s
        usage.credit = min(most, usage.credit + (now_s - usage.at_s) * per_s)
        usage.at_s = now_s
        if usage.credit < 1.0:
            raise TooManyRequests(
                f"{principal.name} sends more than {per_s:g} requests a second to this worker",
                retry_after_s=round((1.0 - usage.credit) / per_s, 3),
            )
        usage.credit -= 1.0
