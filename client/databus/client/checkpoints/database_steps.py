"""Steps of statements on a database of the application, by a driver of the DB-API or by asyncpg.

No driver is imported here: the application opens the connections.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from databus.client.checkpoints.checkpoint_table import Answer, Steps, with_marks
from databus.common.errors import ConfigError, DatabusError, StoreError

T = TypeVar("T")
_IDLE = 0
_IN_TRANSACTION = 1


@contextlib.contextmanager
def as_store_error(failed: str, hint: str) -> Iterator[None]:
    """A driver's error as ours: its classes are not known here, so any exception counts.

    ``failed`` is what could not be done, ``hint`` what to do if there is no such table.

    Raises:
        StoreError: the driver raised something.
    """
    try:
        yield
    except DatabusError:
        raise
    except Exception as error:
        raise StoreError(f"{failed}: {error!r}. {hint}") from error


def _nothing(_: Any) -> None:
    return None


class DbapiDatabase:
    """Runs steps by a driver of the DB-API; ``connect`` opens a connection, which is closed.

    Raises: what the driver raises, and what the steps do.
    """

    def __init__(self, connect: Callable[[], Any], paramstyle: str | None = None) -> None:
        self._connect = connect
        self._style = paramstyle

    def alone(self, steps: Steps[T], before_commit: Callable[[Any], None] = _nothing) -> T:
        """Run the steps on a connection and in a transaction of their own."""
        with contextlib.closing(self._connect()) as connection:
            try:
                found = self.run(connection, steps)
                before_commit(connection)
            except BaseException:
                connection.rollback()
                raise
            connection.commit()
            return found

    def run(self, connection: Any, steps: Steps[T]) -> T:
        """Run the steps in the open transaction of ``connection``."""
        style = self._style or paramstyle_of(connection)
        with contextlib.closing(connection.cursor()) as cursor:

            def ask(sql: str, values: tuple[Any, ...]) -> Answer:
                cursor.execute(with_marks(sql, style), values)
                rows = cursor.fetchall() if cursor.description else []
                return Answer(cursor.rowcount, [row_values(row) for row in rows])

            try:
                statement = next(steps)
                while True:
                    statement = steps.send(ask(*statement))
            except StopIteration as end:
                found: T = end.value
                return found


class KeptDbapiDatabase(DbapiDatabase):
    """As ``DbapiDatabase``, over one connection, which is opened again after a failure.

    Owner: one thread.
    """

    def __init__(self, connect: Callable[[], Any], paramstyle: str | None = None) -> None:
        super().__init__(connect, paramstyle)
        self._kept: Any = None

    def alone(self, steps: Steps[T], before_commit: Callable[[Any], None] = _nothing) -> T:
        """Run the steps in a transaction of their own."""
        if self._kept is None:
            self._kept = self._connect()
        try:
            found = self.run(self._kept, steps)
            before_commit(self._kept)
            self._kept.commit()
        except BaseException:
            self.close()
            raise
        return found

    def close(self) -> None:
        """Close the connection; the next steps open another."""
        kept, self._kept = self._kept, None
        if kept is not None:
            with contextlib.suppress(Exception):  # it is broken
                kept.close()


class AsyncpgDatabase:
    """As ``DbapiDatabase``, for connections of asyncpg."""

    def __init__(self, connect: Callable[[], Awaitable[Any]]) -> None:
        self._connect = connect

    async def alone(self, steps: Steps[T]) -> T:
        """Run the steps on a connection and in a transaction of their own."""
        async with self._opened() as connection, connection.transaction():
            return await self.run(connection, steps)

    async def run(self, connection: Any, steps: Steps[T]) -> T:
        """Run the steps in the open transaction of ``connection``."""
        try:
            sql, values = next(steps)
            while True:
                marked = with_marks(sql, "numeric_dollar")
                if sql.startswith("SELECT"):
                    rows = [tuple(row) for row in await connection.fetch(marked, *values)]
                    answer = Answer(len(rows), rows)
                else:
                    status: str = await connection.execute(marked, *values)
                    last = status.rpartition(" ")[2]
                    answer = Answer(int(last) if last.isdigit() else 0, [])
                sql, values = steps.send(answer)
        except StopIteration as end:
            found: T = end.value
            return found

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        connection = await self._connect()
        try:
            yield connection
        finally:
            await connection.close()


class KeptAsyncpgDatabase(AsyncpgDatabase):
    """As ``AsyncpgDatabase``, over one connection, which is opened again after a failure.

    Owner: one event loop.
    """

    def __init__(self, connect: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(connect)
        self._kept: Any = None

    async def alone(self, steps: Steps[T]) -> T:
        """Run the steps in a transaction of their own."""
        if self._kept is None:
            self._kept = await self._connect()
        try:
            async with self._kept.transaction():
                return await self.run(self._kept, steps)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; the next steps open another."""
        kept, self._kept = self._kept, None
        if kept is not None:
            with contextlib.suppress(Exception):  # it is broken
                await kept.close()


def row_values(row: Any) -> tuple[Any, ...]:
    """The values of a row; some cursors give rows as mappings."""
    return tuple(row.values()) if isinstance(row, Mapping) else tuple(row)


def paramstyle_of(connection: Any) -> str:
    """The style of the driver that a connection comes from: each driver's module names it."""
    for cls in type(connection).__mro__:
        module = sys.modules.get(cls.__module__.partition(".")[0])
        style = getattr(module, "paramstyle", None)
        if isinstance(style, str):
            return style
    raise ConfigError(
        f"the driver of a {type(connection).__module__}.{type(connection).__qualname__} does not "
        "name its paramstyle; give paramstyle='qmark' or 'format'"
    )


def commits_each_statement(connection: Any) -> bool:
    """Whether no transaction is open after a write, where the driver shows it.

    ``sqlite3`` and MySQL Connector show it as ``in_transaction``, asyncpg as
    ``is_in_transaction()``, psycopg in ``info``, PyMySQL in the status that the server sent last.
    """
    is_in_transaction = getattr(connection, "is_in_transaction", None)
    if is_in_transaction is not None:
        return not is_in_transaction()
    if getattr(connection, "in_transaction", None) is False:
        return True
    info = getattr(connection, "info", None)
    if getattr(info, "transaction_status", None) == _IDLE:
        return True
    status = getattr(connection, "server_status", None)
    return isinstance(status, int) and not status & _IN_TRANSACTION
