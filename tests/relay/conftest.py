"""A worker over a ring that the test fills, and a session to ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.live_relay import LiveRelay


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[LiveRelay]:
    live = LiveRelay(tmp_path)
    async with live.served():
        yield live
    live.close()
