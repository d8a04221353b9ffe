"""Applications' databases, by each driver that stores of checkpoints are made for."""

from __future__ import annotations

import inspect
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databus.client import AsyncpgCheckpoints, DatabaseCheckpoints
from tests.support.database_connection import connect

DRIVERS = ("sqlite", "postgres", "asyncpg", "mariadb", "mysql")


@dataclass(frozen=True)
class Application:
    """A database of an application, and how a driver opens it."""

    driver: str
    url: str

    def store(self, name: str = "copy") -> Any:
        if self.driver == "asyncpg":
            return AsyncpgCheckpoints(name, lambda: asyncpg.connect(self.url))
        return DatabaseCheckpoints(name, self.connect)

    def connect(self) -> Any:
        return connect(self.url)

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Run one statement by a connection of its own; returns its rows."""
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(sql)
            rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
            connection.commit()
            return rows


class Transaction:
    """A connection of the application, sync or async, as one."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __aenter__(self) -> Transaction:
        if self._application.driver == "asyncpg":
            self.connection = await asyncpg.connect(self._application.url)
            self._open = self.connection.transaction()
            await self._open.start()
        else:
            self.connection = self._application.connect()
        return self

    async def execute(self, sql: str) -> None:
        if self._application.driver == "asyncpg":
            await self.connection.execute(sql)
        else:
            self.connection.cursor().execute(sql)

    async def commit(self) -> None:
        await settled(
            (self._open if self._application.driver == "asyncpg" else self.connection).commit()
        )

    async def __aexit__(self, *_: object) -> None:
        await settled(self.connection.close())


async def settled(result: Any) -> Any:
    """The result of a store's method, whether it is async or not."""
    return await result if inspect.isawaitable(result) else result


@pytest.fixture(params=DRIVERS)
def application(request: pytest.FixtureRequest, tmp_path: Path) -> Application:
    """An application's database, with an empty table ``applied`` without a key."""
    driver: str = request.param
    if driver == "sqlite":
        path = tmp_path / "application.db"
        sqlite3.connect(path).close()
        made = Application(driver, f"sqlite:///{path}")
    else:
        product = "postgres" if driver == "asyncpg" else driver
        made = Application(driver, request.getfixturevalue(f"{product}_database").url)
    made.execute("CREATE TABLE applied (scn BIGINT NOT NULL, seq BIGINT NOT NULL)")
    return made
