"""A place for the mirror of each kind of database: its target, and questions to it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from databus.client.sinks.sink_kinds import sink_of
from databus.client.sinks.sql.sql_mirror import SqlMirror
from databus.client.sinks.sql.sql_target import SqlTarget
from tests.client.sinks.sink_runs import sink_config

Rows = list[tuple[Any, ...]]


@dataclass
class MirrorHouse:
    """``ask`` runs a statement on a connection of its own."""

    kind: str
    url: str
    ask: Callable[[str], Rows]

    def target(self) -> SqlTarget:
        mirror = sink_of(sink_config("http://127.0.0.1:1", sql={"url": self.url}))
        assert isinstance(mirror, SqlMirror)
        return mirror._target

    def mirror(self) -> SqlMirror:
        return SqlMirror(self.target())

    def columns(self, table: str) -> set[str]:
        if self.kind == "sqlite":
            return {row[1] for row in self.ask(f"PRAGMA table_info({table})")}
        sql = f"SELECT column_name FROM information_schema.columns WHERE table_name = '{table}'"
        return {str(row[0]) for row in self.ask(sql)}

    @property
    def tables(self) -> set[str]:
        if self.kind == "sqlite":
            return {str(row[0]) for row in self.ask("SELECT name FROM sqlite_master")}
        sql = "SELECT table_name FROM information_schema.tables"
        return {str(row[0]) for row in self.ask(sql)}


def file_house(kind: str, path: str) -> MirrorHouse:
    def ask(sql: str) -> Rows:
        driver = importlib.import_module("sqlite3" if kind == "sqlite" else "duckdb")
        with contextlib.closing(driver.connect(path)) as connection:
            found: Rows = connection.execute(sql).fetchall()
            connection.commit()
            return found

    return MirrorHouse(kind, f"{kind}:///{path}", ask)


def server_house(kind: str, database: Any) -> MirrorHouse:
    return MirrorHouse(kind, database.url, lambda sql: list(map(tuple, database.execute(sql))))
