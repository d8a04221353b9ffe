"""A bootstrap server over a store of the tests' own making, and what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.common import checkpoint as checkpoints
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.bootstrap import model

FRAMES = {"Accept": "application/vnd.databus.frames"}
SCHEMA = SourceSchema("shop.orders", (Column("id", Kind.INT, nullable=False),), ("id",))


class Bench:
    """A server over a store of our own making."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.logs = OpenLogs()
        self.store = Store(data_dir / "shop")
        self.store.create()
        self.log: HotLog = self.logs.to_write(data_dir / "shop" / "log")
        self.history = model.History(21)
        self.blocks: list[bytes] = []
        self.url = ""
        self.session: aiohttp.ClientSession

    def bind(self) -> None:
        self.log.bind("shop", model.CLOCK, model.START)

    def seed(self) -> None:
        self.log.put_note("seeding", {name: {"state": "seeded"} for name in model.SOURCES})

    def write(self, windows: int = 10) -> None:
        self.blocks.append(self.history.block(windows))
        self.log.append(self.blocks[-1], 1)

    def seal(self) -> None:
        segments.seal(self.log, self.store, 1)

    def begin(self, windows: int = 10) -> None:
        """A seeded database whose first windows are in a base."""
        self.bind()
        self.seed()
        self.write(windows)
        self.seal()
        self.rebase()

    def bind_sealed(self) -> Position:
        """A log that is not seeded, with some sealed windows; returns their end."""
        self.bind()
        self.write()
        self.seal()
        return self.history.position

    def rebase(self) -> None:
        chain = self.store.read().chain
        frames = model.frames_between(self.blocks, model.START, chain[-1].stop)
        run = model.write_run(
            self.store, RunKind.BASE, model.START, chain[-1].stop, model.compact(frames, base=True)
        )
        old = self.store.read().base
        drop = (old,) if old else ()
        self.store.switch(lambda m: m.with_changes(add=run, drop=drop, now_us=1))

    def merge(self, start: Position) -> Run:
        """All runs of the chain from ``start`` on become one delta, and are gone."""
        chain = [run for run in self.store.read().chain if run.start >= start]
        frames = model.compact(model.frames_between(self.blocks, start, chain[-1].stop), base=False)
        delta = model.write_run(self.store, RunKind.DELTA, start, chain[-1].stop, frames)
        self.store.switch(lambda m: m.with_changes(add=delta, drop=tuple(chain), now_us=1))
        self.store.collect(0, "cs", now_us=2)
        return delta

    def truth(self) -> model.State:
        return model.State().apply_all(self.blocks)

    async def get(self, path: str, **query: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, params=query) as answer:
            return answer.status, await answer.json(content_type=None)

    async def frames(self, endpoint: str = "bootstrap", **query: Any) -> bytes:
        url = f"{self.url}/v1/shop/{endpoint}"
        async with self.session.get(url, params=query, headers=FRAMES) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def metrics(self) -> str:
        async with self.session.get(f"{self.url}/metrics") as answer:
            return await answer.text()


def checkpoints_in(data: bytes) -> list[Any]:
    return [
        checkpoints.decode(bytes(one.after or b""))
        for one in iter_frames(data)
        if one.op == Op.CHECKPOINT
    ]


def rows_in(data: bytes) -> list[bytes]:
    return [bytes(one.bytes) for one in iter_frames(data) if one.op != Op.CHECKPOINT]
