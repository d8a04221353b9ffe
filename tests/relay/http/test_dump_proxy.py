"""What is answered where the fetcher is slow: that, and not that it is restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from databus.common.errors import ServerUnavailable
from databus.relay.http import dump_proxy


@pytest.mark.parametrize(
    ("is_slow", "said"), [(True, r"has not answered within 0\.2 s"), (False, "restarts it")]
)
async def test_a_slow_fetcher_is_not_reported_as_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_slow: bool, said: str
) -> None:
    async def body(_: object) -> bytes:
        return b""

    closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side gives up
        writer.close()
        await writer.wait_closed()
        closed.set()

    monkeypatch.setattr(dump_proxy, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(dump_proxy, "body_of", body)
    socket = tmp_path / "fetcher.sock"
    server = await asyncio.start_unix_server(silent, socket) if is_slow else None
    database: Any = SimpleNamespace(name="shop", folder=SimpleNamespace(socket=socket))
    request: Any = SimpleNamespace(method="GET", rel_url="/v1/shop/dumps", headers={})
    with pytest.raises(ServerUnavailable, match=said) as refused:
        await dump_proxy.pass_on(request, database)
    assert ("restarts" in refused.value.message) == (not is_slow)
    if server is not None:
        await closed.wait()
        server.close()
        await server.wait_closed()
