"""Private servers of Redis and NATS: Debian's programs, on free ports, in their own folders."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.brokers import find
from databus.cli.demo.private_servers import free_port
from tests.support.waiting import PATIENCE


class KeyValueServer(ABC):
    """One server.

    Owner: one test process.
    """

    program: str

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.port = free_port()
        found = find(self.program)
        if found is None:
            pytest.skip(f"{self.program} is not here; scripts/brokers.sh gets it")
        self._path, self._environment = found
        self._log = (folder / "log").open("w")
        self.start()

    @property
    @abstractmethod
    def arguments(self) -> list[str]:
        """The arguments of the program."""

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self.process = subprocess.Popen(
            [self._path, *self.arguments],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=self.folder,
            env=self._environment,
        )  # fmt: skip
        deadline_s = time.monotonic() + 30 * PATIENCE
        while not self._is_ready():
            log = (self.folder / "log").read_text()[-3000:]
            assert self.process.poll() is None, log
            assert time.monotonic() < deadline_s, log
            time.sleep(0.01)

    def _is_ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill9(self) -> None:
        """Kill it, as a crash would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End it; its data are of no use any more."""
        if self.process.poll() is None:
            self.kill9()
        self._log.close()


class RedisServer(KeyValueServer):
    """Redis, whose commands are durable when they are answered."""

    program = "redis-server"

    def __init__(self, folder: Path, *options: str) -> None:
        self._options = options
        super().__init__(folder)
        self.url = f"redis://127.0.0.1:{self.port}/0"

    @property
    def arguments(self) -> list[str]:
        """The arguments of the program."""
        return [
            "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes",
            "--unixsocket", f"{self.folder}/socket", *self._options,
        ]  # fmt: skip

    def _is_ready(self) -> bool:
        import redis

        if not super()._is_ready():
            return False
        try:
            return bool(self.ask("PING"))
        except redis.exceptions.RedisError:  # It reads its file.
            return False

    def client(self) -> Any:
        """A connection of its own."""
        import redis

        return redis.Redis(port=self.port, protocol=2, socket_timeout=30 * PATIENCE)

    def ask(self, *command: Any) -> Any:
        """The answer to a command, on a connection of its own."""
        with self.client() as client:
            return client.execute_command(*command)


class NatsServer(KeyValueServer):
    """NATS with JetStream."""

    program = "nats-server"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"nats://127.0.0.1:{self.port}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of the program."""
        return ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder / "data")]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server for the whole run."""
    server = RedisServer(tmp_path_factory.mktemp("redis") / "server")
    yield server
    server.close()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server for the whole run."""
    server = NatsServer(tmp_path_factory.mktemp("nats") / "server")
    yield server
    server.close()
