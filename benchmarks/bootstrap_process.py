"""A bootstrap server in a process of its own, and readers that cost it little.

They ask by HTTP/1.0, whose bodies are the frames and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.loopback import http_get
from databus.common.config import BootstrapConfig, Config
from databus.common.frame import frame_format

BUFFER_BYTES = 1 << 20
REQUEST = b"GET /v1/shop/bootstrap HTTP/1.0\r\nAccept: application/vnd.databus.frames\r\n\r\n"


@contextlib.contextmanager
def server(data_dir: Path) -> Iterator[int]:
    """A bootstrap server process over the store; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    section = BootstrapConfig(listen=f"127.0.0.1:{port}", data_dir=data_dir, databases=("shop",))
    code = (
        "import sys; from databus.bootstrap import run_server; "
        "from databus.common.config import Config; "
        "run_server(Config.model_validate_json(sys.argv[1]))"
    )
    document = Config(bootstrap=section).model_dump_json()
    child = subprocess.Popen([sys.executable, "-c", code, document])
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError("the server does not come up")
            time.sleep(0.05)
        yield port
    finally:
        child.terminate()
        child.wait(30)


class RowOrder:
    """How many rows there are, and a hash of their positions."""

    def __init__(self) -> None:
        self.rows = 0
        self._digest = hashlib.sha256()

    @property
    def hash(self) -> str:
        """Of the rows so far."""
        return self._digest.hexdigest()[:16]

    def add(self, columns: frame_format.FrameColumns) -> None:
        """Further frames."""
        is_row = columns.op < frame_format.FIRST_CONTROL_OP
        self.rows += int(is_row.sum())
        self._digest.update(columns.scn[is_row].tobytes())
        self._digest.update(columns.seq[is_row].tobytes())


@dataclass(frozen=True, slots=True)
class Read:
    """One full bootstrap."""

    seconds: float
    frame_bytes: int


def read_over_http(
    port: int, look: Callable[[frame_format.FrameColumns], object] | None = None
) -> Read:
    """Take a full bootstrap and check every frame; ``look`` is shown their columns.

    They are received into one buffer and checked where they lie; a frame that is cut off is
    moved to its beginning.
    """
    size = have = 0
    buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
    began_s = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(REQUEST)
        with connection.makefile("rb", buffering=0) as answer:
            status, headers = answer.readline(), [*iter(answer.readline, b"\r\n")]
            if status.split()[1] != b"200":
                raise RuntimeError(f"the server answered {status!r}, {headers}")
            while count := answer.readinto(buffer[have:].data):
                have += count
                columns = frame_format.scan(buffer[:have])
                if look:
                    look(columns)
                size += columns.stop
                buffer[: have - columns.stop] = buffer[columns.stop : have]
                have -= columns.stop
    if have:
        raise RuntimeError(f"the answer ended {have} bytes into a frame")
    return Read(time.perf_counter() - began_s, size)


def receive_over_http(port: int) -> float:
    """Seconds of a full bootstrap whose reader, at C speed, receives and looks at nothing."""
    began_s = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        http_get(connection, "/v1/shop/bootstrap", bytearray(BUFFER_BYTES), began_s + 120)
    return time.perf_counter() - began_s
