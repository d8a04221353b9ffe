"""One call of a callback: its result, and its budget of time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from databus.client.application.consumer import Consumer, Result
from databus.common.errors import DatabusError


class CallbackFailed(Exception):
    """A callback returned ERROR or no result, or exceeded its budget."""

    def __init__(self, message: str, *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class NotStored(Exception):
    """A store refused a checkpoint or a dead letter."""

    def __init__(self, error: DatabusError) -> None:
        super().__init__(str(error))
        self.error = error


class BoundedCalls:
    """Calls callbacks, none longer than ``budget_s`` (None: without a limit).

    Raises: from ``make``: CallbackFailed, and what the callback raises.
    """

    def __init__(self, budget_s: float | None) -> None:
        self.budget_s = budget_s

    async def make(self, function: Callable[..., Any], *arguments: Any) -> Result:
        """Call a callback, and await what it returns if that can be awaited."""
        began_s = time.monotonic()
        try:
            answer = function(*arguments)
            if answer is not None and inspect.isawaitable(answer):
                answer = await self.in_budget(function.__name__, answer)
        except asyncio.CancelledError as error:
            raise_as_failure(function.__name__, error)
        result = checked_result(function.__name__, answer)
        self.check_budget(function.__name__, began_s)
        return result

    async def in_budget(self, name: str, answer: Awaitable[Any]) -> Any:
        """Await a callback's answer; it is cancelled when the budget is over."""
        try:
            async with asyncio.timeout(self.budget_s) as bound:
                return await answer
        except TimeoutError:
            if not bound.expired():
                raise
            raise CallbackFailed(
                f"{name} was cancelled after {self.budget_s:g} s (callback_budget_s)"
            ) from None

    def check_budget(self, name: str, began_s: float) -> None:
        """Raise if a callback that began at ``began_s`` has taken longer than the budget."""
        took_s = time.monotonic() - began_s
        if self.budget_s is not None and took_s > self.budget_s:
            raise CallbackFailed(
                f"{name} took {took_s:.3f} s, callback_budget_s is {self.budget_s:g}"
            )


def is_left_out(consumer: Consumer, name: str) -> bool:
    """Whether a consumer does not override a callback."""
    return getattr(getattr(consumer, name), "__func__", None) is getattr(Consumer, name)


def checked_result(name: str, answer: Any) -> Result:
    """The result that a callback returned, if it is not an error.

    Raises:
        CallbackFailed: it is ERROR, ERROR_FATAL or not a result.
    """
    if answer is None:
        return Result.SUCCESS
    if answer is Result.ERROR:
        raise CallbackFailed(f"{name} returned ERROR")
    if answer is Result.ERROR_FATAL:
        raise CallbackFailed(f"{name} returned ERROR_FATAL", is_fatal=True)
    if not isinstance(answer, Result):
        raise CallbackFailed(f"{name} returned {answer!r}, which is neither a Result nor None")
    return answer


def raise_as_failure(name: str, error: asyncio.CancelledError) -> NoReturn:
    """Raise a callback's own CancelledError as its failure; unchanged if the task is cancelled."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    raise CallbackFailed(f"{name} raised {error!r}, but the client was not cancelled") from error
