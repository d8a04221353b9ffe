"""Checkpoints in the application's own database, in the transaction that holds its rows.

For any driver of the DB-API, and for asyncpg.  No driver is imported here: the application opens
the connections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from databus.client.checkpoints.checkpoint_table import (
    TABLE,
    CheckpointTable,
    Steps,
    StoredCheckpoint,
    checked_consumer,
    new_owner,
)
from databus.client.checkpoints.database_steps import (
    AsyncpgDatabase,
    DbapiDatabase,
    as_store_error,
    commits_each_statement,
)
from databus.common.checkpoint import Checkpoint
from databus.common.errors import UsageError

T = TypeVar("T")


class HeldCheckpoint:
    """The row that this process owns, and what ``put`` wrote that the client has not confirmed."""

    def __init__(self, consumer: str, table: str) -> None:
        self.consumer = checked_consumer(consumer)
        self.table = CheckpointTable(table)
        self._stored: StoredCheckpoint | None = None
        self._written: StoredCheckpoint | None = None

    def claimed(self, row: StoredCheckpoint) -> Checkpoint | None:
        """From now on ``put`` continues from this row."""
        self._stored, self._written = row, None
        return row.checkpoint

    def putting(self, checkpoint: Checkpoint) -> Steps[None]:
        """Write the checkpoint; it counts as stored when ``confirm`` is called."""
        if self._stored is None:
            raise UsageError(
                f"consumer {self.consumer}: put() was called outside a client that has loaded the "
                "checkpoint; pass this store as DatabusClient(checkpoints=...)"
            )
        self._written = yield from self.table.put(self._stored, checkpoint)

    def confirm(self, checkpoint: Checkpoint) -> bool:
        """Whether ``put`` has written the checkpoint; from now on it is the stored one."""
        written, self._written = self._written, None
        if written is None or written.checkpoint != checkpoint:
            return False
        self._stored = written
        return True

    def close(self) -> None:
        """Forget the row."""
        self._stored = self._written = None


class DatabaseCheckpoints:
    """Checkpoints in a table of the application's database, by a driver of the DB-API.

    The application calls ``put`` in ``onCheckpoint``, in the transaction that holds the window's
    rows, and commits.  Rows and checkpoint become durable together, so each window takes effect
    exactly once, wherever the process is killed.  An example:

        store = DatabaseCheckpoints("orders-copy", lambda: sqlite3.connect("shop.db"))
        store.create_table()

        class Copy(Consumer):
            def onDataEvent(self, event):
                connection.execute("INSERT INTO audit VALUES (?)", (event.value["id"],))

            def onCheckpoint(self, checkpoint):
                store.put(connection, checkpoint)
                connection.commit()

            def onRollback(self, checkpoint):
                connection.rollback()

    With the iterator: ``store.put(connection, window.checkpoint)``, ``connection.commit()``,
    ``window.commit()``.  A checkpoint that the application did not ``put`` is stored in a
    transaction of its own, after the application's: delivery is then at-least-once.

    ``connect`` opens a connection, which the store closes.  ``name`` names the consumer: one row
    of the table.  ``paramstyle`` is needed only if the driver's own cannot be found.

    Invariants:
        I1. One process at a time uses a name: the last one that started.  ``put`` of the one
            before raises CheckpointMoved, and its client stops.
        I2. ``put`` accepts a checkpoint only on top of the last confirmed one.  If a COMMIT was
            made although it was reported as failed, its window is not applied again: ``put``
            raises CheckpointMoved, and the next start continues after the window.

    Owner: one client.
    Durability: the application's, with ``put``.
    Raises: StoreError, BadCheckpoint; from ``put`` CheckpointMoved, UsageError, and what the
        driver raises.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        *,
        table: str = TABLE,
        paramstyle: str | None = None,
    ) -> None:
        self._held = HeldCheckpoint(name, table)
        self._database = DbapiDatabase(connect, paramstyle)

    @property
    def ddl(self) -> str:
        """The statement that creates the table, for an account that may."""
        return self._held.table.ddl

    def create_table(self) -> None:
        """Create the table if it is not there."""
        self._alone("create", self._held.table.create())

    def load(self) -> Checkpoint | None:
        """The stored checkpoint; from now on no other process may change it."""
        return self._held.claimed(
            self._alone("read", self._held.table.claim(self._held.consumer, new_owner()))
        )

    def put(self, connection: Any, checkpoint: Checkpoint) -> None:
        """Write the checkpoint in the open transaction of ``connection``; does not commit.

        Raises:
            CheckpointMoved: the row is not as this process left it; roll back.
            UsageError: the connection commits each statement by itself, or the checkpoint lies
                before the stored one.
        """
        self._database.run(connection, self._held.putting(checkpoint))
        if commits_each_statement(connection):
            raise not_in_transaction(self._held.consumer)

    def save(self, checkpoint: Checkpoint) -> None:
        """Store the checkpoint, unless ``put`` has."""
        if not self._held.confirm(checkpoint):
            self._alone("write", self._held.putting(checkpoint))
            self._held.confirm(checkpoint)

    def close(self) -> None:
        """Forget the row; the next ``load`` claims it again."""
        self._held.close()

    def rows(self) -> list[StoredCheckpoint]:
        """The checkpoints of all consumers of the table; claims none."""
        return self._alone("read", self._held.table.rows())

    def stored(self) -> StoredCheckpoint | None:
        """The checkpoint of this consumer; does not claim it."""
        return self._alone("read", self._held.table.row(self._held.consumer))

    def set(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint whatever is there: an operator's change.

        A client that runs under this name stops at its next checkpoint.
        """
        self._alone("write", self._held.table.set(self._held.consumer, checkpoint))

    def _alone(self, what: str, steps: Steps[T]) -> T:
        with _errors_of(self._held, what):
            return self._database.alone(steps)


class AsyncpgCheckpoints:
    """As ``DatabaseCheckpoints``, for connections of asyncpg.

    ``connect`` opens a connection: ``lambda: asyncpg.connect(url)``.  In ``onCheckpoint``::

        await store.put(connection, checkpoint)
        await transaction.commit()

    Invariants, Owner, Durability, Raises: those of ``DatabaseCheckpoints``.
    """

    def __init__(
        self, name: str, connect: Callable[[], Awaitable[Any]], *, table: str = TABLE
    ) -> None:
        self._held = HeldCheckpoint(name, table)
        self._database = AsyncpgDatabase(connect)

    @property
    def ddl(self) -> str:
        """The statement that creates the table, for an account that may."""
        return self._held.table.ddl

    async def create_table(self) -> None:
        """Create the table if it is not there."""
        await self._alone("create", self._held.table.create())

    async def load(self) -> Checkpoint | None:
        """The stored checkpoint; from now on no other process may change it."""
        return self._held.claimed(
            await self._alone("read", self._held.table.claim(self._held.consumer, new_owner()))
        )

    async def put(self, connection: Any, checkpoint: Checkpoint) -> None:
        """Write the checkpoint in the open transaction of ``connection``; does not commit.

        Raises:
            CheckpointMoved: the row is not as this process left it; roll back.
            UsageError: no transaction is open, or the checkpoint lies before the stored one.
        """
        if commits_each_statement(connection):
            raise not_in_transaction(self._held.consumer)
        await self._database.run(connection, self._held.putting(checkpoint))

    async def save(self, checkpoint: Checkpoint) -> None:
        """Store the checkpoint, unless ``put`` has."""
        if not self._held.confirm(checkpoint):
            await self._alone("write", self._held.putting(checkpoint))
            self._held.confirm(checkpoint)

    def close(self) -> None:
        """Forget the row; the next ``load`` claims it again."""
        self._held.close()

    async def rows(self) -> list[StoredCheckpoint]:
        """The checkpoints of all consumers of the table; claims none."""
        return await self._alone("read", self._held.table.rows())

    async def stored(self) -> StoredCheckpoint | None:
        """The checkpoint of this consumer; does not claim it."""
        return await self._alone("read", self._held.table.row(self._held.consumer))

    async def set(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint whatever is there: an operator's change.

        A client that runs under this name stops at its next checkpoint.
        """
        await self._alone("write", self._held.table.set(self._held.consumer, checkpoint))

    async def _alone(self, what: str, steps: Steps[T]) -> T:
        with _errors_of(self._held, what):
            return await self._database.alone(steps)


def _errors_of(held: HeldCheckpoint, what: str) -> AbstractContextManager[None]:
    return as_store_error(
        f"consumer {held.consumer}: the table {held.table.name} of checkpoints could not be used "
        f"({what})",
        "If there is no such table, call create_table(), or create it with the statement that the "
        "store's ddl has.",
    )


def not_in_transaction(consumer: str) -> UsageError:
    """The error of a ``put`` outside a transaction."""
    return UsageError(
        f"consumer {consumer}: put() needs an open transaction, and this connection commits each "
        "statement by itself: switch autocommit off, or begin a transaction before the window's "
        "first row"
    )
