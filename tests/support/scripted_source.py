"""A source whose every commit, delay and failure the test decides.

It fulfils the plug-in contract over an in-memory log, so what is tested is the fetcher, not a
database: a window that is streamed twice has the same frames twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from databus.common.errors import SourcePositionLost
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.contract import Batch, Chunk, ChunkRequest, Finding, TableSize
from databus.relay.sources.row_buffers import Row, Rows

ITEMS = SourceSchema(
    "shop.items",
    (Column("id", Kind.INT, nullable=False), Column("note", Kind.STRING)),
    ("id",),
)
COMMIT_US = 1_700_000_000_000_000


@dataclass(frozen=True)
class ScriptedSnapshot:
    """Everything up to ``high``."""

    high: int

    def sees(self, scn: int, txid: str) -> bool:
        return scn <= self.high


class ScriptedDatabase:
    """The log and the table behind any number of sources."""

    def __init__(self, clock: str = "clock-1") -> None:
        self.clock = clock
        self.first_scn = 0
        self.windows: list[tuple[int, bytes]] = []
        self.rows: dict[int, str] = {}
        self.resolved = 0
        self.acks: list[int] = []
        self.opened = 0
        self.chunk_reads: list[ChunkRequest] = []
        self.open_error: Exception | None = None
        self.stream_error: Exception | None = None
        self.chunk_error: BaseException | None = None
        self.chunk_gate: asyncio.Event | None = None
        self.batch_bytes = 1 << 20
        self.held_after_batches = 1 << 30
        self.forgotten = 0
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.on_ack: Any = None
        self._news = asyncio.Event()

    def commit(self, *rows: tuple[int, str | None], scn: int | None = None) -> int:
        """One transaction that writes (None: deletes) rows; returns its scn."""
        scn = scn or self.resolved + 1
        builder = WindowBuilder(scn, COMMIT_US + scn)
        for key, note in rows:
            key_bytes = ITEMS.encode_key((key,))
            if note is None:
                self.rows.pop(key, None)
                builder.event(Op.DELETE, ITEMS.source_id, ITEMS.fingerprint, key_bytes)
                continue
            op = Op.UPDATE if key in self.rows else Op.INSERT
            self.rows[key] = note
            row = ITEMS.encode_row((key, note))
            builder.event(op, ITEMS.source_id, ITEMS.fingerprint, key_bytes, after=row)
        self.windows.append((scn, builder.end(f"tx{scn}")))
        self.advance(scn)
        return scn

    def advance(self, scn: int) -> None:
        """The log has moved on to ``scn``, without anything of ours since the last commit."""
        self.resolved = scn
        self._news.set()

    def cut(self, error: Exception) -> None:
        """Break the streams that are open now."""
        self.stream_error = error
        self._news.set()

    def release(self) -> None:
        """Resume a stream that was held after some batches."""
        self.held_after_batches = 1 << 30
        self._news.set()

    def source(self, config: object = None) -> ScriptedSource:
        return ScriptedSource(self)


class ScriptedSource:
    """One connection to a ScriptedDatabase."""

    def __init__(self, database: ScriptedDatabase) -> None:
        self.database = database

    @property
    def clock(self) -> str:
        return self.database.clock

    async def preflight(self) -> list[Finding]:
        return []

    async def open(self) -> None:
        self.database.opened += 1
        if self.database.open_error is not None:
            raise self.database.open_error

    async def first_scn(self) -> int:
        return self.database.first_scn

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        database = self.database
        if after_scn < database.forgotten:
            raise SourcePositionLost(f"scn {after_scn} is purged up to {database.forgotten}")
        schemas: tuple[SourceSchema, ...] = (ITEMS,)
        index = batches = 0
        while True:
            database._news.clear()
            while index < len(database.windows):
                scn, data = database.windows[index]
                index += 1
                if scn <= after_scn:
                    continue
                for part in _parts(data, database.batch_bytes):
                    while batches >= database.held_after_batches and not database.stream_error:
                        await database._news.wait()
                        database._news.clear()
                    if database.stream_error is not None:
                        break
                    batches += 1
                    yield Batch(part, schemas, max(0, scn - 1))
                    schemas = ()
            if database.stream_error is not None:
                error, database.stream_error = database.stream_error, None
                raise error
            yield Batch(b"", schemas, database.resolved)
            schemas = ()
            try:
                async with asyncio.timeout(0.05):
                    await database._news.wait()
            except TimeoutError:
                continue

    async def ack(self, scn: int) -> None:
        self.database.acks.append(scn)
        if self.database.on_ack is not None:
            self.database.on_ack(scn)

    async def schemas(self) -> list[SourceSchema]:
        return [ITEMS]

    async def largest_key(self, source: str) -> list[Any] | None:
        return [max(self.database.rows)] if self.database.rows else None

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        after = request.after[0] if request.after else -1
        upto = request.upto[0] if request.upto else max(self.database.rows, default=0)
        found = [key for key in sorted(self.database.rows) if after < key <= upto]
        return [found[request.limit - 1]] if len(found) >= request.limit else None

    async def table_size(self, source: str) -> TableSize:
        return TableSize(len(self.database.rows), 100)

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        database = self.database
        database.chunk_reads.append(request)
        if database.chunk_error is not None:
            error, database.chunk_error = database.chunk_error, None
            raise error
        state, high = dict(database.rows), database.resolved
        if database.chunk_gate is not None:
            await database.chunk_gate.wait()
        if request.keys is not None:
            wanted = [key[0] for key in request.keys]
            missing = [[key] for key in wanted if key not in state]
            found = [key for key in wanted if key in state]
        else:
            after = request.after[0] if request.after else -1
            upto = request.upto[0] if request.upto else max(state, default=0)
            found = [key for key in sorted(state) if after < key <= upto][: request.limit]
            missing = []
        rows = Rows.of(Row(ITEMS.encode_key((k,)), ITEMS.encode_row((k, state[k]))) for k in found)
        done = request.keys is not None or len(rows) < request.limit
        last_key = [found[-1]] if found else request.after
        return Chunk(ITEMS, rows, ScriptedSnapshot(high), last_key, done, missing)

    async def committed_scn(self) -> int:
        return self.database.resolved

    async def status(self) -> dict[str, Any]:
        return {"scn": self.database.resolved}

    async def close(self) -> None:
        if self.database.on_close is not None:
            await self.database.on_close()


def _parts(data: bytes, size: int) -> list[bytes]:
    """Whole frames in pieces of about ``size`` bytes."""
    parts, start, at = [], 0, 0
    while at < len(data):
        at += int.from_bytes(data[at + 4 : at + 8], "little")
        if at - start >= size or at == len(data):
            parts.append(data[start:at])
            start = at
    return parts
