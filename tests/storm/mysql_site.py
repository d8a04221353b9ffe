"""MariaDB and MySQL as sites of the storm."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pymysql
from pymysql.constants import CLIENT, SERVER_STATUS

from databus.cli.demo.private_servers import PASSWORD, USER, MariaDBServer
from databus.common.config import DatabaseConfig
from databus.common.errors import SourcePositionLost
from tests.storm import prepared_statements
from tests.storm.prepared_statements import BINARY
from tests.storm.replica import Row
from tests.storm.servers import number
from tests.storm.site import Column, Session, Site, TableFacts
from tests.storm.spelling import quoted
from tests.support.mysql_server import MySQLServer

CAPTURED = ("storm", "storm_b")
OUTSIDE = "storm_out"
MARK = "storm_mark"
RELAY = "'storm_relay'@'%'"
"""The account of the relays, which has no more rights than docs/managed-servers.md gives."""
_SYSTEM = {"mysql", "information_schema", "performance_schema", "sys"}
_DISCARDED = 1814
_FOLDER_NOT_EMPTY = 1010
LASTING = (
    "holds the date 0000-00-00",
    "is computed from the AUTO_INCREMENT column",
    "is a MERGE table",
    "is in the union of the MERGE table",
)
"""Why a table stays suspended until it or its rows are altered: docs/types-mariadb.md."""
UNLOGGED = "sql_log_bin"
TABLESPACE = "-- tablespace "
"""Not SQL: ``export NAME`` and ``import NAME`` copy the files of a table of the first schema."""
LOADED = "1\tone\n2\ttwo, `t1`\n3\tTRUNCATE TABLE t1\n"


class MySqlSession(Session):
    """A pymysql connection; it may be lost with its server, and is then opened again."""

    def __init__(self, site: MySqlSite) -> None:
        self._site = site
        self._connection = site.connect_session()

    def execute(self, sql: str) -> None:
        if not self._connection.open:
            self._connection = self._site.connect_session()
        try:
            if BINARY in sql.lower():
                prepared_statements.execute(self._connection, sql)
            elif sql.startswith(TABLESPACE):
                self._site.move_tablespace(sql.removeprefix(TABLESPACE))
            else:
                self._send(sql)
                self._site.may_be_lost |= "purge binary logs" in sql.lower()
        except (pymysql.err.OperationalError, pymysql.err.InterfaceError) as error:
            if error.args[0] in (0, 2006, 2013):
                with contextlib.suppress(pymysql.err.Error):
                    self._connection.close()
            raise

    def _send(self, sql: str) -> None:
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(sql)
                while True:
                    cursor.fetchall()
                    if not cursor.nextset():
                        break
        except pymysql.err.Error:
            if UNLOGGED in sql.lower() and self._connection.open:
                self._connection.query("ROLLBACK")
                self._connection.query("SET sql_log_bin = 1")
            raise

    @property
    def in_transaction(self) -> bool:
        flag: int = SERVER_STATUS.SERVER_STATUS_IN_TRANS
        return bool(self._connection.open and self._connection.server_status & flag)

    def unlock(self) -> None:
        with contextlib.suppress(pymysql.err.Error):
            self._send("UNLOCK TABLES")

    def close(self) -> None:
        with contextlib.suppress(pymysql.err.Error, OSError):
            self._connection.close()


class MySqlSite(Site):
    """A private server; ``storm`` and ``storm_b`` are captured, ``storm_out`` is not."""

    mark = f"{MARK}.mark"
    has_binlog = True

    def __init__(self, product: str, folder: Path) -> None:
        self.product = product
        (folder / "rows.tsv").write_text(LOADED)
        self._file = folder / "rows.tsv"
        kind: type[MariaDBServer] = MariaDBServer if product == "mariadb" else MySQLServer
        options = ["--local-infile=1", "--max-statement-time=8"]
        if product == "mysql":
            options = ["--local-infile=1", "--log-bin-trust-function-creators=1"]
        self._server = kind(folder / "server", options=options).start()
        self.version = self._server.version
        self._own = self.connect()
        self._number = 0
        self.may_be_lost = False

    def connect(self) -> Any:
        return pymysql.connect(
            host="127.0.0.1", port=self._server.port, user=USER, password=PASSWORD,
            charset="utf8mb4", autocommit=True, connect_timeout=10, read_timeout=30,
            local_infile=True, client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
            ssl_disabled=self.product == "mariadb",
        )  # fmt: skip

    def _ask(self, sql: str) -> list[tuple[Any, ...]]:
        if not self._own.open:
            self._own = self.connect()
        with self._own.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    @property
    def is_running(self) -> bool:
        return self._server.running

    def is_lost(self, code: str) -> bool:
        """A relay that was not connected when the logs were purged may have missed some."""
        return self.may_be_lost and code == SourcePositionLost.code

    def fresh(self) -> None:
        self.may_be_lost = False
        with contextlib.suppress(pymysql.err.Error):
            self._own.close()
        self._own = self.connect()
        ask = self._ask
        ask("SET lock_wait_timeout = 2")
        for kind, length, _, data in ask("XA RECOVER"):
            id_ = data if isinstance(data, bytes) else data.encode()
            ask(f"XA ROLLBACK X'{id_[:length].hex()}',X'{id_[length:].hex()}',{kind}")
        retained = _SYSTEM | {MARK}
        ask("SET foreign_key_checks = 0")
        folder = Path(str(ask("SELECT @@datadir")[0][0]))
        for (name,) in ask("SHOW DATABASES"):
            if name not in retained:
                self._drop_schema(name, folder / name)
        for name in (*CAPTURED, OUTSIDE):
            # MySQL leaves the folder of a schema that has files which it does not know.
            shutil.rmtree(folder / name, ignore_errors=True)
        for user, host in ask("SELECT user, host FROM mysql.user WHERE user LIKE 'app%'"):
            ask(f"DROP USER '{user}'@'{host}'")
        for variable in (
            "binlog_format = ROW", "binlog_row_image = FULL", "binlog_checksum = CRC32"
        ):  # fmt: skip
            ask(f"SET GLOBAL {variable}")
        for name in (*CAPTURED, OUTSIDE):
            ask(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        ask(f"CREATE DATABASE IF NOT EXISTS {MARK}")
        self._make_relay()
        ask(f"CREATE TABLE IF NOT EXISTS {self.mark} (id INT PRIMARY KEY, n BIGINT)")
        ask(f"DELETE FROM {self.mark}")

    def _drop_schema(self, name: str, folder: Path) -> None:
        try:
            self._ask(f"DROP DATABASE `{name}`")
        except pymysql.err.Error as error:
            if error.args[0] != _FOLDER_NOT_EMPTY:
                raise
            for file in folder.iterdir():
                file.unlink()
            self._ask(f"DROP DATABASE IF EXISTS `{name}`")

    def _make_relay(self) -> None:
        monitor = "BINLOG MONITOR" if self.product == "mariadb" else "REPLICATION CLIENT"
        self._ask(f"DROP USER IF EXISTS {RELAY}")
        self._ask(f"CREATE USER {RELAY} IDENTIFIED BY '{PASSWORD}'")
        self._ask(f"GRANT REPLICATION SLAVE, {monitor} ON *.* TO {RELAY}")
        for name in (*CAPTURED, MARK):
            self._ask(f"GRANT SELECT ON `{name}`.* TO {RELAY}")

    def config(self, name: str) -> DatabaseConfig:
        return DatabaseConfig.model_validate(
            {
                "name": "shop",
                "url": self._server.url("storm").replace(f"//{USER}:", "//storm_relay:"),
                "sources": [f"{name}.*" for name in (*CAPTURED, MARK)],
                "ring_bytes": "8MiB",
                "sync_every": 0.1,
                "options": {"server_id": 4000 + len(name)},
            }
        )

    def session(self) -> MySqlSession:
        return MySqlSession(self)

    def connect_session(self) -> Any:
        """A connection of an application: it waits for locks as shortly as the server can."""
        connection = self.connect()
        waits_s = 0 if self.product == "mariadb" else 1
        with connection.cursor() as cursor:
            with contextlib.suppress(pymysql.err.OperationalError):
                cursor.execute(f"USE {CAPTURED[0]}")
            cursor.execute(
                f"SET innodb_lock_wait_timeout = {waits_s}, lock_wait_timeout = {waits_s}"
            )
        return connection

    def put_mark(self) -> int:
        self._number += 1
        self._ask(f"REPLACE INTO {self.mark} VALUES (1, {self._number})")
        return self._number

    def tables(self) -> list[TableFacts]:
        names = ", ".join(f"'{name}'" for name in (*CAPTURED, OUTSIDE))
        kinds = {
            (schema, name): (str(kind), str(engine or ""))
            for schema, name, kind, engine in self._ask(
                "SELECT table_schema, table_name, table_type, engine FROM "
                f"information_schema.tables WHERE table_schema IN ({names}) "
                "ORDER BY table_schema, table_name"
            )
        }
        keys: dict[tuple[str, str], list[str]] = {}
        for schema, name, column in self._ask(
            "SELECT table_schema, table_name, column_name FROM information_schema.statistics "
            f"WHERE table_schema IN ({names}) AND index_name = 'PRIMARY' "
            "ORDER BY table_schema, table_name, seq_in_index"
        ):
            keys.setdefault((schema, name), []).append(column)
        columns: dict[tuple[str, str], list[Column]] = {}
        for schema, name, column, type_, full, nullable, extra in self._ask(
            "SELECT table_schema, table_name, column_name, data_type, column_type, is_nullable, "
            f"extra FROM information_schema.columns WHERE table_schema IN ({names}) "
            "ORDER BY table_schema, table_name, ordinal_position"
        ):
            extra = str(extra).upper()
            columns.setdefault((schema, name), []).append(
                Column(
                    column, str(type_), nullable == "YES",
                    "GENERATED" in extra and "DEFAULT_GENERATED" not in extra,
                    column in keys.get((schema, name), []), "AUTO_INCREMENT" in extra,
                    _text(full),
                )
            )  # fmt: skip
        return [
            TableFacts(
                schema, name, tuple(columns.get((schema, name), ())),
                tuple(keys.get((schema, name), ())), engine, _kind(kind),
                engine in ("InnoDB", ""),
            )
            for (schema, name), (kind, engine) in kinds.items()
        ]  # fmt: skip

    def rows(self, table: TableFacts) -> list[Row]:
        names = [column.name for column in table.columns]
        # The server rounds a FLOAT to six digits where it is not part of an expression.
        selected = ", ".join(
            f"{quoted(column.name)} + 0e0" if column.type == "float" else quoted(column.name)
            for column in table.columns
        )
        found = self._ask(f"SELECT {selected} FROM {quoted(table.schema)}.{quoted(table.name)}")
        return [dict(zip(names, row, strict=True)) for row in found]

    def move_tablespace(self, what: str) -> None:
        """Copy a table's files out of the server's folder, or back under another name."""
        verb, name = what.split()
        exported = self._file.with_name("exported")
        exported.mkdir(exist_ok=True)
        folder = Path(str(self._ask("SELECT @@datadir")[0][0])) / CAPTURED[0]
        for suffix in (".ibd", ".cfg"):
            inside, outside = folder / f"{name}{suffix}", exported / f"table{suffix}"
            if verb == "export":
                shutil.copyfile(inside, outside)
            elif outside.exists():
                shutil.copyfile(outside, inside)
                owner = folder.stat()
                os.chown(inside, owner.st_uid, owner.st_gid)

    def is_undumped(self, table: TableFacts, why: str) -> bool:
        """MyISAM and MEMORY (docs/dumps.md), and what LASTING names."""
        is_without = not table.is_transactional and "has no snapshots to dump it from" in why
        return is_without or any(cause in why for cause in LASTING)

    def is_refused(self, error: str) -> bool:
        """A relay that connects while its right on a schema is revoked."""
        if "may not read the tables of" not in error:
            return False
        granted = " ".join(str(one) for (one,) in self._ask(f"SHOW GRANTS FOR {RELAY}"))
        return any(f"SELECT ON `{name}`" not in granted for name in CAPTURED)

    def settle(self) -> None:
        """The relay has its rights again, and no table is without its file."""
        for name in CAPTURED:
            self._ask(f"GRANT SELECT ON `{name}`.* TO {RELAY}")
        for table in self.tables():
            try:
                self.rows(table)
            except pymysql.err.Error as error:
                if error.args[0] == _DISCARDED:
                    self._ask(f"DROP TABLE {quoted(table.schema)}.{quoted(table.name)}")

    def is_captured(self, schema: str) -> bool:
        return schema in CAPTURED

    def reset_logs(self) -> bool:
        is_new = self.product == "mysql" and number(self.version) >= (8, 4)
        try:
            self._ask("RESET BINARY LOGS AND GTIDS" if is_new else "RESET MASTER")
        except pymysql.err.Error:
            return False
        return True

    def restart(self, *, kill: bool) -> None:
        with contextlib.suppress(pymysql.err.Error):
            self._own.close()
        if kill:
            self._server.kill9()
        self._server.restart()
        self._own = self.connect()

    def close(self) -> None:
        with contextlib.suppress(pymysql.err.Error):
            self._own.close()
        self._server.remove()

    @property
    def file(self) -> Path:
        """What LOAD DATA reads."""
        return self._file


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _kind(kind: str) -> str:
    return {"VIEW": "view", "SEQUENCE": "sequence", "SYSTEM VERSIONED": "versioned"}.get(
        kind, "table"
    )
