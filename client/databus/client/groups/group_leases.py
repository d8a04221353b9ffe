"""The tables of groups in a database of the application, by the DB-API or by asyncpg."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from databus.client.checkpoints.checkpoint_table import TABLE, Steps
from databus.client.checkpoints.database_steps import (
    AsyncpgDatabase,
    DbapiDatabase,
    KeptAsyncpgDatabase,
    KeptDbapiDatabase,
    as_store_error,
    commits_each_statement,
)
from databus.client.groups.group_table import GroupState, GroupTable
from databus.common.errors import ConfigError, UsageError

T = TypeVar("T")
_DIALECTS = {
    "sqlite3": "sqlite",
    "psycopg": "postgres",
    "psycopg2": "postgres",
    "pg8000": "postgres",
    "pymysql": "mysql",
    "MySQLdb": "mysql",
    "mysql": "mysql",
    "mariadb": "mysql",
}


class GroupLeases(Protocol):
    """What holds the members' leases: ``DatabaseLeases`` or ``AsyncpgLeases``."""

    @property
    def table(self) -> GroupTable:
        """The statements for this database."""

    def alone(self, what: str, steps: Steps[T]) -> T | Awaitable[T]:
        """Run the steps on a connection and in a transaction of their own.

        Raises:
            StoreError: the database could not be used.
        """

    def within(self, connection: Any, steps: Steps[T]) -> T | Awaitable[T]:
        """Run the steps in the application's open transaction."""

    def kept(self) -> GroupLeases:
        """The same, over one connection that stays open, for one thread; ``close`` ends it."""

    def close(self) -> Awaitable[None] | None:
        """Close the connection of ``kept``."""


class DatabaseLeases:
    """The tables of groups, by a driver of the DB-API: PostgreSQL, MySQL, MariaDB or SQLite.

    ``connect`` opens a connection, which is closed after use; it must not commit each statement
    by itself.  ``dialect`` (postgres, mysql or sqlite) is needed only for a driver that is not
    known, ``paramstyle`` if the driver's own cannot be found.  With SQLite all members run on one
    machine.

    Time is the database server's clock.

    Owner: any thread.
    Durability: the database's, when a method returns.
    Raises: ConfigError, StoreError.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        dialect: str | None = None,
        paramstyle: str | None = None,
        prefix: str = "databus_",
        checkpoints: str = TABLE,
    ) -> None:
        self._connect = connect
        self._style = paramstyle
        self._database = DbapiDatabase(connect, paramstyle)
        self._dialect = dialect
        self._names = {"prefix": prefix, "checkpoints": checkpoints}
        if dialect is not None:
            _ = self.table

    @functools.cached_property
    def table(self) -> GroupTable:
        """The statements for this database; the first use connects to see which it is."""
        dialect = self._dialect
        if dialect is None:
            with _errors_of("connect"), contextlib.closing(self._connect()) as connection:
                dialect = _dialect_of(connection)
        return GroupTable(dialect, **self._names)

    @property
    def ddl(self) -> str:
        """The statements that create the tables, for an account that may."""
        return self.table.ddl

    def create_tables(self) -> None:
        """Create the tables if they are not there."""
        self.alone("create", self.table.create())

    def state(self, group: str) -> GroupState:
        """The members of a group, and who owns which partition."""
        return self.alone("read", self.table.state(group))

    def resize(self, group: str, partitions: int) -> None:
        """Ask for another number of partitions; see the manual's page on groups."""
        self.alone("resize", self.table.resize(group, partitions))

    def alone(self, what: str, steps: Steps[T]) -> T:
        """Run the steps on a connection and in a transaction of their own."""
        with _errors_of(what):
            if what == "join":  # the first step of a member, which writes
                return self._database.alone(steps, _require_transaction)
            return self._database.alone(steps)

    def within(self, connection: Any, steps: Steps[T]) -> T:
        """Run the steps in the application's open transaction."""
        found = self._database.run(connection, steps)
        _require_transaction(connection)
        return found

    def kept(self) -> DatabaseLeases:
        """The same, over one connection that stays open, for one thread; ``close`` ends it."""
        leases = copy.copy(self)
        leases._database = KeptDbapiDatabase(self._connect, self._style)
        return leases

    def close(self) -> None:
        """Close the connection of ``kept``."""
        if isinstance(self._database, KeptDbapiDatabase):
            self._database.close()


class AsyncpgLeases:
    """As ``DatabaseLeases``, for connections of asyncpg: ``lambda: asyncpg.connect(url)``.

    Owner: any event loop.
    Durability, Raises: those of ``DatabaseLeases``.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        *,
        prefix: str = "databus_",
        checkpoints: str = TABLE,
    ) -> None:
        self._connect = connect
        self._database = AsyncpgDatabase(connect)
        self.table = GroupTable("postgres", prefix=prefix, checkpoints=checkpoints)

    @property
    def ddl(self) -> str:
        """The statements that create the tables, for an account that may."""
        return self.table.ddl

    async def create_tables(self) -> None:
        """Create the tables if they are not there."""
        await self.alone("create", self.table.create())

    async def state(self, group: str) -> GroupState:
        """The members of a group, and who owns which partition."""
        return await self.alone("read", self.table.state(group))

    async def resize(self, group: str, partitions: int) -> None:
        """Ask for another number of partitions; see the manual's page on groups."""
        await self.alone("resize", self.table.resize(group, partitions))

    async def alone(self, what: str, steps: Steps[T]) -> T:
        """Run the steps on a connection and in a transaction of their own."""
        with _errors_of(what):
            return await self._database.alone(steps)

    async def within(self, connection: Any, steps: Steps[T]) -> T:
        """Run the steps in the application's open transaction."""
        _require_transaction(connection)
        return await self._database.run(connection, steps)

    def kept(self) -> AsyncpgLeases:
        """The same, over one connection that stays open, for one thread; ``close`` ends it."""
        leases = copy.copy(self)
        leases._database = KeptAsyncpgDatabase(self._connect)
        return leases

    async def close(self) -> None:
        """Close the connection of ``kept``."""
        if isinstance(self._database, KeptAsyncpgDatabase):
            await self._database.close()


def _require_transaction(connection: Any) -> None:
    if commits_each_statement(connection):
        raise UsageError(
            "groups need transactions, and this connection commits each statement by itself: "
            "switch autocommit off, or begin a transaction before the window's first row"
        )


def _dialect_of(connection: Any) -> str:
    for cls in type(connection).__mro__:
        found = _DIALECTS.get(cls.__module__.partition(".")[0])
        if found is not None:
            return found
    raise ConfigError(
        f"the driver of a {type(connection).__module__}.{type(connection).__qualname__} is not "
        "known; give dialect='postgres', 'mysql' or 'sqlite'"
    )


def _errors_of(what: str) -> contextlib.AbstractContextManager[None]:
    return as_store_error(
        f"the tables of groups could not be used ({what})",
        "If they are not there, call create_tables(), or create them with the statements that the "
        "leases' ddl has.",
    )
