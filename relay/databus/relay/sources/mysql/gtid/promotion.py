"""Whose turn it is: when the transactions of a server that may take over begin to count.

A MySQL replica can have transactions under its own UUID (a user that was made on it, a table of
somebody's reports) long before it is promoted, and its binlog has them among those of the
primary.  Clocks only go forward, so a generation begins with the first transaction of its
server that changes something captured, or once nothing of the servers before can follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection

_IO_RUNNING, _SQL_RUNNING = 10, 11
"""Columns of SHOW REPLICA STATUS, which MySQL before 8.0.22 knows as SHOW SLAVE STATUS."""


@dataclass(slots=True)
class Promotion:
    """What the server in use says of its own part; told by questions, asked by the stream.

    ``ended_scn`` is the last transaction of the servers before, None while there may be more.

    Owner: one source; whoever asks the server sets it, which is a single assignment.
    """

    ended_scn: int | None = None

    def has_come(self, seen_scn: int) -> bool:
        """Whether a stream that has seen ``seen_scn`` has seen all of the servers before."""
        return self.ended_scn is not None and seen_scn >= self.ended_scn


def is_replicating(connection: MySqlConnection) -> bool:
    """Whether the server receives or applies another one's transactions now."""
    word = "REPLICA" if connection.is_at_least(8, 0, 22) else "SLAVE"
    rows: list[tuple[Any, ...]] = connection.query(f"SHOW {word} STATUS")
    return any((row[_IO_RUNNING], row[_SQL_RUNNING]) != ("No", "No") for row in rows)
