"""Waiting for something outside this process, with a deadline instead of a sleep."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.02


async def eventually(
    predicate: Callable[[], T | Awaitable[T]],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float = _POLL_S,
) -> T:
    """Poll until the predicate is true and return what it gave.

    An AssertionError inside the predicate counts as "not yet" and is chained if the deadline
    passes; any other exception is the test's failure at once.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        last: object = None
        cause: AssertionError | None = None
        try:
            outcome = predicate()
            value = await outcome if inspect.isawaitable(outcome) else outcome
            if value:
                return value
            last = value
        except AssertionError as error:
            cause = error
        if time.monotonic() >= deadline_s:
            raise AssertionError(_complaint(predicate, timeout_s, message, last)) from cause
        await asyncio.sleep(poll_s)


def eventually_sync(
    predicate: Callable[[], T],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float = _POLL_S,
) -> T:
    """``eventually`` for tests without an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        last: object = None
        cause: AssertionError | None = None
        try:
            value = predicate()
            if value:
                return value
            last = value
        except AssertionError as error:
            cause = error
        if time.monotonic() >= deadline_s:
            raise AssertionError(_complaint(predicate, timeout_s, message, last)) from cause
        time.sleep(poll_s)


def _complaint(
    predicate: Callable[..., object], timeout_s: float, message: str, last: object
) -> str:
    what = message or getattr(predicate, "__name__", "the condition")
    return f"not within {timeout_s:g} s: {what} (last value: {last!r})"
