"""The log writer: an ordinary consumer whose application is the hot log.

It takes whole windows undecoded from the client library, appends them with its checkpoint in
one commit, seals segments, and has the sources seeded.  It records what it can no longer get
as a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from databus.bootstrap.log import log_gaps, seeding, segments
from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.hot_log import FOLDER, HotLog
from databus.bootstrap.log.log_recording import record_notes
from databus.bootstrap.log.relay_api import RelayApi, credentials_of
from databus.bootstrap.log.seeding import Seeder
from databus.bootstrap.log.table_repairs import TableRepairs, name_of
from databus.bootstrap.processes.writer_leases import writer_leases
from databus.bootstrap.reading.stored_database import OpenLogs, StoredDatabase
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.verify.table_copy import HttpPeer, LocalCopy
from databus.bootstrap.verify.table_verifier import Report, Verifier
from databus.client import DatabusClient, RawWindows
from databus.common.checkpoint import Position, decode_position
from databus.common.config import BootstrapConfig
from databus.common.errors import (
    DatabusError,
    FormatError,
    ScnTooOld,
    ServerUnavailable,
    StoreError,
    UnsupportedChange,
)
from databus.common.frame.frame_format import Op, scan
from databus.common.processes.completion import completed
from databus.common.schema.source_schema import SourceSchema

_LOG = logging.getLogger("databus.bootstrap.processes.log_writer")

SEED_POLL_S = 0.5
DUMP_POLL_S = 0.05
SEEDED_POLL_S = 5.0
NOTE_EVERY_S = 2.0
RECORD_EVERY_S = 5.0
RETRY_S = 1.0
UNSEALED_SEGMENTS = 2
STANDBY = "standby"
"""The state of a writer whose database another server writes."""


def _now_us() -> int:
    return time.time_ns() // 1000


class LogWriter:
    """Writes one database's log up to date.

    Invariants:
        I1. Every frame that the relays had after the log's checkpoint is appended once, in
            order, or lies in a recorded gap.
        I2. After a gap no source counts as seeded before it was compared with the database.
        I3. One thread appends and one seals. Anything else is done to log and store while neither
            runs, and the writer releases them after both have ended.
        I4. The log has at most ``UNSEALED_SEGMENTS`` segments of whole windows that are not sealed,
            and a piece of the stream.

    Owner: one process, which holds the store's writer lease while ``run`` runs.
    Durability: the log's; no other state exists only in memory.
    """

    def __init__(
        self,
        config: BootstrapConfig,
        database: str,
        logs: OpenLogs,
        store: Store | None = None,
        now_us: Callable[[], int] = _now_us,
        number: int = 1,
    ) -> None:
        """``number`` is that of this process among the log writers."""
        self.config = config
        self._now_us = now_us
        self.database = database
        self.folder = Path(config.data_dir) / database
        self.store = Stores(config).store(database) if store is None else store
        self._logs = logs
        self._appending = asyncio.Lock()
        self._sealing = asyncio.Lock()
        self._is_full = asyncio.Event()
        self._is_sealed = asyncio.Event()
        self._comparing = asyncio.Lock()
        self._table_state = asyncio.Event()
        self._known_schemas = 0
        self._number = number
        self._noted: tuple[str, str] = ("", "")
        self._noted_s = 0.0
        self._log: HotLog | None = None

    @property
    def log(self) -> HotLog:
        """The log; open once ``run`` has begun."""
        if self._log is None:
            self._log = self._logs.to_write(self.folder / FOLDER)
        return self._log

    async def run(self, *, patient: bool = False) -> None:
        """Write until cancelled; a failure is shown in the status and retried.

        With ``patient`` the first steps are retried too.

        Raises:
            StoreError: the store cannot be opened.
            StoreBusy: another process writes this log.
        """
        with contextlib.ExitStack() as held:
            while True:
                try:
                    await self.alone(self._begin, held)
                    break
                except Exception as error:
                    if not patient:
                        raise
                    self.report(error)
                await asyncio.sleep(RETRY_S)
            await self.write()

    async def write(self) -> None:
        """Write until cancelled; a failure is shown in the status and retried.

        The caller holds the leases.
        """
        async with RelayApi(self.config.relays, credentials_of(self.config)) as relay:
            while True:
                try:
                    await self._follow(relay)
                except Exception as error:
                    self._note("failing", self._failure(error))
                await asyncio.sleep(RETRY_S)

    async def copy(self) -> None:
        """Read the relays into the log until cancelled, while another server seals.

        The caller holds the log's lease.
        """
        while True:
            try:
                await self._read(STANDBY)
            except Exception as error:
                self._note("failing", self._failure(error))
            await asyncio.sleep(RETRY_S)

    def _begin(self, held: contextlib.ExitStack) -> None:
        """Take the writer's leases and give them to ``held``; all of them or none."""
        with contextlib.ExitStack() as taken:
            taken.enter_context(writer_leases(self.folder, self.store))
            held.push(taken.pop_all())

    def report(self, error: Exception) -> None:
        """Show a failure in the status.  The log is not ours: nothing may be written to it."""
        self._logs.words[self.folder / FOLDER] = self._word("failing", self._failure(error))

    def report_nothing(self) -> None:
        """Show what the log has in the status again: what its own writer stored there."""
        self._logs.words.pop(self.folder / FOLDER, None)

    def _failure(self, error: Exception) -> str:
        """Log a failure; returns its text for the status."""
        if isinstance(error, DatabusError):
            _LOG.warning("log of %s: %s", self.database, error.message)
            return f"{error.code}: {error.message}"
        _LOG.error("log of %s: %s", self.database, error, exc_info=error)
        return f"{DatabusError.code}: {type(error).__name__}: {error}"

    async def _follow(self, relay: RelayApi) -> None:
        """Bind, tidy up, and read until the stream fails or a gap opens."""
        await self._bind(relay)
        await self.alone(segments.finish, self.log, self.store, self._now_us())
        self._note("running", "")
        seeder = Seeder(self.log, relay, self.database, self.config.sources, self._repair)
        seeds = asyncio.create_task(self._keep_seeding(seeder))
        repairs = TableRepairs(
            self.log, relay, self.database, self.config.sources, partial(self._compare, relay)
        )
        helpers = [
            asyncio.create_task(self._keep_sealing()),
            asyncio.create_task(self._keep_repairing(repairs)),
            seeds,
        ]
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reading, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, *helpers):
                if task.done():
                    task.result()
        except ScnTooOld as error:
            # Its pending notes may be older than the gap.
            seeds.cancel()
            await asyncio.wait({seeds})
            await seeder.give_up()
            await self._record_gap(relay, error)
        finally:
            for task in (reading, *helpers):
                task.cancel()
            await asyncio.gather(reading, *helpers, return_exceptions=True)

    async def _bind(self, relay: RelayApi) -> None:
        document = await relay.sources(self.database)
        start = decode_position(document["prev"])
        is_new = self.log.is_new()
        if is_new and (stop := self.store.read().stop or self.store.dropped()) is not None:
            raise StoreError(
                f"{self.store.url} has runs up to {stop}, but the log that they came from is not "
                f"in {self.folder / FOLDER}; run `databus restore`, or start again with an empty "
                "store"
            )
        self.log.bind(self.database, str(document["clock"]), start)

    async def _read(self, state: str = "running") -> None:
        client = DatabusClient(
            database=self.database,
            relays=self.config.relays,
            sources=() if "*" in self.config.sources else self.config.sources,
            client_name="bootstrap",
            **self.config.credentials.model_dump(),
        )
        self._known_schemas = 0
        checkpoint = self.log.state().checkpoint
        async with contextlib.aclosing(client.raw_windows(checkpoint)) as parts:
            async for part in parts:
                await self._in_thread(self._appending, self._append, self._learnt(client), part)
                await self._room()
                if part.data and (scan(part.data, verify=False).op == Op.TABLE_STATE).any():
                    self._table_state.set()
                self._note(state, "")

    def _learnt(self, client: DatabusClient) -> tuple[SourceSchema, ...]:
        """A copy of the client's schemas if they have changed since the last call: the client
        learns more while a thread stores them."""
        if client.schemas.revision == self._known_schemas:
            return ()
        self._known_schemas = client.schemas.revision
        return tuple(client.schemas)

    def _append(self, schemas: tuple[SourceSchema, ...], part: RawWindows) -> None:
        if schemas:
            self.log.add_schemas(schemas)
        if part.data:
            # The client has checked every frame.
            self.log.append(part.data, self._now_us(), verify=False)
        else:
            self.log.advance(part.position)

    def _is_due(self, segment_count: int = 1) -> bool:
        """Whether frames for so many segments wait, and a whole window is among them."""
        state = self.log.state()
        is_large = state.frame_bytes >= segment_count * self.config.segment_bytes
        return is_large and state.start < state.window

    async def _room(self) -> None:
        """Have a segment sealed if it is due; wait while sealing is too far behind."""
        if self._is_due():
            self._is_full.set()
        while self._is_due(UNSEALED_SEGMENTS):
            self._is_sealed.clear()
            self._is_full.set()
            await self._is_sealed.wait()

    async def _keep_sealing(self) -> None:
        """Seal what has become large or old enough, whether new frames arrive or not."""
        recorded, due_s = -1, 0.0
        while True:
            left_s = await self.seal_what_is_old()
            if self.log.note_revision != recorded and time.monotonic() >= due_s:
                recorded, due_s = self.log.note_revision, time.monotonic() + RECORD_EVERY_S
                try:
                    await self._in_thread(self._sealing, record_notes, self.log, self.store)
                except DatabusError as error:
                    recorded = -1
                    _LOG.warning("the record of %s waits: %s", self.database, error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(left_s, 0.1), 1.0)):
                    await self._is_full.wait()

    async def seal_what_is_old(self) -> float:
        """Seal if the frames make a segment, or if the oldest one came ``segment_every`` ago.

        Returns the seconds left before that.
        """
        state = self.log.state()
        age_s = (self._now_us() - state.since_us) / 1e6 if state.since_us else 0.0
        left_s = self.config.segment_every - age_s
        self._is_full.clear()
        if (state.since_us and left_s <= 0) or self._is_due():
            await self._in_thread(
                self._sealing, segments.seal, self.log, self.store, self._now_us()
            )
            self._is_sealed.set()
        return left_s

    async def _keep_seeding(self, seeder: Seeder) -> None:
        while True:
            began_s = time.monotonic()
            whole = await seeding.try_step(seeder)
            if whole:
                log_gaps.close_gaps(self.log, self._now_us())
            pause_s = DUMP_POLL_S if seeder.is_dumping() else SEED_POLL_S
            # With thousands of tables a step takes time: half of it is left to reading.
            pause_s = max(pause_s, time.monotonic() - began_s)
            await asyncio.sleep(SEEDED_POLL_S if whole else pause_s)

    async def _keep_repairing(self, repairs: TableRepairs) -> None:
        """Repair tables that the relay suspends; a frame about one triggers this at once."""
        while True:
            self._table_state.clear()
            try:
                is_idle = await repairs.step()
            except DatabusError as error:
                _LOG.warning("suspended tables of %s: %s", self.database, error.message)
                is_idle = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEEDED_POLL_S if is_idle else SEED_POLL_S):
                    await self._table_state.wait()

    async def _record_gap(self, relay: RelayApi, cause: ScnTooOld) -> None:
        document = await relay.sources(self.database)
        oldest = decode_position(document["prev"])
        last = self.log.state().last
        if oldest <= last:
            return
        _LOG.error(
            "log of %s: %s; the changes after %s up to %s are lost",
            self.database,
            cause.message,
            last,
            oldest,
        )
        await self.alone(self._continue_after, oldest)

    def _continue_after(self, oldest: Position) -> None:
        """Retain what can be repaired; otherwise restart with an empty log."""
        if log_gaps.can_be_bridged(self.log):
            log_gaps.open_gap(self.log, self.log.state().window, oldest, self._now_us())
        else:
            log_gaps.restart_behind(self.log, self.log.state().last, oldest, self._now_us())
        segments.finish(self.log, self.store, self._now_us())

    def _restart_empty(self) -> None:
        last = self.log.state().last
        log_gaps.restart_behind(self.log, last, last, self._now_us())
        segments.finish(self.log, self.store, self._now_us())

    async def alone(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do work on log and store in a thread while none appends or seals."""
        async with self._sealing:
            await self._in_thread(self._appending, work, *arguments)
        self._is_sealed.set()

    @staticmethod
    async def _in_thread(lock: asyncio.Lock, work: Callable[..., object], *arguments: Any) -> None:
        """Do work in a thread, one at a time for each lock.

        Cancelling the caller does not end a thread.  So a cancelled caller waits for its end, and
        holds the lock and the lease until then.
        """
        async with lock:
            loop = asyncio.get_running_loop()
            await completed(loop.run_in_executor(None, partial(work, *arguments)))

    async def _compare(self, relay: RelayApi, source: str) -> bool:
        """Make a suspended table's copy equal to the database; see ``resync.Compare``."""
        copy = LocalCopy(StoredDatabase(self.database, self.folder, self._logs, self.store))
        async with (
            self._comparing,
            HttpPeer(relay.current, self.database, credentials_of(self.config)) as peer,
        ):
            report = await Verifier(peer, copy, by=name_of(self.log)).verify(source, repair=True)
        self._tell_repaired(report)
        return report.is_equal and report.is_followed

    def _tell_repaired(self, report: Report) -> None:
        _LOG.info(
            "%s of %s: %d of %d rows were not as in the database, and are now",
            report.source, self.database, len(report.differences), report.rows,
        )  # fmt: skip

    async def _repair(self, source: str) -> Position | None:
        """Make a source's copy equal to the database again; see ``seeding.Repair``."""
        verifier_of = partial(
            Verifier,
            by=name_of(self.log),
            copy=LocalCopy(StoredDatabase(self.database, self.folder, self._logs, self.store)),
        )
        try:
            async with self._comparing:
                report = await _first_answer(self.config, self.database, verifier_of, source)
        except UnsupportedChange as error:
            _LOG.warning("%s; %s is dumped again", error.message, self.database)
            await self.alone(self._restart_empty)
            return None
        if not report.is_equal or not report.is_followed:
            return None
        self._tell_repaired(report)
        return report.at

    def _note(self, state: str, error: str) -> None:
        """Store our state for the status, at intervals or when it changes."""
        now_s = time.monotonic()
        if (state, error) == self._noted and now_s - self._noted_s < NOTE_EVERY_S:
            return
        self._noted, self._noted_s = (state, error), now_s
        document = self._word(state, error)
        words = self._logs.words
        try:
            self.log.put_note("writer", document)
            words.pop(self.folder / FOLDER, None)
        except (StoreError, FormatError, OSError) as refused:
            # A full disk takes no note either; the server in this process still reports it.
            words[self.folder / FOLDER] = {"error": str(refused), **document, "state": "failing"}

    def _word(self, state: str, error: str) -> dict[str, Any]:
        failure = {"error": error} if error else {}
        process = {"number": self._number, "pid": os.getpid()}
        return {"state": state, "at_us": self._now_us(), **process, **failure}


async def _first_answer(
    config: BootstrapConfig,
    database: str,
    verifier_of: Callable[[HttpPeer], Verifier],
    source: str,
) -> Report:
    """The result of the first relay that answers."""
    errors = []
    for url in config.relays:
        async with HttpPeer(url, database, credentials_of(config)) as relay:
            try:
                return await verifier_of(relay).verify(source, repair=True)
            except ServerUnavailable as error:
                errors.append(error.message)
    raise ServerUnavailable("; ".join(errors) or "no relay is configured")
