"""Log writers in processes of their own, each for a group of databases.

One process decides which database belongs to which writer, starts the writers and restarts one that
has died.  What a writer does is in ``log_writer``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import pickle
import sys
import threading
import time
from pathlib import Path

from databus.bootstrap.log.hot_log import FOLDER
from databus.bootstrap.log.relay_api import RelayApi, credentials_of
from databus.bootstrap.processes.log_writer import RETRY_S, SEEDED_POLL_S
from databus.bootstrap.processes.log_writers import WriterGroup, listed_databases
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.common.config import BootstrapConfig

_LOG = logging.getLogger("databus.bootstrap.processes.writer_processes")

WRITER_CHILD = """
import sys
from databus.bootstrap.processes.bootstrap_processes import writer_child
writer_child(int(sys.argv[1]))
"""
WRITER_RESTART_S = 1.0
STOP_S = 10.0


class WriterProcess:
    """One writer and its databases.

    Invariants:
        I1. A database belongs to one writer for as long as this object lives; a writer that died is
            started again with the same ones.
        I2. A writer ends with us in every case: its stdin ends.

    Owner: one event loop.
    """

    def __init__(self, number: int, config: BootstrapConfig, logs: OpenLogs) -> None:
        self.number = number
        self.databases: list[str] = []
        self._config = config
        self._logs = logs
        self._stdin: asyncio.StreamWriter | None = None

    def add(self, database: str) -> None:
        """Have it write one database more."""
        self.databases.append(database)
        self._send(json.dumps([database]).encode())

    async def keep(self, stop: asyncio.Event) -> None:
        """Run it until ``stop`` is set, and restart it whenever it dies."""
        while not stop.is_set():
            try:
                what = f"ended with {await self._run(stop)}"
            except (OSError, RuntimeError) as error:
                # The system has no process, thread or pipe: the others continue without it.
                what = f"does not start: {error}"
            if not stop.is_set():
                self._report(f"log writer {self.number} {what}; it is restarted")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), WRITER_RESTART_S)

    async def _run(self, stop: asyncio.Event) -> int:
        """The exit code of a process that died, or that we ended because we stop."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER_CHILD, str(self.number), stdin=asyncio.subprocess.PIPE
        )
        try:
            self._stdin = child.stdin
            # Not in the arguments, which every user of the machine can read.
            self._send(base64.b64encode(pickle.dumps(self._config)))
            self._send(json.dumps(self.databases).encode())
            for database in self.databases:
                self._logs.words.pop(self._log_folder(database), None)
            ended = asyncio.create_task(child.wait())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for end in (child.terminate, child.kill):
                if not ended.done():
                    with contextlib.suppress(ProcessLookupError):
                        end()
                    await asyncio.wait({ended}, timeout=STOP_S)
            return await ended
        finally:
            if self._stdin is not None:
                self._stdin.close()
            self._stdin = None

    def _send(self, line: bytes) -> None:
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(line + b"\n")

    def _log_folder(self, database: str) -> Path:
        return Path(self._config.data_dir) / database / FOLDER

    def _report(self, error: str) -> None:
        """Log that it died, and show it in the status of its databases."""
        _LOG.warning("%s", error)
        document = {
            "state": "down",
            "at_us": time.time_ns() // 1000,
            "number": self.number,
            "error": error,
        }
        for database in self.databases:
            self._logs.words[self._log_folder(database)] = document


async def keep_writers(config: BootstrapConfig, logs: OpenLogs, stop: asyncio.Event) -> None:
    """Run ``config.writers`` writers until ``stop`` is set.

    A database goes to the writer that has the fewest; those that a relay adds later too.
    """
    writers = [WriterProcess(number, config, logs) for number in range(1, config.writers + 1)]
    known: set[str] = set()
    async with asyncio.TaskGroup() as group:
        for writer in writers:
            group.create_task(writer.keep(stop))
        async with RelayApi(config.relays, credentials_of(config)) as relay:
            while not stop.is_set():
                for name in await listed_databases(config, relay):
                    if name not in known:
                        known.add(name)
                        min(writers, key=lambda one: len(one.databases)).add(name)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), SEEDED_POLL_S if known else RETRY_S)


def received_group(number: int) -> tuple[BootstrapConfig, WriterGroup] | None:
    """What the parent sent to a writer: its configuration, and its databases, now and later.

    None if the parent was gone before.  The process ends when the parent does.
    """
    # Not Python's stdin: the interpreter could not exit while a thread waits in that.
    lines = open(0, "rb", closefd=False)  # noqa: SIM115  the thread reads it to the end
    line = lines.readline()
    if not line:
        return None
    config = pickle.loads(base64.b64decode(line))
    group = WriterGroup(number)
    threading.Thread(target=group.follow, args=(lines,), daemon=True).start()
    return config, group
