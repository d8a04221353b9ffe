"""Data folders of the tests' servers: in memory where there is enough of it.

MariaDB and MySQL sync their files at each change of a definition, whatever their settings are.
Their folders are created once in a test process and then copied.  Not those of PostgreSQL: a copy
has the system identifier of its original.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from databus.cli.demo.private_servers import MariaDBServer, PostgresServer, PrivateServer
from tests.support.mysql_server import MySQLServer, mysql_launcher

_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 4 << 30
"""What is free in memory before the first server starts; as for `make quick`."""


@contextlib.contextmanager
def copied_data_folders(folder: Path) -> Iterator[None]:
    """Meanwhile a new server starts on a copy of what the first one of its program created.

    ``folder`` gets the templates.  The first server has created a template when it has not yet
    been started, so that a copy has no transaction, and no identity.
    """
    with contextlib.ExitStack() as patched:
        memory = patched.enter_context(_memory())
        create = PostgresServer._initialise

        def initialise_postgres(server: PostgresServer) -> None:
            _link(server, memory)
            create(server)

        patched.enter_context(patch.object(PostgresServer, "_initialise", initialise_postgres))
        for server, program in ((MariaDBServer, _mariadb), (MySQLServer, _mysql)):
            initialise = _Initialise(folder / server.product, memory, server._initialise, program)
            patched.enter_context(patch.object(server, "_initialise", initialise.method()))
        patched.enter_context(patch.object(PrivateServer, "remove", _removing()))
        yield


@contextlib.contextmanager
def _memory() -> Iterator[Path | None]:
    """A folder in memory for this process; None where there is little of it."""
    free = shutil.disk_usage(_MEMORY).free if _MEMORY.is_dir() else 0
    if min(free, psutil.virtual_memory().available) < _NEEDED_BYTES:
        yield None
        return
    prefix = "databus-servers-"
    for left in _MEMORY.glob(f"{prefix}*"):
        if not psutil.pid_exists(int(left.name.split("-")[2])):  # It was killed.
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=_MEMORY))
    folder.chmod(0o755)  # PostgreSQL may run under an account of its own.
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _link(server: PrivateServer, memory: Path | None) -> None:
    """Have the data folder in memory, unless the server is to be durable."""
    if memory is None or server.durable or server.data_dir.is_symlink():
        return
    data = tempfile.mkdtemp(dir=memory)
    if server.account is not None:
        shutil.chown(data, server.account)
    server.data_dir.symlink_to(data)


def _removing() -> Callable[[PrivateServer], None]:
    """``remove``, which also deletes the data folder that is elsewhere."""
    remove = PrivateServer.remove

    def removed(server: PrivateServer) -> None:
        data = server.data_dir.resolve()
        remove(server)
        shutil.rmtree(data, ignore_errors=True)

    return removed


def _mariadb(server: Any) -> str:
    names = (("mariadbd", "mysqld"), ("mariadb-install-db", "mysql_install_db"))
    return " ".join(server._binary(*one) for one in names)


def _mysql(_: Any) -> str:
    return " ".join(mysql_launcher())


class _Initialise:
    """``_initialise`` of one kind of server."""

    def __init__(
        self,
        folder: Path,
        memory: Path | None,
        create: Callable[[Any], None],
        program: Callable[[Any], str],
    ) -> None:
        self._folder = folder
        self._memory = memory
        self._create = create
        self._program = program
        self._templates: dict[str, Path] = {}

    def method(self) -> Callable[[Any], None]:
        """What replaces the method."""
        return lambda server: self._initialise(server)

    def _initialise(self, server: Any) -> None:
        program = self._program(server)
        _link(server, self._memory)
        template = self._templates.get(program)
        if template is not None:
            _copy(template, server.directory)
            return
        self._create(server)
        template = self._folder / str(len(self._templates))
        template.mkdir(parents=True)
        _copy(server.directory, template)
        (template / "data" / "auto.cnf").unlink(missing_ok=True)  # MySQL's server_uuid
        self._templates[program] = template


def _copy(origin: Path, target: Path) -> None:
    command = ["cp", "-a", "--reflink=auto", "--sparse=always"]
    subprocess.run([*command, origin / "init.sql", target], check=True)
    subprocess.run([*command, f"{origin}/data/.", target / "data"], check=True)
