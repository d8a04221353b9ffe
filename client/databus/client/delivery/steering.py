"""``pause``, ``resume``, ``seek`` and ``stop``: what was asked of a client, and a seek's move."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from databus.client.checkpoints.checkpoint_stores import CheckpointStore
from databus.client.delivery.dispatcher import Dispatcher
from databus.client.pulling.pull_machine import Resume
from databus.client.pulling.puller import Pull
from databus.client.pulling.raw_windows import wait_for_either
from databus.client.pulling.replay_buffer import ReplayBuffer
from databus.common.checkpoint import Checkpoint
from databus.common.errors import DatabusError, InternalError

_LOOK_AGAIN_S = 0.02


class Steering:
    """What ``pause``, ``resume``, ``seek`` and ``stop`` have asked for.

    Invariants:
        I1. A request holds when its method returns: what looks after that sees it.
        I2. A request from before the start holds from the start on.  ``stop`` ends with the
            consumption that it ended, a pause with ``resume``, a seek when it has been made.
        I3. The last seek counts.

    Owner: any thread, task or signal handler asks; the task that delivers looks.
    """

    def __init__(self) -> None:
        # A signal handler may interrupt its own thread while that has the lock.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._hurry: Callable[[], None] | None = None
        self.is_stopping = False
        self.is_paused = False
        self.target: Resume | None = None
        self.seek_count = 0
        self.has_request = False
        """Whether delivery must look at the other fields before its next call."""

    def stop(self) -> None:
        """End the consumption."""
        with self._lock:
            self.is_stopping = True
            self._asked()

    def pause(self) -> None:
        """Deliver nothing until ``resume``."""
        with self._lock:
            self.is_paused = True
            self._asked()

    def resume(self) -> None:
        """Deliver again."""
        with self._lock:
            self.is_paused = False
            self._asked()

    def seek(self, target: Resume) -> None:
        """Continue at ``target``."""
        with self._lock:
            self.target = target
            self.seek_count += 1
            self._asked()

    def sought(self, seek_count: int) -> None:
        """That seek has been made."""
        with self._lock:
            if self.seek_count == seek_count:
                self.target = None
            self._asked()

    @contextlib.contextmanager
    def attached(
        self, wake: asyncio.Event, hurry: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """While delivery runs: ``wake`` is set after each request, ``hurry`` called in it."""
        with self._lock:
            self._loop, self._wake, self._hurry = asyncio.get_running_loop(), wake, hurry
            self._asked()
        try:
            yield
        finally:
            with self._lock:
                self._loop = self._wake = self._hurry = None
                self.is_stopping = False
                self._asked()

    async def unpaused(self, wake: asyncio.Event) -> None:
        """Return when there is no pause, or at ``stop``."""
        while self.is_paused and not self.is_stopping:
            wake.clear()
            await wake.wait()

    def _asked(self) -> None:
        self.has_request = self.is_stopping or self.is_paused or self.target is not None
        if self._hurry is not None:
            self._hurry()
        if self._loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._wake.set)


@dataclass(frozen=True, slots=True)
class Stream:
    """What one consumption reads: the pull, its frames, and their dispatcher.

    Invariants:
        I1. After ``restart`` no frame that was fetched before it is delivered.

    Owner: one task.
    """

    pull: Pull
    buffer: ReplayBuffer
    dispatcher: Dispatcher
    steering: Steering

    async def restart(self, resume: Resume | None) -> None:
        """Drop what was fetched, and read from ``resume`` on (None: from where it began)."""
        origin = resume or self.pull.origin
        await self.pull.end()
        self.buffer.clear()
        self.pull.begin(origin, self.buffer.end)

    async def seek(self) -> Checkpoint | None:
        """Move to the target; returns its checkpoint, or None if ``stop`` or another seek came.

        Nothing may be delivered before the caller has stored the checkpoint.

        Raises:
            DatabusError: no server can serve the target.
        """
        steering, count = self.steering, self.steering.seek_count
        target = steering.target
        assert target is not None
        await self.restart(target)
        self.dispatcher.moved(None)
        while (found := self.pull.origin_checkpoint) is None:
            if steering.is_stopping or steering.seek_count != count:
                return None
            self.require_pulling()
            self.buffer.wake.clear()
            await wait_for_either(self.buffer.wake, self.pull.pulling, _LOOK_AGAIN_S)
        self.dispatcher.moved(found)
        return found

    def require_pulling(self) -> None:
        """Raise the error with which pulling has ended, if it has."""
        pulling = self.pull.pulling
        if pulling.done():
            error = pulling.exception()
            if isinstance(error, DatabusError):
                raise error
            raise InternalError(f"the puller ended with {error!r}") from error


async def store_anywhere(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Store a checkpoint that may lie before the stored one.

    A store that refuses to go back has ``set``, and is then loaded again.
    """
    replace: Callable[[Checkpoint], Any] | None = getattr(store, "set", None)
    if replace is None:
        await _settled(store.save(checkpoint))
    else:
        await _settled(replace(checkpoint))
        await _settled(store.load())


async def _settled(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer
