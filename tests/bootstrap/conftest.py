"""Fixtures of the bootstrap room; every store is checked after its test."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.manifest import Store
from databus.common.config import BootstrapConfig
from databus.common.http.listening_socket import listening_socket
from tests.bootstrap.bench import Bench
from tests.bootstrap.model import CLOCK, START


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store, checked afterwards."""
    store = Store(tmp_path / "shop")
    store.create()
    yield store
    assert store.check() == []


@pytest.fixture
def log(store: Store) -> Iterator[HotLog]:
    """A log of the database shop, checked afterwards."""
    log = HotLog(store.folder / "log")
    log.bind("shop", CLOCK, START)
    yield log
    log.check()
    log.close()


@pytest.fixture
def memory_folder() -> Iterator[Callable[[], Path]]:
    """Gives another empty folder at each call, in memory where the system has that.

    For tests that make hundreds of stores and ask nothing about durability: there each
    fsync costs nothing.
    """
    shared = Path("/dev/shm")
    numbers = itertools.count()
    shared_folder = str(shared) if shared.is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared_folder) as folder:

        def another() -> Path:
            path = Path(folder) / str(next(numbers))
            path.mkdir()
            return path

        yield another


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A running server over a new, empty log."""
    bench = Bench(tmp_path)
    config = BootstrapConfig(data_dir=tmp_path, listen="127.0.0.1:0", databases=("shop",))
    listener = listening_socket(config.listen)
    bench.url = "http://{}:{}".format(*listener.getsockname()[:2])
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_bootstrap(config, listener, stop, bench.logs))
    async with aiohttp.ClientSession() as session:
        bench.session = session
        yield bench
    stop.set()
    await serving
    assert bench.store.check() == []
    bench.logs.close()
