"""Verify where the database's rules leave deletions out: the copy is not meant to be equal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.bootstrap.verify.table_copy import Copy, HttpPeer
from databus.bootstrap.verify.table_verifier import Verifier
from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import FrameView, Op, iter_frames
from databus.common.schema.source_schema import SchemaSet
from databus.relay.columns.ruled_source import RuledSource
from databus.relay.processes.fetcher import Fetcher, Pace
from databus.relay.ring.data_folder import SocketName
from databus.relay.ring.ring import Ring
from tests.support.scripted_source import ITEMS, ScriptedDatabase
from tests.support.waiting import eventually

PACE = Pace(idle_window_s=0.1, status_s=0.02, source_status_s=0.05)


class FetcherPeer(HttpPeer):
    """What a verifier requests of a relay, requested from a fetcher's socket."""

    def __init__(self, folder: Path) -> None:
        super().__init__("http://fetcher", "shop")
        self._folder = folder

    async def body(self, method: str, path: str, body: Any = None, **query: str) -> bytes:
        with SocketName(self._folder / "fetcher.sock") as name:
            connector = aiohttp.UnixConnector(path=name.path)
            async with aiohttp.ClientSession(connector=connector) as session:
                async with session.request(method, f"http://fetcher/{path}", json=body) as answer:
                    assert answer.status < 400, await answer.text()
                    return await answer.read()

    async def document(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        return json.loads(await self.body(method, path, body))


class RingCopy:
    """A copy that is the ring itself, applied from its beginning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def frames(self) -> list[FrameView]:
        with Ring.open_reader(self._folder) as reader:
            data, _ = reader.read(reader.snapshot().head, 1 << 30)
            return list(iter_frames(bytes(data)))

    async def end(self) -> Position:
        return self.frames()[-1].position

    async def schemas(self, source: str) -> SchemaSet:
        schemas = SchemaSet()
        schemas.add(ITEMS)
        return schemas

    async def state(self, source: str) -> AsyncGenerator[bytes, None]:
        rows = [view for view in self.frames() if not view.is_control]
        last = {bytes(view.key): view for view in rows}
        yield b"".join(bytes(view.bytes) for view in last.values() if view.op != Op.DELETE)

    async def changes(self, source: str, since: Position) -> AsyncGenerator[bytes, None]:
        later = (view for view in self.frames() if view.position > since and not view.is_control)
        yield b"".join(bytes(view.bytes) for view in later)


@pytest.mark.parametrize("skipped", [["d"], []])
async def test_a_repair_sends_no_deletion_that_the_rules_leave_out(
    skipped: list[str], tmp_path: Path
) -> None:
    database = ScriptedDatabase()
    database.commit((1, "one"), (2, "two"), (3, "three"))
    document = {"name": "shop", "url": "generator://", "ring_bytes": "256KiB", "sync_every": 0.02}
    config = DatabaseConfig.model_validate(document | {"skipped_operations": skipped})
    fetcher = Fetcher(
        config, tmp_path, make_source=lambda c: RuledSource(database.source(), c), pace=PACE
    )
    running = asyncio.create_task(fetcher.run())
    copy: Copy = RingCopy(tmp_path / "shop")
    try:
        await eventually(lambda: fetcher.status.state == "streaming")
        scn = database.commit((3, None))
        await eventually(lambda: fetcher.intake and fetcher.intake.complete.scn >= scn)
        # Neither the log nor the rules have these.
        database.rows[1] = "changed"
        del database.rows[2]
        verifier = Verifier(FetcherPeer(tmp_path / "shop"), copy)
        report = await verifier.verify("shop.items")
        assert not report.is_equal
        found = {(str(one.result), one.shown_key[0]) for one in report.differences}
        assert found == {("changed", 1)} | (set() if skipped else {("extra", 2)})
        assert report.retained == (2 if skipped else 0)
        report = await verifier.verify("shop.items", repair=True)
        assert report.repaired
        deletions = [view for view in RingCopy(tmp_path / "shop").frames() if view.op == Op.DELETE]
        assert [ITEMS.decode_key(view.key)["id"] for view in deletions] == (
            [] if skipped else [3, 2]
        )
    finally:
        fetcher.stop()
        await running
