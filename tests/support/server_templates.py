"""Data folders of MariaDB and MySQL, which a test process creates once and then copies.

Not those of PostgreSQL: a copy has the system identifier of its original.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from databus.cli.demo.private_servers import MariaDBServer
from tests.support.mysql_server import MySQLServer, mysql_launcher


@contextlib.contextmanager
def copied_data_folders(folder: Path) -> Iterator[None]:
    """Meanwhile a new server starts on a copy of what the first one of its program created.

    ``folder`` gets the templates.  The first server has created a template when it has not yet
    been started, so that a copy has no transaction, and no identity.
    """
    with contextlib.ExitStack() as patched:
        for server, program in ((MariaDBServer, _mariadb), (MySQLServer, _mysql)):
            initialise = _Initialise(folder / server.product, server._initialise, program)
            patched.enter_context(patch.object(server, "_initialise", initialise.method()))
        yield


def _mariadb(server: Any) -> str:
    names = (("mariadbd", "mysqld"), ("mariadb-install-db", "mysql_install_db"))
    return " ".join(server._binary(*one) for one in names)


def _mysql(_: Any) -> str:
    return " ".join(mysql_launcher())


class _Initialise:
    """``_initialise`` of one kind of server."""

    def __init__(
        self, folder: Path, create: Callable[[Any], None], program: Callable[[Any], str]
    ) -> None:
        self._folder = folder
        self._create = create
        self._program = program
        self._templates: dict[str, Path] = {}

    def method(self) -> Callable[[Any], None]:
        """What replaces the method."""
        return lambda server: self._initialise(server)

    def _initialise(self, server: Any) -> None:
        program = self._program(server)
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
    subprocess.run([*command, origin / "data", origin / "init.sql", target], check=True)
