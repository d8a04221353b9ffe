"""SQL against the captured database: tables, slot, publication, facts for the status page.

The only module that uses asyncpg.  It reads no values of captured tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import asyncpg

from databus.common.errors import PreflightFailed, SourceUnavailable
from databus.common.schema.source_names import join_source, split_source
from databus.relay.sources.postgres.protocol.clear_guard import ClearGuardLoop
from databus.relay.sources.postgres.protocol.lsn import (
    END_SQL,
    end_of_log,
    parse_lsn,
    scn_before,
)
from databus.relay.sources.postgres.protocol.postgres_settings import (
    JIT,
    LOCK_TIMEOUT,
    SEARCH_PATH,
    PostgresSettings,
    require_search_path,
)
from databus.relay.sources.postgres.protocol.scram import IN_CLEAR
from databus.relay.sources.postgres.tables.postgres_tables import (
    CATALOGUE_SQL,
    TYPES_SQL,
    PostgresTable,
    literal,
    quote,
    tables_of,
)
from databus.relay.sources.postgres.tables.publications import (
    MEMBERS_SQL,
    PARTITIONS_SQL,
    PARTS_SQL,
    PUBLICATION_SQL,
    SCHEMAS_SQL,
    Publication,
    has_fresh_senders,
    publication_of,
)
from databus.relay.sources.postgres.tables.table_definitions import (
    DEFINITIONS_SQL,
    Definition,
    definition_of,
)

_SCHEMAS_SINCE = _RENAMES_SINCE = 15
_XIDS_SQL = """
SELECT pg_catalog.pg_snapshot_xmin(s.now)::text AS oldest,
       pg_catalog.pg_snapshot_xmax(s.now)::text AS next
FROM (SELECT pg_catalog.pg_current_snapshot() AS now) AS s
"""
_ANSWER_S = 60.0
SIGN_IN_STATES = ("28000", "28P01", "3D000", "42501")

_FACTS_SQL = """
SELECT pg_catalog.current_setting('server_version') AS version,
       pg_catalog.current_setting('server_version_num')::int AS version_number,
       pg_catalog.current_setting('wal_level') AS wal_level,
       pg_catalog.current_setting('max_replication_slots')::int AS max_slots,
       (SELECT count(*) FROM pg_catalog.pg_replication_slots) AS slots,
       pg_catalog.current_setting('max_wal_senders')::int AS max_senders,
       (SELECT count(*) FROM pg_catalog.pg_stat_replication) AS senders,
       pg_catalog.current_setting('server_encoding') AS encoding,
       pg_catalog.pg_is_in_recovery() AS in_recovery,
       current_user AS "user",
       r.rolsuper AS is_superuser, r.rolreplication AS may_replicate,
       pg_catalog.has_database_privilege(
           pg_catalog.current_database(), 'CREATE') AS may_create
FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""

_SLOT_SQL = """
SELECT slot_type, plugin, database, active_pid, wal_status, restart_lsn::text AS restart_lsn,
       confirmed_flush_lsn::text AS confirmed_lsn, safe_wal_size,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL
            ELSE pg_catalog.pg_wal_lsn_diff(
                pg_catalog.pg_current_wal_insert_lsn(), restart_lsn)::bigint
       END AS retained_bytes
FROM pg_catalog.pg_replication_slots WHERE slot_name = $1
"""

_OF_TABLE = """AND database = (SELECT d.oid FROM pg_catalog.pg_database d
                WHERE d.datname = pg_catalog.current_database())
AND relation IN (SELECT $1::bigint::oid
                 UNION ALL SELECT relid FROM pg_catalog.pg_partition_tree($1::bigint::oid))"""

# Open transactions that have written to a table or to one of its partitions.
_WRITERS_SQL = f"""
SELECT DISTINCT virtualtransaction AS writer FROM pg_catalog.pg_locks
WHERE locktype = 'relation' AND granted AND pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
AND mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
{_OF_TABLE}
"""

# Transactions that keep it from being read, and those that wait for that.
_LOCKERS_SQL = f"""
SELECT DISTINCT virtualtransaction AS locker FROM pg_catalog.pg_locks
WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock'
{_OF_TABLE}
"""

# A prepared transaction can have the virtual id of the session that prepared it.
_NAMED_SQL = """
WITH of AS (SELECT DISTINCT pid, transactionid FROM pg_catalog.pg_locks
            WHERE virtualtransaction = ANY ($1::text[]))
SELECT 'the prepared transaction ' || pg_catalog.quote_literal(p.gid) || ' of ' || p.owner
       || ' (since ' || p.prepared::timestamptz(0)::text || ')' AS words
FROM pg_catalog.pg_prepared_xacts p
WHERE p.transaction IN (SELECT transactionid FROM of WHERE pid IS NULL)
UNION ALL
SELECT 'server process ' || a.pid::text || ' of ' || coalesce(a.usename, '')
       || coalesce(' (' || nullif(a.application_name, '') || ')', '')
       || coalesce(', begun ' || a.xact_start::timestamptz(0)::text, '')
FROM pg_catalog.pg_stat_activity a WHERE a.pid IN (SELECT pid FROM of)
ORDER BY 1
"""

