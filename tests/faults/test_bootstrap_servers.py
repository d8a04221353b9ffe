"""Two bootstrap servers over one store: a reader changes between them anywhere, one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.common import checkpoint as checkpoints
from databus.common.checkpoint import OnlineCheckpoint
from databus.common.config import parse
from databus.common.frame.frame_format import FrameSplitter, Op, iter_frames
from tests.bootstrap import model
from tests.faults.test_bootstrap_kill import _merged
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

RUN = """
import sys
from databus.bootstrap import run_server
from databus.common.config import Config
run_server(Config.model_validate_json(sys.argv[1]))
"""


FRAMES = {"Accept": "application/vnd.databus.frames"}


class Reader:
    """A consumer: its state, and the checkpoint after the last frames that it finished."""

    def __init__(self) -> None:
        self.state = model.State()
        self.checkpoint: str | None = None
        self.servers: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether it has been sent to the online stream."""
        return self.checkpoint is not None and isinstance(
            checkpoints.decode(self.checkpoint), OnlineCheckpoint
        )

    async def read(self, session: aiohttp.ClientSession, url: str, most_bytes: int) -> None:
        """Ask a server and leave after ``most_bytes``; what was not finished is forgotten."""
        query = {"max_bytes": "4096"}
        if self.checkpoint:
            query["checkpoint"] = self.checkpoint
        splitter, waiting = FrameSplitter(), []
        path = f"{url}/v1/shop/bootstrap"
        async with session.get(path, params=query, headers=FRAMES) as answer:
            assert answer.status == 200, await answer.text()
            self.servers.append(url)
            got = 0
            async for data in answer.content.iter_chunked(512):
                got += len(data)
                for one in iter_frames(splitter.feed(data)):
                    assert one.op != Op.ERROR, bytes(one.after or b"")
                    if one.op != Op.CHECKPOINT:
                        waiting.append(bytes(one.bytes))
                        continue
                    self._finish(waiting, bytes(one.after or b"").decode())
                    waiting = []
                if got >= most_bytes:
                    answer.close()
                    return

    def _finish(self, frames: list[bytes], text: str) -> None:
        self.state.apply_all(frames)
        self.checkpoint = text


async def test_a_reader_changes_servers_at_any_frame_while_runs_are_merged_and_one_is_killed(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    folder = tmp_path / "data" / "shop"
    store = Store(folder)
    store.create()
    log = HotLog(folder / "log")
    log.bind("shop", model.CLOCK, model.START)
    log.put_note("seeding", {name: {"state": "seeded"} for name in model.SOURCES})
    history = model.History(4, keys=150, payload_bytes=60)
    blocks = []

    def write() -> None:
        blocks.append(history.block(60))
        log.append(blocks[-1], 1)
        segments.seal(log, store, 1)

    for _ in range(4):
        write()
    frames = model.frames_between(blocks, model.START, history.position)
    base = model.write_run(
        store, RunKind.BASE, model.START, history.position, model.compact(frames, base=True),
        rows_per_group=20, rows_per_file=100,
    )  # fmt: skip
    store.switch(lambda m: m.with_changes(add=base, now_us=1))
    write()

    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    children = [_start(tmp_path, port) for port in ports]
    rng = random.Random(8)
    reader = Reader()
    try:
        async with aiohttp.ClientSession() as session:
            for url in urls:
                await eventually(lambda url=url: _is_ready(session, url), 90.0, f"{url} is ready")
            for step in range(400):
                if reader.is_done:
                    break
                if step == 3:
                    chain = store.read().chain
                    run = _merged(store, Merge(chain, RunKind.DELTA))
                    store.switch(
                        lambda m, run=run, chain=chain: m.with_changes(
                            add=run, drop=chain, now_us=1
                        )
                    )
                    store.collect(0, "cs", now_us=2)
                if step == 8:
                    killed = asyncio.create_task(reader.read(session, urls[0], 1 << 30))
                    children[0].send_signal(signal.SIGKILL)
                    with contextlib.suppress(aiohttp.ClientError):
                        await killed
                    children[0].wait(30 * PATIENCE)
                alive = urls if step < 8 else urls[1:]
                await reader.read(session, alive[step % len(alive)], rng.randrange(1, 6000))
        assert reader.is_done
        assert set(reader.servers) == set(urls)
        assert reader.state.rows == model.State().apply_all(blocks).rows
        assert store.check() == []
    finally:
        for child in children:
            child.kill()
            child.wait(30 * PATIENCE)
        log.close()


def _put(store: Store, run: Run, chain: tuple[Run, ...]) -> None:
    store.switch(lambda m: m.with_changes(add=run, drop=chain, now_us=1))


def _start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    config = parse(
        f'''
        [bootstrap]
        listen = "127.0.0.1:{port}"
        data_dir = "{folder}/data"
        databases = ["shop"]
        '''
    )
    with (folder / f"server-{port}.log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, config.model_dump_json()],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{url}/readyz") as answer:
            return answer.status == 200
    return False
