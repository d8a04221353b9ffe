"""Relays of one cluster, each with its own processes, over ZooKeeper or a store."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from databus.cli.demo.private_servers import free_port
from databus.relay.ring.data_folder import DatabaseFolder, read_leader
from tests.support.config_text import section
from tests.support.cut_network import CutNetwork
from tests.support.relay_process import RelayProcess
from tests.support.waiting import eventually_sync

LEASE_S = 4.0


class RelayCluster:
    """Relays ``a``, ``b``, ... of the same databases.

    ``coordination`` are the keys of ``[cluster]`` for ZooKeeper or the store.

    Owner: one test; inside ``with``.
    """

    def __init__(
        self,
        folder: Path,
        coordination: Mapping[str, object],
        databases: Mapping[str, str],
        *,
        followers: int = 1,
        network: CutNetwork | None = None,
        **settings: object,
    ) -> None:
        """With ``network``, each relay runs on the host of its name."""
        self._network = network
        self.folder = folder
        self._coordination = coordination
        self._databases = databases
        self._followers = followers
        self._settings = {"ring_bytes": "8MiB", "sync_every": "50ms", **settings}
        self.ports: dict[str, int] = {}
        self.relays: dict[str, RelayProcess] = {}

    def __enter__(self) -> RelayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self.relays.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in self.processes(relay):
                    process.resume()
            relay.end()

    def url(self, name: str) -> str:
        """The address of a relay, also before it runs."""
        port = self.ports.setdefault(name, free_port())
        host = self._network.address(name) if self._network else "127.0.0.1"
        return f"http://{host}:{port}"

    def start(self, *names: str) -> None:
        """Start relays."""
        for name in names:
            path = self.folder / f"{name}.toml"
            path.write_text(self._text(name))
            inside = self._network.inside(name) if self._network else ()
            self.relays[name] = RelayProcess(path, inside=inside)

    def _text(self, name: str) -> str:
        url = self.url(name)
        relay = {
            "listen": url.removeprefix("http://"),
            "data_dir": self.folder / name,
            "heartbeat": "100ms",
        }
        cluster = {
            **self._coordination,
            "name": self.folder.name,
            "relay": name,
            "address": url,
            "followers": self._followers,
            "lease": LEASE_S,
        }
        return (
            section("[http]", {"insecure": self._network is not None})
            + section("[relay]", relay)
            + section("[cluster]", cluster)
            + "".join(
                section("[[database]]", {"name": database, "url": url, **self._settings})
                for database, url in self._databases.items()
            )
        )

    def table(self, name: str) -> dict[str, Any]:
        """The routing table of a relay."""
        table: dict[str, Any] = self.relays[name].get("/v1/cluster")
        return table

    def log(self, name: str) -> str:
        """The end of a relay's log."""
        return self.relays[name].log.read_text()[-6000:]

    def leader(self, database: str, *, but: str = "", at: str = "") -> str:
        """The relay that leads a database and streams it, once there is one."""

        def found() -> str:
            for name in [at] if at else self.relays:
                if name == but or self.relays[name].process.poll() is not None:
                    continue
                state = self.state(name, database)
                folder = DatabaseFolder.of(self.folder / name, database)
                if state.get("role") == name and read_leader(folder)[1] == name:
                    return name
            return ""

        return eventually_sync(found, 40, f"a leader of {database}")

    def state(self, name: str, database: str) -> dict[str, Any]:
        """What the fetcher of a relay reports: its state, and in ``role`` the leader it names."""
        with contextlib.suppress(OSError):
            documents = self.relays[name].get("/v1/status")["databases"]
            one = next(d for d in documents if d["name"] == database)
            fetcher = one["fetcher"]
            is_streaming = fetcher.get("state") == "streaming" and fetcher["age_s"] < 5
            reads = str(fetcher.get("url", "")).startswith("relay+")
            role = "follower" if reads else name
            return {**one, "role": role if is_streaming else ""}
        return {}

    def follows(self, name: str, database: str) -> bool:
        """Whether a relay follows the leader now."""
        return self.state(name, database).get("role") == "follower"

    def epoch(self, name: str, database: str) -> int:
        """The newest epoch in the ring of a relay."""
        return read_leader(DatabaseFolder.of(self.folder / name, database))[0]

    # -- faults --

    def processes(self, relay: RelayProcess) -> list[psutil.Process]:
        """The supervisor and its children."""
        supervisor = psutil.Process(relay.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def kill(self, name: str) -> None:
        """SIGKILL; the children follow."""
        relay = self.relays.pop(name)
        below = self.processes(relay)
        os.kill(relay.process.pid, signal.SIGKILL)
        psutil.wait_procs(below, timeout=30)
        relay.end()

    def pause(self, name: str) -> list[psutil.Process]:
        """SIGSTOP of all its processes."""
        below = self.processes(self.relays[name])
        for process in below:
            process.suspend()
        return below
