"""The fetcher: one process per database that moves its source's windows into its ring.

It connects, streams, syncs and acknowledges, reconnects after errors, runs the dumps and reports
its status.  ``python -m databus.relay.processes.fetcher`` is the process; ``Fetcher`` is the same
inside another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig, RelayConfig
from databus.common.errors import (
    ConfigError,
    DatabusError,
    InternalError,
    RingFull,
    ServerUnavailable,
    SourcePositionLost,
    SourceUnavailable,
    StoreError,
)
from databus.common.private import make_folder
from databus.common.processes.server_log import log_to_stderr
from databus.relay.capture.commit_coalescing import CommitCoalescing
from databus.relay.capture.intake import Intake, first_position
from databus.relay.capture.reader_release import release
from databus.relay.capture.recent_batches import RecentBatches
from databus.relay.capture.source_catalogue import create_source
from databus.relay.cluster.fetcher_term import FetcherTerm
from databus.relay.cluster.leadership import Leadership
from databus.relay.cluster.lease_word import LeaseWord
from databus.relay.dumps.dump_records import ACTIVE, Dump, DumpBook
from databus.relay.dumps.dump_runner import DumpRunner
from databus.relay.dumps.resync import Resync
from databus.relay.dumps.resync_pace import ResyncPace
from databus.relay.dumps.resync_requests import states_of
from databus.relay.processes.fetcher_api import FetcherApi
from databus.relay.processes.fetcher_durability import FetcherDurability
from databus.relay.processes.fetcher_process import serve_roles
from databus.relay.processes.fetcher_status import FetcherState, FetcherStatus
from databus.relay.processes.process_handover import Handover, take_over
from databus.relay.processes.source_link import SourceLink
from databus.relay.processes.wakeup import WakeupSender
from databus.relay.ring.data_folder import DatabaseFolder, naming, read_document
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_format import INDEX_NAME, RING_NAME
from databus.relay.ring.schema_registry import Registry
from databus.relay.sources import contract
from databus.relay.sources.suspended_tables import TableSuspension

SWITCH_INTERVAL_S = 0.0005

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """The fetcher's intervals; tests make them short."""

    idle_window_s: float = 5.0
    status_s: float = 0.5
    source_status_s: float = 5.0
    committed_s: float = 1.0
    backoff_first_s: float = 0.1
    backoff_most_s: float = 10.0
    failed_retry_s: float = 30.0
    resync: ResyncPace = field(default_factory=ResyncPace)


