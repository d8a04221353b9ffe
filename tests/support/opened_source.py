"""A source that a test reads without a fetcher."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

from databus.relay.sources.contract import Source

S = TypeVar("S", bound=Source)


@contextlib.asynccontextmanager
async def opened_source(source: S) -> AsyncIterator[S]:
    """It is open in the block, and closed afterwards."""
    try:
        await source.open()
        yield source
    finally:
        await source.close()


async def open_source(source: S) -> S:
    """The same source, open; the test closes it."""
    await source.open()
    return source


async def opened_scn(source: Source) -> int:
    """Open a source; the SCN after which a stream of it begins."""
    await source.open()
    return await source.first_scn()
