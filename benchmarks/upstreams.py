"""Databases with a backlog of changes to capture, and the reader that each brings along.

Private servers of Debian's binaries.  A backlog is rows of ten columns, inserted by the server
itself in transactions of one row or of a thousand; the database's own reader, which decodes
nothing, is the limit of what any reader can take off it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from databus.cli.demo.private_servers import (
    PASSWORD,
    USER,
    MariaDBServer,
    PostgresServer,
    PrivateServer,
)
from databus.common.config import DatabaseConfig, SourceUrl
from tests.support.mysql_server import MySQLServer, mysql_launcher

DATABASE = "bench"


@dataclass(frozen=True, slots=True)
class Backlog:
    """Committed changes that wait: ``rows`` of them, ``per_commit`` in each transaction."""

    table: str
    rows: int
    per_commit: int
    config: DatabaseConfig
    after_scn: int
    upto_scn: int
    own: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the database's own reader took for a backlog."""

    seconds: float
    cpu_seconds: float


class Upstream(ABC):
    """One database server with its tables, entered and left as a context manager.

    Owner: the benchmark.
    """

    name: ClassVar[str]
    own_reader: ClassVar[str]
    server: PrivateServer

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="databus-bench-"))

    @property
    def own_reader_absent(self) -> str | None:
        """Why the database's own reader cannot be run here; None if it can."""
        program = self._own_program()[-1]
        return None if shutil.which(program) else f"there is no {program}"

    @abstractmethod
    def _own_program(self) -> list[str]:
        """How the own reader is called, the program last."""

    def __enter__(self) -> Self:
        self.server.start()
        self.server.create_database(DATABASE)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Run one statement in the benchmark's database."""
        return self.server.execute(sql, database=DATABASE)

    def config(self, table: str) -> DatabaseConfig:
        """A ``[[database]]`` that captures one table."""
        return DatabaseConfig(
            name=table,
            url=SourceUrl(self.server.url(DATABASE)),
            sources=(f"{self.schema}.{table}",),
        )

    @property
    @abstractmethod
    def schema(self) -> str:
        """What comes before a table's name."""

    @abstractmethod
    def create_table(self, table: str) -> None:
        """Create a table of ten columns."""

    @abstractmethod
    def insert_one(self, table: str, number: int) -> str:
        """The statement that inserts row ``number``."""

    @abstractmethod
    def fill(self, table: str, rows: int, per_commit: int) -> None:
        """Insert the rows on the server."""

    @abstractmethod
    def before_fill(self, table: str, readings: int) -> dict[str, str]:
        """Prepare for the own reader; its facts."""

    @abstractmethod
    def after_fill(self, facts: dict[str, str]) -> int:
        """Add what the own reader needs; the scn of the last commit."""

    @abstractmethod
    def read_own(self, backlog: Backlog, number: int) -> Reading:
        """Let the database's own reader take the backlog to nowhere, for the nth time."""

    def backlog(
        self, table: str, rows: int, per_commit: int, after_scn: int, readings: int
    ) -> Backlog:
        """Write a backlog of changes that commit after ``after_scn``."""
        facts = self.before_fill(table, readings)
        self.fill(table, rows, per_commit)
        upto_scn = self.after_fill(facts)
        return Backlog(table, rows, per_commit, self.config(table), after_scn, upto_scn, facts)


