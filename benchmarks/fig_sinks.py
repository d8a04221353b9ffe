"""How fast a mirror in SQL takes rows from a filled ring, beside the target's own bulk load.

A worker in a process of its own serves a ring of rows of ten columns, a thousand a commit.  For
each kind of target, in turns: the target's own bulk load of the same rows, prepared beforehand,
into a table with the same key; and a mirror that reads the ring from its beginning to its end.
Rates are by the clock.  Processor time is that of the loading process and of the target's server.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sqlite3
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import psutil
import psycopg
import pyarrow as pa
import pymysql

from benchmarks.fig_client_callback import SCHEMA, row, served_ring
from benchmarks.harness import Report, Run, measure_in_turns, ratio, start
from databus.cli.demo.private_servers import MariaDBServer, PostgresServer, PrivateServer
from databus.client.sinks import Sink, SinkProcess
from databus.client.sinks.sink_kinds import sink_of
from databus.client.tables.arrow_rows import table_schema
from databus.common.checkpoint import Checkpoint
from databus.common.sink_config import SinkConfig

FLOOR = 0.5
PER_COMMIT = 1000
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
    def url(self) -> str:
        """Where the mirror is."""

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
        if self.server is not None and self.server.process is not None:
            parent = psutil.Process(self.server.process.pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    spent += times.user + times.system
            times = parent.cpu_times()
            spent += times.children_user + times.children_system
        return spent

    @property
    def ddl(self) -> str:
        """The table of the bulk load."""
        columns = ", ".join(
            f"{name} {kind}" for name, kind in zip(NAMES, TYPES[self.kind], strict=True)
        )
        return f"CREATE TABLE bulk ({columns}, PRIMARY KEY (id))"


class SqlitePlace(Place):
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


class DuckdbPlace(Place):
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


class ServerPlace(Place):
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


PLACES: dict[str, type[Place]] = {
    one.kind: one for one in (SqlitePlace, DuckdbPlace, PostgresPlace, MariaDBPlace)
}


class EndingProcess(SinkProcess):
    """Stops at the checkpoint of the last commit."""

    def __init__(self, config: SinkConfig, sink: Sink, last_scn: int) -> None:
        super().__init__(config, sink)
        commit = sink.commit

        def committed(checkpoint: Checkpoint) -> None:
            commit(checkpoint)
            if checkpoint.position.scn >= last_scn:
                threading.Thread(target=self.stop).start()

        sink.commit = committed  # type: ignore[method-assign]  # it notices the end


def mirror(relay: str, target: str, last_scn: int, batch_rows: int) -> None:
    """Read the whole ring into the target."""
    config = SinkConfig.model_validate(
        {
            "name": "mirror", "database": "bench", "relays": [relay], "start": "oldest",
            "batch_rows": batch_rows, "sql": {"url": target},
        }
    )  # fmt: skip
    EndingProcess(config, sink_of(config), last_scn).run()


def main(run: Run) -> None:
    """Measure and report."""
    rows = 3000 if run.smoke else run.options.rows
    kinds = run.options.targets if not run.smoke else ["sqlite", "duckdb"]
    report = Report(run, "Mirrors in SQL, filled ring, ten columns", "rows/s")
    report.settings = {"rows": rows, "per_commit": PER_COMMIT, "floor": FLOOR}
    prepared = [row(number) for number in range(1, rows + 1)]
    with served_ring(rows, PER_COMMIT) as relay:
        for kind in kinds:
            with _place(kind, prepared) as place:
                cpu: dict[str, list[float]] = {"bulk": [], "mirror": []}

                def timed(
                    name: str, once: Callable[[], None], place: Place = place,
                    cpu: dict[str, list[float]] = cpu,
                ) -> float:  # fmt: skip
                    place.empty()
                    cpu_before_s, before_s = place.cpu_s(), time.perf_counter()
                    once()
                    took_s = time.perf_counter() - before_s
                    cpu[name].append(place.cpu_s() - cpu_before_s)
                    return rows / took_s

                def mirrored(place: Place = place) -> None:
                    mirror(relay, place.url, rows // PER_COMMIT, run.options.batch_rows)
                    assert place.count() == rows

                found = measure_in_turns(
                    run,
                    {
                        "bulk": lambda timed=timed, place=place: timed("bulk", place.load),
                        "mirror": lambda timed=timed, mirrored=mirrored: timed("mirror", mirrored),
                    },
                )
                for name, sample in found.items():
                    report.add(sample, series=f"{kind}, {name}")
                spent = {name: min(values) / rows * 1e6 for name, values in cpu.items()}
                report.note(
                    f"{kind}: {ratio(found['mirror'], found['bulk']):.2f} of its own bulk load by "
                    f"the clock (floor {FLOOR}); processor time {spent['mirror']:.1f} us a row, "
                    f"bulk load {spent['bulk']:.1f}: {spent['bulk'] / spent['mirror']:.2f}"
                )
    report.output_hash = f"{rows}"
    report.write()


@contextlib.contextmanager
def _place(kind: str, rows: list[tuple[Any, ...]]) -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="databus-bench-"))
    if kind == "postgres":
        folder.chmod(0o755)
    place = PLACES[kind](folder, rows)
    try:
        yield place
    finally:
        if place.server is not None:
            place.server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part."""
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-rows", type=int, default=10_000)
    parser.add_argument(
        "--targets", type=lambda text: text.split(","), default=list(PLACES), help="such as duckdb"
    )


if __name__ == "__main__":
    main(start("fig_sinks", __doc__.partition("\n")[0], add_options))
