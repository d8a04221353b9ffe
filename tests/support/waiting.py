"""Waiting for something outside this process, with a deadline instead of a sleep."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

_POLL_S = 0.02
PATIENCE = 3.0
"""How many times as long as was thought everything may take: a deadline is there to end what
hangs, and a machine that others use meanwhile has been seen at a third of its pace."""


def within(timeout_s: float) -> asyncio.Timeout:
    """``async with within(10.0):`` ends what hangs, like the deadline of ``eventually``."""
    return asyncio.timeout(timeout_s * PATIENCE)


@overload
async def eventually(
    predicate: Callable[[], Awaitable[T]],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float = _POLL_S,
) -> T: ...
@overload
async def eventually(
    predicate: Callable[[], T],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float = _POLL_S,
) -> T: ...
async def eventually(
    predicate: Callable[[], Any],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float = _POLL_S,
) -> Any:
    """Poll until the predicate is true and return what it gave.

    An AssertionError inside the predicate counts as "not yet" and is chained if the deadline
    passes; any other exception is the test's failure at once.
    """
    timeout_s *= PATIENCE
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
    timeout_s *= PATIENCE
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
