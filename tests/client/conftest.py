"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.client.scripted_server import ScriptedServer
from tests.client.shop import SCHEMAS

StartServer = Callable[..., Awaitable[ScriptedServer]]


@pytest.fixture
async def scripted() -> AsyncIterator[StartServer]:
    """``server = await scripted(...)``; stopped after the test."""
    started: list[ScriptedServer] = []

    async def start(*windows: bytes, **settings: Any) -> ScriptedServer:
        server = ScriptedServer(**{"schemas": list(SCHEMAS)} | settings)
        server.append(*windows)
        started.append(server)
        return await server.start()

    yield start
    for server in started:
        await server.stop()
