"""The relay as its own processes, over the generator, and what its ring holds afterwards."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from databus.common.checkpoint import Position
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView, Op
from databus.common.table_state import TableState, decode_table_state
from databus.relay.ring.ring import Ring
from tests.support.config_text import generator_text
from tests.support.processes import wait_process_gone
from tests.support.waiting import PATIENCE, eventually_sync

PROGRAM = """
import logging, sys
from databus.common.config import load
from databus.relay.processes import supervisor as relay_supervisor
logging.basicConfig(level=logging.INFO)
# A test kills children more often than they end in operation.
relay_supervisor.RESTART_MOST_S = 0.2
relay_supervisor.run_relay(
    load(sys.argv[1]),
    lambda supervisor: print(supervisor.url, flush=True),
    lambda: load(sys.argv[1]),
)
"""


class RelayProcess:
    """A supervisor with its children, in a session of its own.

    Owner: the test; ``end`` leaves no process behind.
    """

    def __init__(self, config_path: Path, *, inside: Sequence[str] = ()) -> None:
        """``inside`` comes before the command."""
        self.log = config_path.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-c", PROGRAM, str(config_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.log.read_text()

    @classmethod
    def streaming(cls, folder: Path, events_per_second: int) -> Self:
        """A relay over the generator, once it streams the database ``gen``."""
        config = folder / "relay.toml"
        config.write_text(generator_text(folder, events_per_second))
        relay = cls(config)
        try:
            relay.ready()
            # A ring whose first sync fails is opened again by the same process.
            eventually_sync(lambda: relay.state("gen")["state"] == "streaming", 60, "it streams")
        except BaseException:
            relay.end()
            raise
        return relay

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def children(self, module: str) -> list[psutil.Process]:
        """Child processes that run a module."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    found.append(child)
        return found

    def fetcher(self) -> psutil.Process:
        """The fetcher, once it runs."""
        found = eventually_sync(lambda: self.children("databus.relay.processes.fetcher"), 30)
        return found[0]

    def state(self, database: str) -> dict[str, Any]:
        """What the fetcher of a database says, as the workers pass it on."""
        documents = self.get("/v1/status")["databases"]
        found: dict[str, Any] = next(d for d in documents if d["name"] == database)
        return found

    def newest_scn(self, database: str) -> int:
        """Where its ring ends; 0 while the ring has nothing."""
        return int(self.state(database).get("max", {}).get("scn", 0))

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with urllib.request.urlopen(self.url + path, timeout=20 * PATIENCE) as answer:
            return json.load(answer)

    def send(self, method: str, path: str, body: Any) -> Any:
        """The JSON answer to a request with a JSON body."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=20 * PATIENCE) as answer:
            return json.load(answer)

    def ready(self, timeout_s: float = 60.0) -> None:
        """Return when the relay is ready."""

        def is_ready() -> bool:
            try:
                with urllib.request.urlopen(self.url + "/readyz", timeout=20 * PATIENCE) as answer:
                    return bool(answer.status == 200)
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                return False

        eventually_sync(is_ready, timeout_s, f"ready; log: {self.log.read_text()[-2000:]}")

    def end(self) -> int:
        """SIGTERM, and SIGKILL if that is not enough; the exit code."""
        assert self.process.stdout is not None
        below = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(15 * PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(5 * PATIENCE)
        for child in below:
            wait_process_gone(child.pid)
        self.process.stdout.close()
        return code


def ring_position(folder: Path) -> Position:
    """Up to where the ring in ``folder`` is, for a caller that waits: its frames are not read."""
    with Ring.open_reader(folder) as reader:
        return reader.snapshot().max


def ring_frames(folder: Path) -> list[FrameView]:
    """Every frame that the ring in ``folder`` holds, each fully checked."""
    with Ring.open_reader(folder) as reader:
        state = reader.snapshot()
        ring_position, data = state.head, b""
        while ring_position < state.tail:
            frames, ring_position = reader.read(ring_position, 1 << 30)
            data += bytes(frames)
        return list(frame_format.iter_frames(data))


def table_states(folder: Path) -> list[TableState]:
    """The states of tables in the ring, in order."""
    return [
        decode_table_state(bytes(view.after or b""))
        for view in ring_frames(folder)
        if view.op == Op.TABLE_STATE
    ]