class MariaDB(Upstream):
    """A MariaDB, whose own reader is ``mariadb-binlog --raw``."""

    name = "MariaDB"
    own_reader = "mariadb-binlog --raw"

    def __init__(self) -> None:
        super().__init__()
        self.server = MariaDBServer(self._folder / "server")

    @property
    def schema(self) -> str:
        return DATABASE

    def create_table(self, table: str) -> None:
        self.execute(
            f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, a INT, b INT, c BIGINT, "
            "name VARCHAR(64), email VARCHAR(64), price DECIMAL(12,2), created DATETIME(6), "
            "updated DATETIME, note TEXT)"
        )

    @staticmethod
    def _row(number: str) -> str:
        return (
            f"{number}, {number} * 7919 % 1000000007, {number} % 1000, {number} * 4294967291, "
            f"LEFT(MD5({number}), 20), CONCAT(LEFT(SHA1({number}), 18), '@example.com'), "
            f"{number} % 1000000 + 0.25, "
            f"TIMESTAMPADD(MICROSECOND, {number} * 1000003, '2024-01-01 00:00:00'), "
            f"TIMESTAMPADD(SECOND, {number} % 86400, '2025-01-01 00:00:00'), "
            f"REPEAT(LEFT(MD5({number}), 20), 5)"
        )

    def insert_one(self, table: str, number: int) -> str:
        return f"INSERT INTO {table} SELECT {self._row(str(number))}"

    def fill(self, table: str, rows: int, per_commit: int) -> None:
        if per_commit == 1:
            insert = f"INSERT INTO {table} SELECT {self._row('@i')}"
        else:
            insert = (
                f"INSERT INTO {table} SELECT {self._row('(@i + seq)')} "
                f"FROM seq_0_to_{per_commit - 1}"
            )
        self.execute(
            f"BEGIN NOT ATOMIC SET @i = 0; WHILE @i < {rows} DO {insert}; "
            f"SET @i = @i + {per_commit}; END WHILE; END"
        )

    def before_fill(self, table: str, readings: int) -> dict[str, str]:
        self.execute("FLUSH BINARY LOGS")
        return {"file": str(self.execute("SHOW MASTER STATUS")[0][0])}

    def after_fill(self, facts: dict[str, str]) -> int:
        # The own reader ends where the file does.
        self.execute("FLUSH BINARY LOGS")
        return int(str(self.execute("SELECT @@gtid_binlog_pos")[0][0]).rpartition("-")[2])

    def _own_program(self) -> list[str]:
        return ["mariadb-binlog"]

    def read_own(self, backlog: Backlog, number: int) -> Reading:
        into = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(self._folder)
        with tempfile.TemporaryDirectory(dir=into) as folder:
            return timed(
                [
                    *self._own_program(), "--no-defaults", "--raw", "--read-from-remote-server",
                    "--host=127.0.0.1", f"--port={self.server.port}", f"--user={USER}",
                    f"--password={PASSWORD}", f"--result-file={folder}/", backlog.own["file"],
                ]
            )  # fmt: skip


class MySQL(MariaDB):
    """A MySQL, as ``scripts/mysql.sh`` unpacks it, whose own reader is ``mysqlbinlog --raw``."""

    name = "MySQL"
    own_reader = "mysqlbinlog --raw"

    def __init__(self) -> None:
        super().__init__()
        self.server = MySQLServer(self._folder / "server")

    def _own_program(self) -> list[str]:
        server = mysql_launcher()
        index = next(index for index, part in enumerate(server) if part.endswith("mysqld"))
        return [*server[:index], str(Path(server[index]).parents[1] / "bin/mysqlbinlog")]

    @staticmethod
    def _row(number: str) -> str:
        # MySQL 9 has neither of the older digests.
        row = MariaDB._row(number)
        return re.sub(r"(?:MD5|SHA1)\(((?:[^()]|\([^()]*\))*)\)", r"SHA2(\1, 224)", row)

    def fill(self, table: str, rows: int, per_commit: int) -> None:
        # What MariaDB does in an anonymous block and with a table of numbers.
        numbers = (
            f" FROM (WITH RECURSIVE n(seq) AS (SELECT 0 UNION ALL SELECT seq + 1 FROM n "
            f"WHERE seq < {per_commit - 1}) SELECT seq FROM n) n"
        )
        row = self._row("(@i + seq)") + numbers if per_commit > 1 else self._row("@i")
        self.execute(
            f"CREATE PROCEDURE fill_{table}() BEGIN SET @i = 0; WHILE @i < {rows} DO "
            f"INSERT INTO {table} SELECT {row}; SET @i = @i + {per_commit}; END WHILE; END"
        )
        self.execute(f"CALL fill_{table}()")

    def before_fill(self, table: str, readings: int) -> dict[str, str]:
        self.execute("FLUSH BINARY LOGS")
        return {"file": str(self.execute("SHOW BINARY LOG STATUS")[0][0])}

    def after_fill(self, facts: dict[str, str]) -> int:
        self.execute("FLUSH BINARY LOGS")
        executed = str(self.execute("SELECT @@gtid_executed")[0][0])
        # The only server that there was: the scn's upper bits, which count servers, are zero.
        return int(executed.rpartition("-")[2])


