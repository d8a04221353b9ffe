"""Bootstrap servers of one cluster, each a process that may be killed, over one store."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.runs.manifest import Store
from databus.cli.demo.private_servers import free_port
from databus.common.config import BootstrapConfig, load
from tests.support.config_text import section
from tests.support.processes import DatabusProcess, Processes, http_status
from tests.support.s3_server import S3Server
from tests.support.waiting import PATIENCE, eventually_sync

LEASE_S = 2


class BootstrapCluster:
    """Servers ``a``, ``b``, ... of the database ``shop``.

    With ``s3`` each has a folder of its own, otherwise they share one.

    Owner: one test; ``processes`` ends what is left.
    """

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        relays: list[str],
        names: str,
        s3: S3Server | None,
        **settings: object,
    ) -> None:
        self._folder = folder
        self._processes = processes
        self.urls = {name: f"http://127.0.0.1:{free_port()}" for name in names}
        self.servers: dict[str, DatabusProcess] = {}
        store: dict[str, object] = {}
        if s3 is not None:
            options = s3.options()
            secret = {"secret_key": options.secret_key.get_secret_value(), "lease_ttl": LEASE_S}
            given = options.model_dump(include={"endpoint", "region", "access_key"}) | secret
            store = {"store": s3.empty_prefix(), "s3": given}
        for name in names:
            mine = {
                "listen": self.urls[name].removeprefix("http://"),
                "data_dir": f"bootstrap-{name}" if s3 else "bootstrap",
                "relays": relays,
                "databases": ["shop"],
                "cluster": True,
                "segment_every": "1s",
                "apply_every": "2s",
                "merge_with": "process",
                **store,
                **settings,
            }
            self._path(name).write_text(section("[bootstrap]", mine))

    def _path(self, name: str) -> Path:
        return self._folder / f"server-{name}.toml"

    def start(self, *names: str, arguments: tuple[str, ...] = ()) -> None:
        """Start servers, or start them again."""
        for name in names:
            path = self._path(name)
            self.servers[name] = self._processes.start(
                "bootstrap", "-c", path, *arguments, name=f"server-{name}"
            )

    def wait_ready(self, *names: str) -> None:
        """Return when servers serve whole tables."""
        for name in names:
            eventually_sync(partial(self.is_ready, name), 60, f"{name} is ready")

    def is_ready(self, name: str) -> bool:
        """Whether a server serves whole tables."""
        return self.document(name).get("state") == "seeded"

    def document(self, name: str) -> dict[str, Any]:
        """What a server reports of the database; empty while it does not answer."""
        url = f"{self.urls[name]}/v1/status"
        with contextlib.suppress(OSError, ValueError, StopIteration):
            if http_status(url) == 200:
                with urllib.request.urlopen(url, timeout=10 * PATIENCE) as answer:
                    found: dict[str, Any] = next(iter(json.load(answer)["databases"]))
                    return found
        return {}

    def writer(self, but: str = "") -> str:
        """The server that writes the log, once there is one."""

        def found() -> str:
            for name, server in self.servers.items():
                if name == but or not server.running:
                    continue
                word = self.document(name).get("writer", {})
                if word.get("state") == "running" and word["pid"] == server.pid:
                    return name
            return ""

        return eventually_sync(found, 60, "a server that writes the log", poll_s=0.2)

    def state(self, name: str) -> str:
        """The state of a server's log writer."""
        return str(self.document(name).get("writer", {}).get("state"))

    def wait_state(self, name: str, state: str) -> None:
        """Return when the log writer of a server has a state."""
        eventually_sync(lambda: self.state(name) == state, 60, f"{name} is {state}", poll_s=0.2)

    def wait_sealed(self) -> None:
        """Return when a segment more is in the store."""
        store = self.store()
        ends = {run.stop for run in store.read().runs}
        eventually_sync(lambda: {r.stop for r in store.read().runs} - ends, 60, "one has sealed")

    def kill(self, name: str) -> None:
        """SIGKILL of a server and its applier."""
        self.servers[name].kill9()

    def config(self, name: str) -> BootstrapConfig:
        """The configuration of a server."""
        section = load(self._path(name)).bootstrap
        assert section is not None
        return section

    def store(self) -> Store:
        """The store of the database."""
        return Stores(self.config(next(iter(self.urls)))).store("shop")
