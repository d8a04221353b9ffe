"""A MySQL primary with a replica that can be promoted, each with transactions of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from databus.cli.demo.private_servers import PASSWORD, USER, PrivateServer
from tests.support.mysql_server import MySQLServer
from tests.support.waiting import eventually_sync

NOT_LOCAL = ("--replicate-ignore-db=local", "--replicate-wild-ignore-table=local.%")

Server = TypeVar("Server", bound=PrivateServer)


@contextmanager
def primary_and_replica(folder: Path) -> Iterator[tuple[MySQLServer, MySQLServer]]:
    """Both write tables of their own under their own UUIDs, which the other does not take."""
    # Its older name, which 8.4 does not know; 8.0 wants several appliers with it.
    older = ("--loose-slave-preserve-commit-order=ON", "--loose-slave-parallel-type=LOGICAL_CLOCK")
    options = [*NOT_LOCAL, *older, "--loose-replica-preserve-commit-order=ON"]
    primary = MySQLServer(folder / "primary", server_id=1, options=options)
    replica = MySQLServer(folder / "replica", server_id=2, options=options)
    yield from running_pair(primary, replica, follow, local)


def running_pair(
    primary: Server,
    replica: Server,
    follow: Callable[[Server, Server], None],
    local: Callable[[Server, str], None],
) -> Iterator[tuple[Server, Server]]:
    """A primary with a database ``shop`` and its replica, each with a table for itself alone."""
    with primary, replica:
        follow(replica, primary)
        primary.create_database("shop")
        for server in (primary, replica):
            local(server, "CREATE DATABASE local")
            local(server, "CREATE TABLE local.notes (id INT AUTO_INCREMENT PRIMARY KEY, v INT)")
        yield primary, replica


def own_uuid(server: MySQLServer) -> str:
    return str(server.execute("SELECT @@server_uuid")[0][0])


def local(server: MySQLServer, statement: str) -> None:
    """A transaction that is in this server's binlog, under its own UUID, and in no other's."""
    server.execute(statement)


def follow(replica: MySQLServer, primary: MySQLServer) -> None:
    """Let one server replicate the other's transactions."""
    replica.execute(
        f"CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={primary.port}, "
        f"SOURCE_USER='{USER}', SOURCE_PASSWORD='{PASSWORD}', SOURCE_AUTO_POSITION=1, "
        "SOURCE_CONNECT_RETRY=1, GET_SOURCE_PUBLIC_KEY=1"
    )
    replica.execute("START REPLICA")


def status_of(replica: MySQLServer) -> dict[str, Any]:
    connection = replica.connect()
    try:
        with connection.cursor() as cursor:
            cursor.execute(replica.words("SHOW REPLICA STATUS"))
            names = [column[0] for column in cursor.description]
            row = cursor.fetchone()
    finally:
        connection.close()
    return dict(zip(names, row, strict=True)) if row else {}


def caught_up(replica: MySQLServer, primary: MySQLServer) -> None:
    """Return when the replica has applied all that the primary has under its own UUID."""
    wanted = str(primary.execute("SELECT @@global.gtid_executed")[0][0])
    owner = own_uuid(primary)
    gtids = next(part for part in wanted.replace("\n", "").split(",") if part.startswith(owner))

    def applied() -> bool:
        status = status_of(replica)
        assert not status.get("Last_SQL_Error"), status["Last_SQL_Error"]
        question = f"SELECT GTID_SUBSET('{gtids}', @@global.gtid_executed)"
        return replica.execute(question) == [(1,)]

    eventually_sync(applied, 60, "the replica has caught up")


def promote(replica: MySQLServer) -> None:
    """Make the replica a primary; what it has received is applied already."""
    replica.execute("STOP REPLICA")
    replica.execute("RESET REPLICA ALL")
