"""The demo's steps: start everything, run it, pause one consumer, compare.

The processes are the commands that an operator runs, and the consumers use the client library as
an application does.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from databus.bootstrap.merging.process_merges import has_java
from databus.cli.console.http_client import call
from databus.cli.demo.demo_consumer import ShopMirror
from databus.cli.demo.demo_processes import DemoProcesses
from databus.cli.demo.demo_result import DemoResult
from databus.cli.demo.demo_run import DemoRun
from databus.cli.demo.demo_view import ConsumerState, Picture, Span, draw
from databus.cli.demo.demo_workload import Workload
from databus.cli.demo.private_servers import free_port
from databus.cli.demo.shop import Shop
from databus.client import DatabusClient
from databus.common.errors import DatabusError

_RING_BYTES = "1MiB"
_READY_S = 90.0

_CONFIG = """
[relay]
listen = "127.0.0.1:{relay_port}"
data_dir = "{folder}/relay"

[[database]]
name = "shop"
url = "{url}"
sources = ["{namespace}.*"]
ring_bytes = "{ring_bytes}"

[bootstrap]
listen = "127.0.0.1:{bootstrap_port}"
data_dir = "{folder}/bootstrap"
relays = ["http://127.0.0.1:{relay_port}"]
segment_every = "2s"
apply_every = "{apply_every:.0f}s"
spark_master = "local[1]"
"""


class Demo(DemoRun):
    """One consumer sleeps until the relay has evicted its position; see ``DemoRun``."""

    def __init__(
        self,
        database: str,
        *,
        duration_s: float,
        seed: int,
        keep: bool,
        picture: Path | None = None,
    ) -> None:
        """``picture``: a file for the view while one consumer sleeps, as SVG."""
        super().__init__(database, duration_s=duration_s, seed=seed, keep=keep)
        self._picture_path = picture
        self._step = "starting"
        self._relay_url = self._bootstrap_url = ""
        self._status: dict[str, Any] = {}
        self._bootstrap_status: dict[str, Any] = {}
        self._base_scn = 0

    async def _run(
        self, folder: Path, shop: Shop, url: str, processes: DemoProcesses
    ) -> DemoResult:
        relay_port, bootstrap_port = free_port(), free_port()
        self._relay_url = f"http://127.0.0.1:{relay_port}"
        self._bootstrap_url = f"http://127.0.0.1:{bootstrap_port}"
        config = folder / "databus.toml"
        config.write_text(
            _CONFIG.format(
                relay_port=relay_port,
                bootstrap_port=bootstrap_port,
                folder=folder,
                url=url,
                namespace=shop.dialect.namespace,
                ring_bytes=_RING_BYTES,
                apply_every=max(3.0, self._duration_s / 15),
            )
        )
        self._say("relay, log writer, applier and bootstrap server, each its own process")
        self._say(
            "the applier merges " + ("with Spark" if has_java() else "without Spark: no Java")
        )
        processes.start("relay", "relay", "-c", config)
        await self._wait_for(f"{self._relay_url}/readyz", processes)
        processes.start("bootstrap", "bootstrap", "-c", config)
        workload = Workload(shop)
        async with self._view(), asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(processes))
            first, second = self._mirrors
            serving = [group.create_task(self._connected(first, folder).serve())]
            self._step = "both consumers read the whole tables from the bootstrap server"
            sleeper = self._connected(second, folder)
            dozing = group.create_task(sleeper.serve())
            workload.start(lambda count: setattr(self, "_transactions", count))
            try:
                await self._until(self._both_online, 0.5)
                self._step = "both have reached the relay, and follow it"
                await self._until(lambda: False, 0.3)
                await _stop(sleeper, dozing)
                second.sleeping()
                self._step = "the report's consumer sleeps until its position is evicted"
                await self._until(lambda: self._is_evicted(second), 0.75)
                await self._until(lambda: False, 0.5)
                self._save_picture()
                self._step = "it wakes, too old for the relay: it catches up from the bootstrap"
                again = self._connected(second, folder)
                serving.append(group.create_task(again.serve()))
                await self._until(lambda: False, 0.82)
            finally:
                workload.stop()
            self._step = "the workload has ended; the consumers finish"
            result = await self._drain(shop)
            for task in (*serving, watching):
                task.cancel()
        return result

    def _connected(self, mirror: ShopMirror, folder: Path) -> DatabusClient:
        return self._client(
            mirror, folder, relays=[self._relay_url], bootstraps=[self._bootstrap_url]
        )

    def _is_evicted(self, mirror: ShopMirror) -> bool:
        """Whether the relay no longer has the mirror's position, and there is a snapshot."""
        prev, snapshot = _scn(self._status.get("prev")), self._bootstrap_status.get("snapshot")
        return (prev or 0) > mirror.position.scn > 0 and snapshot is not None

    async def _until(self, condition: Callable[[], bool], latest: float) -> None:
        """Wait until ``condition`` holds, at most up to this part of the duration."""
        while not condition() and time.monotonic() - self._started_s < latest * self._duration_s:
            await asyncio.sleep(0.1)

    async def _wait_for(self, url: str, processes: DemoProcesses) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                await asyncio.to_thread(call, url)
                return
            except DatabusError:
                processes.check()
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _watch(self, processes: DemoProcesses) -> None:
        """Poll the status of both servers."""
        while True:
            processes.check()
            self._status = await self._status_of(self._relay_url) or self._status
            self._bootstrap_status = (
                await self._status_of(self._bootstrap_url) or self._bootstrap_status
            )
            await asyncio.sleep(0.25)

    async def _status_of(self, url: str) -> dict[str, Any]:
        try:
            status = await asyncio.to_thread(call, f"{url}/v1/status")
        except DatabusError:
            return {}
        found: dict[str, Any] = next(iter(status.get("databases", [])), {})
        return found

    @contextlib.asynccontextmanager
    async def _view(self) -> AsyncIterator[None]:
        """The live picture on a terminal; elsewhere one every few seconds."""
        if not self._console.is_terminal:
            printing = asyncio.create_task(self._print_lines())
            try:
                yield
            finally:
                printing.cancel()
            return
        with Live(
            get_renderable=lambda: draw(self._picture()),
            console=self._console,
            refresh_per_second=4,
        ):
            yield

    async def _print_lines(self) -> None:
        while True:
            self._console.print(draw(self._picture()))
            await asyncio.sleep(5)

    def _save_picture(self) -> None:
        if self._picture_path is not None:
            paper = Console(record=True, file=io.StringIO(), width=110)
            paper.print(draw(self._picture()))
            svg = paper.export_svg(title="make demo")
            # A picture in a README must not load fonts from other sites.
            self._picture_path.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))

    def _picture(self) -> Picture:
        elapsed_s = time.monotonic() - self._started_s
        relay, bootstrap = self._status, self._bootstrap_status
        source_scn = int(relay.get("source_scn") or _scn(relay.get("max")) or 0)
        self._base_scn = self._base_scn or (_scn(relay.get("prev")) or 0)
        return Picture(
            title=f"Databus demo: {self._kind}, {elapsed_s:.0f} of {self._duration_s:.0f} s",
            step=self._step,
            source_scn=source_scn,
            transactions=self._transactions,
            transaction_rate=self._transactions / elapsed_s,
            ring=Span(_scn(relay.get("prev")), _scn(relay.get("max"))),
            log=Span(_scn(bootstrap.get("prev")), _scn(bootstrap.get("max"))),
            snapshot_scn=_scn(bootstrap.get("snapshot")),
            consumers=tuple(
                ConsumerState(
                    name=mirror.name,
                    mode=mirror.mode,
                    scn=mirror.position.scn,
                    events=mirror.events,
                    rate=mirror.rate,
                    moves=" → ".join(mirror.moves),
                )
                for mirror in self._mirrors
            ),
            base_scn=self._base_scn,
        )


async def _stop(client: DatabusClient, serving: asyncio.Task[Any]) -> None:
    client.stop()
    await serving


def _scn(position: Any) -> int | None:
    return int(position["scn"]) if isinstance(position, dict) else None
