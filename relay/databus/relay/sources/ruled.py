"""A source with the rules of its database applied: what the fetcher reads where there are any.

``create_source`` puts this around a source whose ``[[database]]`` has rules for columns or
skipped operations.  The database's own keys are seen by nobody behind it: where a key column is
hashed, the places at which a dump goes on are sealed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from databus.common.config import DatabaseConfig
from databus.common.errors import BadRequest, DumpFailed, UnsupportedChange
from databus.common.frame import Op
from databus.common.schema import SourceSchema
from databus.relay.column_rules import ColumnRules, effective_columns
from databus.relay.rewriting import Rewriter
from databus.relay.sealing import Sealing
from databus.relay.sources.source import (
    Batch,
    Chunk,
    ChunkRequest,
    Finding,
    RememberingSource,
    Source,
    TableSize,
    WatermarkingSource,
    raise_findings,
)

_log = logging.getLogger(__name__)


class RuledSource:
    """Any source, seen through the rules of its ``[[database]]``.

    Invariants:
        I1. Whatever leaves, frames, schemas, rows of chunks, has been through the rewriter.
        I2. A value under a rule does not leave in an error or as a place in a table either.

    Owner: as the source's.
    """

    def __init__(self, inner: Source, config: DatabaseConfig) -> None:
        self._inner = inner
        self._rules = ColumnRules(config)
        self._rewriter = Rewriter(self._rules)
        self._sealing = Sealing(config.hash_salt.reveal if config.hash_salt else "")
        self._sealed: set[str] = set()
        self._name = config.name
        # Attributes and not methods, so that only what is around a source that can seems to.
        # Whatever else a source may offer one day has to be handed on here by name as well.
        if isinstance(inner, WatermarkingSource):
            self._watermarks = inner
            self.write_watermark = self._write_watermark
        if isinstance(inner, RememberingSource):
            self.recall = inner.recall

    @property
    def clock(self) -> str:
        """See ``Source.clock``."""
        return self._inner.clock

    # -- opening --

    async def preflight(self) -> list[Finding]:
        """What the source finds, and what is wrong with the rules for its tables."""
        found = await self._inner.preflight()
        if any(finding.fatal for finding in found):
            return found
        return [*found, *self._rules.findings(await self._inner.schemas())]

    async def open(self) -> None:
        """See ``Source.open``; a rule that names no column is logged."""
        await self._inner.open()
        schemas = await self._inner.schemas()
        findings = self._rules.findings(schemas)
        raise_findings(self._name, findings)
        for finding in findings:
            _log.warning("database %s: %s", self._name, finding)
        self._seen(schemas)

    async def effective_columns(self) -> dict[str, str]:
        """For people: the columns of each table as consumers see them."""
        return {
            schema.source: effective_columns(self._rules, schema)
            for schema in await self._inner.schemas()
        }

    def _seen(self, schemas: list[SourceSchema]) -> list[SourceSchema]:
        for schema in schemas:
            plan = self._rewriter.plan_of(schema)
            if plan is not None and plan.key_is_hashed:
                self._sealed.add(schema.source)
        return self._rewriter.seen(schemas)

    # -- the stream --

    async def first_scn(self) -> int:
        """See ``Source.first_scn``."""
        return await self._inner.first_scn()

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """The source's windows, rewritten."""
        try:
            async with contextlib.aclosing(self._inner.stream(after_scn)) as batches:
                async for batch in batches:
                    yield self._rewriter.batch(batch)
        except UnsupportedChange as error:
            raise self._without_value(error) from None

    def _without_value(self, error: UnsupportedChange) -> UnsupportedChange:
        """The error, without its text if that may tell a value that must not be seen."""
        source, column = error.details.get("source"), error.details.get("column")
        if column is None or not self._rules.names(f"{source}.{column}"):
            return error
        return UnsupportedChange(
            f"{source}.{column} holds a value that cannot be carried; it is not shown, for a "
            "rule is about the column",
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
        """See ``Source.largest_key``; sealed where a key column is hashed."""
        return self._seal(source, await self._inner.largest_key(source))

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """See ``Source.chunk_end``; sealed where a key column is hashed."""
        return self._seal(request.source, await self._inner.chunk_end(self._opened(request)))

    async def table_size(self, source: str) -> TableSize:
        """See ``Source.table_size``."""
        return await self._inner.table_size(source)

    async def _write_watermark(self, table: str, token: str) -> None:
        """See ``WatermarkingSource``.

        Raises:
            DumpFailed: the token would not come back as it was written.
        """
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
            BadRequest: rows were asked for by keys of which only hashes are known.
        """
        if request.source not in self._sealed:
            await self.schemas()
        sealed = request.source in self._sealed
        if sealed and request.keys is not None:
            raise BadRequest(
                f"rows of {request.source} cannot be asked for by key: its key is hashed"
            )
        try:
            chunk = await self._inner.read_chunk(self._opened(request))
        except UnsupportedChange as error:
            raise self._without_value(error) from None
        plan = self._rewriter.plan_of(chunk.schema)
        if plan is not None and plan.key_is_hashed:
            self._sealed.add(request.source)
        chunk = self._rewriter.chunk(chunk)
        return replace(chunk, last_key=self._seal(request.source, chunk.last_key))

    def _opened(self, request: ChunkRequest) -> ChunkRequest:
        return replace(
            request, after=self._sealing.open(request.after), upto=self._sealing.open(request.upto)
        )

    def _seal(self, source: str, key: list[Any] | None) -> list[Any] | None:
        return key if key is None or source not in self._sealed else self._sealing.seal(key)

    async def status(self) -> dict[str, Any]:
        """See ``Source.status``."""
        return await self._inner.status()

    async def close(self) -> None:
        """See ``Source.close``."""
        await self._inner.close()
