"""Private MariaDB and PostgreSQL servers: a folder, a free port, nothing else touched.

The demo and the tests run on real databases.  A server here is started from Debian's
binaries in the foreground, listens on 127.0.0.1 only, and is set up for capture: row
format and GTIDs, or logical WAL.  It is not for production, and does not touch the system's own
service: its data folder, its port or its socket.  DATABUS_MARIADB_ROOT and
DATABUS_POSTGRES_ROOT name the folder of another, unpacked server (``scripts/servers.sh``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote

from databus.cli.demo.guardian import Guardian
from databus.common.errors import MissingDependency, SourceUnavailable
from databus.common.extras import imports_of_extra
from databus.relay.sources.tls_contexts import client_context

USER = "databus"
PASSWORD = "databus"

_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 30.0
_SLOTS_WITHIN_S = 60.0
_POLL_S = 0.02
_PORTS = range(12_000, 32_000)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at present.

    It is below the ephemeral ports of Linux.  A connection could take one of those while a server
    restarts on its port.
    """
    while True:
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


class PrivateServer(ABC):
    """One database server process that belongs to the creator of this object.

    Invariants:
        I1. ``process`` is the server itself, not a wrapper: its death is the server's death.
        I2. The port and the folder stay the same over ``stop``, ``kill9`` and ``restart``.
        I3. The process ends at the latest when this interpreter ends, even by kill -9.
    Owner: the creating process; no other may start a server in the same folder.
    Durability: the folder outlives ``stop`` and ``kill9``; ``remove`` deletes it.
    Raises: MissingDependency if a binary is not installed; SourceUnavailable, with the end
        of the server's log, if it does not start.
    """

    product: ClassVar[str]
    package: ClassVar[str]
    root_variable: ClassVar[str]

    def __init__(self, directory: Path, *, port: int | None = None, durable: bool = False) -> None:
        """``durable=False`` leaves flushing to the system: it survives kill -9, not power loss."""
        self.account = self._account()
        self.directory = self._reachable(directory.absolute())
        self.data_dir = self.directory / "data"
        self.log_path = self.directory / "server.log"
        self.port = port if port is not None else free_port()
        self.durable = durable
        self.process: subprocess.Popen[bytes] | None = None
        self._guardian: Guardian | None = None
        self.version = ""

    # -- implemented for each product

    @abstractmethod
    def url(self, database: str) -> str:
        """The address of a database, as ``[[database]] url`` takes it."""

    @abstractmethod
    def connect(self, database: str | None = None) -> Any:
        """An autocommit DB-API connection as the administrator; the caller closes it."""

    @abstractmethod
    def create_database(self, name: str) -> None:
        """Create an empty database."""

    @abstractmethod
    def drop_database(self, name: str) -> None:
        """Drop a database with everything in it; it may be gone already."""

    @abstractmethod
    def _initialise(self) -> None:
        """Create the data folder."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The command line of the server in the foreground."""

    @abstractmethod
    def _read_version(self) -> str:
        """The running server's version; fails until the server accepts connections."""

    # -- start and end of the process

    def start(self) -> Self:
        """Create the folder if necessary, start, and return when the server answers a query."""
        if self.running:
            return self
        self._clear_process()
        if not self.data_dir.exists():
            self._initialise()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._identity(),
            )
        self._guardian = Guardian(self.process.pid)
        atexit.register(self.kill9)
        self._wait_until_ready()
        return self

    def stop(self) -> None:
        """Shut down in order; kill -9 if that takes longer than half a minute."""
        if self.process is None:
            return
        self.process.send_signal(self._stop_signal())
        try:
            self.process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill9()
        self._clear_process()

    def kill9(self) -> None:
        """Kill the server and all its children at once, as a crash would."""
        if self.process is None:
            return
        pids = [self.process.pid, *_descendants(self.process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(_STOP_DEADLINE_S)
        for pid in pids[1:]:
            _wait_gone(pid, _STOP_DEADLINE_S)
        self._clear_process()

    def restart(self) -> Self:
        """Start again on the same folder and port, after stopping if it still runs."""
        self.stop()
        return self.start()

    def remove(self) -> None:
        """End the server at once, and delete its folder."""
        self.kill9()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.remove()

    # -- queries, for set-up and for comparison

    def execute(
        self, sql: str, parameters: Sequence[Any] = (), *, database: str | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement as the administrator and return its rows, if it has any."""
        with contextlib.closing(self.connect(database)) as connection:
            with contextlib.closing(connection.cursor()) as cursor:
                cursor.execute(sql, tuple(parameters) or None)
                return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    # -- inside

    def _account(self) -> str | None:
        """The system account of the server, or None for our own."""
        return None

    def _identity(self) -> dict[str, Any]:
        if self.account is None:
            return {}
        group = pwd.getpwnam(self.account).pw_gid
        return {"user": self.account, "group": group, "extra_groups": []}

    def _reachable(self, directory: Path) -> Path:
        """The folder, or a temporary one if the server's account cannot enter it."""
        if self.account is not None:
            closed = [one for one in directory.parents if one.exists() and not _open_to_all(one)]
            if closed:
                directory = Path(tempfile.mkdtemp(prefix=f"databus-{self.product}-"))
        directory.mkdir(parents=True, exist_ok=True)
        if self.account is not None:
            shutil.chown(directory, self.account)
        return directory

    def _stop_signal(self) -> signal.Signals:
        return signal.SIGTERM

    def _clear_process(self) -> None:
        self.process = None
        if self._guardian is not None:
            self._guardian.release()
            self._guardian = None
        atexit.unregister(self.kill9)

    def _run(self, command: list[str]) -> None:
        """Run a set-up command under the server's account; an error contains its output."""
        done = subprocess.run(
            command,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            # A starting MariaDB deletes temporary tables of other servers in a shared folder.
            env={**os.environ, "TMPDIR": str(self.directory)},
            **self._identity(),
        )
        if done.returncode != 0:
            output = done.stdout.decode(errors="replace").strip()
            raise SourceUnavailable(
                f"{command[0]} failed with exit code {done.returncode}: {output[-2000:]}"
            )

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while True:
            try:
                self.version = self._read_version()
                return
            except Exception as error:
                if self.process.poll() is None and time.monotonic() < deadline_s:
                    time.sleep(_POLL_S)
                    continue
                self.kill9()
                raise SourceUnavailable(
                    f"{self.product} did not come up on port {self.port} "
                    f"(last answer: {error}); its log {self.log_path} ends:\n{self._log_end()}"
                ) from error

    def _log_end(self) -> str:
        if not self.log_path.exists():
            return "(empty)"
        return self.log_path.read_text(errors="replace")[-2000:]

    def _binary(self, *names: str) -> str:
        """The first of these programs that is installed."""
        for name in names:
            for folder in self._folders():
                path = folder / name
                if os.access(path, os.X_OK):
                    return str(path)
        raise MissingDependency(
            f"{names[0]} is not installed; on Debian: apt-get install {self.package}",
            package=self.package,
        )

    def _folders(self) -> list[Path]:
        if root := self._root():
            return [root / "bin", root / "scripts"]
        path = os.environ.get("PATH", os.defpath).split(os.pathsep)
        return [Path("/usr/sbin"), Path("/usr/bin"), *(Path(one) for one in path if one)]

    def _root(self) -> Path | None:
        """The folder of an unpacked server that is used instead of the installed one."""
        named = os.environ.get(self.root_variable)
        return Path(named).absolute() if named else None


class MariaDBServer(PrivateServer):
    """A MariaDB with row format, full images and metadata, and strict GTIDs in one domain.

    Invariants, owner, durability and errors: those of PrivateServer.
    """

    product = "mariadb"
    # The core packages hold the server without the system service.
    package = "mariadb-server-core mariadb-client-core"
    root_variable = "DATABUS_MARIADB_ROOT"

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        durable: bool = False,
        domain_id: int = 1,
        server_id: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        """``options`` are further command-line options and override those given here."""
        super().__init__(directory, port=port, durable=durable)
        self.domain_id = domain_id
        self.server_id = server_id
        self.options = tuple(options)

    def url(self, database: str) -> str:
        return f"mariadb://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{quote(database)}"

    def connect(self, database: str | None = None) -> Any:
        with imports_of_extra("demo", package="pymysql", needed_by="the demo's MariaDB"):
            import pymysql
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user=USER,
            password=PASSWORD,
            database=database,
            charset="utf8mb4",
            autocommit=True,
            connect_timeout=10,
            # A server that is killed may leave a connection that is never answered.
            read_timeout=150,
            ssl_disabled=self.product == "mariadb",
            ssl=client_context(None, verifies=False, checks_name=False),
        )

    def create_database(self, name: str) -> None:
        self.execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS `{name}`")

    def _initialise(self) -> None:
        self._binary("mariadbd", "mysqld")
        install = self._binary("mariadb-install-db", "mysql_install_db")
        self._run(
            [
                install,
                "--no-defaults",
                # Relative to our folder: the script does not quote it, and it may hold a space.
                f"--datadir=./{self.data_dir.name}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
                *self._based(),
                *self._as_root(),
            ]
        )
        (self.directory / "init.sql").write_text(
            "SET SESSION sql_log_bin = 0;\n"
            f"CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';\n"
            f"GRANT ALL PRIVILEGES ON *.* TO '{USER}'@'%' WITH GRANT OPTION;\n"
        )

    def _command(self) -> list[str]:
        flush = "1" if self.durable else "2"
        sync_binlog = "1" if self.durable else "0"
        return [
            self._binary("mariadbd", "mysqld"),
            "--no-defaults",
            f"--datadir={self.data_dir}",
            f"--tmpdir={self.directory}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            f"--socket={self._socket()}",
            f"--pid-file={self.directory / 'server.pid'}",
            f"--init-file={self.directory / 'init.sql'}",
            f"--server-id={self.server_id}",
            "--log-bin=binlog",
            "--binlog-format=ROW",
            "--binlog-row-image=FULL",
            "--binlog-row-metadata=FULL",
            "--log-slave-updates",
            "--gtid-strict-mode=1",
            f"--gtid-domain-id={self.domain_id}",
            "--character-set-server=utf8mb4",
            "--innodb-buffer-pool-size=128M",
            "--innodb-log-file-size=48M",
            f"--innodb-flush-log-at-trx-commit={flush}",
            f"--sync-binlog={sync_binlog}",
            "--max-allowed-packet=64M",
            "--performance-schema=OFF",
            "--skip-name-resolve",
            *self._based(),
            *self._as_root(),
            *self.options,
        ]

    def _based(self) -> list[str]:
        """The base folder of an unpacked server, which differs from the one it was built for."""
        root = self._root()
        return [f"--basedir={root}"] if root else []

    def remove(self) -> None:
        """Delete the socket too, which may be outside of the folder."""
        super().remove()
        socket_path = self._socket()
        for path in (socket_path, Path(f"{socket_path}.lock")):
            path.unlink(missing_ok=True)

    def _as_root(self) -> list[str]:
        return ["--user=root"] if os.geteuid() == 0 else []

    def _socket(self) -> Path:
        """In the folder, or in the system's if the path would exceed the kernel's 107 bytes."""
        inside = self.directory / "server.sock"
        if len(os.fsencode(inside)) < 100:
            return inside
        return Path(tempfile.gettempdir()) / f"databus-mariadb-{self.port}.sock"

    def _read_version(self) -> str:
        return str(self.execute("SELECT VERSION()")[0][0])


class PostgresServer(PrivateServer):
    """A PostgreSQL with logical WAL.  It refuses root, so under root it runs as ``postgres``.

    Invariants, owner, durability and errors: those of PrivateServer.
    """

    product = "postgres"
    package = "postgresql"
    root_variable = "DATABUS_POSTGRES_ROOT"

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        durable: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """``options`` are ``name=value`` settings and override those given here."""
        super().__init__(directory, port=port, durable=durable)
        self.options = tuple(options)

    def url(self, database: str) -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{quote(database)}"

    def connect(self, database: str | None = None) -> Any:
        with imports_of_extra("demo", package="psycopg", needed_by="the demo's PostgreSQL"):
            import psycopg
        return psycopg.connect(self.url(database or "postgres"), autocommit=True)

    def create_database(self, name: str) -> None:
        self.execute(f'CREATE DATABASE "{name}"')

    def drop_database(self, name: str) -> None:
        """Drop the slots first: PostgreSQL does not drop a database that has one."""
        if not self.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]):
            return
        # A relay that was killed may have left a process that connects once more.
        self.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        deadline_s = time.monotonic() + _SLOTS_WITHIN_S
        slots = "FROM pg_replication_slots WHERE database = %s"
        while left := self.execute(f"SELECT slot_name, active_pid {slots}", [name]):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the slots of {name} are still in use: {left}")
            self.execute(f"SELECT pg_terminate_backend(active_pid) {slots}", [name])
            time.sleep(_POLL_S)
            drop = f"SELECT pg_drop_replication_slot(slot_name) {slots} AND active_pid IS NULL"
            self.execute(drop, [name])
        self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def _initialise(self) -> None:
        secret = self.directory / "password"
        secret.write_text(PASSWORD + "\n")
        if self.account is not None:
            shutil.chown(secret, self.account)
        self._run(
            [
                self._binary("initdb"),
                f"--pgdata={self.data_dir}",
                f"--username={USER}",
                f"--pwfile={secret}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C.UTF-8",
                "--no-sync",
            ]
        )
        secret.unlink()

    def _command(self) -> list[str]:
        switch = "on" if self.durable else "off"
        settings = [
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "wal_level=logical",
            "max_wal_senders=64",
            "max_replication_slots=64",
            "max_connections=200",
            "shared_buffers=64MB",
            "max_wal_size=512MB",
            f"fsync={switch}",
            f"full_page_writes={switch}",
            "timezone=UTC",
            *self.options,
        ]
        flags = [part for setting in settings for part in ("-c", setting)]
        return [self._binary("postgres"), "-D", str(self.data_dir), *flags]

    def _account(self) -> str | None:
        if os.geteuid() != 0:
            return None
        for account in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                return pwd.getpwnam(account).pw_name
        raise MissingDependency(
            "PostgreSQL refuses to run as root and there is no account 'postgres'; "
            f"on Debian: apt-get install {self.package}",
            package=self.package,
        )

    def remove(self) -> None:
        """Shut down as "immediate": kill -9 would leak its shared memory."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_DEADLINE_S)
        super().remove()

    def _stop_signal(self) -> signal.Signals:
        return signal.SIGINT  # "fast": sessions are ended, not waited for

    def _folders(self) -> list[Path]:
        if self._root():
            return super()._folders()
        versions = sorted(
            Path("/usr/lib/postgresql").glob("*/bin"), key=_major_version, reverse=True
        )
        return [*versions, *super()._folders()]

    def _read_version(self) -> str:
        return str(self.execute("SHOW server_version")[0][0])


def _major_version(folder: Path) -> int:
    name = folder.parent.name
    return int(name) if name.isdigit() else 0


def _open_to_all(folder: Path) -> bool:
    return bool(folder.stat().st_mode & 0o001)


def _descendants(pid: int) -> list[int]:
    """All processes below this one, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name may hold spaces and brackets: the fields are counted from its end.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _wait_gone(pid: int, deadline_s: float) -> None:
    """Return when an orphan has left the process table or is a zombie."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return
        if state[0] == "Z":
            return
        time.sleep(_POLL_S)
