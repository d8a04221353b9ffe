"""An SQLite file as a site of the storm."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from databus.common.config import DatabaseConfig
from tests.storm.replica import Row
from tests.storm.site import Column, Session, Site, TableFacts


class SqliteSession(Session):
    """A connection that waits for the locks of the relay, which are short."""

    def __init__(self, path: Path) -> None:
        self._connection = connected(path)

    def execute(self, sql: str) -> None:
        self._connection.execute(sql).fetchall()

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def close(self) -> None:
        self._connection.close()


class SqliteSite(Site):
    """One file; everything in it is captured."""

    product = "sqlite"
    mark = "main.storm_mark"
    has_one_relay = True

    def __init__(self, folder: Path) -> None:
        self._path = folder / "storm.db"
        self.version = sqlite3.sqlite_version
        self._own: sqlite3.Connection | None = None
        self._number = 0

    def fresh(self) -> None:
        self.close()
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        self._own = connected(self._path)
        self._own.execute("PRAGMA journal_mode = WAL")
        self._own.execute("CREATE TABLE storm_mark (id INTEGER PRIMARY KEY, n INT)")

    def _ask(self, sql: str) -> list[tuple[Any, ...]]:
        assert self._own is not None
        return self._own.execute(sql).fetchall()

    def config(self, name: str) -> DatabaseConfig:
        return DatabaseConfig.model_validate(
            {
                "name": "shop",
                "url": f"sqlite:///{self._path}",
                "sources": ["main.*"],
                "ring_bytes": "8MiB",
                "sync_every": 0.1,
            }
        )

    def session(self) -> SqliteSession:
        return SqliteSession(self._path)

    def put_mark(self) -> int | None:
        """None: a session holds the write lock."""
        self._number += 1
        try:
            self._ask(
                f"INSERT INTO storm_mark VALUES (1, {self._number}) "
                "ON CONFLICT (id) DO UPDATE SET n = excluded.n"
            )
        except sqlite3.OperationalError:
            return None
        return self._number

    def tables(self) -> list[TableFacts]:
        found = []
        # Virtual tables and the shadow tables in which they are stored are not captured.
        kinds = {row[1]: row[2] for row in self._ask("PRAGMA main.table_list")}
        for name, kind, sql in self._ask("SELECT name, type, sql FROM sqlite_master ORDER BY 1"):
            is_ours = name.startswith(("sqlite_", "databus", "_databus", "storm_mark"))
            if kind not in ("table", "view") or is_ours:
                continue
            try:
                infos = self._ask(f"PRAGMA table_xinfo({quoted(name)})")
            except sqlite3.OperationalError:
                continue  # A view of a table that is gone.
            columns = []
            for _, column, type_, notnull, _, key, hidden in infos:
                columns.append(
                    Column(column, type_, not notnull, hidden > 1, key > 0, is_logged=hidden < 2)
                )
            keys = tuple(row[1] for row in sorted(infos, key=lambda row: row[5]) if row[5])
            found.append(TableFacts("main", name, tuple(columns), keys, str(sql), kinds[name]))
        return found

    def rows(self, table: TableFacts) -> list[Row]:
        names = [column.name for column in table.columns]
        selected = ", ".join(quoted(name) for name in names)
        found = self._ask(f"SELECT {selected} FROM {quoted(table.name)}")
        return [dict(zip(names, row, strict=True)) for row in found]

    def triggers(self, table: str) -> list[str]:
        """The names of all triggers of a table."""
        found = self._ask("SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'")
        return [name for name, of in found if of == table]

    def is_captured(self, schema: str) -> bool:
        return True

    def is_undumped(self, table: TableFacts, why: str) -> bool:
        # A value of another type than its column is declared with stays until it is corrected.
        return "only the application has" in why or "holds a value of type" in why

    def restart(self, *, kill: bool) -> None:
        """There is no server."""

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


def connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=0.05, check_same_thread=False)
    # A function and a collation that the relay does not have.
    connection.create_function("fold", 1, lambda value: str(value).lower(), deterministic=True)
    connection.create_collation(
        "own", lambda a, b: (a.lower() > b.lower()) - (a.lower() < b.lower())
    )
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA synchronous = OFF")
    return connection


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
