"""What each demo has: a folder, a database, two consumers, and a comparison at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rich.console import Console

from databus.cli.demo.demo_consumer import ShopMirror
from databus.cli.demo.demo_processes import DemoProcesses
from databus.cli.demo.demo_result import DemoResult, compare, show
from databus.cli.demo.demo_workload import DATABASE, open_shop
from databus.cli.demo.shop import Shop
from databus.client import DatabusClient, FileCheckpoints


class DemoRun(ABC):
    """One run of a demo; ``_run`` has its steps.

    Owner: the event loop that calls ``run``; the workload has a thread of its own.
    Raises: DatabusError if a part cannot be started; all other parts are ended before.
    """

    drain_s = 20.0
    """The longest time for which the consumers are waited for at the end."""

    def __init__(self, database: str, *, duration_s: float, seed: int, keep: bool) -> None:
        self._kind = database
        self._duration_s = duration_s
        self._seed = seed
        self._keep = keep
        self._console = Console(width=max(Console().width, 110))
        self._started_s = time.monotonic()
        self._mirrors = (ShopMirror("search index"), ShopMirror("report"))
        self._transactions = 0

    async def run(self) -> bool:
        """Run it to the end; True if every consumer's tables equal the source's."""
        folder = Path(tempfile.mkdtemp(prefix="databus-demo-"))
        folder.chmod(0o755)
        logging.basicConfig(filename=folder / "demo.log", level=logging.INFO)
        try:
            with contextlib.ExitStack() as stack:
                shop, url = await asyncio.to_thread(
                    open_shop, self._kind, folder, stack, self._seed, self._say
                )
                processes = stack.enter_context(DemoProcesses(folder))
                result = await self._run(folder, shop, url, processes)
            show(result, self._console)
            return result.equal
        except BaseExceptionGroup as group:
            raise _first_leaf(group) from group
        finally:
            if self._keep:
                self._console.print(f"logs and data: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)

    @abstractmethod
    async def _run(
        self, folder: Path, shop: Shop, url: str, processes: DemoProcesses
    ) -> DemoResult:
        """Start the parts, run the workload, and compare."""

    def _client(self, mirror: ShopMirror, folder: Path, **servers: Any) -> DatabusClient:
        """A consumer's client; ``servers`` are its URLs and how it finds them."""
        name = mirror.name.replace(" ", "-")
        return DatabusClient(
            database=DATABASE,
            consumer=mirror,
            checkpoints=FileCheckpoints(folder / f"{name}.checkpoint"),
            start="bootstrap",
            checkpoint_every_s=0.2,
            **servers,
        )

    def _both_online(self) -> bool:
        return all(mirror.mode == "relay" for mirror in self._mirrors)

    async def _drain(self, shop: Shop) -> DemoResult:
        """Wait until every consumer equals the source, at most for a while, and compare."""
        expected = await asyncio.to_thread(shop.rows)
        deadline_s = time.monotonic() + self.drain_s
        while True:
            result = compare(expected, self._mirrors, shop, self._transactions)
            if result.equal or time.monotonic() > deadline_s:
                return result
            await asyncio.sleep(0.2)

    def _say(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._console.print(f"  {elapsed_s:4.1f} s  {text}", highlight=False)
        sys.stdout.flush()


def _first_leaf(error: BaseException) -> BaseException:
    """The first error in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
