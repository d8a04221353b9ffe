"""The document of a cluster as a row of a table, in PostgreSQL, MariaDB or MySQL."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from databus.common.config import DatabaseConfig
from databus.common.config_values import SourceUrl
from databus.common.errors import ConfigError, ServerUnavailable
from databus.relay.cluster.database_role import CLUSTER_TABLE
from databus.relay.cluster.shared_document import StoredDocument

_DDL = (
    "CREATE TABLE IF NOT EXISTS {table} (name VARCHAR(63) NOT NULL PRIMARY KEY, "
    "tag CHAR(32) NOT NULL, content {text} NOT NULL)"
)
_IS_THERE = (
    "SELECT count(*) FROM information_schema.tables WHERE table_schema = ? AND table_name = ?"
)


class Session(Protocol):
    """A connection that is opened again after a failure; each statement is a transaction.

    Raises: ServerUnavailable if the server does not answer, or refuses the statement.
    """

    text_type: str
    insert: str
    """An INSERT that leaves a row alone that is there; {0} is the table."""

    def rows(self, sql: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
        """The rows of a statement."""

    def change(self, sql: str, values: Sequence[str]) -> int:
        """How many rows a statement has changed."""

    def close(self) -> None:
        """Close it."""


class DocumentRow:
    """One row for each cluster.

    The table is made at the first use, if it is not there.  Nothing else is changed.

    Owner: the thread of the membership.
    Raises: ServerUnavailable.
    """

    def __init__(self, session: Session, schema: str, cluster: str) -> None:
        self._session = session
        self._schema = schema
        self._cluster = cluster
        self._table = f"{schema}.{CLUSTER_TABLE}"
        self.ddl = _DDL.format(table=self._table, text=session.text_type)
        self._is_made = False

    @property
    def name(self) -> str:
        """See ``SharedDocument``."""
        return f"the row {self._cluster} of {self._table}"

    @contextlib.contextmanager
    def _made(self) -> Iterator[Session]:
        """The session, once the table is there."""
        try:
            if not self._is_made:
                self._make()
                self._is_made = True
            yield self._session
        except ServerUnavailable:
            self._is_made = False  # The table may have been dropped.
            raise

    def _make(self) -> None:
        (found,) = self._session.rows(_IS_THERE, (self._schema, CLUSTER_TABLE))
        if int(found[0]):
            return
        try:
            self._session.change(self.ddl, ())
        except ServerUnavailable as error:
            raise ServerUnavailable(
                f"{error.message}. Create the table with an account that may: {self.ddl}; "
                "and grant SELECT, INSERT and UPDATE on it"
            ) from error

    def read(self) -> StoredDocument | None:
        """See ``SharedDocument``."""
        with self._made() as session:
            select = f"SELECT content, tag FROM {self._table} WHERE name = ?"
            rows = session.rows(select, (self._cluster,))
        return StoredDocument(str(rows[0][0]).encode(), str(rows[0][1])) if rows else None

    def replace(self, content: bytes, tag: str | None) -> bool:
        """See ``SharedDocument``."""
        values = (secrets.token_hex(16), content.decode(), self._cluster)
        with self._made() as session:
            if tag is None:
                return bool(session.change(session.insert.format(self._table), values))
            update = f"UPDATE {self._table} SET tag = ?, content = ? WHERE name = ? AND tag = ?"
            return bool(session.change(update, (*values, tag)))

    def close(self) -> None:
        """See ``SharedDocument``."""
        self._session.close()


class MySqlSession:
    """``Session`` for MariaDB and MySQL."""

    text_type = "mediumtext"
    insert = "INSERT IGNORE INTO {0} (tag, content, name) VALUES (?, ?, ?)"

    def __init__(self, config: DatabaseConfig, answer_s: float) -> None:
        from databus.relay.sources.mysql.protocol import mysql_connection
        from databus.relay.sources.mysql.protocol.mysql_settings import read_settings

        self._module, self._settings = mysql_connection, read_settings(config)
        self._answer_s = answer_s
        self._connection: mysql_connection.MySqlConnection | None = None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        try:
            if self._connection is None:
                self._connection = self._module.MySqlConnection(
                    self._settings, answer_s=self._answer_s
                )
            yield self._connection
        except Exception as error:
            self.close()
            raise _unavailable(f"{self._settings.host}:{self._settings.port}", error) from error

    def rows(self, sql: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
        """See ``Session``."""
        with self._connected() as connection:
            found: list[tuple[Any, ...]] = connection.query(sql.replace("?", "%s"), values)
            return found

    def change(self, sql: str, values: Sequence[str]) -> int:
        """See ``Session``."""
        with self._connected() as connection:
            return int(connection.change(sql.replace("?", "%s"), values))

    def close(self) -> None:
        """See ``Session``."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class PostgresSession:
    """``Session`` for PostgreSQL, with an event loop of its own."""

    text_type = "text"
    insert = "INSERT INTO {0} (tag, content, name) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"

    def __init__(self, config: DatabaseConfig, answer_s: float) -> None:
        from databus.relay.sources.postgres.protocol.postgres_settings import read_settings
        from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue

        self._open, self._settings = Catalogue, read_settings(config)
        self._answer_s = answer_s
        self._runner = asyncio.Runner()
        self._catalogue: Catalogue | None = None

    def rows(self, sql: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
        """See ``Session``."""
        first, *others = sql.split("?")
        marked = first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))
        try:
            return self._runner.run(self._ask(marked, values))
        except Exception as error:
            self._end()
            raise _unavailable(self._settings.address, error) from error

    def change(self, sql: str, values: Sequence[str]) -> int:
        """See ``Session``."""
        return len(self.rows(f"{sql} RETURNING 1" if values else sql, values))

    async def _ask(self, sql: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
        if self._catalogue is None:
            self._catalogue = self._open(self._settings)
        async with asyncio.timeout(self._answer_s):
            return [tuple(row) for row in await self._catalogue.fetch(sql, *values)]

    def _end(self) -> None:
        catalogue, self._catalogue = self._catalogue, None
        if catalogue is not None:
            self._runner.run(catalogue.close())

    def close(self) -> None:
        """See ``Session``."""
        self._end()
        self._runner.close()


def _unavailable(where: str, error: Exception) -> ServerUnavailable:
    reason = str(error) or type(error).__name__
    return ServerUnavailable(f"the cluster's store at {where} cannot be used: {reason}")


def open_row(url: str, cluster: str, answer_s: float) -> DocumentRow:
    """The row of a cluster in the database of a URL; nothing is connected yet.

    Raises:
        ConfigError: the URL names no database, or an option in it is wrong.
    """
    config = DatabaseConfig(name="cluster", url=SourceUrl(url))
    database = unquote(urlsplit(url).path.strip("/"))
    if not database.replace("_", "a").isalnum():
        raise ConfigError(
            f"[cluster] store {SourceUrl(url)}: {database!r} is no name of a database in plain "
            "letters; the URL is SCHEME://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    if url.startswith("postgres"):
        return DocumentRow(PostgresSession(config, answer_s), "public", cluster)
    return DocumentRow(MySqlSession(config, answer_s), database, cluster)
