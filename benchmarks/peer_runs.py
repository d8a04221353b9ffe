"""What a user would take instead of Databus, over the same backlog in the same run.

Debezium's embedded engine, tuned, and the Node clients of the binlog and of pgoutput; fetched by
``benchmarks/peers/install.sh``.  A peer that is not installed is named as absent.  Each counts
from its first row on, in a process of its own: what it needs to start is not held against it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.upstreams import DATABASE, Backlog, MariaDB, Postgres, Upstream
from databus.cli.demo.private_servers import PASSWORD, USER
from databus.common.compiled.kernels import I64Array

SOURCES = Path(__file__).parent / "peers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
INSTALLED = Path(os.environ.get("DATABUS_PEERS") or CACHE / "databus-peers")
RUN_S = 900
MARK_S = 120
JAVA = ("-Xmx4g", "-XX:+UseParallelGC")
TUNED = {
    "max.batch.size": 8192,
    "max.queue.size": 65536,
    "poll.interval.ms": 5,
    "offset.flush.interval.ms": 1000,
    "converter.schemas.enable": "false",
    "include.schema.changes": "false",
}


@dataclass(frozen=True, slots=True)
class Taken:
    """What a peer needed, from its first rows to its last."""

    rows: int
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int


class Peer(ABC):
    """One way to take a backlog.

    Owner: the benchmark; ``close`` deletes what it kept.
    """

    def __init__(self, name: str, upstream: Upstream) -> None:
        self.name = name
        self.upstream = upstream
        self.folder = Path(tempfile.mkdtemp(prefix="databus-peer-"))

    @property
    @abstractmethod
    def absent(self) -> str | None:
        """What is missing on this machine; None if nothing is."""

    @abstractmethod
    def mark(self, table: str) -> None:
        """Remember the log position where the backlog of a table is about to begin."""

    @abstractmethod
    def take(self, backlog: Backlog, number: int) -> Taken:
        """Take the whole backlog, for the nth time.

        Raises:
            RuntimeError: it failed, with what it printed.
        """

    def close(self) -> None:
        """Delete the remembered positions."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _slot(self, of: str, slot: str) -> None:
        self.upstream.execute(f"SELECT pg_copy_logical_replication_slot('{of}', '{slot}')")

    def _drop(self, slot: str) -> None:
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            try:
                self.upstream.execute(f"SELECT pg_drop_replication_slot('{slot}')")
                return
            except Exception:
                time.sleep(0.2)


class NodeClient(Peer):
    """@vlasky/zongji, or pg-logical-replication."""

    @property
    def absent(self) -> str | None:
        if shutil.which("node") is None:
            return "node is not installed"
        return None if (INSTALLED / "node/node_modules").is_dir() else f"not in {INSTALLED}"

    def mark(self, table: str) -> None:
        """Nothing: it begins where our own source does, or with the binlog's file."""

    def take(self, backlog: Backlog, number: int) -> Taken:
        given: dict[str, Any] = {
            "modules": str(INSTALLED / "node"), "host": "127.0.0.1",
            "port": self.upstream.server.port, "user": USER, "password": PASSWORD,
            "database": DATABASE, "table": backlog.table, "rows": backlog.rows,
        }  # fmt: skip
        slot = f"node_{backlog.table}_{number}"
        if isinstance(self.upstream, Postgres):
            own = f"databus_{backlog.table}"
            self._slot(own, slot)
            given |= {"client": "pgoutput", "slot": slot, "publication": own}
        else:
            given |= {"client": "zongji", "file": backlog.own["file"]}
        try:
            return _run(["node", str(SOURCES / "drain.mjs"), json.dumps(given)])
        finally:
            if isinstance(self.upstream, Postgres):
                self._drop(slot)


