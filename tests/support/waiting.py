"""Waiting for something outside this process, with a deadline instead of a sleep."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, overload

T = TypeVar("T")

_POLL_S = 0.02
_SELDOM_S, _SHARE = 0.1, 0.02
"""The longest pause between two looks, and its share of what has been waited already: a look is
often a request to the process that is waited for, and takes processor time from it."""
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
    poll_s: float | None = None,
) -> T: ...
@overload
async def eventually(
    predicate: Callable[[], T],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float | None = None,
) -> T: ...
async def eventually(
    predicate: Callable[[], Any],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float | None = None,
) -> Any:
    """Poll until the predicate is true and return what it gave.

    What is there for a moment only needs ``poll_s``: without it the looks become rarer, up to one
    in a tenth of a second.

    An AssertionError inside the predicate counts as "not yet" and is chained if the deadline
    passes; any other exception is the test's failure at once.
    """
    attempts = _Attempts(predicate, timeout_s, message)
    while True:
        with attempts.another():
            outcome = predicate()
            attempts.value = await outcome if inspect.isawaitable(outcome) else outcome
        if attempts.value:
            return attempts.value
        await asyncio.sleep(attempts.pause_s(poll_s))


def eventually_sync(
    predicate: Callable[[], T],
    timeout_s: float = 10.0,
    message: str = "",
    *,
    poll_s: float | None = None,
) -> T:
    """``eventually`` for tests without an event loop."""
    attempts = _Attempts(predicate, timeout_s, message)
    while True:
        with attempts.another():
            attempts.value = value = predicate()
            if value:
                return value
        time.sleep(attempts.pause_s(poll_s))


class _Attempts:
    """The tries of a predicate until a deadline; ``value`` is what the last one gave."""

    def __init__(self, predicate: Callable[..., object], timeout_s: float, message: str) -> None:
        self.value: Any = None
        self._timeout_s = timeout_s * PATIENCE
        self._began_s = time.monotonic()
        self._what = message or getattr(predicate, "__name__", "the condition")

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def pause_s(self, poll_s: float | None) -> float:
        """How long until the next try: as asked, or a little longer each time."""
        seldom_s = max(_POLL_S, min(_SELDOM_S, _SHARE * self._waited_s))
        return seldom_s if poll_s is None else poll_s

    @contextlib.contextmanager
    def another(self) -> Iterator[None]:
        """One try; an error if it fails and the deadline has passed."""
        self.value = None
        cause: AssertionError | None = None
        try:
            yield
        except AssertionError as error:
            cause = error
        if not self.value and self._waited_s >= self._timeout_s:
            raise AssertionError(
                f"not within {self._timeout_s:g} s: {self._what} (last value: {self.value!r})"
            ) from cause
