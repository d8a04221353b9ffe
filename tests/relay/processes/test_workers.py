"""Several worker processes at one address, under the real supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from databus.common.config import parse
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.relay.processes.supervisor import Supervisor
from tests.support.waiting import eventually

FRAMES = {"Accept": FRAMES_TYPE}


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    config = parse(
        f'[relay]\nlisten = "127.0.0.1:0"\ndata_dir = "{tmp_path}"\nworkers = 2\n'
        '[[database]]\nname = "gen"\n'
        'url = "generator://?events_per_second=200&events_per_window=2&seed=1"\n'
    )
    running = Supervisor(config)
    task = asyncio.create_task(running.run())
    try:
        await eventually(lambda: ready(running.url), 40)
        yield running
    finally:
        running.stop()
        await task


async def ready(url: str) -> bool:
    async with aiohttp.ClientSession() as http:
        try:
            async with http.get(f"{url}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


async def worker_of(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/v1/status", headers={"Connection": "close"}) as answer:
        number: int = (await answer.json())["worker"]
        return number


async def test_each_worker_answers_for_both_and_followers_end_cleanly(
    supervisor: Supervisor,
) -> None:
    url = f"{supervisor.url}/v1/gen/stream"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        seen: set[int] = set()

        async def both_seen() -> bool:
            seen.add(await worker_of(http, supervisor.url))
            return seen == {0, 1}

        await eventually(both_seen, 30)
        followers = [
            await http.get(url, params={"follow": "true"}, headers=FRAMES) for _ in range(8)
        ]
        for worker in (0, 1):

            async def all_counted(worker: int = worker) -> bool:
                async with http.get(
                    f"{supervisor.url}/v1/status", headers={"Connection": "close"}
                ) as answer:
                    document = await answer.json()
                readers = document["databases"][0]["served"]["readers"]
                return document["worker"] == worker and readers == 8

            await eventually(all_counted, 20)
        for name, pid in supervisor.pids.items():
            if name.startswith("worker"):
                os.kill(pid, signal.SIGTERM)
        for follower in followers:
            frames = list(iter_frames(await follower.read()))
            assert frames
            positions = [frame.position for frame in frames if frame.op != Op.HEARTBEAT]
            assert positions == sorted(set(positions))


@pytest.mark.faults
async def test_a_worker_that_is_killed_comes_back_and_the_stream_continues(
    supervisor: Supervisor,
) -> None:
    url = f"{supervisor.url}/v1/gen/stream"
    async with aiohttp.ClientSession() as http:
        async with http.get(url, params={"wait_ms": 20_000}, headers=FRAMES) as answer:
            last = list(iter_frames(await answer.read()))[-1].position
        old = {name: pid for name, pid in supervisor.pids.items() if name.startswith("worker")}
        for pid in old.values():
            os.kill(pid, signal.SIGKILL)

        async def continues() -> bool:
            query = {"scn": f"{last.scn}:{last.seq}", "wait_ms": "5000"}
            try:
                async with http.get(url, params=query, headers=FRAMES) as answer:
                    frames = list(iter_frames(await answer.read()))
            except aiohttp.ClientError:
                return False
            assert answer.status == 200
            assert frames[0].position > last
            return frames[0].op != Op.HEARTBEAT

        await eventually(continues, 40)
        new = {name: pid for name, pid in supervisor.pids.items() if name.startswith("worker")}
        assert not set(new.values()) & set(old.values())
