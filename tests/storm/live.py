"""A relay in a thread of its own, for a driver that is not asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from databus.common.config import Config, DatabaseConfig, RelayConfig
from databus.common.table_state import CaptureState
from databus.relay.dumps.dump_records import ACTIVE, DumpState, new_dump
from databus.relay.dumps.resync_pace import ResyncPace
from databus.relay.dumps.table_records import TableRecord
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.fetcher import Fetcher, Pace
from databus.relay.processes.fetcher_status import FetcherState
from databus.relay.sources.mysql.chunks import mysql_chunks
from tests.storm.replica import RingReplica

PATIENCE_S = 60.0
ITERATION_S = 0.01
ENOUGH_ITERATIONS_PER_S = 50
"""So often the loop iterates on a machine that has half of its time for it."""
MANY_RECONNECTS = 12
MANY_TRIES = 7
"""After so many failed attempts a table does not come back by itself."""
PACE = Pace(
    idle_window_s=0.2,
    status_s=0.2,
    source_status_s=0.1,
    backoff_first_s=0.02,
    backoff_most_s=0.3,
    failed_retry_s=1.0,
    resync=ResyncPace(alone_s=0.0, accompanied_s=5.0, first_pause_s=0.05),
)
# A case waits with its transactions and locks open: other tables come back meanwhile.
mysql_chunks.LOCK_WAIT_S = 2
_T = TypeVar("_T")


class Stalled(Exception):
    """The stream does not come to where the source is; ``code`` is that of the relay's error.

    ``is_slow``: the relay has no error, and the machine is too slow to say more.
    """

    def __init__(self, code: str, message: str, *, is_slow: bool) -> None:
        super().__init__(message)
        self.code, self.is_slow = code, is_slow


class Loop:
    """An event loop in a thread, for all relays of a process."""

    def __init__(self) -> None:
        self.iterations = 0
        """How often the loop has slept for ``ITERATION_S``: what a busy machine does less often."""
        self._is_closing = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._counting = asyncio.run_coroutine_threadsafe(self._count(), self.loop)

    async def _count(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(ITERATION_S)
            self.iterations += 1

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What the work returns.

        Raises:
            Stalled: it does not end.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(PATIENCE_S * 4)
        except TimeoutError:
            if future.done():
                raise
            waits = "; ".join(self.waits())
            message = f"{work} not within {PATIENCE_S * 4:.0f} s: {waits}"
            raise Stalled("", message, is_slow=False) from None

    def waits(self) -> list[str]:
        """Where each task of the loop waits, for people; or what the loop itself is doing."""

        async def look() -> list[str]:
            return sorted(map(waiting_at, asyncio.all_tasks() - {asyncio.current_task()}))

        try:
            return asyncio.run_coroutine_threadsafe(look(), self.loop).result(PATIENCE_S)
        except TimeoutError:
            assert self._thread.ident is not None
            frame = sys._current_frames()[self._thread.ident]
            return [line.strip() for line in traceback.format_stack(frame)]

    def close(self) -> None:
        self._is_closing = True
        self._counting.result(PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Patience:
    """How long something is waited for: by the clock, and by what the machine did meanwhile.

    It is over after ``most_s`` in which the loop turned often enough: then more time would not
    help.  A loop that turned less often belongs to a machine that is busy with something else: it
    is over after four times as long, and ``is_slow``.
    """

    def __init__(self, loop: Loop, most_s: float = PATIENCE_S) -> None:
        self._loop, self._most_s = loop, most_s
        self._began_s, self._iterations = time.monotonic(), loop.iterations

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def is_slow(self) -> bool:
        """Whether the machine has done too little to say that there is a fault."""
        return self._loop.iterations - self._iterations < ENOUGH_ITERATIONS_PER_S * self._most_s

    @property
    def is_over(self) -> bool:
        return self.waited_s > (4 * self._most_s if self.is_slow else self._most_s)


def waiting_at(task: asyncio.Task[Any]) -> str:
    """The coroutines that a task is in, the innermost last."""
    frames: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        inner = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None)
    return " > ".join(frames)


class LiveFetcher:
    """A relay that captures one database into a folder; its replica reads the ring there.

    Owner: the driver's thread; the relay itself belongs to ``loop``.
    """

    def __init__(self, loop: Loop, config: DatabaseConfig, folder: Path, mark: str) -> None:
        self._loop, self._config, self._folder, self.mark = loop, config, folder, mark
        self.database, self._listen = config.name, "127.0.0.1:0"
        self._relay: LocalRelay | None = None
        self._replica: RingReplica | None = None
        self._dumping = False
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def ring_folder(self) -> Path:
        return self._folder / self._config.name

    @property
    def replica(self) -> RingReplica:
        if self._replica is None:
            self._replica = RingReplica(self.ring_folder)
        return self._replica

    @property
    def has_replica(self) -> bool:
        return self._replica is not None

    def start(self) -> None:
        """Begin, or resume where the ring ends; returns when it streams."""
        self._loop.run(self._start())
        self.wait(lambda: self.fetcher.status.state == FetcherState.STREAMING, "it streams")

    async def _start(self) -> None:
        config = Config(
            relay=RelayConfig(listen=self._listen, data_dir=self._folder),
            database=(self._config,),
        )
        relay = LocalRelay(config, pace=PACE)
        await relay.__aenter__()
        self._relay = relay
        if error := relay.refused.get(self._config.name):
            raise error
        self.fetcher: Fetcher = relay.fetchers[self._config.name]
        self.url = relay.url
        self._listen = self.url.removeprefix("http://")

    def stop(self) -> None:
        """End the relay; the ring stays."""
        self._loop.run(self._stop())

    async def _stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            with contextlib.suppress(Exception):
                await relay.__aexit__(None, None, None)

    def restart(self) -> None:
        """Another relay on the same folder and address."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End it and release the files."""
        try:
            self.stop()
        finally:
            if self._replica is not None:
                self._replica.close()

    def dump(self, sources: list[str]) -> None:
        """Have each of these tables dumped; ``is_dumping`` while that lasts."""
        self._loop.run(self._dump(sources))
        self._dumping = True

    @property
    def is_dumping(self) -> bool:
        """Whether a dump that ``dump`` began is not at its end."""
        if self._dumping:
            self._dumping = any(dump.state in ACTIVE for dump in self.fetcher.book)
        return self._dumping

    def wait_dumped(self) -> None:
        """Return when nothing is being dumped."""
        self.wait(lambda: not self.is_dumping, "its dumps end")

    async def _dump(self, sources: list[str]) -> None:
        for source in sources:
            await self.fetcher.start_dump(new_dump({"sources": [source]}))

    def undumped(self) -> set[str]:
        """Tables whose dump has failed, as its record says."""
        return {
            source
            for dump in self.fetcher.book
            if dump.state == DumpState.FAILED
            for source in dump.sources
        }

    def wait_mark(self, number: int) -> None:
        """Return when everything that was committed before mark ``number`` is in the replica.

        Raises:
            Stalled: it does not come; the message has the relay's error.
        """
        self.wait(lambda: self.read().marked(self.mark) >= number, f"mark {number}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Return when something is so.  A dump that completes begins the wait again.

        Raises:
            Stalled: it does not come; the message has the relay's error.
        """
        patience, reconnects = Patience(self._loop), self.fetcher.status.reconnect_count
        done = self._done_dumps()
        while not condition():
            if (now_done := self._done_dumps()) != done:
                patience, done = Patience(self._loop), now_done
            status = self.fetcher.status
            tries = status.reconnect_count - reconnects
            is_lost = status.state == FetcherState.FAILED and tries > 1
            if is_lost or tries > MANY_RECONNECTS or patience.is_over:
                error, waited_s = status.error, patience.waited_s
                raise Stalled(
                    error.code if error is not None else "",
                    f"not within {waited_s:.1f} s: {what}; the relay is {status.state} after "
                    f"{tries} attempts: {error.message if error else 'no error'}; "
                    f"{self._left()}",
                    is_slow=error is None and patience.is_slow,
                )
            time.sleep(0.0005)

    def _done_dumps(self) -> set[str]:
        return {dump.id for dump in self.fetcher.book if dump.state == DumpState.COMPLETED}

    def _left(self) -> str:
        """What is still to be done, for people."""
        dumps = [f"{one.state} {one.sources}" for one in self.fetcher.book if one.state in ACTIVE]
        tables = [
            f"{one.source}, {one.tries} tries: {one.reason}; {one.waits_for}"
            for one in self.unfollowed()
        ]
        return f"dumps: {dumps or 'none'}; tables: {tables or 'none'}"

    def unfollowed(self) -> list[TableRecord]:
        """The records of the tables that are suspended or resynchronising."""
        return [
            record for record in self.fetcher.tables.book if record.state != CaptureState.FOLLOWED
        ]

    def read(self) -> RingReplica:
        """The replica, with everything that was published."""
        self.replica.read()
        return self.replica

    def is_named(self, source: str) -> bool:
        """Whether stream or status say that a table is not followed."""
        return self.replica.state(source) is not None or source in self.named()

    def named(self) -> dict[str, str]:
        """Sources that the status names as not followed, and why."""
        document = self.fetcher.status_document()
        found = {table["source"]: table["reason"] for table in document.get("tables", [])}
        source = document["source"]
        for warning in source.get("warnings") or []:
            name, _, why = str(warning).partition(" is suspended: ")
            if not why:
                name, _, why = str(warning).partition(" cannot be captured: ")
            found.setdefault(name, why)
        return found


class Latecomer:
    """A consumer that begins at the end of a relay's ring and has every table dumped.

    Owner: the driver's thread.
    """

    def __init__(self, relay: LiveFetcher) -> None:
        self.relay = relay
        self.replica = RingReplica(relay.ring_folder, at_end=True)
        self.has_replica = True

    @property
    def fetcher(self) -> Fetcher:
        return self.relay.fetcher

    def dump(self, sources: list[str]) -> None:
        """Have each of these tables dumped; ``is_dumping`` while that lasts."""
        self.relay.dump(sources)

    @property
    def is_dumping(self) -> bool:
        return self.relay.is_dumping

    def wait_dumped(self) -> None:
        """Return when nothing is being dumped."""
        self.relay.wait_dumped()

    def undumped(self) -> set[str]:
        """Tables whose dump has failed, as its record says."""
        return self.relay.undumped()

    def wait_mark(self, number: int) -> None:
        """See ``LiveFetcher.wait_mark``."""
        mark = self.relay.mark
        self.relay.wait(lambda: self.read().marked(mark) >= number, f"mark {number}")

    def unfollowed(self) -> list[TableRecord]:
        """The records of the tables that are suspended or resynchronising."""
        return self.relay.unfollowed()

    def read(self) -> RingReplica:
        """The replica, with everything that was published."""
        self.replica.read()
        return self.replica

    def is_named(self, source: str) -> bool:
        """Whether stream or status say that a table is not followed."""
        return self.replica.state(source) is not None or source in self.relay.named()

    def restart(self) -> None:
        """The relay is restarted by its owner."""

    def close(self) -> None:
        """Release the ring's files."""
        self.replica.close()
