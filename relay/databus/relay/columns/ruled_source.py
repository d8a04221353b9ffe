"""A source with the rules of its database and the ring's limit applied: what the fetcher reads.

``create_source`` puts this around a source whose ``[[database]]`` has rules for columns or
skipped operations, the fetcher around every other one.  No code behind it sees the database's own
keys: if a key column is hashed, the keys at which a dump resumes are sealed.

A table that the rules do not fit forbids capture at the first start.  A table that comes later is
suspended by itself (``rule_suspensions.py``), like tables that cannot be read
(``suspended_tables.py``) and tables with a row that the ring cannot hold (``large_rows.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, cast

from databus.common.config import DatabaseConfig
from databus.common.errors import BadRequest, DumpFailed, UnsupportedChange
from databus.common.frame.frame_format import Op
from databus.common.schema.source_schema import SourceSchema
from databus.relay.columns.column_rewriting import Rewriter
from databus.relay.columns.column_rules import Action, ColumnRules, effective_columns
from databus.relay.columns.key_encryption import KeyEncryption
from databus.relay.columns.large_rows import LargeRows, RowLimit, decode_large
from databus.relay.columns.rule_suspensions import (
    RuledResumeState,
    Sifted,
    UnfitTables,
    decode_ruled,
)
from databus.relay.sources.contract import (
    Batch,
    Chunk,
    ChunkRequest,
    DropConfirmingSource,
    Finding,
    RelayingSource,
    ResumableSource,
    Source,
    SuspendingSource,
    TableSize,
    Transaction,
    WatermarkingSource,
    raise_findings,
)
from databus.relay.sources.suspended_tables import SuspendedTables, TableSuspension

_LOOK_AGAIN_S = 30.0
"""How often the status looks for tables without rows that a rule does not fit."""

_log = logging.getLogger(__name__)


class RuledSource:
    """Any source, seen through the rules of its ``[[database]]``.

    Invariants:
        I1. Everything that leaves (frames, schemas, rows of chunks) has been through the rewriter.
        I2. A value under a rule does not leave in an error or as a key of a dump either.
        I3. A table that a rule does not fit is suspended on disk before the window of its first
            such frame ends in the ring.  It stays so over restarts, also under other rules or none.
        I4. It resumes between two transactions, when all of it is read and the rules fit it; that
            is on disk before its first row is in the ring.
        I5. The same holds for a table with a row that is too large, met by the stream or by a read
            of the suspended table.

    Owner: as the source's.
    """

    def __init__(self, inner: Source, config: DatabaseConfig) -> None:
        self._inner = inner
        self._rules = ColumnRules(config)
        self._rewriter = Rewriter(self._rules)
        self._captures = config.captures
        self._name, self._ring_bytes = config.name, config.ring_bytes
        self._has_rules = not self._rules.is_empty
        self._load_suspensions({}, {})
        self._resume_state = RuledResumeState(self._rules.digest)
        self._resumed: set[str] = set()
        self._too_large: dict[str, UnsupportedChange] = {}
        self._without: dict[str, str] = {}
        self._resumed_from: set[str] = set()
        self._suspend_next: dict[str, str] = {}
        self._resolved, self._looked_s = 0, 0.0
        self._is_unchanged = False
        self._sealing = KeyEncryption(config.hash_salt.reveal if config.hash_salt else "")
        self._sealed: set[str] = set()
        # Attributes and not methods: a method exists only if the wrapped source has it.
        # A new optional method of sources has to be forwarded here by name.
        if isinstance(inner, WatermarkingSource):
            self._watermarks = inner
            self.write_watermark = self._write_watermark
        if isinstance(inner, DropConfirmingSource):
            self._drops = inner
            self.confirm_drop = self._confirm_drop

    @property
    def clock(self) -> str:
        """See ``Source.clock``."""
        return self._inner.clock

    def _load_suspensions(
        self, suspensions: Mapping[str, TableSuspension], large: Mapping[str, LargeRows]
    ) -> None:
        tables = SuspendedTables(suspensions)
        self._limit = RowLimit(self._ring_bytes, tables, large)
        self._unfit = UnfitTables(self._name, self._rules, tables, self._limit.large)

    # -- opening --

    async def preflight(self) -> list[Finding]:
        """The source's findings, and what is wrong with the rules for its tables."""
        found = await self._inner.preflight()
        if not self._has_rules or any(finding.fatal for finding in found):
            return found
        return [*found, *self._rules.findings(await self._inner.schemas())]

    def restore(self, resume_state: str, last: Transaction | None, after_scn: int) -> None:
        """See ``ResumableSource``: the suspended tables, and the source's own resume state.

        Rules that have changed since are refused like those of a first start: an operator has just
        changed them and can fix them, and nothing is lost until then.
        """
        state = decode_ruled(resume_state)
        self._is_unchanged = state.digest == self._rules.digest
        # A part of a window that is read again may have other definitions or other rules, under
        # which the table would not be suspended; but its rows there are lost.
        suspensions = {
            source: TableSuspension(min(suspension.since_scn, after_scn), suspension.why)
            for source, suspension in state.suspended.items()
            if self._captures(source)
        }
        limit_bytes = self._limit.limit_bytes
        large = {s: rows for s, rows in decode_large(state.large).items() if s in suspensions}
        for source, rows in large.items():
            if not self._is_unchanged or limit_bytes > state.limit_bytes:
                rows.waits_for = ""  # The obstacle may be gone.
            suspensions[source] = replace(suspensions[source], waits_for=rows.waits_for)
        self._load_suspensions(suspensions, large)
        self._resume_state = RuledResumeState(self._rules.digest, text=state.text)
        self._update_resume_state()
        if isinstance(self._inner, ResumableSource):
            self._inner.restore(state.text, last, after_scn)

    async def open(self) -> None:
        """See ``Source.open``; a rule that names no column is logged."""
        await self._inner.open()
        if not self._has_rules:
            return
        schemas = await self._inner.schemas()
        suspensions = self._unfit.tables.suspensions
        findings = [f for f in self._rules.findings(schemas) if f.table not in suspensions]
        raise_findings(self._name, findings, resumes=self._is_unchanged)
        for finding in findings:
            if not finding.fatal:
                _log.warning("database %s: %s", self._name, finding)
        self._seen(schemas)

    async def effective_columns(self) -> dict[str, str]:
        """For the operator: the columns of each table as consumers see them."""
        return {
            schema.source: effective_columns(self._rules, schema)
            for schema in await self._inner.schemas()
        }

    def _seen(self, schemas: list[SourceSchema]) -> list[SourceSchema]:
        """All captured tables as consumers see them, except those that the rules do not fit."""
        if not self._has_rules:
            self._limit.learn(schemas)
            return schemas
        problems = {schema.source: self._unfit.problem(schema) for schema in schemas}
        self._without = {source: problem for source, problem in problems.items() if problem}
        fitting = [schema for schema in schemas if schema.source not in self._without]
        for schema in fitting:
            plan = self._rewriter.plan_of(schema)
            if plan is not None and plan.key_is_hashed:
                self._sealed.add(schema.source)
        return self._rewriter.seen(fitting)

    # -- the stream --

    async def first_scn(self) -> int:
        """See ``Source.first_scn``."""
        return await self._inner.first_scn()

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """The source's windows, rewritten, without the suspended tables."""
        self._unfit.begin()
        self._resolved = after_scn
        self._unfit.tables.begin()
        try:
            async with contextlib.aclosing(self._inner.stream(after_scn)) as batches:
                async for batch in batches:
                    if self._settle():
                        yield Batch(b"", resume_state=self._resume_state, persist_first=True)
                    sifted = self._sifted(batch)
                    if sifted.has_suspended:
                        yield Batch(b"", resume_state=self._resume_state, persist_first=True)
                    if batch.resume_state is not None:
                        self._resume_state = replace(self._resume_state, inner=batch.resume_state)
                    self._resolved = max(self._resolved, batch.resolved)
                    yield replace(sifted.batch, resume_state=self._resume_state)
        except UnsupportedChange as error:
            raise self._without_value(error) from None
        finally:
            self._unfit.tables.end()

    def _sifted(self, batch: Batch) -> Sifted:
        """The part of a batch that passes, rewritten."""
        suspensions = self._unfit.tables.suspensions
        if not (self._has_rules or suspensions) and self._limit.passes(batch):
            self._limit.learn(batch.schemas)
            self._unfit.passed(batch.data)
            return Sifted(batch)
        fitting = self._unfit.sift(batch)
        ruled, columns = fitting.batch, fitting.columns
        if self._has_rules:
            ruled = self._rewriter.batch(ruled, columns)
            columns = columns if ruled.data is fitting.batch.data else None
        found = self._limit.sift(ruled, columns)
        has_suspended = fitting.has_suspended or found.has_suspended
        if has_suspended or found.has_changed:
            self._update_resume_state()
        return replace(found, has_suspended=has_suspended)

    def _settle(self) -> bool:
        """Between two transactions: resume or suspend the tables that were requested.

        Returns whether there were any.
        """
        tables = self._unfit.tables
        is_due = tables.has_requests or self._suspend_next or self._too_large
        if not is_due or self._unfit.in_window:
            return False
        tables.resume_requested()
        self._limit.resumed()
        for source, why in self._suspend_next.items():
            _log.warning("database %s: %s is suspended: %s", self._name, source, why)
            tables.suspend_again(source, self._resolved, why)
        for source, problem in self._too_large.items():
            _log.warning("database %s: %s", self._name, problem.message)
            self._limit.suspend_again(source, self._resolved, problem)
        self._suspend_next.clear()
        self._too_large.clear()
        self._update_resume_state()
        return True

    def _update_resume_state(self) -> None:
        self._resume_state = replace(
            self._resume_state,
            suspended=dict(self._unfit.tables.suspensions),
            limit_bytes=self._limit.limit_bytes,
            large={source: rows.to_json() for source, rows in self._limit.large.items()},
        )

    def _without_value(self, error: UnsupportedChange) -> UnsupportedChange:
        """The error, without its text if that may show a value under a rule."""
        source, column = error.details.get("source"), error.details.get("column")
        if column is None or not self._rules.names(f"{source}.{column}"):
            return error
        return UnsupportedChange(
            f"{source}.{column} holds a value that cannot be captured; it is not shown, because a "
            "rule concerns the column",
            source=source,
            column=column,
        )

    async def ack(self, scn: int) -> None:
        """See ``Source.ack``."""
        await self._inner.ack(scn)

    # -- tables --

    async def schemas(self) -> list[SourceSchema]:
        """The captured tables as consumers see them."""
        return self._seen(await self._inner.schemas())

    async def largest_key(self, source: str) -> list[Any] | None:
        """See ``Source.largest_key``; sealed if a key column is hashed."""
        await self._resume_first(source)
        return self._seal(source, await self._inner.largest_key(source))

    async def _resume_first(self, source: str) -> None:
        """All of a table is about to be read: a suspended table resumes in the stream before.

        Raises:
            UnsupportedChange: a rule does not fit it as it is now, or it still has a row that is
                too large.
        """
        suspensions = self._unfit.tables.suspensions
        if source in self.suspended():
            self._resumed.add(source)
        if source in suspensions or source in self._without:
            await self.schemas()
            self._require_fit(source)
        if source not in suspensions:
            return
        await self._require_small(source)
        await self._unfit.tables.resumption(source)
        self._resumed_from.add(source)

    def _require_fit(self, source: str) -> None:
        if source in self._without:
            raise UnsupportedChange(self._without[source], source=source)

    async def _require_small(self, source: str) -> None:
        """Check that the rows that were too large are gone or smaller, if their keys are known.

        Raises:
            UnsupportedChange: one is not.
        """
        schema = next((s for s in await self._inner.schemas() if s.source == source), None)
        if schema is None or source in self._sealed:
            return
        plan = self._rewriter.plan_of(schema) if self._has_rules else None
        if plan is None or all(one.action is Action.KEEP for one in plan.key_plans()):
            for key in self._limit.keys_of(source, schema):
                await self._read(ChunkRequest(source, 1, keys=[key], is_probe=True))

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """See ``Source.chunk_end``; sealed if a key column is hashed."""
        self._require_fit(request.source)
        return self._seal(request.source, await self._inner.chunk_end(self._opened(request)))

    def suspended(self) -> Mapping[str, TableSuspension]:
        """See ``SuspendingSource``: the tables suspended by the source and by the rules."""
        inner = self._inner
        suspensions = inner.suspended() if isinstance(inner, SuspendingSource) else {}
        gone = {
            source: suspension for source, suspension in suspensions.items() if suspension.is_gone
        }
        return {**suspensions, **self._unfit.tables.suspensions, **gone}

    async def _confirm_drop(self, source: str) -> None:
        """See ``DropConfirmingSource``."""
        await self._drops.confirm_drop(source)
        self._unfit.tables.resume_emptied(source)

    async def table_size(self, source: str) -> TableSize:
        """See ``Source.table_size``."""
        return await self._inner.table_size(source)

    async def _write_watermark(self, table: str, token: str) -> None:
        """See ``WatermarkingSource``.

        Raises:
            DumpFailed: the token would not come back as it was written.
        """
        if not self._has_rules:
            return await self._watermarks.write_watermark(table, token)
        ruled = [s for s in await self._inner.schemas() if s.source == table]
        if self._rules.skipped_ops & {Op.INSERT, Op.UPDATE} or any(map(self._rules.plan, ruled)):
            raise DumpFailed(
                f"watermarks in {table} would not come back: skipped_operations or a rule for its "
                "columns changes them; dump without watermark_table, which needs no writes"
            )
        await self._watermarks.write_watermark(table, token)

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """A chunk, rewritten.

        Raises:
            BadRequest: rows were requested by keys of which only hashes are known.
            UnsupportedChange: a rule does not fit the table, a value cannot be captured, or a row
                is too large.
        """
        if request.is_of_whole_table:
            await self._resume_first(request.source)
        elif request.is_probe and request.source in self._limit.large:
            await self._require_small(request.source)
        return await self._read(request)

    async def _read(self, request: ChunkRequest) -> Chunk:
        if self._has_rules and request.source not in self._sealed:
            await self.schemas()
        sealed = request.source in self._sealed
        if sealed and request.keys is not None:
            raise BadRequest(
                f"rows of {request.source} cannot be requested by key: its key is hashed"
            )
        try:
            chunk = await self._inner.read_chunk(self._opened(request))
            plan = self._rewriter.plan_of(chunk.schema) if self._has_rules else None
        except UnsupportedChange as error:
            shown = self._without_value(error)
            if request.source in self._resumed_from:
                self._suspend_next[request.source] = shown.message
            raise shown from None
        if plan is not None and plan.key_is_hashed:
            self._sealed.add(request.source)
        if self._has_rules:
            chunk = self._rewriter.chunk(chunk)
        if not request.is_filtered:
            self._require_size(chunk, request.source)
        return replace(chunk, last_key=self._seal(request.source, chunk.last_key))

    def _require_size(self, chunk: Chunk, source: str) -> None:
        try:
            self._limit.require(chunk)
        except UnsupportedChange as error:
            if source in self._resumed or source in self.suspended():
                self._too_large[source] = error
            raise

    def _opened(self, request: ChunkRequest) -> ChunkRequest:
        return replace(
            request, after=self._sealing.open(request.after), upto=self._sealing.open(request.upto)
        )

    def _seal(self, source: str, key: list[Any] | None) -> list[Any] | None:
        return key if key is None or source not in self._sealed else self._sealing.seal(key)

    async def committed_scn(self) -> int | None:
        """See ``Source.committed_scn``."""
        return await self._inner.committed_scn()

    async def status(self) -> dict[str, Any]:
        """See ``Source.status``; with the tables that a rule does not fit."""
        facts = await self._inner.status()
        now_s = asyncio.get_running_loop().time()
        if self._without or (self._has_rules and now_s >= self._looked_s + _LOOK_AGAIN_S):
            self._looked_s = now_s
            await self.schemas()
        tables = self._unfit.tables
        without = [
            f"{source} cannot be captured: {why}"
            for source, why in self._without.items()
            if source not in tables.suspensions
        ]
        facts["stopped_tables"] = {**facts.get("stopped_tables", {}), **tables.document()}
        facts["warnings"] = [*tables.warnings(), *without, *facts.get("warnings", [])]
        return facts

    async def close(self) -> None:
        """See ``Source.close``."""
        await self._inner.close()


def within_limits(source: Source, config: DatabaseConfig) -> Source:
    """The source, wrapped in this unless it is already; a chained relay's source stays as it is."""
    if isinstance(source, RuledSource | RelayingSource):
        return source
    return cast("Source", RuledSource(source, config))
