"""The code of a fetcher's process around the fetcher."""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import Protocol


class Running(Protocol):
    """The fetcher."""

    def stop(self) -> None:
        """Make ``run`` return."""

    async def run(self) -> None:
        """Fetch until ``stop``."""

    async def connected(self) -> object:
        """Return once it is streaming."""


async def serve_until_signal(fetcher: Running) -> None:
    """Run until SIGTERM or SIGHUP."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, fetcher.stop)
    settling = asyncio.create_task(settle_heap(fetcher))
    try:
        await fetcher.run()
    finally:
        settling.cancel()


async def settle_heap(fetcher: Running) -> None:
    """Exclude the objects of modules and compiled kernels from garbage collection: they live
    forever, and each walk over them would delay the stream for a tenth of a second."""
    await fetcher.connected()
    gc.freeze()  # without a collection before, which would be such a walk
