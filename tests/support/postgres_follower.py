"""Follows a PostgreSQL source in a test: decoded events, windows, and the tables they make."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.schema.source_schema import SchemaSet
from databus.relay.sources.contract import Batch, ChunkRequest
from databus.relay.sources.postgres import PostgresSource
from databus.relay.sources.postgres.protocol.lsn import parse_lsn, scn_before
from tests.support.fixtures import FreshDatabase
from tests.support.opened_source import opened_source
from tests.support.waiting import PATIENCE

ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, name text, qty int)"
ITEMS = "CREATE TABLE items (a int, b text, v text, PRIMARY KEY (b, a))"


@dataclass(frozen=True)
class Event:
    """One row change, decoded."""

    op: Op
    source: str
    scn: int
    seq: int
    key: tuple[Any, ...]
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    absent: tuple[str, ...]
    schema_fp: int


@dataclass
class Seen:
    """What a stream has given so far."""

    events: list[Event] = field(default_factory=list)
    windows: list[tuple[int, str, int]] = field(default_factory=list)
    schema_changes: list[tuple[int, str]] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    schemas: SchemaSet = field(default_factory=SchemaSet)
    tables: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    last: tuple[int, int] = (0, 0)
    resolved: int = 0
    resume_state: str = ""

    def take(self, batch: Batch) -> None:
        """Check the contract on a batch and take it in; what was seen before is dropped."""
        for schema in batch.schemas:
            self.schemas.add(schema)
        for frame in iter_frames(batch.data):
            position = (frame.scn, frame.seq)
            if position <= self.last:
                continue
            if frame.scn == self.last[0]:
                assert frame.seq == self.last[1] + 1
            else:
                assert frame.seq == 0
            self.last = position
            self.frames.append(bytes(frame.bytes))
            if frame.op == Op.END_OF_WINDOW:
                self.windows.append((frame.scn, bytes(frame.key).decode(), frame.event_count))
            elif frame.op == Op.SCHEMA_CHANGE:
                source = self.schemas.by_fingerprint(frame.schema_fp).source
                self.schema_changes.append((frame.scn, source))
            else:
                self._event(frame)
        assert batch.resolved >= self.resolved
        self.resolved = batch.resolved
        self.resume_state = batch.resume_state.encode() if batch.resume_state else ""

    def _event(self, frame: Any) -> None:
        schema = self.schemas.by_fingerprint(frame.schema_fp)
        event = Event(
            op=Op(frame.op),
            source=schema.source,
            scn=frame.scn,
            seq=frame.seq,
            key=tuple(schema.decode_key(frame.key).values()) if frame.key_len else (),
            before=schema.decode_row(frame.before) if frame.before is not None else None,
            after=schema.decode_row(frame.after) if frame.after is not None else None,
            absent=schema.absent_names(frame.absent),
            schema_fp=frame.schema_fp,
        )
        self.events.append(event)
        table = self.tables.setdefault(event.source, {})
        if event.op is Op.TRUNCATE:
            table.clear()
        elif event.op is Op.DELETE:
            table.pop(event.key, None)
        else:
            row = dict(event.after or {})
            for name in event.absent:
                row[name] = table[event.key][name] if event.key in table else None
            table[event.key] = row

    @property
    def ops(self) -> str:
        """One letter an event: c, u, d, t."""
        letters = {Op.INSERT: "c", Op.UPDATE: "u", Op.DELETE: "d", Op.TRUNCATE: "t"}
        return "".join(letters[event.op] for event in self.events)


def config_of(
    database: FreshDatabase, *sources: str, url: str = "", **options: str | int | float | bool
) -> DatabaseConfig:
    """The configuration of a test's database; its slot has the database's own name."""
    return DatabaseConfig.model_validate(
        {
            "name": database.name,
            "url": url or database.url,
            "sources": sources or ("public.*",),
            "options": options,
        }
    )


def opened(config: DatabaseConfig) -> AbstractAsyncContextManager[PostgresSource]:
    """A source that is open, and closed afterwards."""
    return opened_source(PostgresSource(config))


@contextlib.asynccontextmanager
async def opened_on(
    database: FreshDatabase,
    *statements: str,
    sources: tuple[str, ...] = (),
    url: str = "",
    **options: str | int | float | bool,
) -> AsyncIterator[tuple[PostgresSource, int]]:
    """Execute the statements; then a source that is open, and the scn at which it begins."""
    for statement in statements:
        database.execute(statement)
    async with opened(config_of(database, *sources, url=url, **options)) as source:
        yield source, await source.first_scn()


def now_scn(database: FreshDatabase) -> int:
    """An scn at or after every commit until now."""
    ((lsn,),) = database.execute("SELECT pg_current_wal_insert_lsn()::text")
    return scn_before(parse_lsn(str(lsn)))


async def follow(
    source: PostgresSource,
    after_scn: int,
    enough: Callable[[Seen], bool],
    seen: Seen | None = None,
    timeout_s: float = 20.0,
) -> Seen:
    """Stream until ``enough``; the stream is closed then."""
    seen = seen or Seen()
    seen.resolved = 0  # a new stream announces it again
    async with asyncio.timeout(timeout_s * PATIENCE):
        async with contextlib.aclosing(source.stream(after_scn)) as batches:
            async for batch in batches:
                seen.take(batch)
                if enough(seen):
                    break
    return seen


async def follow_to(
    source: PostgresSource, after_scn: int, scn: int, seen: Seen | None = None
) -> Seen:
    """Stream until everything up to ``scn`` has come."""
    return await follow(source, after_scn, lambda now: now.resolved >= scn, seen)


async def table_of(source: PostgresSource, name: str, limit: int = 10_000) -> dict[Any, Any]:
    """A table as its chunks show it, by key."""
    rows, after, done = {}, None, False
    while not done:
        chunk = await source.read_chunk(ChunkRequest(name, limit, after=after))
        for row in chunk.rows:
            key = tuple(chunk.schema.decode_key(row.key).values())
            rows[key] = chunk.schema.decode_row(row.row)
        after, done = chunk.last_key, chunk.done
    return rows
