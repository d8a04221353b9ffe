"""PostgreSQL as a site of the storm."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from databus.cli.demo.private_servers import PostgresServer
from databus.common.config import DatabaseConfig
from databus.common.errors import PreflightFailed, SourcePositionLost
from databus.relay.sources.postgres.tables.publications import has_fresh_senders
from tests.storm.replica import Row
from tests.storm.servers import number
from tests.storm.site import Column, Session, Site, TableFacts

CAPTURED = ("public", "extra")
OUTSIDE = "outside"
MARK = "storm_mark"
PUBLICATION = "`storm_stream`"
"""What the first relay has made, as the grammar writes it."""
SLOT = "storm_stream"
RELAY = "storm_relay"
"""The account of the first relay in some cases, with the rights of docs/managed-servers.md."""
PASSWORD = "storm"
_OF_RELAY = (
    f"CREATE ROLE {RELAY} LOGIN REPLICATION BYPASSRLS PASSWORD '{PASSWORD}'",
    *(f"GRANT USAGE ON SCHEMA {name} TO {RELAY}" for name in (*CAPTURED, MARK)),
    *(f"GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {RELAY}" for name in (*CAPTURED, MARK)),
    f"ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO {RELAY}",
)
MAKE_RELAY = "; ".join(_OF_RELAY)
_RESTORE_RELAY = (f"ALTER ROLE {RELAY} LOGIN REPLICATION BYPASSRLS", *_OF_RELAY[1:])
_LACKING = (
    "the server refuses", "REPLICATION attribute", "may not read", "permission denied", "lacks it",
)  # fmt: skip
_WAITING = "slot storm_stream: canceling statement due to lock timeout"
_AWAITED = (
    "was altered, and changes",
    "open when the publication was altered",
    "joined the publication",
    "before the relay had found it",
)
_WRITING = """
SELECT 1 FROM pg_catalog.pg_stat_activity WHERE backend_xid IS NOT NULL AND datname = 'storm'
UNION ALL SELECT 1 FROM pg_catalog.pg_prepared_xacts
"""
_OPEN = (
    "SELECT 1 FROM pg_catalog.pg_locks WHERE locktype = 'relation' AND granted "
    "AND mode = 'AccessExclusiveLock'"
)
_LOSES = re.compile(
    r"\bdrop\b.*\bpublication\b.*storm_stream|pg_drop_repl|slot_advance", re.IGNORECASE | re.DOTALL
)
LOADED = "1\tone\n2\ttwo, t1\n3\tTRUNCATE TABLE t1\n"
_SESSION = "-c lock_timeout=5 -c statement_timeout=8000"
_OWN = "-c lock_timeout=5"
_TRIES = 100

_TABLES = """
SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.relispartition,
    ARRAY(SELECT a.attname::text FROM pg_catalog.pg_index i
        CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY k (number, at)
        JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
        WHERE i.indrelid = c.oid AND i.indisprimary ORDER BY k.at)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY (%s) AND c.relkind IN ('r', 'p', 'v', 'm') ORDER BY 1, 2
"""
_COLUMNS = """
SELECT n.nspname, c.relname, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
    NOT a.attnotnull, a.attgenerated::text, a.attidentity::text
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY (%s) AND c.relkind IN ('r', 'p', 'v', 'm') AND a.attnum > 0
    AND NOT a.attisdropped ORDER BY 1, 2, a.attnum
"""
_CUT_PUBLICATIONS = """
SELECT p.pubname FROM pg_catalog.pg_publication p WHERE p.pubname LIKE 'storm\\_%%'
    AND NOT (p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate AND (
        p.puballtables OR EXISTS (
            SELECT 1 FROM pg_catalog.pg_class c
            JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = %s AND (c.oid IN (
                SELECT r.prrelid FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = p.oid
            ){by_schema}))))
"""
"""Publications of relays that do not give the marking table, or not all of its changes."""
_NARROWED = """
SELECT pubname FROM pg_catalog.pg_publication WHERE pubname LIKE 'storm\\_%'
    AND NOT (pubinsert AND pubupdate AND pubdelete AND pubtruncate AND pubviaroot)
"""
_NOTHING = """
SELECT n.nspname, c.relname FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY (%s) AND c.relkind IN ('r', 'p') AND c.relreplident = 'n'
"""
_LEFT_OUT = """
SELECT p.pubname, n.nspname, c.relname, r.prrelid IS NOT NULL
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_index k ON k.indrelid = c.oid AND k.indisprimary AND k.indimmediate
CROSS JOIN pg_catalog.pg_publication p
LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
WHERE p.pubname LIKE 'storm\\_%%' AND n.nspname = ANY (%s) AND c.relkind IN ('r', 'p')
    AND c.relpersistence = 'p' AND NOT c.relispartition AND NOT p.puballtables
    AND (r.prrelid IS NULL AND NOT (false{by_schema}){cut})
