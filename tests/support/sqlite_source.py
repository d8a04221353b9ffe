"""An SQLite database of two tables, and its source read as a consumer would see it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.frame import frame_format
from databus.common.frame.frame_format import OP_LETTERS, FrameView
from databus.common.schema.source_schema import SchemaSet
from databus.relay.sources.contract import Batch
from databus.relay.sources.sqlite.sqlite_source import SqliteSource

TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, photo BLOB, tax DECIMAL(9,2));
CREATE TABLE line (shop INT NOT NULL, code TEXT NOT NULL, qty INT, PRIMARY KEY (shop, code));
"""


def config(path: Path, *sources: str, **options: Any) -> DatabaseConfig:
    return DatabaseConfig(
        name="shop",
        url=SourceUrl(f"sqlite:///{path}"),
        sources=sources or ("main.*",),
        options=options,
    )


class Reader:
    """Reads a source's stream as a consumer would see it."""

    def __init__(self, source: SqliteSource, after: int) -> None:
        self.schemas = SchemaSet()
        self.frames: list[FrameView] = []
        self._batches = source.stream(after)

    async def until(self, scn: int) -> list[tuple[Any, ...]]:
        """Everything up to ``scn``: (op, source, key, before, after) of each event; TRUNCATE has
        no key."""
        async for batch in self._batches:
            for schema in batch.schemas:
                self.schemas.add(schema)
            self.frames += frame_format.iter_frames(batch.data)
            if batch.resolved >= scn:
                break
        return [self._event(view) for view in self.frames if not view.is_control]

    def _event(self, view: FrameView) -> tuple[Any, ...]:
        schema = self.schemas.by_fingerprint(view.schema_fp)
        rows = [
            None if part is None else schema.decode_row(part) for part in (view.before, view.after)
        ]
        key = schema.decode_key(view.key) if view.key else None
        return (OP_LETTERS[view.op], schema.source, key, *rows)


async def batches_until(source: SqliteSource, after: int, scn: int) -> list[Batch]:
    found = []
    async with contextlib.aclosing(source.stream(after)) as batches:
        async for batch in batches:
            found.append(batch)
            if batch.resolved >= scn:
                break
    return found


async def read(source: SqliteSource, after: int = 0) -> list[tuple[Any, ...]]:
    return await Reader(source, after).until(await source.first_scn())
