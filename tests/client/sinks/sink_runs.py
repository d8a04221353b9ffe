"""Sinks against a scripted server: run to an SCN, with trouble, and what the target has then."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from databus.client.sinks import Sink, SinkProcess
from databus.client.sinks.sql.sql_mirror import SqlMirror
from databus.client.sinks.sql.sqlite_target import SqliteTarget
from databus.common.checkpoint import Checkpoint, decode
from databus.common.sink_config import SinkConfig
from tests.support.waiting import PATIENCE

SQLITE = {"url": "sqlite:///mirror.db"}


def sink_config(*relays: str, **settings: Any) -> SinkConfig:
    return SinkConfig.model_validate(
        {
            "name": "copy",
            "database": "shop",
            "relays": list(relays),
            "start": "oldest",
            "commit_every": 0,
            "retry": 0.001,
            "retry_most": 0.002,
            "sql": SQLITE,
        }
        | settings
    )


class Watched(SinkProcess):
    """A sink of which a test sees each commit."""

    def __init__(self, config: SinkConfig, sink: Sink, **options: Any) -> None:
        super().__init__(config, sink, reconnect_s=0.001, idle_checkpoint_s=0.01, **options)
        self.committed: list[Checkpoint] = []
        self.changed = asyncio.Event()
        save = self._store.save

        def saved(checkpoint: Checkpoint) -> None:
            save(checkpoint)
            self.committed.append(checkpoint)
            self.changed.set()

        self._store.save = saved  # type: ignore[method-assign]  # a look, not another behaviour

    async def until(self, condition: Callable[[Checkpoint], bool]) -> None:
        """Serve until a commit of which the condition holds, then stop."""
        task = asyncio.create_task(self.serve())
        try:
            async with asyncio.timeout(20 * PATIENCE):
                while not (self.committed and condition(self.committed[-1])):
                    self.changed.clear()
                    changed = asyncio.create_task(self.changed.wait())
                    await asyncio.wait({changed, task}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                    if task.done():
                        break
        finally:
            self.stop()
            await task

    async def until_scn(self, scn: int) -> None:
        await self.until(lambda checkpoint: checkpoint.position.scn >= scn)


def sqlite_mirror(path: Path) -> SqlMirror:
    return SqlMirror(SqliteTarget(str(path)))


def sqlite_rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def stored_checkpoint(path: Path) -> Checkpoint:
    ((text,),) = sqlite_rows(path, "SELECT checkpoint FROM databus_checkpoints")
    return decode(text)
