"""Fixtures of tests that run on MariaDB and on MySQL."""

from __future__ import annotations

import pytest

from tests.support.fixtures import FreshDatabase


@pytest.fixture(params=["mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    """An empty database; skipped, with the reason, where there is no such server."""
    found: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return found
