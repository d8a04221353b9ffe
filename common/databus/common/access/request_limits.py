"""Limits of each principal: open streams, and requests a second.

A worker counts its own requests, as it does connections.
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
    """``credit`` requests may be made now; it grows with time, to one second's worth."""

    credit: float
    at_s: float
    streams: int = 0


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
        usage = self._usages.setdefault(principal.name, _Usage(most, now_s))
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
