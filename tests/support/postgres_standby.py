"""A PostgreSQL primary with a streaming standby that can be promoted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import PASSWORD, USER, PostgresServer
from tests.support.waiting import eventually_sync

# Autovacuum commits too, at unknown times.
OPTIONS = ("autovacuum=off", "hot_standby=on", "wal_keep_size=256MB")
PHYSICAL_SLOT = "standby"


@contextmanager
def primary_and_standby(
    folder: Path, *standby_options: str
) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """Both have the database ``shop``; the standby follows, by a physical slot of the primary."""
    primary = PostgresServer(folder / "primary", options=OPTIONS)
    standby = PostgresServer(folder / "standby", options=[*OPTIONS, *standby_options])
    with primary:
        primary.create_database("shop")
        primary.execute(f"SELECT pg_create_physical_replication_slot('{PHYSICAL_SLOT}')")
        address = f"host=127.0.0.1 port={primary.port} user={USER} password={PASSWORD} dbname=shop"
        settings = f"primary_conninfo = '{address}'\nprimary_slot_name = '{PHYSICAL_SLOT}'\n"
        primary.stop()
        source, copy = shlex.quote(str(primary.data_dir)), shlex.quote(str(standby.data_dir))
        # A folder of a server that is stopped is a backup; not every server has pg_basebackup.
        standby._run(
            [
                "sh",
                "-ec",
                f"cp -a {source}/. {copy}; : >{copy}/standby.signal; "
                f"printf %s {shlex.quote(settings)} >>{copy}/postgresql.auto.conf",
            ]
        )
        primary.start()
        with standby:
            yield primary, standby


def inspect_log(server: PostgresServer) -> None:
    """Make pg_walinspect in ``shop``; the test is skipped on a server without it."""
    if not server.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'pg_walinspect'"):
        pytest.skip(f"this PostgreSQL {server.version} has no pg_walinspect")
    server.execute("CREATE EXTENSION pg_walinspect", database="shop")


def caught_up(primary: PostgresServer, standby: PostgresServer) -> None:
    """Return when the standby has applied what the primary has written."""
    ((lsn,),) = primary.execute("SELECT pg_current_wal_lsn()::text")
    eventually_sync(
        lambda: standby.execute(
            "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", [lsn]
        ) == [(True,)],
        60,
        "the standby has caught up",
    )  # fmt: skip


def promote(standby: PostgresServer) -> None:
    """Make the standby a primary."""
    assert standby.execute("SELECT pg_promote(true, 60)") == [(True,)]


def insert(server: PostgresServer, first: int, count: int) -> None:
    """So many transactions of one row."""
    for number in range(first, first + count):
        server.execute(f"INSERT INTO orders VALUES ({number}, 0)", database="shop")