_OID_SQL = """
SELECT c.oid::bigint AS oid FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p')
"""

# Existing tables without events of their own.
_EVENTLESS_SQL = """
SELECT n.nspname AS schema_name, c.relname AS table_name, c.relispartition AS is_partition,
       c.relpersistence <> 'p' AS is_unlogged
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY ($1::bigint[]::oid[]) AND (
    c.relispartition OR c.relpersistence <> 'p' OR NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped))
"""

_NAME_SQL = """
SELECT n.nspname AS schema_name, c.relname AS table_name
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = $1::bigint::oid
"""

# VACUUM FULL and CLUSTER copy rows with the transaction that wrote them; rows that ALTER TABLE
# writes have its own transaction.  The first rows are enough: they are the oldest.
_OLD_ROWS_SQL = """
SELECT EXISTS (
    SELECT FROM (SELECT t.xmin AS version FROM ONLY {table} AS t
                 WHERE t.tableoid = $1::bigint::oid LIMIT 1000) AS r
    WHERE pg_catalog.age(r.version) > pg_catalog.age($2::text::xid)) AS found
"""

# A TRUNCATE takes the numbers of a table's and of its index's or TOAST table's new file directly
# one after the other.  ALTER TABLE takes two more in between, for the row type of a table that it
# creates and drops.  A file that the first command (cmin 0) of a transaction gave a table is not
# from ALTER TABLE either: that creates the other table first.
_TRUNCATED_SQL = """
SELECT c.oid::bigint AS oid FROM pg_catalog.pg_class c
WHERE c.oid = ANY ($1::bigint[]::oid[]) AND c.xmin = $2::text::xid
AND (c.cmin = '0'::cid AND c.xmax = '0'::xid OR EXISTS (
    SELECT FROM pg_catalog.pg_class f
    WHERE f.relfilenode::bigint - c.relfilenode::bigint IN (1, 2) AND (f.oid = c.reltoastrelid
        OR f.oid IN (SELECT i.indexrelid FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid))))
"""

_ROOT_SQL = """
SELECT n.nspname AS schema_name, c.relname AS table_name
FROM pg_catalog.pg_class p
JOIN pg_catalog.pg_class c ON c.oid = pg_catalog.pg_partition_root(p.oid)
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.oid = $1::bigint::oid AND p.relispartition
"""


@dataclass(frozen=True, slots=True)
class Slot:
    """The server's view of a replication slot."""

    slot_type: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    wal_status: str | None
    restart_lsn: int | None
    confirmed_lsn: int | None
    safe_wal_bytes: int | None
    retained_bytes: int | None


