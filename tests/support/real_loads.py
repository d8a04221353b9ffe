"""sysbench and pgbench: loads of other projects, each on a database server of its own.

A load reports, while it runs, what its tables hold at a moment and which scn that moment has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import (
    PASSWORD,
    USER,
    MariaDBServer,
    PostgresServer,
    PrivateServer,
)
from databus.cli.demo.shop import Rows
from tests.support.waiting import eventually_sync

Tables = dict[str, Rows]
"""Rows by source, then by key, as ``databus.cli.demo.shop.differences`` compares them."""


@dataclass(frozen=True)
class Snapshot:
    """What the tables held when exactly the commits up to ``scn`` were visible."""

    scn: int
    tables: Tables


class Load(ABC):
    """A database server, and a program that works on it until the test ends it."""

    server: PrivateServer
    sources: list[str]

    @abstractmethod
    def create(self) -> None:
        """Whatever must be there before the relay starts."""

    @abstractmethod
    def fill(self) -> None:
        """The first rows."""

    @abstractmethod
    def command(self) -> list[str]:
        """The load, without end."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The tables now, and the scn of this now."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The load; it is started again when a restart of the server has ended it."""
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                with subprocess.Popen(
                    self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ) as process:
                    guardian = Guardian(process.pid)
                    while process.poll() is None and not ended.wait(0.05):
                        pass
                    process.kill()
                    process.wait()
                    guardian.release()

        thread = threading.Thread(target=work, name="load")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def last_snapshot(self) -> Snapshot:
        """The end: once nothing moves any more, for a killed program's statement may still run."""
        before = self.snapshot()

        def still() -> bool:
            nonlocal before
            now = self.snapshot()
            same, before = now.tables == before.tables, now
            return same

        eventually_sync(still, 60, poll_s=0.2)
        return before

    def run(self, command: list[str]) -> None:
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        subprocess.run(command, check=True, capture_output=True, env=environment)

    def rows(self, cursor: Any, source: str, columns: tuple[str, ...]) -> Rows:
        cursor.execute(f"SELECT {', '.join(columns)} FROM {source.partition('.')[2]}")
        return {(row[0],): dict(zip(columns, row, strict=True)) for row in cursor}


class Sysbench(Load):
    """Two tables of sysbench on a MariaDB of its own."""

    def __init__(self, folder: Path, script: str) -> None:
        self.server = MariaDBServer(folder / "mariadb")
        self.sources = ["shop.sbtest1", "shop.sbtest2"]
        self._script = script

    def create(self) -> None:
        self.server.create_database("shop")

    def _sysbench(self, action: str, *options: str) -> list[str]:
        return [
            "sysbench", self._script, "--db-driver=mysql", "--mysql-host=127.0.0.1",
            f"--mysql-port={self.server.port}", f"--mysql-user={USER}",
            f"--mysql-password={PASSWORD}", "--mysql-db=shop", "--tables=2", "--table-size=400",
            *options, action,
        ]  # fmt: skip

    def fill(self) -> None:
        self.run(self._sysbench("prepare"))

    def command(self) -> list[str]:
        return self._sysbench("run", "--threads=3", "--time=600", "--rate=120")

    def snapshot(self) -> Snapshot:
        with contextlib.closing(self.server.connect("shop")) as connection:
            cursor = connection.cursor()
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SHOW STATUS LIKE 'binlog_snapshot_%'")
            status = {name.lower(): value for name, value in cursor.fetchall()}
            file, offset = status["binlog_snapshot_file"], status["binlog_snapshot_position"]
            cursor.execute("SELECT BINLOG_GTID_POS(%s, %s)", (file, int(offset)))
            scn = int(cursor.fetchall()[0][0].rpartition("-")[2])
            columns = ("id", "k", "c", "pad")
            return Snapshot(scn, {one: self.rows(cursor, one, columns) for one in self.sources})


class Pgbench(Load):
    """pgbench's tables but the history, which has no key, on a PostgreSQL of its own."""

    COLUMNS: ClassVar = {
        "public.pgbench_accounts": ("aid", "bid", "abalance", "filler"),
        "public.pgbench_tellers": ("tid", "bid", "tbalance", "filler"),
        "public.pgbench_branches": ("bid", "bbalance", "filler"),
    }

    def __init__(self, folder: Path) -> None:
        self.server = PostgresServer(folder / "postgres")
        self.sources = list(self.COLUMNS)

    def create(self) -> None:
        self.server.create_database("shop")
        self.run(self._pgbench("--initialize", "--init-steps=dtp"))

    def _pgbench(self, *options: str) -> list[str]:
        found = shutil.which("pgbench") or str(
            max(Path("/usr/lib/postgresql").glob("*/bin/pgbench"))
        )
        return [
            found, "--host=127.0.0.1", f"--port={self.server.port}", f"--username={USER}",
            *options, "shop",
        ]  # fmt: skip

    def fill(self) -> None:
        with contextlib.closing(self.server.connect("shop")) as connection:
            # Of its 100,000 accounts the first few: an update of another one changes nothing.
            connection.execute("INSERT INTO pgbench_branches VALUES (1, 0)")
            connection.execute(
                "INSERT INTO pgbench_tellers SELECT n, 1, 0 FROM generate_series(1, 10) n"
            )
            connection.execute(
                "INSERT INTO pgbench_accounts SELECT n, 1, 0, '' FROM generate_series(1, 3000) n"
            )

    def command(self) -> list[str]:
        load = self._pgbench(
            "--no-vacuum", "--client=3", "--time=600", "--rate=150", "--max-tries=3"
        )
        return ["env", f"PGPASSWORD={PASSWORD}", *load]

    def snapshot(self) -> Snapshot:
        import psycopg

        # A new slot's snapshot shows exactly the commits whose record lies before its position.
        url = self.server.url("shop")
        with (
            contextlib.closing(psycopg.connect(f"{url}?replication=database", autocommit=True)) as
            maker, contextlib.closing(self.server.connect("shop")) as connection,
        ):  # fmt: skip
            name = f"snapshot_{time.monotonic_ns()}"
            made = maker.execute(
                f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            ).fetchall()[0]
            high, low = (int(part, 16) for part in made[1].split("/"))
            cursor = connection.cursor()
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{made[2]}'")
            tables = {one: self.rows(cursor, one, names) for one, names in self.COLUMNS.items()}
            return Snapshot((high << 32 | low) - 1, tables)


def make_load(name: str, folder: Path) -> Load:
    """pgbench on PostgreSQL, or one of sysbench's scripts on MariaDB."""
    if name == "pgbench":
        return Pgbench(folder)
    if shutil.which("sysbench") is None:
        pytest.skip("there is no sysbench; on Debian: apt-get install sysbench")
    return Sysbench(folder, name)
