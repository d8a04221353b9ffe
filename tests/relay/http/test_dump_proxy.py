"""What is answered where the fetcher is slow: that, and not that it is restarted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from databus.common.errors import ServerUnavailable
from databus.relay.http import dump_proxy


@pytest.mark.parametrize(
    ("failure", "said"),
    [(TimeoutError(), "has not answered within 30 s"), (ConnectionRefusedError(), "restarted")],
)
async def test_a_fetcher_that_takes_its_time_is_not_said_to_be_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, failure: Exception, said: str
) -> None:
    async def ask(*_: object) -> Any:
        raise failure

    async def body(_: object) -> bytes:
        return b""

    monkeypatch.setattr(dump_proxy, "_ask", ask)
    monkeypatch.setattr(dump_proxy, "body_of", body)
    database: Any = SimpleNamespace(
        name="shop", folder=SimpleNamespace(socket=tmp_path / "fetcher.sock")
    )
    request: Any = None
    with pytest.raises(ServerUnavailable, match=said) as refused:
        await dump_proxy.pass_on(request, database)
    assert ("restarted" in refused.value.message) == (said == "restarted")
