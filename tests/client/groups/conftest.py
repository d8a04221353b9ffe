"""Databases that hold groups, by each driver."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.client.checkpoints.conftest import DRIVERS, Application


def database_of(driver: str, folder: Path, request: pytest.FixtureRequest) -> Application:
    """An empty database of an application."""
    if driver == "sqlite":
        path = folder / "application.db"
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        return Application(driver, f"sqlite:///{path}")
    product = "postgres" if driver == "asyncpg" else driver
    return Application(driver, request.getfixturevalue(f"{product}_database").url)


@pytest.fixture(params=DRIVERS)
def application(request: pytest.FixtureRequest, tmp_path: Path) -> Application:
    """A database of an application, by each driver."""
    return database_of(request.param, tmp_path, request)
