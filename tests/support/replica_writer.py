"""Writes to a primary that has a replica, for the tests of failover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Writer:
    """Inserts and updates rows, one transaction after the other; knows how many it committed."""

    def __init__(self, local: Callable[[Any, str], None]) -> None:
        """``local`` runs a statement that the server does for itself alone."""
        self._local = local
        self.transactions = 0

    def write(self, server: Any, count: int) -> None:
        """Commit so many transactions, with local ones of the server among them."""
        connection = server.connect("shop")
        try:
            with connection.cursor() as cursor:
                for _ in range(count):
                    self.transactions += 1
                    number = self.transactions
                    cursor.execute("BEGIN")
                    cursor.execute(f"INSERT INTO orders VALUES ({number}, 0)")
                    cursor.execute(f"UPDATE orders SET v = v + 1 WHERE id = {(number + 1) // 2}")
                    cursor.execute("COMMIT")
                    if number % 20 == 0:
                        self._local(server, f"INSERT INTO local.notes (v) VALUES ({number})")
        finally:
            connection.close()


def rows_of(server: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The table that ``Writer`` writes, by key."""
    rows = server.execute("SELECT id, v FROM shop.orders")
    return {(number,): {"id": number, "v": v} for number, v in rows}
