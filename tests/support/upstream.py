"""A database of any kind that a source reads, for tests that run on all of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fixtures import FreshDatabase

KINDS = ["sqlite", "mariadb", "mysql", "postgres"]


@dataclass(frozen=True)
class Upstream:
    """A database of one kind: its URL, the namespace of its tables, and how to write to it."""

    kind: str
    url: str
    namespace: str
    execute: Callable[[str], list[tuple[Any, ...]]]

    def table(self, name: str) -> str:
        """A table's name as the sources have it."""
        return f"{self.namespace}.{name}"


def sqlite_upstream(path: Path) -> Upstream:
    """An SQLite file, which is opened for each statement."""

    def execute(statement: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(path, timeout=60)
        try:
            with connection:
                return connection.execute(statement).fetchall()
        finally:
            connection.close()

    execute("PRAGMA journal_mode = wal")
    return Upstream("sqlite", f"sqlite:///{path}", "main", execute)


def server_upstream(kind: str, database: FreshDatabase) -> Upstream:
    """An empty database of a private server."""
    namespace = "public" if kind == "postgres" else database.name
    return Upstream(kind, database.url, namespace, database.execute)