class Fetcher:
    """Writes one database's ring from its source.

    Invariants:
        I1. The source is acknowledged only up to a window that is on disk (``FetcherDurability``).
        I2. Only ``stop`` and a failed sync end it: errors that can pass are retried with
            back-off, the others are shown as state ``failed`` and retried slowly.
        I3. It never holds more than one batch of the source, besides ``RecentBatches``.
        I4. No reader delays a database: only what another relay sends may be blocked.
        I5. After a failed sync of the ring ``run`` ends; opening the ring again verifies the rest.

    Owner: one event loop; its ring's lock excludes a second fetcher.
    Durability: at most ``sync_every`` after a window was appended it is on disk.
    """

    def __init__(
        self,
        config: DatabaseConfig,
        data_dir: Path | str,
        *,
        wakeup: WakeupSender | None = None,
        make_source: Callable[[DatabaseConfig], contract.Source] = create_source,
        pace: Pace | None = None,
        jitter: random.Random | None = None,
        leadership: Leadership | None = None,
    ) -> None:
        self.config = config
        self.folder = DatabaseFolder.of(data_dir, config.name)
        make_folder(self.folder.path)
        self.status = FetcherStatus(config, self.folder)
        self.intake: Intake | None = None
        self._pace = pace or Pace()
        self.book, self.tables, self._term = self._open_books(leadership)
        self.dumps = DumpRunner(self.book, self)
        self._wakeup = wakeup or WakeupSender()
        self._link = SourceLink(config, make_source)
        self._durability = FetcherDurability(
            self.folder, self._link, self.tables, self.dumps, self.stop, self._term.ackable
        )
        self._jitter = jitter or random.Random()
        self._registry: Registry | None = None
        self._released = asyncio.Event()
        self._stopping = asyncio.Event()
        self._recent = RecentBatches()
        self._asked_scn = -1
        self._status_due = asyncio.Event()

    def _open_books(self, leadership: Leadership | None) -> tuple[DumpBook, Resync, FetcherTerm]:
        try:
            resync = Resync(self.config, self.folder.tables, self, self._pace.resync)
            book, term = DumpBook(self.folder.dumps), FetcherTerm(self.folder, leadership)
            term.take_over_records(book, resync.book, follows=self._is_follower)
            return book, resync, term
        except DatabusError as error:
            self.status.enter(FetcherState.FAILED, error)
            self.status.write(self.status.document(None, {}))
            raise

    @property
    def _is_follower(self) -> bool:
        """Whether it follows the leader of its cluster."""
        return "follower" in self.config.options

    # -- life --

    def stop(self) -> None:
        """Make ``run`` return."""
        self._stopping.set()

    async def run(self) -> None:
        """Fetch until ``stop``.

        Raises:
            StoreError: the data folder cannot be used.
            SyncFailed: the disk failed to write the ring; run another one.
        """
        api = FetcherApi(self, self.folder)
        tasks: list[asyncio.Task[None]] = []
        try:
            await api.start()
            loops = (
                self._capture_loop, self._sync_loop, self._ask_loop, self._status_loop,
                self.dumps.run, self.tables.run,
            )  # fmt: skip
            tasks = [asyncio.create_task(loop()) for loop in loops]
            stopping = asyncio.create_task(self._wait_stop())
            tasks.append(stopping)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await api.close()
            try:
                # A leader that is gone is not waited for.
                await self.make_durable(acknowledges=not self._is_follower)
            except (DatabusError, OSError) as error:
                _log.warning("%s: the last frames are not on disk: %s", self.config.name, error)
            await self._close()
        if self._durability.failure is not None:
            raise self._durability.failure
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _wait_stop(self) -> None:
        await self._stopping.wait()

    async def _close(self) -> None:
        async with self._durability.lock:
            if self.intake is not None:
                self.intake.ring.close()
            if self._registry is not None:
                self._registry.close()
        self._wakeup.close()
        failure = self._durability.failure
        self.status.enter(FetcherState.FAILED if failure else FetcherState.STOPPED, failure)
        # The folder may be the cause of the failure.
        with contextlib.suppress(StoreError) if failure else contextlib.nullcontext():
            self.status.write(self.status.document(None, self.dumps.counts()))

    # -- capture --

    async def _capture_loop(self) -> None:
        while True:
            try:
                await self._capture()
            except SourcePositionLost as error:
                if self._is_follower:
                    self._start_over(error)
                delay_s = self._note_failure(error)
            except DatabusError as error:
                delay_s = self._note_failure(error)
            except (OSError, EOFError, TimeoutError) as error:
                delay_s = self._note_failure(SourceUnavailable(f"{type(error).__name__}: {error}"))
            except Exception as error:
                _log.exception("%s: the source failed", self.config.name)
                delay_s = self._note_failure(InternalError(f"{type(error).__name__}: {error}"))
            else:
                delay_s = self._note_failure(SourceUnavailable("the source's stream has ended"))
            await asyncio.sleep(delay_s)

    def _start_over(self, error: SourcePositionLost) -> None:
        """At a follower whose position the leader has no longer: begin with the leader's ring."""
        intake, self.intake = self.intake, None
        if intake is not None:
            _log.warning("%s: the ring is made again: %s", self.config.name, error.message)
            intake.ring.close()
            for name in (RING_NAME, INDEX_NAME):
                (self.folder.path / name).unlink(missing_ok=True)
            self._durability.synced_tail = -1

    def _note_failure(self, error: DatabusError) -> float:
        """Show the failure; returns the seconds to wait before the next attempt."""
        pace = self._pace
        self.status.reconnect_count += 1
        if error.retry:
            delay_s = min(
                pace.backoff_most_s, pace.backoff_first_s * 2.0 ** min(self._link.attempt, 20)
            )
            self._link.attempt += 1
            state = FetcherState.RECONNECTING
        else:
            delay_s = pace.failed_retry_s
            state = FetcherState.FAILED
        delay_s *= self._jitter.uniform(0.5, 1.0)
        _log.warning(
            "%s: %s (%s); next attempt in %.1f s",
            self.config.name, error.message, error.code, delay_s,
        )  # fmt: skip
        self.status.enter(state, error)
        self.status.retry_at_us = time.time_ns() // 1000 + int(delay_s * 1e6)
        self._write_status()
        return delay_s

    async def _capture(self) -> None:
        """Connect and stream until an error."""
        self._term.guard()
        if self.intake is None and (self.folder.path / RING_NAME).exists():
            self._open_intake(None, Position(0, 0))
        if self.intake is not None:
            # The source continues behind what the ring has, with the resume state of that.
            await self.make_durable()
        source = self._link.make()
        try:
            self._restore(source)
            await source.open()
            if self.intake is None:
                self.folder.resume_state.unlink(missing_ok=True)
                start = await first_position(source)
                intake = self._open_intake(source.clock, start)
            else:
                intake = self.intake
                intake.ring.require_clock(source.clock)
            intake.registry.add(await source.schemas())
            if isinstance(source, contract.RelayingSource):
                self.tables.parents(await states_of(source), adds=self._is_follower)
            self._asked_scn = max(self._asked_scn, await self._term.begin(source, intake))
            self._link.connected(source)
            await self._copy_state(source)
            coalescing = CommitCoalescing()
            async with contextlib.aclosing(intake.stream(source)) as batches:
                async for batch in batches:
                    if intake.ring.blocks:
                        await self._take_waiting(intake, batch)
                    else:
                        self._take(intake, batch)
                    if self._is_follower and self._term.relayed(batch):
                        await self._copy_state(source)
                    if batch.persist_first:
                        await self.make_durable()
                        if self._term.mark(intake):
                            self._wakeup.wake()
                    # A source that never has to wait must not block the other tasks.
                    now_s = time.monotonic()
                    await asyncio.sleep(
                        coalescing.coalescing_delay_s(intake.window_count, len(batch.data), now_s)
                    )
        finally:
            self.status.caught_up = False
            await self._link.close(source)

    async def _copy_state(self, source: contract.Source) -> None:
        """At a follower: copy what the leader would need to resume."""
        if self._is_follower and isinstance(source, contract.RelayingSource):
            await self._term.copy(source)

    def _restore(self, source: contract.Source) -> None:
        """Give the source its resume state if the stream continues at the same position."""
        intake = self.intake
        if intake is not None and isinstance(source, contract.ResumableSource):
            resume_state = (read_document(self.folder.resume_state) or b"").decode()
            with naming(self.folder.resume_state):
                source.restore(resume_state, intake.last_transaction(), intake.complete.scn)

    def _open_intake(self, clock: str | None, start: Position) -> Intake:
        config = self.config
        ring = Ring.open_writer(
            self.folder.path,
            config.ring_bytes,
            clock=clock,
            start=start,
            block=bool(config.options.get("block", False)),
        )
        try:
            if ring.blocks and not config.is_relayed:
                raise ConfigError(
                    f"{config.name}: its ring was made in block mode for a child of another relay, "
                    f"and would stop reading {config.url} until a consumer releases, while the "
                    f"database retains its log; move {self.folder.path} away for a new ring"
                )
            if self._registry is None:
                self._registry = Registry(self.folder.registry, self.tables.columns_returned)
            self.intake = Intake(ring, self._registry, self._term.guard)
        except BaseException:
            ring.close()
            raise
        return self.intake

    def _take(self, intake: Intake, batch: contract.Batch) -> None:
        if batch.data:
            self._recent.add(batch.data)
        self._term.guard()
        took = intake.take(batch)
        resume_state = batch.resume_state or self._term.copied(intake.complete)
        self._durability.resume_state = resume_state or self._durability.resume_state
        if self._link.is_relaying:
            self.tables.relayed(batch.data)
        else:
            took |= self._term.took(intake) | intake.announce_due()
        took |= self.tables.took(intake, batch)
        if took:
            self._wakeup.wake()
        elif self._wants_idle_window(intake):
            self._recent.added_s = time.monotonic()
            if intake.append_idle_window(time.time_ns() // 1000):
                self._wakeup.wake()
        self.status.batch_count += 1
        self.status.caught_up = not batch.data
        if self._link.has_begun():
            self.status.enter(FetcherState.STREAMING)
            self._write_status()

    def _wants_idle_window(self, intake: Intake) -> bool:
        """At intervals, and as soon as it covers all that a chunk has shown."""
        if intake.complete.scn < self._asked_scn <= intake.resolved:
            return True
        return time.monotonic() - self._recent.added_s >= self._pace.idle_window_s

    async def _take_waiting(self, intake: Intake, batch: contract.Batch) -> None:
        """In block mode: take the batch part by part, as room is released."""
        for part in intake.parts(batch):
            while True:
                self._released.clear()
                try:
                    self._take(intake, part)
                    break
                except RingFull as error:
                    self.status.enter(FetcherState.BLOCKED, error)
                    self._write_status()
                await self._released.wait()
                self.status.enter(FetcherState.STREAMING)

    def followed(self, follower: str, position: Position) -> dict[str, Any]:
        """A follower of this leader has everything up to ``position`` on disk.

        Returns the range of the ring.

        Raises:
            ServerUnavailable: there is no ring yet.
        """
        self._term.followed(follower, position)
        state = self._made_intake.ring.state
        return {"prev": state.prev.to_json(), "max": state.max.to_json()}

    def resume_document(self) -> dict[str, Any]:
        """What a follower would need to resume in our place, and as of which position.

        Raises:
            ServerUnavailable: there is no stream yet.
        """
        intake = self._made_intake
        state = self._durability.resume_text()
        if not state:
            state = (read_document(self.folder.resume_state) or b"").decode()
        term = {"epoch": self._term.epoch, "leader": self._term.leader}
        return {"at": intake.complete.to_json(), "state": state, **term}

    @property
    def _made_intake(self) -> Intake:
        if self.intake is None:
            raise ServerUnavailable(f"the ring of {self.config.name} is not made yet")
        return self.intake

    def release(self, position: Position) -> dict[str, Any]:
        """In block mode: the ring's reader has everything up to ``position``.

        Returns the range that is left.

        Raises:
            BadRequest: the ring is not in block mode, or has not come as far.
            ScnTooOld: it was released before, and is gone.
        """
        released = release(self.intake, self.config, self.folder, position)
        self._released.set()
        return released

    # -- durability --

    async def _sync_loop(self) -> None:
        refused = ""
        while True:
            await asyncio.sleep(self.config.sync_every)
            if self.intake is not None:
                if self.config.retention is not None:
                    keep_us = int(self.config.retention * 1e6)
                    self.intake.ring.expire(time.time_ns() // 1000 - keep_us)
                try:
                    await self.make_durable()
                    refused = ""
                except StoreError as error:  # not the ring, which has its room
                    if error.message != refused:
                        _log.warning("%s: not acknowledged: %s", self.config.name, error.message)
                    refused = error.message

    async def make_durable(self, *, acknowledges: bool = True) -> None:
        """Sync the ring if it is dirty, record the dumps' progress, acknowledge the source."""
        await self._durability.make(self.intake, acknowledges=acknowledges)

    # -- for the dumps --

    async def connected(self) -> tuple[contract.Source, Intake]:
        """The source, once it is streaming."""
        while True:
            await self._link.streaming.wait()
            if self._link.source is not None and self.intake is not None:
                return self._link.source, self.intake

    async def read_chunk(self, request: contract.ChunkRequest) -> tuple[Position, contract.Chunk]:
        """A chunk for a comparison, and the end of the last window that it shows.

        Raises:
            ServerUnavailable: the source is not connected now.
        """
        source, intake = self._link.source, self.intake
        if source is None or intake is None or not self._link.streaming.is_set():
            raise ServerUnavailable(f"the source of {self.config.name} is not connected now")
        low = intake.complete
        self.tables.touch(request.source)
        chunk = await source.read_chunk(request)
        self._asked_scn = max(self._asked_scn, chunk.snapshot.high)
        return low, chunk

    def recent(self) -> bytes:
        """What was streamed in the last moment, the oldest first."""
        return self._recent.frames()

    @property
    def skipped_operations(self) -> tuple[str, ...]:
        """The letters of the operations that the database's rules leave out."""
        return self.config.skipped_operations

    async def shaped(self, chunk: contract.Chunk) -> contract.Chunk:
        """A dump's chunk as it goes out: as it was read."""
        return chunk

    def published(self) -> None:
        """Wake the readers."""
        self._wakeup.wake()

    async def save_dumps(self) -> None:
        """Write the dumps' records to disk."""
        await self._durability.save_dumps()

    def dump_reader_moved(self) -> None:
        """Let the runner look at the dumps; the reader's position on disk may stay older."""
        self.dumps.poke()

    async def dumps_changed(self) -> None:
        """Write the dumps' records to disk and let the runner look at them."""
        self.dumps.poke()
        await self.save_dumps()

    def suspended(self) -> Mapping[str, TableSuspension] | None:
        """The tables that the source suspends now; None while it is not connected."""
        return self._link.suspended()

    async def start_dump(self, dump: Dump) -> None:
        """Add a dump to the queue."""
        self.book.add(dump)
        await self.dumps_changed()

    def origin(self) -> contract.RelayingSource | None:
        """The relay that runs this database's dumps instead of us; None if they run here."""
        return self._link.origin()

    # -- status --

    def known_sources(self) -> list[str]:
        """Names of the captured tables; empty before the source was reached once."""
        return self._registry.schemas.sources if self._registry is not None else []

    def status_document(self) -> dict[str, Any]:
        """The live status."""
        document = self.status.document(self.intake, self.dumps.counts())
        return {**document, "cluster": self._term.document(), "tables": self.tables.document()}

    def dump_document(self, dump: Dump) -> dict[str, Any]:
        """A dump as it is served, with what it waits for while there is no stream."""
        document, error = self.dumps.document(dump), self.status.error
        if error is not None and dump.state in ACTIVE and not self._link.streaming.is_set():
            document["progress"]["waits_for"] = error.message
        return document

    def _write_status(self) -> None:
        self._status_due.set()  # not here: a sync may block the file system

    async def _status_loop(self) -> None:
        while True:
            self._status_due.clear()
            document = self.status_document()
            writing = asyncio.ensure_future(asyncio.to_thread(self.status.write, document))
            try:
                await asyncio.shield(writing)
            except StoreError as error:
                _log.warning("%s: the status is not written: %s", self.config.name, error.message)
            finally:
                # There are never two that write, and ``_close`` writes last.
                await asyncio.wait([writing])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.status_s):
                    await self._status_due.wait()

    async def _ask_loop(self) -> None:
        """Query the source's status at intervals, and more often what it has committed."""
        next_status_s = 0.0
        while True:
            source = self._link.source
            if source is None:
                await asyncio.sleep(self._pace.status_s)
                continue
            try:
                async with asyncio.timeout(self._pace.source_status_s):
                    if (now_s := time.monotonic()) >= next_status_s:
                        next_status_s = now_s + self._pace.source_status_s
                        await self.status.ask(source)
                    else:
                        await self.status.ask_committed(source)
            except (DatabusError, OSError, TimeoutError):
                pass  # The stream has the same error and reports it.
            except Exception:
                _log.exception("%s: the source's status", self.config.name)
            await asyncio.sleep(min(self._pace.committed_s, self._pace.source_status_s))


def _of(handover: Handover, wakeup: WakeupSender) -> Fetcher:
    relay = handover.config.relay or RelayConfig()
    term = handover.term
    leadership = Leadership(*term, LeaseWord(handover.lease_fd)) if term else None
    return Fetcher(handover.database_config, relay.data_dir, wakeup=wakeup, leadership=leadership)


def main(arguments: list[str]) -> int:
    """The fetcher's process; the relay's supervisor starts it."""
    log_to_stderr()
    # How long a thread that reads a chunk may delay the stream while it runs Python.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_roles(take_over(arguments), _of))
    except DatabusError as error:
        _log.error("%s: %s", error.message, error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
