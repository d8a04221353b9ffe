"""A database server that restarts twenty times in a row, under load, and nobody lends a hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.cli.servers import MariaDBServer, PostgresServer, PrivateServer
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(300),
    # asyncpg leaves a transport behind where the server is killed in the middle of a connect.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RESTARTS = 20


@pytest.fixture(params=[MariaDBServer, PostgresServer])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrivateServer]:
    """What a server has confirmed survives kill -9: that is not a power loss."""
    with request.param(tmp_path / "server") as found:
        found.create_database("shop")
        found.execute("CREATE TABLE orders (id INT PRIMARY KEY, v INT)", database="shop")
        yield found


class Writer:
    """Writes while the server lives; knows what was confirmed."""

    def __init__(self, server: PrivateServer) -> None:
        self.server = server
        self.number = 0
        self.ended = False

    def run(self) -> None:
        """One transaction after the other, over one session as long as it lasts."""
        while not self.ended:
            # Whether the last transaction was committed is the server's to say.
            with contextlib.suppress(Exception), contextlib.closing(self._session()) as session:
                while not self.ended:
                    self.number += 1
                    cursor = session.cursor()
                    cursor.execute("BEGIN")
                    cursor.execute(f"INSERT INTO orders VALUES ({self.number}, 0)")
                    cursor.execute(f"UPDATE orders SET v = v + 1 WHERE id = {self.number // 2}")
                    cursor.execute("COMMIT")
                    cursor.close()

    def _session(self) -> Any:
        return self.server.connect("shop")


async def test_twenty_restarts_in_a_row_need_no_hand(server: PrivateServer, tmp_path: Path) -> None:
    product = server.product
    source = "shop.orders" if product == "mariadb" else "public.orders"
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
            for restart in range(RESTARTS):
                reached, reconnects = writer.number + 3, fetcher.status.reconnect_count
                await eventually(lambda least=reached: writer.number >= least, 60, "it is written")
                # In turn: as a crash, and as an operator does it.
                await asyncio.to_thread(server.kill9 if restart % 2 else server.stop)
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
        assert fetcher.status.reconnect_count >= RESTARTS
    state = ring_state(folder)
    assert len(state.tables[source]) >= 3 * RESTARTS
    assert {count for _, _, count in state.windows} <= {1, 2}
