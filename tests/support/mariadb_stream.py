"""Reading a MariaDB source in tests: everything up to the server's present end, decoded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from databus.cli.demo.private_servers import MariaDBServer
from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import FrameView, Op, iter_frames
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from databus.relay.sources.contract import Batch
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.binlog.fast_path import warm_up
from tests.support.fixtures import FreshDatabase
from tests.support.opened_source import opened_source
from tests.support.waiting import PATIENCE

warm_up()  # before any test's clock runs: without a cache it takes half a minute


@dataclass(frozen=True)
class StreamedEvent:
    """One decoded row frame."""

    op: Op
    source: str
    scn: int
    seq: int
    key: dict[str, Any]
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    commit_us: int


@dataclass
class Streamed:
    """What a source has yielded: raw bytes, schemas, the last ``resolved`` and resume state."""

    data: bytearray = field(default_factory=bytearray)
    schemas: SchemaSet = field(default_factory=SchemaSet)
    resolved: int = 0
    resume_state: str = ""
    batch_count: int = 0
    largest_batch_bytes: int = 0

    def take(self, batch: Batch) -> None:
        """What a batch brings comes behind what has come."""
        self.data += batch.data
        for schema in batch.schemas:
            self.schemas.add(schema)
        assert batch.resolved >= self.resolved
        self.resolved = batch.resolved

    def frames(self) -> Iterator[FrameView]:
        """All frames."""
        return iter_frames(bytes(self.data))

    def events(self, source: str | None = None) -> list[StreamedEvent]:
        """The row events, of one source if it is given."""
        found = []
        for view in self.frames():
            if view.is_control or view.op == Op.TRUNCATE:
                continue
            schema = self.schemas.by_fingerprint(view.schema_fp)
            if source in (None, schema.source):
                found.append(_event(view, schema))
        return found

    def windows(self) -> list[list[FrameView]]:
        """The frames cut after each end of window; whatever follows the last one is an error."""
        windows: list[list[FrameView]] = [[]]
        for view in self.frames():
            windows[-1].append(view)
            if view.op == Op.END_OF_WINDOW:
                windows.append([])
        assert windows.pop() == [], "the last window has no end"
        return windows

    def tables(self) -> dict[str, dict[bytes, dict[str, Any]]]:
        """The rows that a consumer holds after all of it, by source and key bytes."""
        tables: dict[str, dict[bytes, dict[str, Any]]] = {}
        for view in self.frames():
            if view.is_control:
                continue
            schema = self.schemas.by_fingerprint(view.schema_fp)
            rows = tables.setdefault(schema.source, {})
            if view.op == Op.TRUNCATE:
                rows.clear()
            elif view.op == Op.DELETE:
                del rows[bytes(view.key)]
            else:
                assert (view.op == Op.UPDATE) == (bytes(view.key) in rows)
                assert view.after is not None
                rows[bytes(view.key)] = schema.decode_row(view.after)
        return tables


def _event(view: FrameView, schema: SourceSchema) -> StreamedEvent:
    return StreamedEvent(
        Op(view.op),
        schema.source,
        view.scn,
        view.seq,
        schema.decode_key(view.key),
        None if view.before is None else schema.decode_row(view.before),
        None if view.after is None else schema.decode_row(view.after),
        view.commit_us,
    )


def mariadb_config(
    url: str, *sources: str, options: dict[str, str | int | float | bool] | None = None
) -> DatabaseConfig:
    """A database section for a source under test."""
    return DatabaseConfig.model_validate(
        {"name": "shop", "url": url, "sources": sources, "options": options or {}}
    )


def source_of(database: FreshDatabase, **arguments: Any) -> MySqlSource:
    """A source of all tables of a database, not open yet."""
    return MySqlSource(mariadb_config(database.url, f"{database.name}.*"), **arguments)


def opened(config: DatabaseConfig) -> AbstractAsyncContextManager[MySqlSource]:
    """A source that is open, and closed afterwards."""
    return opened_source(MySqlSource(config))


@contextlib.asynccontextmanager
async def opened_on(
    database: FreshDatabase, *, sources: tuple[str, ...] = ()
) -> AsyncIterator[tuple[MySqlSource, int]]:
    """A source that is open on the database's tables, and the scn at which it begins."""
    patterns = sources or (f"{database.name}.*",)
    async with opened(mariadb_config(database.url, *patterns)) as source:
        yield source, await source.first_scn()


async def read_to_end(
    source: MySqlSource, after_scn: int = 0, *, timeout_s: float = 30.0
) -> Streamed:
    """Everything after ``after_scn`` up to where the server is now."""
    head = int((await source.status())["scn"])
    streamed = Streamed(resolved=after_scn)
    if head <= after_scn:
        return streamed
    stream = source.stream(after_scn)
    try:
        async with asyncio.timeout(timeout_s * PATIENCE):
            async for batch in stream:
                streamed.take(batch)
                assert batch.resume_state is not None
                streamed.resume_state = batch.resume_state.encode()
                streamed.batch_count += 1
                streamed.largest_batch_bytes = max(streamed.largest_batch_bytes, len(batch.data))
                if batch.resolved >= head:
                    return streamed
    finally:
        await stream.aclose()
    raise AssertionError("the stream ended by itself")


async def read_up_to(stream: AsyncIterator[Batch], streamed: Streamed, scn: int) -> None:
    """Take what the stream brings until it has come to ``scn``."""
    async with asyncio.timeout(30 * PATIENCE):
        while streamed.resolved < scn:
            streamed.take(await anext(stream))


async def opened_mariadb(server: MariaDBServer, *sources: str, **options: Any) -> MySqlSource:
    """A source on the database ``shop`` of a server, opened."""
    source = MySqlSource(
        mariadb_config(server.url("shop"), *(sources or ("shop.*",)), options=options)
    )
    await source.open()
    return source


def sql_rows(database: FreshDatabase, table: str) -> list[dict[str, Any]]:
    """The rows of a table by SQL, in the order of the first column."""
    names = [row[0] for row in database.execute(f"SHOW COLUMNS FROM {table}")]
    return [
        dict(zip(map(str, names), row, strict=True))
        for row in database.execute(f"SELECT * FROM {table} ORDER BY 1")
    ]
