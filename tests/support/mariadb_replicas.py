"""A MariaDB primary with a replica that can be promoted, each with transactions of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from databus.cli.demo.private_servers import PASSWORD, USER, MariaDBServer
from tests.support.mysql_replicas import NOT_LOCAL, running_pair
from tests.support.waiting import eventually_sync

LOCAL_DOMAINS = {1: 101, 2: 102}
"""By server id: the domain of what a server does for itself alone."""


@contextmanager
def primary_and_replica(folder: Path) -> Iterator[tuple[MariaDBServer, MariaDBServer]]:
    """Semi-synchronous: what the primary has confirmed to a writer, the replica has received."""
    primary = MariaDBServer(
        folder / "primary",
        server_id=1,
        options=[
            "--rpl-semi-sync-master-enabled=ON",
            "--rpl-semi-sync-master-timeout=60000",
            "--rpl-semi-sync-master-wait-no-slave=ON",
            "--rpl-semi-sync-master-wait-point=AFTER_SYNC",
            *NOT_LOCAL,
        ],
    )
    replica = MariaDBServer(
        folder / "replica", server_id=2, options=["--rpl-semi-sync-slave-enabled=ON", *NOT_LOCAL]
    )
    yield from running_pair(primary, replica, follow, local)


def follow(replica: MariaDBServer, primary: MariaDBServer) -> None:
    """Let one server replicate the other's transactions, but not its local ones."""
    replica.execute(
        f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port}, "
        f"MASTER_USER='{USER}', MASTER_PASSWORD='{PASSWORD}', MASTER_USE_GTID=slave_pos, "
        "MASTER_CONNECT_RETRY=1"
    )
    replica.execute("START SLAVE")


def local(server: MariaDBServer, statement: str) -> None:
    """A transaction of a server's own, in its binlog under its own domain."""
    connection = server.connect()
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SET gtid_domain_id = {LOCAL_DOMAINS[server.server_id]}")
            cursor.execute(statement)
    finally:
        connection.close()


def promote(replica: MariaDBServer) -> None:
    """Make the replica a primary, once it has applied everything that it has received."""

    def applied() -> bool:
        connection = replica.connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute("SHOW SLAVE STATUS")
                names = [column[0] for column in cursor.description]
                status = dict(zip(names, cursor.fetchone(), strict=True))
                cursor.execute("SELECT @@global.gtid_slave_pos")
                (applied,) = cursor.fetchone()
        finally:
            connection.close()
        assert not status["Last_SQL_Error"], status["Last_SQL_Error"]
        received = str(status["Gtid_IO_Pos"])
        return set(received.split(",")) == set(str(applied).split(","))

    replica.execute("STOP SLAVE IO_THREAD")
    eventually_sync(applied, 60, "the replica has applied what it received")
    replica.execute("STOP SLAVE")
    replica.execute("RESET SLAVE ALL")