class Debezium(Peer):
    """The embedded engine with tuned settings; ``form`` is json, or connect for its records."""

    def __init__(self, name: str, upstream: Upstream, form: str) -> None:
        super().__init__(name, upstream)
        self.form = form
        is_mariadb = upstream.name == MariaDB.name
        self._installed = INSTALLED / ("debezium-mariadb" if is_mariadb else "debezium")

    @property
    def absent(self) -> str | None:
        if shutil.which("java") is None:
            return "java is not installed"
        installed = (self._installed / "classes/DebeziumDrain.class").exists()
        return None if installed else f"not in {self._installed}"

    def mark(self, table: str) -> None:
        """Let it see one row of another table: that leaves an offset file and the tables'
        history."""
        self.upstream.execute("CREATE TABLE IF NOT EXISTS marks (id BIGINT PRIMARY KEY)")
        slot = f"marked_{table}_{self.form}"
        if isinstance(self.upstream, Postgres):
            self.upstream.execute(f"CREATE PUBLICATION {slot} FOR TABLE {table}, marks")
        run_folder = self.folder / table
        run_folder.mkdir()
        command = self._command(run_folder, table, slot, slot, topic="marks", rows=1)
        with (run_folder / "log").open("wb") as log:
            marking = subprocess.Popen(command, stdout=log, stderr=log)
        self._commit_marks_until(lambda: marking.poll() is not None)
        if marking.poll() != 0:
            marking.kill()
            raise RuntimeError(f"{self.name} has not begun: {_said(run_folder)}")

    def _commit_marks_until(self, reached: Callable[[], bool]) -> None:
        number, deadline_s = time.time_ns(), time.monotonic() + MARK_S
        while not reached() and time.monotonic() < deadline_s:
            number += 1
            self.upstream.execute(f"INSERT INTO marks VALUES ({number})")
            time.sleep(0.2)

    def snapshot(self, table: str, rows: int, number: int) -> Taken:
        """Take a whole table by an initial snapshot, for the nth time.

        Raises:
            RuntimeError: it failed, with what it printed.
        """
        slot = f"snapshot_{table}_{number}"
        run_folder = self.folder / slot
        run_folder.mkdir()
        if isinstance(self.upstream, Postgres):
            self.upstream.execute(f"DROP PUBLICATION IF EXISTS {slot}")
            self.upstream.execute(f"CREATE PUBLICATION {slot} FOR TABLE {table}")
        more = {"snapshot.mode": "initial", "snapshot.locking.mode": "none"}
        try:
            return _run(
                self._command(run_folder, table, slot, slot, topic=table, rows=rows, **more)
            )
        finally:
            if isinstance(self.upstream, Postgres):
                self._drop(slot)

    @contextlib.contextmanager
    def following(self, table: str, count: int) -> Iterator[Callable[[], I64Array]]:
        """While it follows a table's rows with the ids below ``count``; what is yielded waits for
        the last one and returns when each came, in microseconds."""
        self.upstream.execute("CREATE TABLE IF NOT EXISTS marks (id BIGINT PRIMARY KEY)")
        slot = f"follows_{table}"
        if isinstance(self.upstream, Postgres):
            self.upstream.execute(f"CREATE PUBLICATION {slot} FOR TABLE {table}, marks")
        run_folder = self.folder / slot
        run_folder.mkdir()
        arrivals = run_folder / "arrivals"
        command = self._command(
            run_folder, table, slot, slot, topic=table, rows=count, **{"drain.arrivals": arrivals}
        )
        with (run_folder / "log").open("wb") as log:
            follower = subprocess.Popen(command, stdout=log, stderr=log)

        def is_streaming() -> bool:
            return b"streaming" in (run_folder / "log").read_bytes() or follower.poll() is not None

        def arrived() -> I64Array:
            if follower.wait(MARK_S) or not arrivals.exists():
                raise RuntimeError(f"{self.name} has not followed: {_said(run_folder)}")
            return np.fromfile(arrivals, dtype=np.int64)

        try:
            self._commit_marks_until(is_streaming)
            yield arrived
        finally:
            follower.kill()
            follower.wait()
            if isinstance(self.upstream, Postgres):
                self._drop(slot)

    def take(self, backlog: Backlog, number: int) -> Taken:
        publication = f"marked_{backlog.table}_{self.form}"
        slot = f"{publication}_{number}"
        run_folder = self.folder / f"{backlog.table}-{number}"
        shutil.copytree(self.folder / backlog.table, run_folder)
        if isinstance(self.upstream, Postgres):
            self._slot(publication, slot)
        try:
            return _run(
                self._command(
                    run_folder,
                    backlog.table,
                    slot,
                    publication,
                    topic=backlog.table,
                    rows=backlog.rows,
                )
            )
        finally:
            if isinstance(self.upstream, Postgres):
                self._drop(slot)

    def _command(
        self,
        run_folder: Path,
        table: str,
        slot: str,
        publication: str,
        *,
        topic: str,
        rows: int,
        **more: Any,
    ) -> list[str]:
        schema = self.upstream.schema
        properties: dict[str, Any] = {
            "name": "peer",
            "topic.prefix": "peer",
            "database.hostname": "127.0.0.1",
            "database.port": self.upstream.server.port,
            "database.user": USER,
            "database.password": PASSWORD,
            "table.include.list": f"{schema}.{table},{schema}.marks",
            "snapshot.mode": "no_data",
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": run_folder / "offsets",
            "drain.topic": topic,
            "drain.rows": rows,
            "drain.format": self.form,
            **TUNED,
        }
        if isinstance(self.upstream, Postgres):
            properties |= {
                "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
                "database.dbname": DATABASE,
                "plugin.name": "pgoutput",
                "slot.name": slot,
                "publication.name": publication,
                "publication.autocreate.mode": "disabled",
            }
        else:
            properties |= {
                "connector.class": "io.debezium.connector.mysql.MySqlConnector",
                "database.server.id": 910_000,
                "database.include.list": DATABASE,
                "database.ssl.mode": "disabled",
                "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
                "schema.history.internal.file.filename": run_folder / "history",
            }
        properties |= more
        file = run_folder / "drain.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        path = f"{self._installed}/classes:{self._installed}/jars/*"
        return ["java", *JAVA, "-cp", path, "DebeziumDrain", str(file)]


def peers_of(upstream: Upstream) -> list[Peer]:
    """All that this database has, installed or not."""
    node = "pg-logical-replication" if isinstance(upstream, Postgres) else "zongji"
    return [
        Debezium("Debezium, tuned, JSON", upstream, "json"),
        Debezium("Debezium, tuned, Connect records", upstream, "connect"),
        NodeClient(f"Node: {node}", upstream),
    ]


def _said(run_folder: Path) -> str:
    return (run_folder / "log").read_text(errors="replace")[-1500:]


def _run(command: list[str]) -> Taken:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-1500:]}")
    return Taken(**json.loads(lines[-1]))
