"""Promotion: when the transactions of a server that takes over begin to count.

A MySQL replica can have transactions under its own UUID (a new user, a local table for reports)
long before it is promoted, and its binlog has them among those of the primary.  Scns only grow,
so a generation begins with the first transaction of its server that changes a captured table, or
once no transaction of earlier servers can follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection

_IO_RUNNING, _SQL_RUNNING = 10, 11
"""Columns of SHOW REPLICA STATUS, which is SHOW SLAVE STATUS before MySQL 8.0.22."""


@dataclass(slots=True)
class Promotion:
    """Whether the server in use was promoted, from queries to it; the stream reads this.

    ``ended_scn`` is the last transaction of earlier servers, None while more may come.

    Owner: one source; the thread that queries the server sets it by a single assignment.
    """

    ended_scn: int | None = None

    def has_come(self, seen_scn: int) -> bool:
        """Whether a stream that has seen ``seen_scn`` has seen all of the earlier servers."""
        return self.ended_scn is not None and seen_scn >= self.ended_scn


def is_replicating(connection: MySqlConnection) -> bool:
    """Whether the server receives or applies another one's transactions now."""
    word = "REPLICA" if connection.is_at_least(8, 0, 22) else "SLAVE"
    rows: list[tuple[Any, ...]] = connection.query(f"SHOW {word} STATUS")
    return any((row[_IO_RUNNING], row[_SQL_RUNNING]) != ("No", "No") for row in rows)
