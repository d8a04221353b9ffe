"""Servers of one test file, for tests that leave something in the history of their server.

A file imports the fixtures, which then replace the shared ones of ``fixtures.py``.  What they leave
(tagged GTIDs, groups of other domains and servers, purged files) would change what the tests of
other files read.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from databus.cli.demo.private_servers import MariaDBServer
from databus.common.errors import MissingDependency
from tests.support.fixtures import skip_if_unwanted
from tests.support.mysql_server import MySQLServer, mysql_launcher


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDBServer]:
    """A MariaDB of this file."""
    skip_if_unwanted()
    with MariaDBServer(tmp_path_factory.mktemp("mariadb") / "server") as server:
        yield server


@pytest.fixture(scope="module")
def mysql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MySQLServer]:
    """A MySQL of this file; skipped, with the reason, where there is none."""
    skip_if_unwanted()
    try:
        mysql_launcher()
    except MissingDependency as error:
        pytest.skip(error.message)
    with MySQLServer(tmp_path_factory.mktemp("mysql") / "server") as server:
        yield server
