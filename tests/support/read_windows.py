"""Windows of a client up to a known one: no idle time has to show which was the last."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from databus.client import AsyncPulledWindow, DatabusClient, PulledWindow


def up_to(scn: int, client: DatabusClient) -> Iterator[PulledWindow]:
    """The client's windows; that of ``scn`` is the last."""
    with client.windows() as windows:
        for window in windows:
            yield window
            if window.scn >= scn:
                break


async def aup_to(scn: int, client: DatabusClient) -> AsyncIterator[AsyncPulledWindow]:
    """As ``up_to``, in an event loop."""
    async with client.awindows() as windows:
        async for window in windows:
            yield window
            if window.scn >= scn:
                break
