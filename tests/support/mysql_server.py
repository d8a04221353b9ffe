"""A private MySQL server for tests: from an unpacked folder, or from the PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import PASSWORD, USER, MariaDBServer
from databus.common.errors import MissingDependency

ROOT_VARIABLE = "DATABUS_MYSQL_ROOT"
_OLD_WORDS = (
    ("SHOW BINARY LOG STATUS", "SHOW MASTER STATUS"),
    ("RESET BINARY LOGS AND GTIDS", "RESET MASTER"),
    ("CHANGE REPLICATION SOURCE", "CHANGE MASTER"),
    (r"SOURCE_", "MASTER_"),
    (r"\bREPLICA\b", "SLAVE"),
)


def mysql_launcher() -> list[str]:
    """The beginning of a command line that starts a MySQL server.

    The server of an unpacked system (``scripts/mysql.sh``) runs with that system's loader and
    libraries, so it needs neither root nor a chroot.

    Raises:
        MissingDependency: there is none; the message says where it was looked for.
    """
    root = os.environ.get(ROOT_VARIABLE) or _unpacked()
    if root:
        if (unpacked := Path(root, "bin/mysqld")).exists():
            # scripts/servers.sh: it finds its own libraries.
            return [str(unpacked), f"--basedir={root}", f"--lc-messages-dir={root}/share"]
        loaders = sorted(Path(root).glob("lib64/ld-linux*.so.*"))
        server = Path(root, "usr/sbin/mysqld")
        if not loaders or not server.exists():
            raise MissingDependency(
                f"{ROOT_VARIABLE}={root} holds neither usr/sbin/mysqld nor bin/mysqld"
            )
        libraries = ":".join(
            str(path) for pattern in ("lib/*-linux-gnu", "usr/lib/*-linux-gnu", "usr/lib/mysql*")
            for path in Path(root).glob(pattern)
        )  # fmt: skip
        return [
            str(loaders[0]),
            "--library-path",
            libraries,
            str(server),
            f"--lc-messages-dir={root}/usr/share/mysql",
            f"--character-sets-dir={root}/usr/share/mysql/charsets",
        ]
    found = shutil.which("mysqld")
    if found is None or "MariaDB" in _version(found):
        raise MissingDependency(
            f"there is no MySQL server: {ROOT_VARIABLE} is not set, scripts/mysql.sh has not "
            "unpacked one, and no MySQL's mysqld is on the PATH"
        )
    return [found]


def _unpacked() -> str | None:
    """Where scripts/mysql.sh puts a server if no folder is given."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(cache, "databus-mysql")
    return str(folder) if (folder / "usr/sbin/mysqld").exists() else None


def _version(binary: str) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


class MySQLServer(MariaDBServer):
    """A MySQL with row format, full images and metadata, and GTIDs.

    Invariants, owner, durability and errors: those of PrivateServer.
    """

    product = "mysql"
    package = "mysql-server-core"
    root_variable = ROOT_VARIABLE

    def url(self, database: str) -> str:
        return super().url(database).replace("mariadb://", "mysql://", 1)

    def _launch(self) -> list[str]:
        launcher = mysql_launcher()
        position = next(index for index, part in enumerate(launcher) if part.endswith("mysqld"))
        return [
            *launcher[: position + 1],
            "--no-defaults",
            *launcher[position + 1 :],
            f"--datadir={self.data_dir}",
            *self._as_root(),
        ]

    def _initialise(self) -> None:
        self._run([*self._launch(), "--initialize-insecure"])
        (self.directory / "init.sql").write_text(
            "SET SESSION sql_log_bin = 0;\n"
            f"CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';\n"
            f"GRANT ALL PRIVILEGES ON *.* TO '{USER}'@'%' WITH GRANT OPTION;\n"
        )

    def is_at_least(self, *version: int) -> bool:
        """Whether the running server is of this version or a later one."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:3]) >= version

    def words(self, statement: str) -> str:
        """A statement about replication in the words that the server has: 8.4 dropped the old."""
        if self.is_at_least(8, 4):
            return statement
        for new, old in _OLD_WORDS:
            statement = re.sub(new, old, statement)
        return statement

    def execute(
        self, sql: str, parameters: Sequence[Any] = (), *, database: str | None = None
    ) -> list[tuple[Any, ...]]:
        return super().execute(self.words(sql), parameters, database=database)

    def _command(self) -> list[str]:
        flush = "1" if self.durable else "2"
        sync_binlog = "1" if self.durable else "0"
        return [
            *self._launch(),
            f"--tmpdir={self.directory}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--mysqlx=OFF",
            f"--socket={self._socket()}",
            f"--pid-file={self.directory / 'server.pid'}",
            f"--init-file={self.directory / 'init.sql'}",
            "--secure-file-priv=NULL",
            f"--server-id={self.server_id}",
            "--log-bin=binlog",
            "--binlog-format=ROW",
            "--binlog-row-image=FULL",
            "--binlog-row-metadata=FULL",
            "--gtid-mode=ON",
            "--enforce-gtid-consistency=ON",
            "--character-set-server=utf8mb4",
            "--innodb-buffer-pool-size=128M",
            # Its name since 8.0.30; servers before that one keep their 96 MiB.
            "--loose-innodb-redo-log-capacity=64M",
            f"--innodb-flush-log-at-trx-commit={flush}",
            f"--sync-binlog={sync_binlog}",
            "--max-allowed-packet=64M",
            "--performance-schema=OFF",
            "--skip-name-resolve",
            *self.options,
        ]


def require(server: object, what: str, *version: int) -> None:
    """Skip the running test where the server is a MySQL before the version that has ``what``."""
    if isinstance(server, MySQLServer) and not server.is_at_least(*version):
        since = ".".join(map(str, version))
        pytest.skip(f"{what}: since MySQL {since}, this is {server.version}")
