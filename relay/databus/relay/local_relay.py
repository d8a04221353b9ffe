"""A whole relay in one process and one event loop, for tests, the demo and embedding.

The same fetchers and the same server as under the supervisor; only the processes are missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

from databus.common.access.listener_rules import require_protection
from databus.common.access.listener_tls import server_tls
from databus.common.config import Config, DatabaseConfig
from databus.common.errors import ConfigError, DatabusError, ServerUnavailable, StoreError
from databus.common.http.http_application import serve
from databus.common.http.listening_socket import listening_socket
from databus.relay.capture.source_catalogue import create_source
from databus.relay.http.relay_server import SERVER, RelayServer, make_relay_app
from databus.relay.processes.fetcher import Fetcher, Pace
from databus.relay.processes.reload import ConfigChanges, changes
from databus.relay.processes.wakeup import WakeupSender, make_wakeup
from databus.relay.ring.folder_locks import lock_data_dir
from databus.relay.sources.contract import Source

READY_POLL_S = 0.01

_log = logging.getLogger("databus.relay.local_relay")


class LocalRelay:
    """``async with LocalRelay(config) as relay: relay.url``

    Invariants:
        I1. Inside the block the address is served; ``ready`` returns when every ring is.
        I2. After the block nothing of it runs and all files are closed.
        I3. Each database is in ``fetchers``, or in ``refused`` with the error of its folder:
            that one is ``failed``, and the others are read.

    Owner: one event loop.
    Raises: ServerUnavailable if the address is taken, StoreBusy if another relay has the
        folder; the error that ended a fetcher or the server is raised at the end of the block.
    """

    def __init__(
        self,
        config: Config,
        *,
        pace: Pace | None = None,
        make_source: Callable[[DatabaseConfig], Source] = create_source,
        jitter: random.Random | None = None,
    ) -> None:
        if config.relay is None:
            raise ConfigError("the configuration has no [relay] section")
        if config.cluster is not None:
            raise ConfigError("a relay of a [cluster] has processes: run databus relay -c FILE")
        self.config = config
        self.relay_config = config.relay
        self.url = ""
        self.fetchers: dict[str, Fetcher] = {}
        self.refused: dict[str, DatabusError] = {}
        self._pace = pace
        self._make_source = make_source
        self._jitter = jitter
        self._stop = asyncio.Event()
        self._server: RelayServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        require_protection(self.relay_config.listen, self.config.http, self.config.auth)
        tls = server_tls(self.config.http.tls)
        listener = listening_socket(self.relay_config.listen)
        host, port = listener.getsockname()[:2]
        self.url = f"{self.config.http.scheme}://{host}:{port}"
        try:
            self._lock_fd = lock_data_dir(self.relay_config.data_dir)
        except StoreError:
            listener.close()
            raise
        wakeups = {database.name: make_wakeup() for database in self.config.database}
        for database in self.config.database:
            self._make_fetcher(database, wakeups[database.name])
        app = make_relay_app(self.config, wakeups=wakeups)
        self._server = app[SERVER]
        started = asyncio.Event()
        self._serving = asyncio.create_task(
            serve(
                app,
                listener,
                self._stop,
                started=started.set,
                max_connections=self.relay_config.max_connections,
                tls=tls,
            )
        )
        for database in self.config.database:
            self._start_fetcher(database.name)
        await started.wait()
        return self

    def _make_fetcher(self, database: DatabaseConfig, wakeup_fd: int) -> None:
        # Both sides close their own descriptor.
        wakeup = WakeupSender((os.dup(wakeup_fd),))
        self.refused.pop(database.name, None)
        try:
            self.fetchers[database.name] = Fetcher(
                database,
                self.relay_config.data_dir,
                wakeup=wakeup,
                make_source=self._make_source,
                pace=self._pace,
                jitter=self._jitter,
            )
        except DatabusError as error:
            wakeup.close()
            self.refused[database.name] = error
            _log.error("%s is not read: %s", database.name, error)

    def _start_fetcher(self, name: str) -> None:
        if name in self.refused:
            return
        self._fetching[name] = asyncio.create_task(self.fetchers[name].run())

    async def reload(self, config: Config) -> ConfigChanges:
        """Apply another configuration: databases are added, changed and removed.

        Raises:
            ConfigError: it needs a restart; nothing was changed.
        """
        found = changes(self.config, config)
        self.config = config
        server = self._server
        assert server is not None
        for name in found.removed:
            server.remove(name)
        for name in (*found.removed, *(database.name for database in found.changed)):
            if self.refused.pop(name, None) is None:
                self.fetchers.pop(name).stop()
                await self._fetching.pop(name)
        for database in (*found.added, *found.changed):
            # A wake-up is shared with the server; a database that the server has keeps its own.
            known = server.databases.get(database.name)
            fd = make_wakeup() if known is None else known.wakeup.fileno()
            self._make_fetcher(database, fd)
            server.add(database, fd if known is None else -1)
            self._start_fetcher(database.name)
        return found

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for fetcher in self.fetchers.values():
            fetcher.stop()
        tasks = [*self._fetching.values(), *([self._serving] if self._serving else [])]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        os.close(self._lock_fd)
        if error is None:
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def ready(self, timeout_s: float = 30.0) -> None:
        """Return when every database has a ring that can be served.

        Raises:
            ServerUnavailable: one is refused, or has none after ``timeout_s``; the message names
                the reason.
        """
        if self.refused:
            reasons = "; ".join(f"{name}: {error}" for name, error in self.refused.items())
            raise ServerUnavailable(f"not ready: {reasons}")
        try:
            async with asyncio.timeout(timeout_s):
                while not all(fetcher.intake for fetcher in self.fetchers.values()):
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            late = [f"{n}: {f.status.error}" for n, f in self.fetchers.items() if not f.intake]
            raise ServerUnavailable(f"not ready after {timeout_s:g} s: {'; '.join(late)}") from None
