"""A fetcher in the test's own event loop over a real server, and the state that its ring makes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import OP_LETTERS, FrameView, Op
from databus.common.schema.source_schema import SourceSchema
from databus.relay.dumps.resync_pace import ResyncPace
from databus.relay.processes.fetcher import Fetcher, Pace
from databus.relay.ring.data_folder import read_document
from databus.relay.ring.schema_registry import RegistryReader
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually

PACE = Pace(
    idle_window_s=0.2,
    status_s=0.05,
    source_status_s=0.2,
    backoff_first_s=0.02,
    backoff_most_s=0.2,
    failed_retry_s=0.2,
    resync=ResyncPace(alone_s=0.1, accompanied_s=60.0, first_pause_s=0.1),
)


def database_config(name: str, url: str, *sources: str, **settings: Any) -> DatabaseConfig:
    """A ``[[database]]`` that is synced often, and has suspended tables left to the test."""
    return DatabaseConfig.model_validate(
        {
            "name": name,
            "url": url,
            "sources": sources,
            "ring_bytes": "32MiB",
            "sync_every": 0.05,
            "resync": "manual",
            "options": settings,
        }
    )


@contextlib.asynccontextmanager
async def capturing(
    config: DatabaseConfig, data_dir: Path, *, pace: Pace = PACE, **options: Any
) -> AsyncIterator[Fetcher]:
    """A fetcher that runs meanwhile, with a name of its own in ``data_dir``."""
    fetcher = Fetcher(config, data_dir, pace=pace, **options)
    task = asyncio.create_task(fetcher.run())
    try:
        yield fetcher
    finally:
        fetcher.stop()
        await task


def is_settled(fetcher: Fetcher) -> bool:
    """Whether no table is suspended or being resynchronised."""
    suspended = fetcher.suspended()
    return suspended is not None and not suspended and not fetcher.tables.document()


async def streaming(fetcher: Fetcher, timeout_s: float = 90.0) -> None:
    """Return when it is reading its source."""
    await eventually(lambda: fetcher.status.state == "streaming", timeout_s, "streaming")


async def failed_with(fetcher: Fetcher, code: str, timeout_s: float = 90.0) -> str:
    """What it says of its failure, once it has failed with this code."""

    def failed() -> bool:
        error = fetcher.status.error
        return error is not None and error.code == code

    await eventually(failed, timeout_s, f"failed with {code}")
    assert fetcher.status.error is not None
    return fetcher.status.error.message


def stored_resume_state(fetcher: Fetcher) -> str:
    """The source's resume state on disk; empty while there is none."""
    return (read_document(fetcher.folder.resume_state) or b"").decode()


def suspended(fetcher: Fetcher) -> dict[str, str]:
    """The reasons by suspended table, as the status has them."""
    stops = fetcher.status.source.get("stopped_tables") or {}
    return {source: stop["why"] for source, stop in stops.items()}


def suspended_in(fetcher: Fetcher) -> dict[str, str]:
    """The reasons by suspended table, as the fetcher's source has them now."""
    return {source: one.why for source, one in (fetcher.suspended() or {}).items()}


@dataclass
class RingState:
    """What a consumer holds that has applied a ring from its beginning.

    Making it checks that positions grow, and that a row is updated or deleted only while it is
    there: an older state after a newer one does not go unseen.
    """

    tables: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    windows: list[tuple[int, str, int]] = field(default_factory=list)
    ops: list[tuple[str, str]] = field(default_factory=list)
    last: Position = field(default_factory=lambda: Position(0, 0))

    @property
    def letters(self) -> str:
        """One letter an event, in order."""
        return "".join(letter for letter, _ in self.ops)


def ring_state(folder: Path) -> RingState:
    """The state that the ring of ``<data_dir>/<database>`` makes."""
    reader = RegistryReader(folder / "schemas.jsonl")
    reader.refresh()
    state = RingState()
    for view in ring_frames(folder):
        assert view.position > state.last, (view.position, state.last)
        state.last = view.position
        if view.op == Op.END_OF_WINDOW:
            if view.event_count:
                state.windows.append((view.scn, bytes(view.key).decode(), view.event_count))
            continue
        if view.is_control:
            continue
        schema = reader.schemas.by_fingerprint(view.schema_fp)
        rows = state.tables.setdefault(schema.source, {})
        letter = {1: "c", 2: "u", 3: "d", 4: "r", 5: "t"}[view.op]
        state.ops.append((letter, schema.source))
        if view.op == Op.TRUNCATE:
            rows.clear()
            continue
        key = tuple(schema.decode_key(view.key).values())
        if view.op == Op.DELETE:
            del rows[key]
            continue
        assert (key in rows) == (view.op == Op.UPDATE), (letter, key, view.position)
        assert view.after is not None
        row = schema.decode_row(view.after)
        for name in schema.absent_names(view.absent):
            row[name] = rows[key][name]
        rows[key] = row
    return state


Rows = dict[tuple[Any, ...], dict[str, Any]]
"""A table's rows by key."""


def upserted(folder: Path, source: str) -> tuple[Rows, str]:
    """A table as a consumer has it that upserts, and the letters of its events.

    A repair sends rows that the consumer may have, and deletions of rows that it may not.
    """
    return upserted_of_each(folder, (source,))[source]


def upserted_of_each(folder: Path, sources: Iterable[str]) -> dict[str, tuple[Rows, str]]:
    """The same of several tables, with the ring read once."""
    reader = RegistryReader(folder / "schemas.jsonl")
    reader.refresh()
    copies: dict[str, tuple[Rows, str]] = {source: ({}, "") for source in sources}
    for view in ring_frames(folder):
        if view.is_control:
            continue
        schema = reader.schemas.by_fingerprint(view.schema_fp)
        if schema.source not in copies:
            continue
        rows, letters = copies[schema.source]
        copies[schema.source] = rows, letters + OP_LETTERS[view.op]
        upsert(rows, schema, view)
    return copies


def upsert(rows: Rows, schema: SourceSchema, view: FrameView) -> None:
    """One event onto a table's rows, whether or not they have its row already."""
    if view.op == Op.TRUNCATE:
        rows.clear()
        return
    key = tuple(schema.decode_key(view.key).values())
    if view.op == Op.DELETE:
        rows.pop(key, None)
    else:
        assert view.after is not None
        rows[key] = schema.decode_row(view.after)
