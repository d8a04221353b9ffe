"""SQL against the captured database: tables, slot, publication, facts for the status page.

The only place that touches asyncpg.  It never reads a row of a user's table.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import asyncpg

from databus.common.errors import SourceUnavailable
from databus.relay.sources.postgres.lsn import parse_lsn
from databus.relay.sources.postgres.schema import (
    CATALOGUE_SQL,
    DOMAINS_SQL,
    Table,
    literal,
    quote,
    tables_of,
)
from databus.relay.sources.postgres.settings import Settings

SIGN_IN_STATES = ("28000", "28P01", "3D000", "42501")

_FACTS_SQL = """
SELECT current_setting('server_version') AS version,
       current_setting('server_version_num')::int AS version_number,
       current_setting('wal_level') AS wal_level,
       current_setting('max_replication_slots')::int AS max_slots,
       (SELECT count(*) FROM pg_replication_slots) AS slots,
       current_setting('max_wal_senders')::int AS max_senders,
       (SELECT count(*) FROM pg_stat_replication) AS senders,
       current_setting('server_encoding') AS encoding,
       pg_is_in_recovery() AS in_recovery,
       current_user AS "user",
       r.rolsuper AS is_superuser, r.rolreplication AS may_replicate,
       has_database_privilege(current_database(), 'CREATE') AS may_create
FROM pg_roles r WHERE r.rolname = current_user
"""

_SLOT_SQL = """
SELECT slot_type, plugin, database, active_pid, wal_status, restart_lsn::text AS restart_lsn,
       confirmed_flush_lsn::text AS confirmed_lsn, safe_wal_size,
       CASE WHEN pg_is_in_recovery() THEN NULL
            ELSE pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn)::bigint
       END AS retained_bytes
FROM pg_replication_slots WHERE slot_name = $1
"""

_PUBLICATION_SQL = """
SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AS complete,
       pg_has_role(pubowner, 'USAGE') AS is_owner
