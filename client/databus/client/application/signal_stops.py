"""Runs a client that blocks, until it is stopped or a signal arrives."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from databus.common.errors import ConfigError


def run_until_signal(
    serve: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[], None]
) -> None:
    """Run ``serve()`` in an event loop of its own; SIGINT and SIGTERM call ``stop``.

    The first signal ends it in order; a second SIGINT raises KeyboardInterrupt.  In another thread
    than the main one, signals remain as they are.

    Raises:
        ConfigError: there is an event loop in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_serve(serve, stop))
    else:
        raise ConfigError("run() was called in an event loop; use 'await client.serve()'")


async def _serve(serve: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    taken: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        taken.remove(number)
        stop()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
            taken.append(number)
    try:
        await serve()
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
