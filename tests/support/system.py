"""The whole system for one test: a shop database, relay, bootstrap and consumers as processes."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from databus.cli.demo import shop as shops
from databus.cli.demo.private_servers import free_port
from databus.cli.demo.shop import Rows, Shop, differences
from tests.support.config_text import bootstrap_text, relay_text
from tests.support.fixtures import FreshDatabase
from tests.support.mirror_process import stored_facts, stored_rows
from tests.support.processes import DatabusProcess, Processes
from tests.support.waiting import PATIENCE, eventually_sync


def sqlite_shop(path: Path) -> tuple[Shop, str]:
    """A shop in an SQLite file, with the URL of the source."""
    shop = Shop(shops.DIALECTS["sqlite"], shops.sqlite_connector(str(path)))
    shop.create()
    return shop, f"sqlite:///{path}"


def server_shop(kind: str, database: FreshDatabase) -> tuple[Shop, str]:
    """A shop in an empty database of a private server, with the URL of the source."""
    dialect = shops.DIALECTS["mariadb" if kind == "mysql" else kind]
    if kind in ("mariadb", "mysql"):
        dialect = replace(dialect, namespace=database.name)
    shop = Shop(dialect, lambda: database.server.connect(database.name))
    shop.create()
    return shop, database.url


def relay_and_bootstrap(
    folder: Path,
    processes: Processes,
    url: str,
    *sources: str,
    ring_bytes: str = "4MiB",
    arguments: tuple[str, ...] = (),
    **settings: object,
) -> tuple[str, str]:
    """The URLs of a relay over ``url``, which is ready, and of a bootstrap that reads it.

    ``arguments`` and ``settings`` are the bootstrap's.
    """
    relay_port, bootstrap_port = free_port(), free_port()
    relay_url = f"http://127.0.0.1:{relay_port}"
    config = folder / "databus.toml"
    config.write_text(
        relay_text(url, *sources, port=relay_port, ring_bytes=ring_bytes)
        + bootstrap_text(relay_url, bootstrap_port, **settings)
    )
    processes.start("relay", "-c", config, name="relay").wait_ready(f"{relay_url}/readyz", 60)
    processes.start("bootstrap", "-c", config, *arguments, name="bootstrap")
    return relay_url, f"http://127.0.0.1:{bootstrap_port}"


class Workload:
    """The shop's transactions in a thread, at a bounded rate, until stopped."""

    def __init__(self, shop: Shop, per_s: float = 150.0) -> None:
        self._shop = shop
        self._per_s = per_s
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="workload", daemon=True)

    def __enter__(self) -> Workload:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30 * PATIENCE)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with self._shop.session() as step:
                while not self._ended.wait(1 / self._per_s):
                    step()
        except BaseException as failure:
            self._failure = failure


class System:
    """Relay, bootstrap and consumers over one shop, each a process that may be killed.

    Owner: the test; ``processes`` ends what is left.
    """

    def __init__(
        self,
        folder: Path,
        shop: Shop,
        url: str,
        processes: Processes,
        *,
        ring_bytes: str = "1MiB",
        **settings: object,
    ) -> None:
        """``settings`` are the bootstrap's."""
        self.folder = folder
        self.shop = shop
        self._processes = processes
        self._relay_port, self._bootstrap_port = free_port(), free_port()
        self.relay_url = f"http://127.0.0.1:{self._relay_port}"
        self.bootstrap_url = f"http://127.0.0.1:{self._bootstrap_port}"
        self.bootstrap_urls = [self.bootstrap_url]
        self.config = folder / "databus.toml"
        self.config.write_text(
            relay_text(
                url,
                f"{shop.dialect.namespace}.*",
                port=self._relay_port,
                ring_bytes=ring_bytes,
            )
            + bootstrap_text(
                self.relay_url,
                self._bootstrap_port,
                segment_every="1s",
                apply_every="3s",
                spark_master="local[1]",
                **settings,
            )
        )

    def start_relay(self) -> DatabusProcess:
        """The relay, ready to serve."""
        relay = self._processes.start("relay", "-c", self.config, name="relay")
        relay.wait_ready(f"{self.relay_url}/readyz")
        return relay

    def start_bootstrap(self, *arguments: str, name: str = "bootstrap") -> DatabusProcess:
        """The bootstrap, or with ``--role`` a part of it."""
        return self._processes.start("bootstrap", "-c", self.config, *arguments, name=name)

    def start_another_server(self, name: str) -> DatabusProcess:
        """A second bootstrap server over the same store; consumers that start later know both."""
        port = free_port()
        config = self.folder / f"{name}.toml"
        config.write_text(self.config.read_text().replace(f":{self._bootstrap_port}", f":{port}"))
        self.bootstrap_urls.append(f"http://127.0.0.1:{port}")
        return self._processes.start("bootstrap", "-c", config, "--role", "server", name=name)

    def start_consumer(self, name: str = "mirror", *, start: str = "bootstrap") -> DatabusProcess:
        """A consumer that stores its copy in ``<name>.db``."""
        settings = {
            "path": str(self.mirror(name)),
            "relays": [self.relay_url],
            "bootstraps": self.bootstrap_urls,
            "start": start,
        }
        command = [sys.executable, "-m", "tests.support.mirror_process", json.dumps(settings)]
        return self._processes.start_command(command, name=name)

    def mirror(self, name: str = "mirror") -> Path:
        """The file of a consumer's copy."""
        return self.folder / f"{name}.db"

    def copy(self, name: str = "mirror") -> dict[str, Rows]:
        """The consumer's tables; empty while it has none."""
        return stored_rows(self.mirror(name))

    def wait_until_equal(self, name: str = "mirror", timeout_s: float = 120.0) -> None:
        """Return when the consumer's tables are the source's; no writer may run meanwhile."""
        self.wait_until(self.shop.rows(), name, timeout_s)

    def wait_until(self, expected: dict[str, Rows], name: str, timeout_s: float = 120.0) -> None:
        """Return when the consumer's tables are these."""
        try:
            eventually_sync(
                lambda: not differences(expected, self.copy(name)),
                timeout_s,
                f"{name} equals the source",
                poll_s=0.2,
            )
        except AssertionError as error:
            unequal = differences(expected, self.copy(name))
            sizes = {source: len(rows) for source, rows in self.copy(name).items()}
            raise AssertionError(
                f"{error}; {len(unequal)} rows differ, such as {unequal[:3]}; it has {sizes}; "
                f"logs in {self.folder}"
            ) from error

    def assert_faultless(self, name: str = "mirror") -> dict[str, Any]:
        """No row went back, no window was torn; returns the consumer's counters."""
        facts, faults = stored_facts(self.mirror(name))
        assert faults == []
        return facts


def children_named(process: DatabusProcess, text: str) -> list[psutil.Process]:
    """The processes below ``process`` whose command line has ``text`` in it."""
    found = []
    for child in process.descendants():
        try:
            if any(text in argument for argument in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Poll until it holds."""
    eventually_sync(condition, timeout_s, what, poll_s=0.05)


def wait_s(seconds: float) -> None:
    """Let the system run for a while: what a random moment to kill at is made of."""
    time.sleep(seconds)
