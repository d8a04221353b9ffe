"""Waits until the server shows the commits that the stream has read.

A server writes a transaction to its binlog before it is visible.  The stream can read a change
without its rows, suspend the table and resume it before a snapshot shows that change.  No event
of the stream would correct a chunk that is read so early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from databus.common.errors import SourceUnavailable
from databus.relay.sources.contract import Snapshot

_WITHIN_S, _POLL_S = 30.0, 0.01


async def shown(source: str, scn: int, snapshot: Callable[[], Awaitable[Snapshot]]) -> None:
    """Return once a snapshot of the server shows the commit ``scn``; 0: there is none yet.

    Raises:
        SourceUnavailable: no snapshot shows it within 30 s.
    """

    async def sees() -> bool:
        return not scn or (await snapshot()).sees(scn, "")

    await until(source, f"scn {scn}", sees)


async def until(source: str, commit: str, is_shown: Callable[[], Awaitable[bool]]) -> None:
    """Return once the server shows a commit.

    Raises:
        SourceUnavailable: it does not within 30 s, for example because the replica lags.
    """
    until_s = time.monotonic() + _WITHIN_S
    while not await is_shown():
        if time.monotonic() > until_s:
            raise SourceUnavailable(
                f"{source} cannot be read yet: for {_WITHIN_S:g} s the server has not shown the "
                f"commit with {commit}, which is in its binlog"
            )
        await asyncio.sleep(_POLL_S)
