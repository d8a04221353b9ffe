"""The relay's parent process: one fetcher process per database and N HTTP workers.

It binds the sockets, makes the wake-ups, starts the children and restarts whichever dies,
with back-off, while the others go on.  It reads no source and serves no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from databus.common.config import Config, RelayConfig
from databus.common.errors import ConfigError
from databus.common.http import listening_socket
from databus.relay.handover import HANDOVER_FLAG, Handover
from databus.relay.wakeup import make_wakeup

FETCHER_MODULE = "databus.relay.fetcher"
WORKER_MODULE = "databus.relay.server"
RESTART_FIRST_S = 0.1
RESTART_MOST_S = 10.0
STEADY_S = 10.0
STOP_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Child:
    """A process that is kept running: its module and what it is told."""

    name: str
    module: str
    handover: Handover


def free_address(address: str) -> str:
    """``address`` with its port chosen, once it is sure that nobody else listens there.

    Raises:
        ServerUnavailable: somebody does.
    """
    with listening_socket(address) as probe:
        host = address.rpartition(":")[0]
        return f"{host}:{probe.getsockname()[1]}"


class Supervisor:
    """Keeps the relay's processes running.

    Invariants:
        I1. There is at most one process per child: the next starts when the last is reaped.
        I2. A child that dies takes no other with it.
        I3. No child outlives this process.

    Owner: one event loop in the main thread, for the kernel ties the children to the thread
    that started them.
    Raises: ServerUnavailable from the constructor where the address is taken.
    """

    def __init__(self, config: Config, *, jitter: random.Random | None = None) -> None:
        if config.relay is None:
            raise ConfigError("the configuration has no [relay] section")
        if not config.database:
            raise ConfigError("the configuration has no [[database]] section to serve")
        self.pids: dict[str, int] = {}
        self.restart_count = 0
        self._jitter = jitter or random.Random()
        self._stopping = asyncio.Event()
        relay: RelayConfig = config.relay
        self.address = free_address(relay.listen)
        self._sockets: list[socket.socket] = []
        self._wakeups: list[int] = []
        try:
            self.children = self._make_children(config, relay)
        except BaseException:
            self._close()
            raise

    def _make_children(self, config: Config, relay: RelayConfig) -> list[Child]:
        names = [database.name for database in config.database]
        of_database: dict[str, list[int]] = {name: [] for name in names}
        workers = []
        for number in range(relay.workers):
            listener = listening_socket(self.address, reuse_port=True)
            self._sockets.append(listener)
            wakeups = {name: make_wakeup() for name in names}
            self._wakeups.extend(wakeups.values())
            for name, fd in wakeups.items():
                of_database[name].append(fd)
            handover = Handover(
                config,
                os.getpid(),
                worker=number,
                listen_fd=listener.fileno(),
                wakeups=wakeups,
            )
            workers.append(Child(f"worker {number}", WORKER_MODULE, handover))
        fetchers = [
            Child(
                f"fetcher {name}",
                FETCHER_MODULE,
                Handover(config, os.getpid(), database=name, wakeup_fds=tuple(of_database[name])),
            )
            for name in names
        ]
        return [*fetchers, *workers]

    @property
    def url(self) -> str:
        """Where the workers are reached."""
        host, _, port = self.address.rpartition(":")
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"

    def stop(self) -> None:
        """Let ``run`` end all children and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Start all children and keep them running until ``stop``."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in self.children:
                    group.create_task(self._keep(child))
        finally:
            self._close()

    def _close(self) -> None:
        for listener in self._sockets:
            listener.close()
        for fd in self._wakeups:
            os.close(fd)
        self._sockets, self._wakeups = [], []

    async def _keep(self, child: Child) -> None:
        delay_s = RESTART_FIRST_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            process = await self._start(child)
            try:
                code = await self._until_end(process)
            finally:
                self.pids.pop(child.name, None)
                if process.returncode is None:
                    process.kill()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_s >= STEADY_S:
                delay_s = RESTART_FIRST_S
            pause_s = delay_s * self._jitter.uniform(0.5, 1.0)
            delay_s = min(RESTART_MOST_S, delay_s * 2)
            self.restart_count += 1
            _log.warning(
                "%s (pid %d) ended with %s; restart in %.1f s",
                child.name, process.pid, _describe(code), pause_s,
            )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _start(self, child: Child) -> asyncio.subprocess.Process:
        read_fd, write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                child.module,
                HANDOVER_FLAG,
                str(read_fd),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(read_fd, *child.handover.fds),
                process_group=0,  # ctrl-C in a terminal is for this process alone
            )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        self.pids[child.name] = process.pid
        text = json.dumps(child.handover.to_json()).encode()
        await asyncio.to_thread(_tell, write_fd, text)
        return process

    async def _until_end(self, process: asyncio.subprocess.Process) -> int:
        """The exit code; after ``stop`` the process is asked to end, and then made to."""
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                process.terminate()
                await asyncio.wait({ended}, timeout=STOP_S)
            if not ended.done():
                _log.warning("pid %d does not end within %g s and is killed", process.pid, STOP_S)
                process.kill()
            return await ended
        finally:
            stopping.cancel()
            ended.cancel()


def _tell(fd: int, text: bytes) -> None:
    # A child that is dead already does not read; its end is noticed elsewhere.
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(text)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


async def supervise(config: Config, started: Callable[[Supervisor], None]) -> None:
    """Run the relay until SIGTERM or SIGINT; ``started`` is called once the address is bound."""
    supervisor = Supervisor(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    started(supervisor)
    await supervisor.run()


def run_relay(
    config: Config, started: Callable[[Supervisor], None] = lambda supervisor: None
) -> None:
    """The relay's process: returns after SIGTERM or SIGINT, when all children have ended.

    Raises:
        ConfigError: there is nothing to serve.
        ServerUnavailable: the address is taken.
    """
    asyncio.run(supervise(config, started))
