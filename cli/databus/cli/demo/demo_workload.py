"""The demo's database with a small shop in it, and the transactions that change it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from databus.cli.demo import shop as shops
from databus.cli.demo.private_servers import MariaDBServer, PostgresServer
from databus.cli.demo.shop import Shop

DATABASE = "shop"
_TRANSACTIONS_PER_S = 250


def open_shop(
    kind: str, folder: Path, stack: contextlib.ExitStack, seed: int, say: Callable[[str], None]
) -> tuple[Shop, str]:
    """A database with the shop's tables in it, and its URL; ``stack`` ends its server."""
    say(f"a {kind} database with a small shop in it")
    dialect = shops.DIALECTS[kind]
    connect: Callable[[], Any]
    if kind == "sqlite":
        path = str(folder / "shop.db")
        connect, url = shops.sqlite_connector(path), f"sqlite:///{path}"
    else:
        kinds = {"postgres": PostgresServer, "mariadb": MariaDBServer}
        server = stack.enter_context(kinds[kind](folder / "server"))
        server.create_database(DATABASE)
        say(f"private server: {server.version}")
        connect, url = lambda: server.connect(DATABASE), server.url(DATABASE)
    shop = Shop(dialect, connect, seed=seed)
    shop.create()
    return shop, url


class Workload:
    """The shop's transactions at a steady rate, in a thread."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, report: Callable[[int], None]) -> None:
        """Begin; ``report`` is called with the number of transactions so far."""
        self._thread = threading.Thread(target=self._work, args=(report,), name="workload")
        self._thread.start()

    def stop(self) -> None:
        """End after the running transaction.

        Raises: the error of a failed transaction.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self, report: Callable[[int], None]) -> None:
        started = time.monotonic()
        try:
            with self._shop.session() as step:
                count = 0
                while not self._ended.is_set():
                    step()
                    count += 1
                    report(count)
                    ahead_s = count / _TRANSACTIONS_PER_S - (time.monotonic() - started)
                    if ahead_s > 0:
                        self._ended.wait(ahead_s)
        except BaseException as failure:
            self._failure = failure
