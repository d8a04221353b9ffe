"""Neither the client nor the relay leaves a socket for the garbage collector to close.

The collector says so in whichever test it runs, so the suite does not fail for it there
(pyproject.toml, filterwarnings); here it is called at a known moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databus.client.testing import Recorder
from databus.common.frame.frame_format import Op
from tests.client.test_client import make
from tests.support.config_text import relay_text
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.processes import Processes
from tests.support.waiting import eventually


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    gc.collect()  # what others left is not ours
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    left = [str(one.message) for one in said if issubclass(one.category, ResourceWarning)]
    assert left == []


def test_what_is_left_open_is_found() -> None:
    with pytest.raises(AssertionError, match="unclosed"), nothing_left_open():
        socket.socket()


@pytest.mark.parametrize("end", ["stopped", "cancelled", "its relay is killed"])
def test_a_client(
    processes: Processes, tmp_path: Path, free_port: Callable[[], int], end: str
) -> None:
    port = free_port()
    path = tmp_path / "databus.toml"
    url = "generator://?events_per_second=500&seed=1"
    path.write_text(relay_text(url, "*", port=port, ring_bytes="1MiB"))
    relay = processes.start("relay", "-c", path)
    relay.wait_ready(f"http://127.0.0.1:{port}/readyz", 40.0)

    async def consume() -> None:
        recorder = Recorder()
        client = make(recorder, f"http://127.0.0.1:{port}")
        serving = asyncio.create_task(client.serve())
        await recorder.until(lambda r: len(r.checkpoints) > 3)
        if end == "its relay is killed":
            relay.kill9()
            await eventually(lambda: not client.status.is_flowing)
        if end == "cancelled":
            serving.cancel()
        else:
            client.stop()
        await asyncio.wait({serving})

    with nothing_left_open():
        asyncio.run(consume())


@pytest.mark.parametrize("wants", ["follow=true", "wait=30", "max_bytes=4000000"])
@pytest.mark.parametrize("left", [True, False], ids=["its reader has left", "its reader stays"])
def test_a_relay(tmp_path: Path, wants: str, left: bool) -> None:
    relay = LiveRelay(tmp_path, ring_bytes=8 << 20)
    relay.append(
        *(window(scn, [(Op.INSERT, ORDERS, scn)], text="x" * 9000) for scn in range(1, 500))
    )

    async def serve(reader: socket.socket) -> None:
        async with relay.served():
            host, port = relay.url.removeprefix("http://").split(":")
            start = "latest" if wants.startswith("wait") else "oldest"
            request = f"GET /v1/shop/stream?start={start}&{wants} HTTP/1.1\r\nHost: {host}\r\n\r\n"
            await asyncio.to_thread(reader.connect, (host, int(port)))
            await asyncio.to_thread(reader.sendall, request.encode())
            if not wants.startswith("wait"):
                assert await asyncio.to_thread(reader.recv, 100)
            if left:
                reader.close()

    with socket.socket() as reader:
        with nothing_left_open():
            asyncio.run(serve(reader))
    relay.close()