class Postgres(Upstream):
    """A PostgreSQL, whose own reader is ``pg_recvlogical``."""

    name = "PostgreSQL"
    own_reader = "pg_recvlogical"

    def __init__(self) -> None:
        super().__init__()
        self.server = PostgresServer(self._folder / "server", options=["max_wal_size=4GB"])

    @property
    def schema(self) -> str:
        return "public"

    def create_table(self, table: str) -> None:
        self.execute(
            f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, a INT, b INT, c BIGINT, "
            "name VARCHAR(64), email VARCHAR(64), price NUMERIC(12,2), created TIMESTAMP(6), "
            "updated TIMESTAMP(0), note TEXT)"
        )

    @staticmethod
    def _row(number: str) -> str:
        n = f"({number})::bigint"
        text = f"({n})::text"
        return (
            f"{n}, ({n} * 7919 % 1000000007)::int, ({n} % 1000)::int, {n} * 4294967291, "
            f"left(md5({text}), 20), left(md5({text}), 18) || '@example.com', "
            f"({n} % 1000000 + 0.25)::numeric(12,2), "
            f"timestamp '2024-01-01' + {n} * interval '1000003 microseconds', "
            f"timestamp '2025-01-01' + ({n} % 86400) * interval '1 second', "
            f"repeat(left(md5({text}), 20), 5)"
        )

    def insert_one(self, table: str, number: int) -> str:
        return f"INSERT INTO {table} SELECT {self._row(str(number))}"

    def fill(self, table: str, rows: int, per_commit: int) -> None:
        self.execute(
            f"DO $$ BEGIN FOR i IN 0..{rows // per_commit - 1} LOOP "
            f"INSERT INTO {table} SELECT {self._row(f'i::bigint * {per_commit} + n')} "
            f"FROM generate_series(0, {per_commit - 1}) n; COMMIT; END LOOP; END $$"
        )

    def before_fill(self, table: str, readings: int) -> dict[str, str]:
        # It acknowledges what it has read, so that each reading needs a slot of its own.
        for number in range(readings):
            self.execute(
                f"SELECT pg_copy_logical_replication_slot('databus_{table}', 'own_{table}{number}')"
            )
        return {}

    def after_fill(self, facts: dict[str, str]) -> int:
        facts["end"] = str(self.execute("SELECT pg_current_wal_lsn()")[0][0])
        # A commit starts before the log's end: no more is needed to be sure that all has come.
        high, low = (int(part, 16) for part in facts["end"].split("/"))
        self.execute("SELECT pg_logical_emit_message(true, 'databus-bench', '')")
        return (high << 32 | low) - 1

    def _own_program(self) -> list[str]:
        return [_newest("pg_recvlogical")]

    def read_own(self, backlog: Backlog, number: int) -> Reading:
        slot = f"own_{backlog.table}{number}"
        reading = timed(
            [
                *self._own_program(), "--host=127.0.0.1", f"--port={self.server.port}",
                f"--username={USER}", f"--dbname={DATABASE}", f"--slot={slot}", "--start",
                "--file=/dev/null", "--fsync-interval=0", f"--endpos={backlog.own['end']}",
                "--no-loop", "--option=proto_version=1",
                f"--option=publication_names=databus_{backlog.table}",
            ],
            PGPASSWORD=PASSWORD,
        )  # fmt: skip
        with contextlib.suppress(Exception):
            self.execute(f"SELECT pg_drop_replication_slot('{slot}')")
        return reading


def _newest(program: str) -> str:
    """A program of PostgreSQL's, where Debian puts them, or on PATH."""
    found = Path("/usr/lib/postgresql").glob(f"*/bin/{program}")
    return str(max(found, key=lambda path: float(path.parts[-3]), default=program))


def timed(command: list[str], **environment: str) -> Reading:
    """Run a program to its end; wall clock and CPU.

    Raises:
        RuntimeError: it failed, with what it printed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, check=False
    )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.decode(errors='replace')[-500:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Reading(seconds, cpu)
