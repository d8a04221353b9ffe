"""How many readers there are at once, what they keep busy, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.reading import answer_sender
from databus.bootstrap.reading.bootstrap_stream import PIECE_BYTES, BootstrapStream
from databus.bootstrap.reading.read_pool import READER_DESCRIPTORS, ReadPool
from databus.bootstrap.runs.open_run import OpenRun
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.client import DatabusClient
from databus.client.tables.table_reader import TableAddress, TableReader
from databus.common.checkpoint import Position
from databus.common.config import BootstrapConfig
from databus.common.errors import TooManyRequests
from databus.common.frame.frame_format import Op
from databus.common.http.listening_socket import listening_socket
from tests.bootstrap import model
from tests.bootstrap.bench import FRAMES, Bench
from tests.support.bootstrap_log import written_log
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually, within

STREAMS = ("bootstrap", "changes", "snapshot")
ROW_BYTES = 64 << 10


class Gate:
    """Reading the store waits here while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waiting = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def pass_through(self) -> None:
        with self._lock:
            self.waiting += 1
        self._open.wait(60)
        with self._lock:
            self.waiting -= 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """An open gate before each file of a store that is opened."""
    gate, opening = Gate(), LocalFiles.open
    gate.open()

    def waiting(files: LocalFiles, name: str) -> Any:
        gate.pass_through()
        return opening(files, name)

    monkeypatch.setattr(LocalFiles, "open", waiting)
    yield gate
    gate.open()


@contextlib.asynccontextmanager
async def serving(bench: Bench, **settings: Any) -> AsyncIterator[Bench]:
    """A server over the bench's store."""
    config = BootstrapConfig(
        data_dir=bench.data_dir, listen="127.0.0.1:0", databases=("shop",), **settings
    )
    listener, stop = listening_socket(config.listen), asyncio.Event()
    bench.url = "http://{}:{}".format(*listener.getsockname()[:2])
    task = asyncio.create_task(serve_bootstrap(config, listener, stop, bench.logs))
    async with aiohttp.ClientSession() as session:
        bench.session = session
        yield bench
    stop.set()
    await task


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Bench]:
    """A store with a base of 60 large rows, in groups of four."""
    bench = Bench(tmp_path / "data")
    bench.history = model.History(21, keys=200, payload_bytes=ROW_BYTES)
    bench.begin(300)
    yield bench
    assert bench.store.check() == []
    bench.logs.close()


async def readers(bench: Bench) -> dict[str, int]:
    """What the server's status reports of its readers."""
    _, document = await bench.get("/v1/status")
    found: dict[str, int] = document["readers"]
    return found


async def are_open(bench: Bench, count: int) -> bool:
    return (await readers(bench))["open"] == count


@contextlib.asynccontextmanager
async def requested(bench: Bench, endpoint: str) -> AsyncIterator[asyncio.Task[bytes]]:
    """A request that runs meanwhile, and is broken off at the end."""
    task = asyncio.create_task(bench.frames(endpoint))
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reader_more_than_there_may_be_is_told_when_to_try_again(
    full: Bench, gate: Gate
) -> None:
    async with serving(full, max_readers=2, read_threads=1), AsyncExitStack() as open_readers:
        gate.close()
        tasks = [
            await open_readers.enter_async_context(requested(full, endpoint))
            for endpoint in ("bootstrap", "snapshot")
        ]
        await eventually(lambda: are_open(full, 2))
        for refusals, endpoint in enumerate(STREAMS, 1):
            url = f"{full.url}/v1/shop/{endpoint}"
            async with full.session.get(url, headers=FRAMES) as answer:
                problem = await answer.json(content_type=None)
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert (problem["code"], problem["retry"]) == ("too_many_requests", True)
            assert "max_readers" in problem["detail"]
            assert await readers(full) == {"open": 2, "most": 2, "refused": refusals}
        assert (await full.get("/v1/shop/targetSCN"))[0] == 200, "short requests need no place"
        gate.open()
        async with within(30):
            answers = await asyncio.gather(*tasks)
        assert model.State().apply_all([answers[0]]).rows == full.truth().rows
        assert await full.frames("snapshot") == answers[1]
        assert await are_open(full, 0)


async def test_our_clients_wait_as_long_as_they_are_told_and_are_served_then(
    tmp_path: Path, gate: Gate
) -> None:
    bench = Bench(tmp_path / "data")
    bench.bind()
    bench.seed()
    bench.log.add_schemas([ORDERS])
    bench.log.append(window(500, [(Op.INSERT, ORDERS, 1)]), 1)
    bench.seal()
    end = bench.log.state().window
    async with serving(bench, max_readers=1), AsyncExitStack() as open_readers:
        gate.close()
        first = await open_readers.enter_async_context(requested(bench, "snapshot"))
        await eventually(lambda: are_open(bench, 1))
        client = DatabusClient(
            database="shop",
            relays=["http://127.0.0.1:1"],
            bootstraps=[bench.url],
            start="bootstrap",
            reconnect_s=0.001,
            reconnect_most_s=0.001,
        )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        table = TableReader(
            TableAddress("shop", "shop.orders", bootstraps=(bench.url,), give_up_s=0.5)
        )
        time = dt.datetime.fromtimestamp(1_700_000_001, dt.UTC).isoformat()
        position = asyncio.create_task(asyncio.to_thread(table.position_of, time))
        windows = client.awindows(idle_s=None)
        arriving = asyncio.ensure_future(anext(windows))
        await eventually(lambda: client.status.failure_count >= 2)
        assert "too_many_requests" in client.status.last_error
        failures, took_s = client.status.failure_count, loop.time() - began_s
        # Without the pauses there would be a failure every millisecond or so.
        assert took_s > 0.9 * (failures - 1)
        gate.open()
        async with within(30):
            await first
            assert await position == end
            assert (await arriving).scn == 500
        await windows.aclose()
    bench.logs.close()


