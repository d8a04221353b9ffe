"""Servers of one test file, for tests that leave something in the history of their server.

A file imports the fixtures, which then replace the shared ones of ``fixtures.py``.  What they leave
(tagged GTIDs, groups of other domains and servers, purged files) would change what the tests of
other files read.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from databus.cli.demo.private_servers import MariaDBServer
from tests.support.fixtures import mysql_or_skip, skip_if_unwanted
from tests.support.mysql_server import MySQLServer


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDBServer]:
    """A MariaDB of this file."""
    skip_if_unwanted()
    with MariaDBServer(tmp_path_factory.mktemp("mariadb") / "server") as server:
        yield server


@pytest.fixture(scope="module")
def mysql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MySQLServer]:
    """A MySQL of this file; skipped, with the reason, where there is none."""
    with mysql_or_skip(tmp_path_factory) as server:
        yield server
