"""Tables that are not followed: notices them, publishes their states, starts resynchronisation.

A source suspends a table (sources/suspended_tables.py).  From then on the table has a record here
until its content is whole again, even if the suspension ends earlier: a table that the stream
reads again is not yet equal to its copies.  docs/decisions/0040 has the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from databus.common.config import DatabaseConfig
from databus.common.errors import BadRequest, DatabusError, SourceUnavailable
from databus.common.filters.stream_filter import matches
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op, trusted_frame
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import CaptureState, TableState, decode_table_state
from databus.relay.capture.intake import Intake
from databus.relay.dumps.dump_records import FINISHED, Dump, DumpBook, DumpState, new_dump
from databus.relay.dumps.resync_pace import ResyncPace
from databus.relay.dumps.table_records import TableBook, TableRecord, shown
from databus.relay.ring.returning_columns import returned_words
from databus.relay.sources.contract import Batch, ChunkRequest, DropConfirmingSource, Source
from databus.relay.sources.suspended_tables import TableSuspension

RELAY = "relay"
CLAIM_S = 300.0
"""How long a claim holds after the last request of the claimant."""
PRESENT_S = 30.0
"""How long a bootstrap server counts as present after it has reported itself."""
_BEHIND_WITHIN_S = 60.0

_log = logging.getLogger(__name__)


class ResyncHost(Protocol):
    """The part of the fetcher that ``Resync`` uses."""

    intake: Intake | None

    def published(self) -> None:
        """Something was appended: wake the readers."""

    async def make_durable(self) -> None:
        """Sync the ring and the records."""

    book: DumpBook

    async def start_dump(self, dump: Dump) -> None:
        """Add a dump to the queue."""

    def suspended(self) -> Mapping[str, TableSuspension] | None:
        """The tables that the source suspends now; None while it is not connected."""

    async def connected(self) -> tuple[Source, Intake]:
        """The source, once it is connected."""


@dataclass(slots=True)
class _Present:
    """A bootstrap server that has reported itself, and the tables that it stores."""

    patterns: tuple[str, ...]
    seen_s: float = field(default_factory=time.monotonic)


class Resync:
    """Tracks which tables of a database are not followed, and resynchronises them.

    Invariants:
        I1. A table that the source suspends has a record before the next window of the source is
            in the ring.
        I2. A record ends only when the whole table was read after its suspension, was published,
            and nothing has suspended the table meanwhile.
        I3. One process at a time resynchronises a table: the relay, or the holder of a claim.
        I4. A frame about a table is in a window of its own, after the windows that the
            change of state is about.  After a crash it may come twice.
        I5. A table emptied by a TRUNCATE event is suspended in the source at that moment, or the
            stream reads it from an earlier position on; its dump follows.

    Owner: the fetcher's loop.
    Durability: the records' file follows the ring; see ``TableBook``.
    """

    def __init__(
        self, config: DatabaseConfig, path: Path, host: ResyncHost, pace: ResyncPace
    ) -> None:
        self.book = TableBook(path)
        self._config = config
        self._host = host
        self._pace = pace
        self._resuming: dict[str, str] = {}
        self._present: dict[str, _Present] = {}
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()
        self._written = self.book.content()

    @property
    def _is_automatic(self) -> bool:
        return self._config.resync == "auto"

    # -- beside the stream --

    def took(self, intake: Intake, batch: Batch) -> bool:
        """A batch is in the ring; whether windows of ours follow it."""
        for schema in batch.schemas:
            record = self.book.get(schema.source)
            if record is not None and record.again_us:
                record.again_us = 0  # The cause of the failure may be gone.
                self._changed.set()
        self.notice()
        if self.book:
            self._end_emptied(batch.data)
        if not intake.is_closed:
            return False
        self._closed.set()
        return self.publish(intake)

    def _end_emptied(self, data: bytes) -> None:
        """The source has no rows of a table any more, and reads it: no repair is needed."""
        columns = frame_format.scan(data, verify=False)
        emptied = set(columns.source_id[columns.op == Op.TRUNCATE].tolist())
        for record in self.book:
            is_read = record.source not in (self._host.suspended() or {})
            is_emptied = is_read and frame_format.source_id(record.source) in emptied
            if is_emptied and record.is_restored_by_truncate:
                self._followed(record)

    def relayed(self, data: bytes) -> None:
        """Frames of a parent relay: its states are those of our tables."""
        columns = frame_format.scan(data, verify=False)
        for index in np.flatnonzero(columns.op == Op.TABLE_STATE).tolist():
            view = trusted_frame(memoryview(data), int(columns.offset[index]))
            state = decode_table_state(bytes(view.after or b""))
            if state.state == CaptureState.FOLLOWED:
                self.book.remove(state.source)
                continue
            self._follow(state)

    def parents(self, states: Sequence[TableState], *, adds: bool = False) -> None:
        """Take over all tables that a parent does not follow; ``adds``: beside those known here."""
        for record in () if adds else self.book:
            self.book.remove(record.source)
        for state in states:
            self._follow(state)

    def _follow(self, state: TableState) -> None:
        record = TableRecord(state.source, state.state, state.since_scn, state.reason)
        record.published, record.cure = str(state.state), state.cure
        self.book.add(record)

    def notice(self) -> None:
        """Check which tables the source suspends now."""
        suspensions = self._host.suspended()
        if suspensions is None:
            return
        self._resuming = {
            source: _identity(suspensions[source])
            for source, identity in self._resuming.items()
            if source in suspensions and identity in ("", _identity(suspensions[source]))
        }
        for known in self.book:
            suspension = suspensions.get(known.source)
            self._waits_for(known, suspension.waits_for if suspension is not None else "")
            self._gone(known, suspension is not None and suspension.is_gone)
        for source, suspension in suspensions.items():
            record = self.book.get(source)
            if record is None:
                record = TableRecord(
                    source, CaptureState.SUSPENDED, suspension.since_scn, suspension.why
                )
                record.noticed_us, record.rows_remain = _now_us(), suspension.rows_remain
                record.waits_for, record.is_gone = suspension.waits_for, suspension.is_gone
                self.book.add(record)
                self._changed.set()
                continue
            record.rows_remain &= suspension.rows_remain
            if record.state == CaptureState.SUSPENDED:
                if record.error or record.reason == suspension.why:
                    continue
                record.reason = suspension.why
            elif source in self._resuming:
                continue
            else:
                self._suspend_again(record, suspension.since_scn, suspension.why)
            self._changed.set()

    def _suspend_again(self, record: TableRecord, since_scn: int, why: str) -> None:
        record.reason = why
        if record.state == CaptureState.FOLLOWED:
            record.since_scn, record.error = since_scn, ""
            record.noticed_us = _now_us()
            record.suspend("", 0)
        else:
            self._failed(record, "it was suspended again meanwhile")

    def columns_returned(self, source: str, names: Sequence[str]) -> None:
        """The stream comes to a definition that has columns again: see ``returning_columns.py``.

        The table's record is on disk when this returns: the definition precedes the next sync.
        """
        intake = self._host.intake
        if self._config.is_relayed or intake is None:
            return  # A parent publishes the state.
        why, record = returned_words(names), self.book.get(source)
        if record is None:
            record = self._suspended_here(source, why)
            record.rows_remain = True
        elif record.state != CaptureState.SUSPENDED:
            self._suspend_again(record, intake.resolved, why)
        record.returned = sorted({*record.returned, *names})
        self.book.write_before_sync(self._written, record)
        self._changed.set()

    def _suspended_here(self, source: str, why: str) -> TableRecord:
        """Suspend a table that the source does not suspend."""
        intake = self._host.intake
        assert intake is not None
        _log.warning("database %s: %s is suspended: %s", self._config.name, source, why)
        record = TableRecord(source, CaptureState.SUSPENDED, intake.resolved, why)
        record.noticed_us = _now_us()
        self.book.add(record)
        return record

    def _waits_for(self, record: TableRecord, what: str) -> None:
        """The source has found whether the table can be resynchronised."""
        if record.waits_for == what:
            return
        if what and record.state == CaptureState.SUSPENDED:
            record.is_confirmed = False
        elif not what:
            record.again_us = 0
        record.waits_for = what
        self._changed.set()

    def _gone(self, record: TableRecord, is_gone: bool) -> None:
        """The source has found whether there is a table of this name."""
        if record.is_gone != is_gone:
            record.is_gone, record.again_us = is_gone, 0
            self._changed.set()

    def publish(self, intake: Intake) -> bool:
        """Append the frames that are due; no window is open."""
        due = [
            record
            for record in self.book
            if record.published != record.state
            and (record.state != CaptureState.SUSPENDED or intake.resolved >= record.since_scn)
        ]
        for record in due:
            self._append(intake, record)
            if record.state == CaptureState.FOLLOWED:
                self.book.remove(record.source)
        return bool(due)

    def _append(
        self, intake: Intake, record: TableRecord, emptied: SourceSchema | None = None
    ) -> None:
        after, commit_us = intake.own_after, intake.ring.state.max_commit_us or _now_us()
        window = WindowBuilder(after.scn, commit_us, after.seq + 1)
        window.control(
            Op.TABLE_STATE,
            source=frame_format.source_id(record.source),
            after=self._shown(record).encode(),
        )
        if emptied is not None:
            intake.registry.add((emptied,))
            window.event(Op.TRUNCATE, emptied.source_id, emptied.fingerprint, b"")
        intake.append_dump_window(window.end(dump=True))
        record.published = str(record.state)
        self._host.published()

    def _shown(self, record: TableRecord) -> TableState:
        return shown(record, self._config.name, is_automatic=self._is_automatic)

    async def _behind(self, record: TableRecord) -> Intake:
        """The intake without an open window, once it is behind a table's suspension: the source can
        name that before it hands out the windows that come before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEHIND_WITHIN_S):
                while True:
                    intake = self._host.intake
                    is_closed = intake is not None and intake.is_closed
                    if intake is not None and is_closed and intake.resolved >= record.since_scn:
                        return intake
                    self._closed.clear()
                    await self._closed.wait()
        raise SourceUnavailable(
            f"{record.source} cannot be resynchronised yet: for {_BEHIND_WITHIN_S:g} s the stream "
            f"has not come to scn {record.since_scn}, where the table was suspended"
        )

    # -- by dumps --

    async def before_dump(self, dump: Dump, reader: Source, schema: SourceSchema) -> None:
        """All of a table is about to be dumped: empty its readers' copies first if it is not
        followed, because nothing else deletes the rows that are gone.

        Raises:
            UnsupportedChange: its first rows cannot be read; nothing was emptied.
        """
        self.notice()
        record = self.book.get(schema.source)
        why = self._host.intake.changed_key(schema) if self._host.intake is not None else ""
        if why:
            record = record or self._suspended_here(schema.source, why)
            record.rows_remain = False
        if record is None:
            return
        # If the table cannot be read at all, the old rows in the copies are better than none.
        await reader.read_chunk(ChunkRequest(schema.source, dump.chunk_rows, is_probe=True))
        intake = await self._behind(record)
        record.state, record.by, record.dump = CaptureState.RESYNCHRONISING, RELAY, dump.id
        record.until_us = 0
        self._take_up(schema.source)
        if why:
            intake.come_to(schema, intake.definitions.of(schema.source))
        keeps_deleted = {"d", "t"} & set(self._config.skipped_operations)
        self._append(intake, record, None if keeps_deleted or record.rows_remain else schema)
        # A dump's plan is written to disk only after this.
        await self._host.make_durable()

    def _take_up(self, source: str) -> None:
        """Note which suspension ends, for the table is about to be read.

        The next suspension is a new one, also if the source has ended this one already, as for a
        table whose rows remain, or if the end of this one was not noticed yet.
        """
        stops = self._host.suspended()
        if stops is None:
            self._resuming[source] = ""  # whichever it is
        elif source in stops:
            self._resuming[source] = _identity(stops[source])

    def dump_ended(self, dump: Dump) -> None:
        """A dump is completed, has failed or was cancelled."""
        self.notice()
        read = {table.source for table in dump.tables or () if table.done}
        begun = {table.source for table in dump.tables or () if table.rows}
        for record in self.book:
            if record.dump != dump.id:
                continue
            if dump.state != DumpState.COMPLETED and record.source not in read:
                self._failed(record, dump.failure(record.source), read_rows=record.source in begun)
            elif record.state != CaptureState.RESYNCHRONISING or record.source in self._resuming:
                self._failed(record, "it was suspended again meanwhile")
            else:
                self._followed(record)
        self._publish_now()

    def _followed(self, record: TableRecord) -> None:
        _log.info("database %s: %s is followed again", self._config.name, record.source)
        record.state, record.returned = CaptureState.FOLLOWED, []

    def _failed(self, record: TableRecord, error: str, *, read_rows: bool = True) -> None:
        record.tries += 1
        pause_s = self._pace.pause_s(record.tries, read_rows=read_rows)
        _log.warning(
            "database %s: %s is not resynchronised: %s; retried in %g s",
            self._config.name, record.source, error, pause_s,
        )  # fmt: skip
        record.suspend(error, _now_us() + int(pause_s * 1e6))
        if record.waits_for:
            record.is_confirmed = False
        self._changed.set()

    def _publish_now(self) -> None:
        self._changed.set()
        intake = self._host.intake
        if intake is not None and intake.is_closed:
            self.publish(intake)

    async def run(self) -> None:
        """Have suspended tables dumped when they are due, forever."""
        while True:
            self._changed.clear()
            wait_s = await self._step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _step(self) -> float | None:
        """Do what is due; returns the seconds until something else is."""
        waits = []
        for record in self.book:
            self._check(record)
            due_us = self._due_us(record)
            if due_us is None:
                continue
            if (left_us := due_us - _now_us()) > 0:
                waits.append(left_us / 1e6)
            elif record.state == CaptureState.RESYNCHRONISING:
                self._failed(
                    record, f"{record.by} has claimed it, and sent nothing for {CLAIM_S:g} s"
                )
                self._publish_now()
            else:
                await self._start(record)
        return min(waits) + 0.001 if waits else None

    def _check(self, record: TableRecord) -> None:
        """Check its dump, which may have ended unnoticed."""
        if not record.dump:
            return
        dump = next((one for one in self._host.book if one.id == record.dump), None)
        if dump is None:
            self._failed(record, f"dump {record.dump} is gone")
        elif dump.state in FINISHED:
            self.dump_ended(dump)

    def _due_us(self, record: TableRecord) -> int | None:
        """When it is due; None: when an event happens."""
        if self._config.is_relayed:
            return None
        if record.state == CaptureState.RESYNCHRONISING:
            return record.until_us or None
        if record.state != CaptureState.SUSPENDED or record.dump:
            return None
        if not self._may_start(record):
            return None
        grace_s = self._pace.alone_s
        if not (record.is_declined or record.is_gone) and self._is_accompanied(record.source):
            grace_s = self._pace.accompanied_s
        return max(record.again_us, record.noticed_us + int(grace_s * 1e6))

    def _may_start(self, record: TableRecord) -> bool:
        """Whether it may be resynchronised without an operator's request."""
        return record.is_confirmed or (self._is_automatic and not record.waits_for)

    def _is_accompanied(self, source: str) -> bool:
        now_s = time.monotonic()
        return any(
            now_s < present.seen_s + PRESENT_S
            and (not present.patterns or matches(source, present.patterns))
            for present in self._present.values()
        )

    async def _start(self, record: TableRecord) -> None:
        if record.is_gone:
            return await self._empty(record)
        dump = new_dump({"sources": [_exactly(record.source)]})
        record.by, record.dump = RELAY, dump.id
        _log.info(
            "database %s: dump %s resynchronises %s", self._config.name, dump.id, record.source
        )
        await self._host.start_dump(dump)

    async def _empty(self, record: TableRecord) -> None:
        """Its table is gone: its readers' copies are emptied, and nothing else is done."""
        try:
            intake = await self._behind(record)
        except SourceUnavailable as error:
            return self._failed(record, error.message)
        record.state, record.by = CaptureState.FOLLOWED, RELAY
        self._take_up(record.source)
        keeps_deleted = {"d", "t"} & set(self._config.skipped_operations)
        schema = intake.registry.schemas.latest(record.source)
        self._append(intake, record, None if keeps_deleted else schema)
        await self._host.make_durable()
        try:
            source, _ = await self._host.connected()
            if isinstance(source, DropConfirmingSource):
                await source.confirm_drop(record.source)
        except DatabusError as error:
            self._resuming.pop(record.source, None)
            self._failed(record, error.message)
            self._publish_now()
            return
        self.book.remove(record.source)
        _log.info("database %s: %s is gone and was emptied", self._config.name, record.source)

    # -- by a bootstrap server --

    def present(self, by: str, patterns: Sequence[str]) -> None:
        """A bootstrap server reports that it runs and repairs these tables."""
        self._present[by] = _Present(() if "*" in patterns else tuple(patterns))
        self._changed.set()

    def confirm(self, source: str) -> None:
        """An operator requests that a table is resynchronised now."""
        record = self._record(source)
        record.is_confirmed, record.again_us = True, 0
        if not self._is_accompanied(source):
            record.noticed_us = 0
        self._publish_now()

    def claim(self, source: str, by: str, *, is_operator: bool = False) -> bool:
        """Whether ``by`` may compare and repair a table; no other process does so meanwhile."""
        self.notice()
        record = self.book.get(source)
        if record is None:
            return True
        if record.by and record.by != by:
            return False
        if not (self._may_start(record) or is_operator):
            return False
        if record.is_gone or (record.is_declined and not is_operator):
            return False
        record.state, record.by = CaptureState.RESYNCHRONISING, by
        record.until_us = _now_us() + int(CLAIM_S * 1e6)
        self._take_up(source)
        self._publish_now()
        return True

    def touch(self, source: str) -> None:
        """The holder of a table's claim reads it."""
        record = self.book.get(source)
        if record is not None and record.until_us:
            record.until_us = _now_us() + int(CLAIM_S * 1e6)

    def done(self, source: str, by: str) -> bool:
        """The table was compared and repaired; whether it counts as followed now."""
        self.notice()
        record = self.book.get(source)
        if record is None:
            return True
        if record.state != CaptureState.RESYNCHRONISING or record.by != by:
            return False
        if source in self._resuming:
            return False  # The stream does not read it: no dump has read it from its beginning.
        self._followed(record)
        self._publish_now()
        return True

    def give_up(self, source: str, by: str, reason: str, *, for_good: bool) -> None:
        """The holder of a table's claim could not repair it."""
        record = self.book.get(source)
        if record is None or record.by != by:
            return
        record.is_declined |= for_good
        self._failed(record, reason)
        if for_good:
            record.again_us = 0
        self._publish_now()

    def _is_free(self, record: TableRecord) -> bool:
        """Whether a bootstrap server may claim it now."""
        return (
            record.state == CaptureState.SUSPENDED
            and not record.by
            and not (record.is_declined or record.is_gone)
            and self._may_start(record)
            and record.again_us <= _now_us()
        )

    def _record(self, source: str) -> TableRecord:
        record = self.book.get(source)
        if record is None:
            raise BadRequest(f"{source} of {self._config.name} is followed: nothing is to be done")
        return record

    # -- documents --

    def document(self) -> list[dict[str, Any]]:
        """For the status: the tables that are not followed."""
        return [
            {
                **self._shown(record).to_json(),
                "by": record.by,
                "dump": record.dump,
                "tries": record.tries,
                "again_us": record.again_us,
                "is_free": self._is_free(record),
            }
            for record in self.book
            if record.state != CaptureState.FOLLOWED
        ]

    def unwritten(self) -> bytes | None:
        """The content of the records' file, if it differs from what is there."""
        content = self.book.content()
        return content if content != self._written else None

    def written(self, content: bytes) -> None:
        """``content`` is on disk."""
        self._written = content


def _exactly(source: str) -> str:
    """The glob that matches this name and no other."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in source)


def _identity(suspension: TableSuspension) -> str:
    return f"{suspension.since_scn} {suspension.why}"


def _now_us() -> int:
    return time.time_ns() // 1000
