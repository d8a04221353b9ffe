"""``databus demo --cluster``: two relays of one database, and leaders that are killed and stopped.

The leases are in the demo's database.  At the end each consumer's tables are compared with the
source's, row by row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from databus.cli.console.http_client import call
from databus.cli.demo.demo_consumer import ShopMirror
from databus.cli.demo.demo_processes import DemoProcesses
from databus.cli.demo.demo_result import DemoResult
from databus.cli.demo.demo_run import DemoRun
from databus.cli.demo.demo_workload import Workload
from databus.cli.demo.private_servers import free_port
from databus.cli.demo.shop import Shop
from databus.common.errors import DatabusError, ServerUnavailable

RELAYS = ("relay-a", "relay-b")
LEASE_S = 3.0
_WAIT_S = 90.0
_PHASE = 0.15
"""The part of the duration between two events."""
_POLL_S = 0.05

_RELAY = """
[relay]
listen = "127.0.0.1:{port}"
data_dir = "{folder}/{name}"

[cluster]
store = "{url}"
relay = "{name}"
address = "http://127.0.0.1:{port}"
lease = "{lease:.0f}s"

[[database]]
name = "shop"
url = "{url}"
sources = ["{namespace}.*"]
ring_bytes = "16MiB"
"""
_BOOTSTRAP = """
[bootstrap]
listen = "127.0.0.1:{port}"
data_dir = "{folder}/bootstrap"
relays = {relays}
segment_every = "2s"
apply_every = "5s"
spark_master = "local[1]"
"""


class ClusterDemo(DemoRun):
    """Two relays, whose leaders end one after the other; see ``DemoRun``."""

    drain_s = 60.0

    def __init__(self, database: str, *, duration_s: float, seed: int, keep: bool) -> None:
        super().__init__(database, duration_s=duration_s, seed=seed, keep=keep)
        self._ports = {name: free_port() for name in (*RELAYS, "bootstrap")}

    def _write_files(self, folder: Path, url: str, namespace: str) -> None:
        for name in RELAYS:
            text = _RELAY.format(
                name=name,
                port=self._ports[name],
                folder=folder,
                url=url,
                namespace=namespace,
                lease=LEASE_S,
            )
            (folder / f"{name}.toml").write_text(text)
        text = _BOOTSTRAP.format(
            port=self._ports["bootstrap"],
            folder=folder,
            relays=[self._url(name) for name in RELAYS],
        )
        (folder / "bootstrap.toml").write_text(text.replace("'", '"'))

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    async def _run(
        self, folder: Path, shop: Shop, url: str, processes: DemoProcesses
    ) -> DemoResult:
        self._write_files(folder, url, shop.dialect.namespace)
        self._say("two relays of one cluster, a bootstrap server, and two consumers")
        for name in RELAYS:
            processes.start(name, "relay", "-c", folder / f"{name}.toml")
        first = await self._led(processes)
        second = next(name for name in RELAYS if name != first["leader"])
        self._say(f"{first['leader']} leads with the epoch {first['epoch']}; {second} follows it")
        processes.start("bootstrap", "bootstrap", "-c", folder / "bootstrap.toml")
        workload = Workload(shop)
        async with asyncio.TaskGroup() as group:
            serving = [group.create_task(self._serve(one, folder)) for one in self._mirrors]
            workload.start(lambda count: setattr(self, "_transactions", count))
            try:
                self._say("both consumers read the whole tables, and then the relays")
                await self._wait_for_relay(processes)
                await asyncio.sleep(self._duration_s * _PHASE)
                await self._lose(first["leader"], processes.kill, "killed (SIGKILL)", processes)
                processes.start(first["leader"], "relay", "-c", folder / f"{first['leader']}.toml")
                led = await self._led(processes, followed=True)
                self._say(f"{first['leader']} is back, and follows {led['leader']}")
                await asyncio.sleep(self._duration_s * _PHASE)
                await self._lose(led["leader"], processes.stop, "stopped (SIGTERM)", processes)
                await asyncio.sleep(self._duration_s * _PHASE)
            finally:
                workload.stop()
            self._say("the workload has ended; the consumers finish")
            result = await self._drain(shop)
            for task in serving:
                task.cancel()
        return result

    async def _lose(
        self,
        leader: str,
        how: Callable[[str], None],
        what: str,
        processes: DemoProcesses,
    ) -> None:
        """End the leader, and report when the other relay leads."""
        self._say(f"{leader} is {what}, after {self._transactions:,} transactions")
        began_s = time.monotonic()
        ending = asyncio.create_task(asyncio.to_thread(how, leader))
        led = await self._led(processes, but=leader)
        took_s = time.monotonic() - began_s
        await ending
        self._say(f"{led['leader']} leads with the epoch {led['epoch']}, {took_s:.1f} s later")

    async def _led(
        self, processes: DemoProcesses, *, but: str = "", followed: bool = False
    ) -> dict[str, Any]:
        """What the routing table has of the database, once a relay leads it."""
        deadline_s = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline_s:
            if not but:
                processes.check()
            for name in RELAYS:
                if name == but:
                    continue
                found = await asyncio.to_thread(self._entry, name)
                states = {one["relay"]: one.get("state") for one in found.get("relays", [])}
                leader = found.get("leader")
                is_complete = not followed or list(states.values()) == ["streaming"] * 2
                if leader and leader != but and states.get(leader) == "streaming" and is_complete:
                    return found
            await asyncio.sleep(_POLL_S)
        raise ServerUnavailable(f"no relay leads within {_WAIT_S:.0f} s")

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            table = call(f"{self._url(name)}/v1/cluster")
        except DatabusError:
            return {}
        found: dict[str, Any] = next(iter(table["databases"]), {})
        return found

    async def _serve(self, mirror: ShopMirror, folder: Path) -> None:
        client = self._client(
            mirror,
            folder,
            relays=[self._url(one) for one in RELAYS],
            bootstraps=[self._url("bootstrap")],
            discover=True,
            reconnect_most_s=1.0,
        )
        await client.serve()

    async def _wait_for_relay(self, processes: DemoProcesses) -> None:
        """Wait until both consumers read a relay."""
        deadline_s = time.monotonic() + _WAIT_S
        while not self._both_online():
            processes.check()
            if time.monotonic() > deadline_s:
                raise ServerUnavailable(f"the consumers read no relay within {_WAIT_S:.0f} s")
            await asyncio.sleep(_POLL_S)