class Catalogue:
    """One SQL session, opened on demand and again after it was lost, until ``close``.

    Owner: one event loop; concurrent calls run one after the other.
    Raises: SourceUnavailable if the server cannot be queried; asyncpg.PostgresError for what
        it refuses.
    """

    def __init__(self, settings: PostgresSettings) -> None:
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
                why = str(error) or type(error).__name__
                raise SourceUnavailable(
                    f"{self._settings.address} cannot be queried: {why}"
                ) from error
            except asyncpg.PostgresError:
                raise
            except BaseException:
                # The query may still be on its way, and the next one would meet its answer.
                self._drop()
                raise

    def _drop(self) -> None:
        if self._session is not None:
            self._session.terminate()
            self._session = None

    async def close(self) -> None:
        """End the session; later calls raise SourceUnavailable."""
        self._is_closed = True
        async with self._turn:
            self._drop()

    async def tables(self) -> dict[int, PostgresTable]:
        """All tables of the database, by oid."""
        types = await self.fetch(TYPES_SQL)
        return tables_of(await self.fetch(CATALOGUE_SQL, None), types, self._settings.keys)

    async def table(self, oid: int) -> PostgresTable | None:
        """One table as it is now; None if it is gone."""
        types = await self.fetch(TYPES_SQL)
        rows = await self.fetch(CATALOGUE_SQL, oid)
        return tables_of(rows, types, self._settings.keys).get(oid)

    async def table_named(self, source: str) -> PostgresTable | None:
        """The table of this name as it is now; None if there is none."""
        oid = await self.oid_named(source)
        return await self.table(oid) if oid is not None else None

    async def oid_named(self, source: str) -> int | None:
        """The oid of the table of this name, even if it cannot be captured."""
        rows = await self.fetch(_OID_SQL, *split_source(source))
        return int(rows[0]["oid"]) if rows else None

    async def definitions(self, tables: Collection[PostgresTable]) -> dict[int, Definition]:
        """The definitions of these tables, by oid, without tables that were replaced since."""
        only = next(iter(tables)).oid if len(tables) == 1 else None
        rows = {row["oid"]: row for row in await self.fetch(DEFINITIONS_SQL, only)}
        found = {
            table.oid: definition_of(rows[table.oid], table.key)
            for table in tables
            if table.oid in rows
        }
        return {oid: definition for oid, definition in found.items() if definition is not None}

    async def facts(self) -> dict[str, Any]:
        """The server's settings and the role's rights."""
        return dict((await self.fetch(_FACTS_SQL))[0])

    async def slot(self) -> Slot | None:
        """The relay's slot; None if there is none of this name."""
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

    @property
    def renames_partitions(self) -> bool:
        """Whether the server's stream notices that a table was attached to a root, or detached."""
        return bool(self._session.get_server_version().major >= _RENAMES_SINCE)

    @property
    def has_fresh_senders(self) -> bool:
        """Whether a sender notices that a publication was altered beside open transactions."""
        version = self._session.get_server_version()
        return has_fresh_senders(version.major, version.micro)

    async def next_xid(self) -> int:
        """Transactions that are open now have lower ids, or have written nothing yet."""
        return int((await self.fetch(_XIDS_SQL))[0]["next"])

    async def have_ended(self, xid: int) -> bool:
        """Whether every transaction with an id below ``xid`` has ended."""
        return int((await self.fetch(_XIDS_SQL))[0]["oldest"]) >= xid

    async def publication(self) -> Publication | None:
        """The relay's publication; None if there is none of this name."""
        name = self._settings.publication
        rows = await self.fetch(PUBLICATION_SQL, name)
        if not rows:
            return None
        has_schemas = self._session.get_server_version().major >= _SCHEMAS_SINCE
        members = MEMBERS_SQL.format(parts=PARTS_SQL if has_schemas else "")
        return publication_of(
            name,
            rows[0],
            await self.fetch(members, rows[0]["oid"]),
            await self.fetch(SCHEMAS_SQL, rows[0]["oid"]) if has_schemas else [],
            await self.fetch(PARTITIONS_SQL),
        )

    async def required_publication(self) -> Publication:
        """The relay's publication.

        Raises:
            SourceUnavailable: there is none of this name.
        """
        publication = await self.publication()
        if publication is None:
            raise SourceUnavailable(f"the publication {self._settings.publication} is gone")
        return publication

    async def create_publication(self) -> None:
        """Create the relay's publication, without tables.

        Tables are added one by one, so that no table is locked while the relay waits for another.
        """
        await self.fetch(create_publication_sql(self._settings.publication, []))

    async def extend_publication(self, table: PostgresTable) -> None:
        """Add this table to the publication."""
        await self.fetch(extend_publication_sql(self._settings.publication, table))

    async def reduce_publication(self, table: PostgresTable) -> str:
        """Remove this table from the publication; returns the statement if the server refuses it,
        with the reason."""
        sql = f"ALTER PUBLICATION {quote(self._settings.publication)} DROP TABLE {table.only}"
        try:
            await self.fetch(sql)
        except (
            asyncpg.InsufficientPrivilegeError,
            asyncpg.LockNotAvailableError,
            asyncpg.UndefinedObjectError,
            asyncpg.UndefinedTableError,
        ) as error:
            return f"{sql} ({error})"
        return ""

    async def writers(self, table: PostgresTable) -> set[str]:
        """The open transactions that have written to the table."""
        return {row["writer"] for row in await self.fetch(_WRITERS_SQL, table.oid)}

    async def lockers(self, table: PostgresTable) -> str:
        """The transactions that keep a table from being read, for people."""
        rows = await self.fetch(_LOCKERS_SQL, table.oid)
        return await self.named({row["locker"] for row in rows})

    async def named(self, transactions: Collection[str]) -> str:
        """Transactions by their names or server processes, for people."""
        rows = await self.fetch(_NAMED_SQL, list(transactions))
        return ", ".join(row["words"] for row in rows) or "transactions that have just ended"

    async def is_empty(self, table: PostgresTable) -> bool:
        """Whether the table has no committed row, and no open transaction has written one.

        False if the server refuses to read it.
        """
        try:
            if await self.writers(table):
                return False
            rows = await self.fetch(f"SELECT EXISTS (SELECT FROM {table.only}) AS has_rows")
        except asyncpg.PostgresError:
            return False
        return not rows[0]["has_rows"]

    async def root_of(self, oid: int) -> str | None:
        """The source of which this table is a partition; None if it is no partition."""
        rows = await self.fetch(_ROOT_SQL, oid)
        return join_source(*rows[0].values()) if rows else None

    async def eventless(self, oids: Collection[int]) -> dict[str, tuple[str, str]]:
        """The tables whose rows have no events under their own name, each with reason and cure."""
        found = {}
        rows = await self.fetch(_EVENTLESS_SQL, list(oids))
        for schema, name, is_partition, is_unlogged in rows:
            table = f"{quote(schema)}.{quote(name)}"
            why = "it has no column", f"ALTER TABLE {table} ADD COLUMN ... PRIMARY KEY"
            if is_partition:
                why = (
                    "it is a partition: its rows come under the name of its root",
                    f"Detach {table}",
                )
            elif is_unlogged:
                why = "it is unlogged: its rows have no events", f"ALTER TABLE {table} SET LOGGED"
            found[join_source(schema, name)] = why
        return found

    async def has_rows_before(self, oid: int, horizon: int) -> bool:
        """Whether one of the first rows of this table is older than this transaction."""
        for names in await self.fetch(_NAME_SQL, oid):
            table = ".".join(quote(name) for name in names.values())
            xid = str(horizon & 0xFFFFFFFF)
            try:
                (row,) = await self.fetch(_OLD_ROWS_SQL.format(table=table), oid, xid)
            except asyncpg.PostgresError:
                return False
            return bool(row["found"])
        return False

    async def truncated_by(self, oids: Collection[int], transaction: int) -> set[int]:
        """Those of these tables to which a TRUNCATE of this transaction gave their file, and
        nothing another one since."""
        rows = await self.fetch(_TRUNCATED_SQL, list(oids), str(transaction))
        return {int(row["oid"]) for row in rows}

    async def written_scn(self) -> int:
        """An scn below every future commit."""
        (row,) = await self.fetch(END_SQL)
        return scn_before(end_of_log(row.values()))

    async def end_reader(self) -> None:
        """End the connection of another process that reads the slot: it has led, and may be
        paused for as long as the server's wal_sender_timeout."""
        await self.fetch(
            "SELECT pg_catalog.pg_terminate_backend(active_pid) FROM "
            "pg_catalog.pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL",
            self._settings.slot,
        )

    async def drop_slot(self) -> None:
        """Drop the relay's slot, so that the server retains no WAL for it."""
        await self.fetch("SELECT pg_catalog.pg_drop_replication_slot($1)", self._settings.slot)

    async def _connect(self) -> Any:
        settings = self._settings
        context: Any = settings.ssl_context()
        if settings.sslmode == "prefer":
            context = "prefer"
        # If "password" is among them, postgres_settings.py has checked that TLS is used.
        guard = None if "password" in settings.require_auth else ClearGuardLoop(settings.password)
        try:
            session = await asyncpg.connect(
                host=settings.host,
                port=settings.port,
                user=settings.user,
                password=settings.password or None,
                database=settings.database,
                ssl=context if context is not None else False,
                timeout=settings.connect_timeout_s,
                command_timeout=_ANSWER_S,
                server_settings={
                    "application_name": "databus",
                    "search_path": SEARCH_PATH,
                    "lock_timeout": LOCK_TIMEOUT,
                    "row_security": "off",
                    "jit": JIT,
                },
                loop=guard,
            )
        except (OSError, asyncpg.PostgresError, asyncpg.InternalClientError):
            if guard is not None and guard.was_asked:
                raise PreflightFailed(f"{settings.address}: {IN_CLEAR}") from None
            raise
        try:
            found = await session.fetchval("SELECT pg_catalog.current_setting('search_path')")
            require_search_path(settings, found)
        except BaseException:  # The server hangs, the caller is cancelled, or the path is another.
            session.terminate()
            raise
        return session


def create_publication_sql(name: str, tables: list[PostgresTable]) -> str:
    """The statement that publishes exactly these tables."""
    # ONLY: an inheriting table is published separately, if it has a key.
    named = ", ".join(table.only for table in tables)
    for_tables = f" FOR TABLE {named}" if tables else ""
    return f"CREATE PUBLICATION {quote(name)}{for_tables} WITH (publish_via_partition_root = true)"


def extend_publication_sql(name: str, table: PostgresTable) -> str:
    """The statement that adds a table to the publication."""
    return f"ALTER PUBLICATION {quote(name)} ADD TABLE {table.only}"


def start_replication_command(settings: PostgresSettings, lsn: str) -> str:
    """The command that starts the stream, with protocol version 1."""
    names = literal(quote(settings.publication))
    return (
        f"START_REPLICATION SLOT {quote(settings.slot)} LOGICAL {lsn} "
        f"(proto_version '1', publication_names {names})"
    )


def _lsn(text: str | None) -> int | None:
    return parse_lsn(text) if text is not None else None