"""
"""Tables with a key that publications of relays do not give, or not whole."""
_BY_SCHEMA = """ OR n.oid IN (
    SELECT s.pnnspid FROM pg_catalog.pg_publication_namespace s WHERE s.pnpubid = p.oid)"""
_CUT = " OR r.prqual IS NOT NULL OR r.prattrs IS NOT NULL"
_FROM_STDIN = re.compile(r"\bfrom\b.{0,40}\bstdin\b", re.IGNORECASE | re.DOTALL)
_KINDS = {"r": "table", "p": "table", "v": "view", "m": "view"}


class PostgresSession(Session):
    """A psycopg connection; it may be lost with its server, and is then opened again."""

    def __init__(self, site: PostgresSite) -> None:
        self._site = site
        self._connection = site.connect(_SESSION)

    def execute(self, sql: str) -> None:
        if self._connection.closed:
            self._connection = self._site.connect(_SESSION)
        with self._connection.cursor() as cursor:
            if _FROM_STDIN.search(sql):
                with cursor.copy(sql) as copy:
                    copy.write(LOADED)
                return
            cursor.execute(sql, prepare=False)
        if _LOSES.search(sql):
            self._site.may_be_lost = True

    @property
    def in_transaction(self) -> bool:
        status = self._connection.info.transaction_status
        return not self._connection.closed and status != TransactionStatus.IDLE

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()


class PostgresSite(Site):
    """A private server; ``public`` and ``extra`` are captured, ``outside`` is not."""

    product = "postgres"
    mark = f"{MARK}.mark"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "rows.tsv"
        self.file.write_text(LOADED)
        options = ["max_prepared_transactions=20", "max_replication_slots=20", "max_wal_senders=20"]
        self._server = PostgresServer(folder / "server", options=options).start()
        self.version = self._server.version
        self._server.create_database("storm")
        self._own = self.connect(_OWN)
        self._number = 0
        self.may_be_lost = False

    def connect(self, options: str = "") -> Any:
        """A session; one that waits for a lock of the catalogue is tried again."""
        url = self._server.url("storm")
        for left in reversed(range(_TRIES)):
            try:
                return psycopg.connect(url, autocommit=True, options=options)
            except psycopg.OperationalError as error:
                if not left or "lock timeout" not in str(error):
                    raise
        raise AssertionError("unreachable")

    def _ask(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        for left in reversed(range(_TRIES)):
            if self._own.closed:
                self._own = self.connect(_OWN)
            try:
                with self._own.cursor() as cursor:
                    cursor.execute(sql, parameters or None, prepare=False)
                    return cursor.fetchall() if cursor.description else []
            except psycopg.errors.LockNotAvailable:
                # A session's lock stays; that of a vacuum on a catalogue does not.
                if not left or "pg_catalog" not in sql:
                    raise
                time.sleep(0.05)
        raise AssertionError("unreachable")

    @property
    def is_running(self) -> bool:
        return self._server.running

    def fresh(self) -> None:
        self._own.close()
        ask = self._ask
        self._end_prepared()
        ask(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'storm' "
            "AND pid <> pg_backend_pid()"
        )
        while ask("SELECT 1 FROM pg_replication_slots WHERE active"):
            time.sleep(0.01)  # PostgreSQL 13 cannot wait for what it terminates.
        for (slot,) in ask("SELECT slot_name FROM pg_replication_slots"):
            ask("SELECT pg_drop_replication_slot(%s)", slot)
        for (name,) in ask("SELECT pubname FROM pg_publication"):
            ask(f'DROP PUBLICATION "{name}"')
        self.may_be_lost = False
        for (name,) in ask(
            "SELECT rolname FROM pg_roles WHERE rolname LIKE 'app%%' OR rolname = %s", RELAY
        ):
            ask(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')
        for name in (*CAPTURED, OUTSIDE):
            ask(f"DROP SCHEMA IF EXISTS {name} CASCADE; CREATE SCHEMA {name}")
        ask(f"CREATE SCHEMA IF NOT EXISTS {MARK}")
        ask(f"CREATE TABLE IF NOT EXISTS {self.mark} (id int PRIMARY KEY, n bigint)")
        ask(f"DELETE FROM {self.mark}")

    def config(self, name: str) -> DatabaseConfig:
        return DatabaseConfig.model_validate(
            {
                "name": "shop",
                "url": self._url_of(name),
                "sources": [f"{schema}.*" for schema in (*CAPTURED, MARK)],
                "ring_bytes": "8MiB",
                "sync_every": 0.1,
                "options": {
                    "slot": f"storm_{name}",
                    "publication": f"storm_{name}",
                    "discover_every": 0.05,
                },
            }
        )

    def _url_of(self, name: str) -> str:
        url = self._server.url("storm")
        if name != "stream" or not self._has_relay():
            return url
        return re.sub(r"//.*@", f"//{RELAY}:{PASSWORD}@", url)

    def _has_relay(self) -> bool:
        return bool(self._ask("SELECT 1 FROM pg_roles WHERE rolname = %s", RELAY))

    def session(self) -> PostgresSession:
        return PostgresSession(self)

    def put_mark(self) -> int | None:
        """None: a publication does not give the marking table now."""
        if self._ask(self._since_15(_CUT_PUBLICATIONS), MARK):
            return None
        self._number += 1
        self._ask(
            f"INSERT INTO {self.mark} VALUES (1, {self._number}) "
            "ON CONFLICT (id) DO UPDATE SET n = excluded.n"
        )
        return self._number

    def _since_15(self, sql: str) -> str:
        """A query with what only PostgreSQL 15 and later have."""
        is_new = number(self.version) >= (15,)
        return sql.format(by_schema=_BY_SCHEMA if is_new else "", cut=_CUT if is_new else "")

    def is_refused(self, error: str) -> bool:
        """A relay that connects while it lacks a right, or one whose server's process waits.

        Before PostgreSQL 14 the process that sends the stream waits for the lock of a session.  If
        it may keep an altered publication, tables wait for all open transactions (0124).
        """
        is_old = not has_fresh_senders(*number(self.version)[:2])
        if is_old and any(words in error for words in _AWAITED) and self._ask(_WRITING):
            return True
        if number(self.version) < (14,) and _WAITING in error and self._ask(_OPEN):
            return True
        return self._has_relay() and any(words in error for words in _LACKING)

    def is_lost(self, code: str) -> bool:
        """The slot or the publication was dropped: what was written meanwhile cannot come."""
        # A relay that may not make its publication again is refused before it asks for its slot.
        return self.may_be_lost and code in (SourcePositionLost.code, PreflightFailed.code)

    def _end_prepared(self) -> None:
        for (name,) in self._ask("SELECT gid FROM pg_prepared_xacts"):
            self._ask(f"ROLLBACK PREPARED '{name}'")

    def settle(self) -> None:
        """What the reasons of suspensions name as the cure."""
        self._end_prepared()
        if self._has_relay():
            for statement in _RESTORE_RELAY:
                # A script may have dropped a schema, and been refused when it made it again.
                with contextlib.suppress(psycopg.errors.InvalidSchemaName):
                    self._ask(statement)
            with contextlib.suppress(psycopg.errors.DuplicateObject):
                self._ask(f"CREATE PUBLICATION {SLOT} WITH (publish_via_partition_root = true)")
        for (name,) in self._ask(_NARROWED):
            self._ask(
                f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate', "
                "publish_via_partition_root = true)"
            )
        left_out = self._since_15(_LEFT_OUT)
        for name, schema, table, is_cut in self._ask(left_out, [*CAPTURED, MARK]):
            full = f"{quoted(schema)}.{quoted(table)}"
            with contextlib.suppress(psycopg.Error):
                if is_cut:
                    self._ask(f"ALTER PUBLICATION {name} DROP TABLE ONLY {full}")
                self._ask(f"ALTER PUBLICATION {name} ADD TABLE ONLY {full}")
        for schema, table in self._ask(_NOTHING, list(CAPTURED)):
            full = f"{quoted(schema)}.{quoted(table)}"
            self._ask(f"ALTER TABLE {full} REPLICA IDENTITY DEFAULT")

    def tables(self) -> list[TableFacts]:
        schemas = [*CAPTURED, OUTSIDE]
        columns: dict[tuple[str, str], list[Column]] = {}
        facts = self._ask(_TABLES, schemas)
        keys = {(row[0], row[1]): row[5] for row in facts}
        for schema, table, name, type_, nullable, generated, identity in self._ask(
            _COLUMNS, schemas
        ):
            columns.setdefault((schema, table), []).append(
                Column(
                    name, type_, nullable, bool(generated) or identity == "a",
                    name in keys.get((schema, table), ()), bool(identity), type_,
                    not generated,
                )
            )  # fmt: skip
        found = []
        for schema, name, kind, persistence, is_part, key in facts:
            what = "part" if is_part else _KINDS[kind]
            if persistence != "p" and what == "table":
                what = "unlogged"
            listed = tuple(columns.get((schema, name), ()))
            found.append(TableFacts(schema, name, listed, tuple(key), kind, what))
        return found

    def rows(self, table: TableFacts) -> list[Row]:
        names = [column.name for column in table.columns]
        selected = ", ".join(
            # As the stream has them.
            quoted(one.name) + ("::text" if one.type.endswith(("[]", "interval")) else "")
            for one in table.columns
        )
        only = "" if table.engine == "p" else "ONLY "
        found = self._ask(
            f"SELECT {selected} FROM {only}{quoted(table.schema)}.{quoted(table.name)}"
        )
        return [dict(zip(names, row, strict=True)) for row in found]

    def is_captured(self, schema: str) -> bool:
        return schema in CAPTURED

    def is_open(self) -> bool:
        return bool(self._ask("SELECT 1 FROM pg_prepared_xacts"))

    def restart(self, *, kill: bool) -> None:
        self._own.close()
        if kill:
            self._server.kill9()
        self._server.restart()
        self._own = self.connect(_OWN)

    def close(self) -> None:
        self._own.close()
        self._server.remove()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
