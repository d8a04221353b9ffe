"""Fixtures of SQLite as a source: a file, its writer, and its source."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from tests.support.sqlite_source import TABLES, config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "shop.db"
    with sqlite3.connect(file) as connection:
        connection.executescript(TABLES)
    connection.close()
    return file


@pytest.fixture
def writer(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


@pytest.fixture
async def source(path: Path) -> AsyncIterator[SqliteSource]:
    opened = SqliteSource(config(path))
    await opened.open()
    yield opened
    await opened.close()
