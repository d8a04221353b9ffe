"""A table that joins the captured ones of MariaDB and MySQL while all others continue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from databus.common.config import Config, parse
from databus.common.frame.frame_format import FrameSplitter, Op, iter_frames
from databus.relay.local_relay import LocalRelay
from tests.support.capture import ring_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

WAIT_S = 60.0
RELAY = """
[relay]
listen = "127.0.0.1:0"
data_dir = "data"
heartbeat = "200ms"

[[database]]
name = "other"
url = "generator://?events_per_second=300&seed=3"
ring_bytes = "1MiB"

[[database]]
name = "shop"
url = "{url}"
sources = [{sources}]
sync_every = "20ms"
"""


def relay_config(folder: Path, database: FreshDatabase, *tables: str) -> Config:
    sources = ", ".join(f'"{database.name}.{table}"' for table in tables)
    return parse(RELAY.format(url=database.url, sources=sources), folder=folder)


class Follower:
    """Counts what comes on one connection for as long as it is open."""

    def __init__(self) -> None:
        self.row_count = 0
        self.ended = False

    async def follow(self, session: aiohttp.ClientSession, name: str) -> None:
        splitter = FrameSplitter()
        headers = {"Accept": "application/vnd.databus.frames"}
        url = f"/v1/{name}/stream?start=oldest&follow=true"
        try:
            timeout = aiohttp.ClientTimeout(total=None)
            async with session.get(url, headers=headers, timeout=timeout) as answer:
                assert answer.status == 200
                async for chunk in answer.content.iter_any():
                    for view in iter_frames(splitter.feed(chunk)):
                        assert view.op != Op.ERROR
                        self.row_count += not view.is_control
        finally:
            self.ended = True


@contextlib.asynccontextmanager
async def following(session: aiohttp.ClientSession, name: str) -> AsyncIterator[Follower]:
    follower = Follower()
    task = asyncio.create_task(follower.follow(session, name))
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_table_joins_by_the_configuration_or_by_its_creation_and_the_others_continue(
    database: FreshDatabase, tmp_path: Path
) -> None:
    for table in ("a", "b"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY)")

    def rows() -> dict[str, list[int]]:
        tables = ring_state(tmp_path / "data" / "shop").tables
        return {name.partition(".")[2]: sorted(key for (key,) in of) for name, of in tables.items()}

    def insert(number: int, *tables: str) -> None:
        for table in tables:
            database.execute(f"INSERT INTO {table} VALUES ({number})")

    async with contextlib.AsyncExitStack() as stack:
        relay = await stack.enter_async_context(LocalRelay(relay_config(tmp_path, database, "a")))
        await relay.ready()
        await streaming(relay.fetchers["shop"])
        session = await stack.enter_async_context(aiohttp.ClientSession(relay.url))
        reader = await stack.enter_async_context(following(session, "shop"))
        bystander = await stack.enter_async_context(following(session, "other"))
        first = relay.fetchers["shop"], relay.fetchers["other"]
        insert(1, "b", "a")
        await eventually(lambda: rows() == {"a": [1]}, WAIT_S)
        # By the configuration: what was written before is for a dump to bring.
        await relay.reload(relay_config(tmp_path, database, "a", "b", "new_*"))
        insert(2, "a")
        await streaming(relay.fetchers["shop"])
        insert(3, "a", "b")
        await eventually(lambda: rows() == {"a": [1, 2, 3], "b": [3]}, WAIT_S)
        assert relay.fetchers["shop"] is not first[0]
        # By its creation: the fetcher is the same one.
        second = relay.fetchers["shop"]
        database.execute("CREATE TABLE new_c (id INT PRIMARY KEY)")
        database.execute("CREATE TABLE not_ours (id INT PRIMARY KEY)")
        insert(4, "not_ours", "new_c", "a", "b")
        expected = {"a": [1, 2, 3, 4], "b": [3, 4], "new_c": [4]}
        await eventually(lambda: rows() == expected, WAIT_S)
        assert relay.fetchers["shop"] is second
        # No connection was cut, and the other database's fetcher noticed nothing.
        await eventually(lambda: reader.row_count == 7, WAIT_S)
        assert relay.fetchers["other"] is first[1]
        seen = bystander.row_count
        await eventually(lambda: bystander.row_count > seen, WAIT_S)
        assert not (reader.ended or bystander.ended)
