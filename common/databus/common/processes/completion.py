"""Work that runs to its end although its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


async def completed(work: Awaitable[_T]) -> _T:
    """The result of ``work``, which has always ended when this returns or raises.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile, once or more often.
        Exception: what ``work`` raised.
    """
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # It is of no more use, and asyncio would report it.
        raise cancelled
    return running.result()
