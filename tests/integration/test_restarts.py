"""A database server that restarts again and again, under load, without an operator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import MariaDBServer, PostgresServer, PrivateServer
from databus.common.errors import MissingDependency
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.mysql_server import MySQLServer, mysql_launcher
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(300),
    # asyncpg leaves a transport behind where the server is killed in the middle of a connect.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RESTARTS = {
    "mariadb": 20,
    "postgres": 20,
    # One takes MySQL seven seconds, so that twenty run only on request.
    "mysql": int(os.environ.get("DATABUS_MYSQL_RESTARTS", "1")),
}


@pytest.fixture(params=[MariaDBServer, MySQLServer, PostgresServer])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrivateServer]:
    """What a server has confirmed survives kill -9: that is not a power loss."""
    if request.param is MySQLServer:
        try:
            mysql_launcher()
        except MissingDependency as error:
            pytest.skip(error.message)
    with request.param(tmp_path / "server") as found:
        found.create_database("shop")
        found.execute("CREATE TABLE orders (id INT PRIMARY KEY, v INT)", database="shop")
        yield found


MOST_WRITTEN = 200
"""Transactions between two restarts, so that the ring retains them all."""


class Writer:
    """Writes while the server runs; records what was confirmed."""

    def __init__(self, server: PrivateServer) -> None:
        self.server = server
        self.number = 0
        self.limit = 0
        self.ended = False

    def run(self) -> None:
        """One transaction after the other, over one session as long as it lasts."""
        while not self.ended:
            # Only the server shows whether the last transaction was committed.
            with contextlib.suppress(Exception), contextlib.closing(self._session()) as session:
                while not self.ended:
                    if self.number >= self.limit:
                        time.sleep(0.01)
                        cursor = session.cursor()
                        cursor.execute("SELECT 1")  # The session notices that the server is gone.
                        cursor.close()
                        continue
                    self.number += 1
                    cursor = session.cursor()
                    cursor.execute("BEGIN")
                    cursor.execute(f"INSERT INTO orders VALUES ({self.number}, 0)")
                    cursor.execute(f"UPDATE orders SET v = v + 1 WHERE id = {self.number // 2}")
                    cursor.execute("COMMIT")
                    cursor.close()

    def _session(self) -> Any:
        return self.server.connect("shop")


async def test_restarts_in_a_row_need_no_hand(server: PrivateServer, tmp_path: Path) -> None:
    product = server.product
    restarts = RESTARTS[product]
    source = "public.orders" if product == "postgres" else "shop.orders"
    config = database_config("shop", server.url("shop"), source)
    folder = tmp_path / "relay" / "shop"

    def rows() -> dict[tuple[Any, ...], dict[str, Any]]:
        found = server.execute("SELECT id, v FROM orders", database="shop")
        return {(number,): {"id": number, "v": v} for number, v in found}

    async with capturing(config, tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        writer = Writer(server)
        writing = asyncio.create_task(asyncio.to_thread(writer.run))
        try:
            for restart in range(restarts):
                reached, reconnects = writer.number + 3, fetcher.status.reconnect_count
                writer.limit = writer.number + MOST_WRITTEN
                await eventually(lambda least=reached: writer.number >= least, 60, "it is written")
                # Alternately: as a crash, and as an operator does it.
                await asyncio.to_thread(server.stop if restart % 2 else server.kill9)
                await asyncio.to_thread(server.start)
                await eventually(
                    lambda least=reconnects: fetcher.status.reconnect_count > least, 60, "noticed"
                )
                await streaming(fetcher)
        finally:
            writer.ended = True
            await writing
        await eventually(
            lambda: ring_state(folder).tables.get(source) == rows(), 90, "equal to the table"
        )
        assert fetcher.status.error is None
        assert fetcher.status.reconnect_count >= restarts
    state = ring_state(folder)
    assert len(state.tables[source]) >= 3 * restarts
    assert {count for _, _, count in state.windows} <= {1, 2}
