"""The targets of ``fig_sinks``: databases, each with its own bulk load."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import psutil
import psycopg
import pyarrow as pa
import pymysql

from benchmarks.fig_client_callback import SCHEMA
from databus.cli.demo.private_servers import MariaDBServer, PostgresServer, PrivateServer
from databus.client.tables.arrow_rows import table_schema

NAMES = [column.name for column in SCHEMA.columns]
TYPES = {
    "sqlite": ["INTEGER"] * 4 + ["TEXT"] * 6,
    "duckdb": [*["BIGINT"] * 4, *["TEXT"] * 2, "DECIMAL(12, 2)", *["TIMESTAMP"] * 2, "TEXT"],
    "postgres": [*["bigint"] * 4, *["text"] * 2, "numeric(12, 2)", *["timestamp"] * 2, "text"],
    "mariadb": [
        *["BIGINT"] * 4, *["LONGTEXT"] * 2, "DECIMAL(12, 2)", *["DATETIME(6)"] * 2, "LONGTEXT"
    ],
}  # fmt: skip


class Place(ABC):
    """A target: its URL, its own bulk load, and its server if it has one."""

    kind: str
    server: PrivateServer | None = None

    def __init__(self, folder: Path, rows: list[tuple[Any, ...]]) -> None:
        self.folder = folder
        self.prepare(rows)

    @property
    @abstractmethod
    def section(self) -> dict[str, Any]:
        """The section of the sink's configuration."""

    @property
    def process_id(self) -> int | None:
        """The process of the server, if it has one."""
        running = self.server.process if self.server is not None else None
        return None if running is None else running.pid

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()

    @abstractmethod
    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        """Bring the rows into the form that the bulk load takes."""

    @abstractmethod
    def empty(self) -> None:
        """Remove all tables, and make the one of the bulk load."""

    @abstractmethod
    def load(self) -> None:
        """The bulk load."""

    @abstractmethod
    def count(self) -> int:
        """Rows of the mirror."""

    def cpu_s(self) -> float:
        """Processor time of this process and of the server."""
        spent = time.process_time()
        if self.process_id is not None:
            parent = psutil.Process(self.process_id)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    spent += times.user + times.system
            times = parent.cpu_times()
            spent += times.children_user + times.children_system
        return spent


class DatabasePlace(Place):
    """A database."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the mirror is."""

    @property
    def section(self) -> dict[str, Any]:
        return {"sql": {"url": self.url}}

    @property
    def ddl(self) -> str:
        """The table of the bulk load."""
        columns = ", ".join(
            f"{name} {kind}" for name, kind in zip(NAMES, TYPES[self.kind], strict=True)
        )
        return f"CREATE TABLE bulk ({columns}, PRIMARY KEY (id))"


class SqlitePlace(DatabasePlace):
    """INSERT by executemany, in one transaction."""

    kind = "sqlite"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/mirror.db"

    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        self.rows = [(*one[:6], str(one[6]), str(one[7]), str(one[8]), one[9]) for one in rows]

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.folder / "mirror.db")
        connection.execute("PRAGMA journal_mode = WAL")
        return connection

    def empty(self) -> None:
        for path in self.folder.glob("mirror.db*"):
            path.unlink()
        with contextlib.closing(self._connect()) as connection:
            connection.execute(self.ddl)

    def load(self) -> None:
        marks = ", ".join("?" * len(NAMES))
        with contextlib.closing(self._connect()) as connection, connection:
            connection.executemany(f"INSERT INTO bulk VALUES ({marks})", self.rows)

    def count(self) -> int:
        with contextlib.closing(self._connect()) as connection:
            return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])


class DuckdbPlace(DatabasePlace):
    """INSERT from an Arrow table."""

    kind = "duckdb"

    @property
    def url(self) -> str:
        return f"duckdb:///{self.folder}/mirror.duckdb"

    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        columns = list(zip(*rows, strict=True))
        self.table = pa.table(
            [
                pa.array(column, field.type)
                for column, field in zip(columns, table_schema(SCHEMA), strict=True)
            ],
            names=NAMES,
        )

    def _connect(self) -> duckdb.DuckDBPyConnection:
        return duckdb.connect(str(self.folder / "mirror.duckdb"))

    def empty(self) -> None:
        for path in self.folder.glob("mirror.duckdb*"):
            path.unlink()
        with contextlib.closing(self._connect()) as connection:
            connection.execute(self.ddl)

    def load(self) -> None:
        with contextlib.closing(self._connect()) as connection:
            connection.register("prepared", self.table)
            connection.execute("INSERT INTO bulk SELECT * FROM prepared")

    def count(self) -> int:
        with contextlib.closing(self._connect()) as connection:
            found = connection.execute("SELECT count(*) FROM orders").fetchone()
            assert found is not None
            return int(found[0])


class ServerPlace(DatabasePlace):
    """A private server, with a database for each round."""

    make: Callable[[Path], PrivateServer]

    def __init__(self, folder: Path, rows: list[tuple[Any, ...]]) -> None:
        self.server = self.make(folder / "server")
        self.server.start()
        self.number = 0
        super().__init__(folder, rows)

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.url(self.database)

    @property
    def database(self) -> str:
        return f"bench{self.number}"

    def empty(self) -> None:
        assert self.server is not None
        if self.number:
            self.server.drop_database(self.database)
        self.number += 1
        self.server.create_database(self.database)
        self.server.execute(self.ddl, database=self.database)

    def count(self) -> int:
        assert self.server is not None
        return int(self.server.execute("SELECT count(*) FROM orders", database=self.database)[0][0])


class PostgresPlace(ServerPlace):
    """COPY of a text in memory."""

    kind = "postgres"
    make = staticmethod(lambda folder: PostgresServer(folder, options=["max_wal_size=4GB"]))

    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        self.text = "".join("\t".join(map(str, one)) + "\n" for one in rows).encode()

    def load(self) -> None:
        with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
            with cursor.copy("COPY bulk FROM STDIN") as copy:
                copy.write(self.text)


class MariaDBPlace(ServerPlace):
    """LOAD DATA LOCAL of a file."""

    kind = "mariadb"
    make = staticmethod(MariaDBServer)

    def prepare(self, rows: list[tuple[Any, ...]]) -> None:
        self.path = self.folder / "rows.tsv"
        self.path.write_text("".join("\t".join(map(str, one)) + "\n" for one in rows))

    def load(self) -> None:
        assert self.server is not None
        connection = self.server.connect(self.database)
        assert isinstance(connection, pymysql.connections.Connection)
        url = pymysql.connect(
            host="127.0.0.1", port=connection.port, user=connection.user,
            password=connection.password, database=self.database, local_infile=True,
        )  # fmt: skip
        connection.close()
        with contextlib.closing(url), url.cursor() as cursor:
            cursor.execute(f"LOAD DATA LOCAL INFILE '{self.path}' INTO TABLE bulk")
            url.commit()
