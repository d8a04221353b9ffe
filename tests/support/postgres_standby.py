"""A PostgreSQL primary with a streaming standby that can be promoted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from databus.cli.servers import PASSWORD, USER, PostgresServer
from tests.support.waiting import eventually_sync

# Autovacuum commits too, and nobody could say when.
OPTIONS = ("autovacuum=off", "hot_standby=on", "wal_keep_size=256MB")


@contextmanager
def primary_and_standby(folder: Path) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """Both have the database ``shop``; the standby follows."""
    primary = PostgresServer(folder / "primary", options=OPTIONS)
    standby = PostgresServer(folder / "standby", options=OPTIONS)
    with primary:
        primary.create_database("shop")
        primary.execute("CREATE EXTENSION pg_walinspect", database="shop")
        address = (
            f"host=127.0.0.1 port={primary.port} user={USER} password={PASSWORD} dbname=postgres"
        )
        standby._run(
            [
                standby._binary("pg_basebackup"),
                f"--pgdata={standby.data_dir}",
                "--checkpoint=fast",
                "--no-sync",
                "--write-recovery-conf",
                f"--dbname={address}",
            ]
        )
        with standby:
            yield primary, standby


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
