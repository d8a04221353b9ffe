"""Fixtures of the bootstrap room; every store is checked after its test."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databus.bootstrap.log import HotLog
from databus.bootstrap.manifest import Store
from tests.bootstrap.model import CLOCK, START
from tests.support.s3_server import Faults, S3Server


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
    place = str(shared) if shared.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder:

        def another() -> Path:
            path = Path(folder) / str(next(numbers))
            path.mkdir()
            return path

        yield another


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(_s3: S3Server) -> Iterator[S3Server]:
    """A private S3 server that does nothing wrong until it is told to."""
    yield _s3
    _s3.faults = Faults()
