"""The database of a test: on MariaDB and on MySQL, on PostgreSQL, or on every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fixtures import FreshDatabase
from tests.support.upstream import KINDS, Upstream, server_upstream, sqlite_upstream


@pytest.fixture(params=["mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    """An empty database; skipped, with the reason, where there is no such server."""
    found: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture
def db(postgres_database: FreshDatabase) -> FreshDatabase:
    """An empty database on the shared PostgreSQL."""
    return postgres_database


@pytest.fixture
def shop(request: pytest.FixtureRequest, db: FreshDatabase) -> FreshDatabase:
    """A database on the shared PostgreSQL with the module's ``TABLES``."""
    for statement in request.module.TABLES:
        db.execute(statement)
    return db


@pytest.fixture(params=KINDS)
def upstream(request: pytest.FixtureRequest, tmp_path: Path) -> Upstream:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return sqlite_upstream(tmp_path / "source.db")
    return server_upstream(request.param, request.getfixturevalue(f"{request.param}_database"))
