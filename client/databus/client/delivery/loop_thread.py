"""For callers without an event loop: one in a thread, and the iterator of what it brings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, Self, TypeVar

from databus.client.delivery.window_reader import ENDED
from databus.common.errors import InternalError

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, Any]], Any]


class LoopThread:
    """An event loop in a thread of its own.

    Owner: the thread that entered it.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="databus-loop", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for its result."""
        if self.loop.is_closed():
            coroutine.close()
            raise InternalError(ENDED)
        running = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return running.result()
        except BaseException:  # a KeyboardInterrupt, too
            running.cancel()
            raise

    @contextmanager
    def entered(self, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """An asynchronous context, entered and left there."""
        found = self.wait(_enter(context))
        try:
            yield found
        finally:
            self.wait(_leave(context))


async def _enter(context: AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def _leave(context: AbstractAsyncContextManager[Any]) -> None:
    await context.__aexit__(None, None, None)


class ClosingIterator(Iterator[T], Generic[T]):
    """What a generator gives, until it ends, ``close`` or the end of a ``with`` block.

    Owner: one thread.
    Raises: what the generator raises.
    """

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items

    def __next__(self) -> T:
        return next(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._items.close()