async def test_a_reader_that_leaves_in_the_middle_ends_its_reading_and_frees_its_place(
    full: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = full.store.read().base
    assert base is not None
    groups = sum(1 for _ in full.store.open_run(base).row_groups())
    reads: list[int] = []
    frames, table = OpenRun.frames, OpenRun.table

    def noting_frames(opened: OpenRun, group: Any) -> Any:
        reads.append(group.first_row)
        return frames(opened, group)

    def noting_table(opened: OpenRun, group: Any, names: list[str]) -> Any:
        reads.append(group.first_row)
        return table(opened, group, names)

    monkeypatch.setattr(OpenRun, "frames", noting_frames)
    monkeypatch.setattr(OpenRun, "table", noting_table)
    async with serving(full, max_readers=1, read_threads=1):
        for endpoint in ("bootstrap", "snapshot"):
            reads.clear()
            url = f"{full.url}/v1/shop/{endpoint}"
            async with full.session.get(url, headers=FRAMES) as answer:
                assert await answer.content.read(100)
                assert await are_open(full, 1)
                answer.close()
            await eventually(lambda: are_open(full, 0), message=endpoint)
            seen = len(reads)
            assert 0 < seen < groups
            await full.get("/v1/status")
            assert len(reads) == seen
        # The thread is free as well: the next reader gets everything.
        assert model.State().apply_all([await full.frames()]).rows == full.truth().rows


async def test_a_reader_that_leaves_before_its_turn_frees_its_place_at_once(
    full: Bench, gate: Gate
) -> None:
    async with serving(full, max_readers=2, read_threads=1):
        gate.close()
        async with requested(full, "snapshot") as busy:
            await eventually(lambda: gate.waiting == 1)
            async with requested(full, "bootstrap"):
                await eventually(lambda: are_open(full, 2))
            await eventually(lambda: are_open(full, 1))
            assert gate.waiting == 1, "the only thread still reads for the first reader"
            gate.open()
            async with within(30):
                assert len(await busy) > ROW_BYTES


async def test_a_commit_time_is_no_longer_searched_when_its_reader_has_gone(
    full: Bench, gate: Gate
) -> None:
    full.write(2)
    full.seal()
    chain = full.store.read().chain
    async with serving(full, max_readers=1, read_threads=1):
        gate.close()
        until = dt.datetime.fromtimestamp(1_600_000_000, dt.UTC).isoformat()
        task = asyncio.create_task(full.get("/v1/shop/changes", until=until))
        await eventually(lambda: gate.waiting == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.open()
        await eventually(lambda: are_open(full, 0))
        assert len(chain) > 1


async def test_the_log_is_written_while_every_thread_of_readers_is_busy(
    full: Bench, tmp_path: Path, gate: Gate
) -> None:
    # More than asyncio's own threads, which the log writer uses.
    count = (os.cpu_count() or 1) + 8
    live = LiveRelay(tmp_path / "relay")
    live.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    async with (
        live.served(),
        serving(full, max_readers=2 * count, read_threads=count),
        AsyncExitStack() as open_readers,
    ):
        gate.close()
        for _ in range(2 * count):
            await open_readers.enter_async_context(requested(full, "snapshot"))
        await eventually(lambda: gate.waiting == count)
        async with written_log(tmp_path / "written", live.url) as log:
            for scn in range(2, 6):
                live.append(window(scn, [(Op.INSERT, ORDERS, scn)]))
                await eventually(lambda scn=scn: not log.is_new() and log.state().window.scn == scn)
        assert gate.waiting == count and await are_open(full, 2 * count)
        gate.open()
    live.close()


async def test_for_a_reader_that_takes_nothing_a_few_pieces_are_read_and_no_more(
    full: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("databus.bootstrap.http.bootstrap_server.PIECE_BYTES", ROW_BYTES)
    taken: list[int] = []
    pieces = BootstrapStream.pieces

    def noting(stream: BootstrapStream) -> Any:
        for piece in pieces(stream):
            taken.append(len(piece.frames))
            yield piece

    monkeypatch.setattr(BootstrapStream, "pieces", noting)
    async with serving(full, max_readers=1):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
        host, port = full.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 10)
        writer.write(
            b"GET /v1/shop/bootstrap HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Accept: application/vnd.databus.frames\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n")
        stalled_at = -1

        def has_stalled() -> bool:
            nonlocal stalled_at
            before, stalled_at = stalled_at, len(taken)
            return before == stalled_at > 0

        await eventually(has_stalled, poll_s=0.05)
        whole = sum(len(bytes(piece.frames)) for piece in pieces(_everything(full)))
        in_the_kernel = 1 << 20  # of both sockets, at most
        ahead = (answer_sender.PIECES_AHEAD + 3) * 4 * ROW_BYTES
        assert sum(taken) <= in_the_kernel + ahead < whole
        assert max(taken) <= 2 * ROW_BYTES < PIECE_BYTES
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await eventually(lambda: are_open(full, 0))


def _everything(bench: Bench) -> BootstrapStream:
    return model.whole_stream(bench.store, bench.log, target=Position(bench.history.position.scn))


async def test_the_limit_of_open_files_bounds_the_readers() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        pool = ReadPool(10_000, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert 150 < pool.most < 1024 // READER_DESCRIPTORS
    with contextlib.ExitStack() as places:
        for _ in range(pool.most):
            places.enter_context(pool.reader())
        with pytest.raises(TooManyRequests) as refused, pool.reader():
            raise AssertionError
        assert refused.value.details["retry_after_s"] >= 1
    with pool.reader():
        assert pool.readers == 1
    pool.close()