FROM pg_publication WHERE pubname = $1
"""


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot as the server shows it."""

    slot_type: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    wal_status: str | None
    restart_lsn: int | None
    confirmed_lsn: int | None
    safe_wal_bytes: int | None
    retained_bytes: int | None


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as the server shows it.

    ``complete`` says that it publishes every kind of change; ``sources`` are its tables.
    """

    complete: bool
    is_owner: bool
    sources: frozenset[str]


class Catalogue:
    """One SQL session, opened when it is needed and again after it was lost, until ``close``.

    Owner: one event loop; calls of several tasks take turns.
    Raises: SourceUnavailable where the server cannot be asked; asyncpg.PostgresError for what
        it refuses.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turn = asyncio.Lock()
        self._session: Any = None
        self._is_closed = False

    async def fetch(self, sql: str, *parameters: Any) -> list[Any]:
        """The rows of a query."""
        async with self._turn:
            if self._is_closed:
                raise SourceUnavailable(f"{self._settings.address}: the source was closed")
            try:
                if self._session is None or self._session.is_closed():
                    self._session = await self._connect()
                rows: list[Any] = await self._session.fetch(sql, *parameters)
                return rows
            except (
                OSError,
                TimeoutError,
                asyncpg.InterfaceError,
                asyncpg.InternalClientError,
                asyncpg.PostgresConnectionError,
                asyncpg.OperatorInterventionError,
                asyncpg.InsufficientResourcesError,
            ) as error:
                self._drop()
                raise SourceUnavailable(
                    f"{self._settings.address} cannot be asked: {error or type(error).__name__}"
                ) from error
            except asyncpg.PostgresError:
                raise
            except BaseException:
                # The question may still be on its way, and the next one would meet its answer.
                self._drop()
                raise

    def _drop(self) -> None:
        if self._session is not None:
            self._session.terminate()
            self._session = None

    async def close(self) -> None:
        """End the session; whoever asks later is refused."""
        self._is_closed = True
        async with self._turn:
            self._drop()

    async def tables(self) -> dict[int, Table]:
        """All tables of the database, by oid."""
        domains = await self.fetch(DOMAINS_SQL)
        return tables_of(await self.fetch(CATALOGUE_SQL, None), domains, self._settings.keys)

    async def table(self, oid: int) -> Table | None:
        """One table as it is now; None if it is gone."""
        domains = await self.fetch(DOMAINS_SQL)
        rows = await self.fetch(CATALOGUE_SQL, oid)
        return tables_of(rows, domains, self._settings.keys).get(oid)

    async def facts(self) -> dict[str, Any]:
        """The server's settings and the role's rights."""
        return dict((await self.fetch(_FACTS_SQL))[0])

    async def slot(self) -> Slot | None:
        """Our slot; None if there is none of this name."""
        rows = await self.fetch(_SLOT_SQL, self._settings.slot)
        if not rows:
            return None
        row = rows[0]
        return Slot(
            slot_type=row["slot_type"],
            plugin=row["plugin"],
            database=row["database"],
            active_pid=row["active_pid"],
            wal_status=row["wal_status"],
            restart_lsn=_lsn(row["restart_lsn"]),
            confirmed_lsn=_lsn(row["confirmed_lsn"]),
            safe_wal_bytes=row["safe_wal_size"],
            retained_bytes=row["retained_bytes"],
        )

    async def publication(self) -> Publication | None:
        """Our publication; None if there is none of this name."""
        name = self._settings.publication
        rows = await self.fetch(_PUBLICATION_SQL, name)
        if not rows:
            return None
        sources = await self.fetch(
            "SELECT schemaname || '.' || tablename AS source FROM pg_publication_tables "
            "WHERE pubname = $1",
            name,
        )
        return Publication(
            complete=rows[0]["complete"],
            is_owner=rows[0]["is_owner"],
            sources=frozenset(row["source"] for row in sources),
        )

    async def create_publication(self, tables: list[Table]) -> None:
        """Publish these tables, and no other."""
        await self.fetch(create_publication_sql(self._settings.publication, tables))

    async def extend_publication(self, tables: list[Table]) -> None:
        """Publish these tables too."""
        for table in tables:
            await self.fetch(extend_publication_sql(self._settings.publication, table))

    async def drop_slot(self) -> None:
        """Give up our slot: the server need keep nothing for us."""
        await self.fetch("SELECT pg_drop_replication_slot($1)", self._settings.slot)

    async def _connect(self) -> Any:
        settings = self._settings
        context: Any = settings.ssl_context()
        if settings.sslmode == "prefer":
            context = "prefer"
        return await asyncpg.connect(
            host=settings.host,
            port=settings.port,
            user=settings.user,
            password=settings.password or None,
            database=settings.database,
            ssl=context if context is not None else False,
            timeout=settings.connect_timeout_s,
            command_timeout=60,
            server_settings={"application_name": "databus"},
        )


def create_publication_sql(name: str, tables: list[Table]) -> str:
    """The statement that publishes exactly these tables."""
    named = ", ".join(table.quoted for table in tables)
    for_tables = f" FOR TABLE {named}" if tables else ""
    return f"CREATE PUBLICATION {quote(name)}{for_tables} WITH (publish_via_partition_root = true)"


def extend_publication_sql(name: str, table: Table) -> str:
    """The statement that publishes one table more."""
    return f"ALTER PUBLICATION {quote(name)} ADD TABLE {table.quoted}"


def start_replication_command(settings: Settings, lsn: str, *, binary: bool = False) -> str:
    """The command that starts our stream; tables come with protocol version 1."""
    names = literal(quote(settings.publication))
    return (
        f"START_REPLICATION SLOT {quote(settings.slot)} LOGICAL {lsn} "
        f"(proto_version '1', publication_names {names}{', binary' if binary else ''})"
    )


def _lsn(text: str | None) -> int | None:
    return parse_lsn(text) if text is not None else None
