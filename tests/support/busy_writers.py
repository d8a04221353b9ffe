"""Threads that write a table all the time, and what a consumer must make of it afterwards.

Each writer signs: all rows of one transaction carry its number in ``version``, and every other
column a value that follows from the column's name and that number. So a row that was decoded with
another definition than that of its time does not have the values of its columns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from databus.cli.demo.private_servers import PrivateServer
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op
from databus.common.schema.source_schema import Kind, SourceSchema
from databus.relay.ring.schema_registry import RegistryReader
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually, eventually_sync

TABLE = "CREATE TABLE busy (id INT PRIMARY KEY, version INT NOT NULL, a INT, b INT, c VARCHAR(30))"
KEYS = ("id", "version")
_END_WITHIN_S = 60.0
_OWN_ROWS = 60

# The names of today are not those of a moment ago: an unknown column, a definition that changed
# in mid-transaction, a table that is renamed in two steps, a deadlock.  MySQL's numbers, and
# PostgreSQL's.
_PASSING = {1054, 1136, 1146, 1412, 1213, 1205, "42703", "40P01"}


def signed(column: str, version: int) -> int:
    """What a transaction writes into a column."""
    return (zlib.crc32(column.encode()) % 900 + 100) * 1_000_000 + version


class BusyWriters:
    """Insert, update and delete rows in multi-row transactions, each thread rows of its own.

    Invariants:
        I1. A row's ``version`` only grows, over its deletions too.
        I2. ``committed`` has each transaction whose COMMIT was answered, with the count of rows
            that it changed; ``unsure`` those of which the answer was lost.
        I3. No writer waits between two transactions longer than ``pause_s``.

    Owner: one test; ``at_work`` ends the threads.
    Raises: the first error of a thread that no change of the table explains, from ``stop``.
    """

    def __init__(self, database: str, count: int = 3, *, pause_s: float = 0.0) -> None:
        self.committed: dict[int, int] = {}
        self.unsure: dict[int, int] = {}
        self.surprises = 0
        self._database = database
        self._count = count
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._killed = False
        self._stale = [False] * count
        self._done = [0] * count
        self._versions = list(range(count))
        self._rows: list[set[int]] = [set() for _ in range(count)]
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    @contextlib.contextmanager
    def at_work(self, server: PrivateServer) -> Iterator[None]:
        """They write to the server meanwhile."""
        self.start(server)
        try:
            yield
        finally:
            self.stop()

    def start(self, server: PrivateServer) -> None:
        """Begin to write, with what the table holds of ours already."""
        self._stopping.clear()
        self._killed = False
        for number in range(self._count):
            thread = threading.Thread(target=self._work, args=(server, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Let each come to the end of its transaction."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_END_WITHIN_S)
            assert not thread.is_alive(), "a writer still waits for its server"
        self._threads.clear()
        if self._errors:
            raise self._errors[0]

    def kill(self, server: PrivateServer) -> None:
        """Kill -9 the server while they write to it; no writer writes when this returns."""
        self._killed = True
        server.kill9()
        self.stop()

    def read_columns_again(self) -> None:
        """Nothing fails where a column was added: the test has to announce it."""
        self._stale = [True] * self._count

    def each_commits(self, count: int) -> None:
        """Return when every thread has committed so many transactions more."""
        wanted = [done + count for done in self._done]
        eventually_sync(
            lambda: self._errors or all(map(int.__ge__, self._done, wanted)),
            30,
            "everyone has committed",
        )
        assert not self._errors, self._errors

    def _work(self, server: PrivateServer, number: int) -> None:
        try:
            with contextlib.closing(server.connect(self._database)) as connection:
                self._write(connection.cursor(), number, random.Random(number))
        except Exception as error:
            if not self._killed:
                self._errors.append(error)

    def _write(self, cursor: Any, number: int, dice: random.Random) -> None:
        columns = self._columns(cursor)
        cursor.execute("SELECT id FROM busy")
        own = range(number, _OWN_ROWS * self._count, self._count)
        self._rows[number] = {row for (row,) in cursor.fetchall() if row in own}
        while not self._stopping.is_set():
            version = self._versions[number] = self._versions[number] + self._count
            try:
                if self._stale[number]:
                    columns = self._columns(cursor)
                    self._stale[number] = False
                rows, changed = self._change(cursor, columns, version, number, dice)
            except Exception as error:
                if not _codes(error) & _PASSING:
                    raise
                self.surprises += 1
                cursor.execute("ROLLBACK")
                self._stale[number] = True
                continue
            self.unsure[version] = changed
            cursor.execute("COMMIT")
            self.committed[version] = self.unsure.pop(version)
            self._rows[number] = rows
            self._done[number] += 1
            if self._pause_s:
                self._stopping.wait(self._pause_s)

    def _change(
        self, cursor: Any, columns: list[str], version: int, number: int, dice: random.Random
    ) -> tuple[set[int], int]:
        """One transaction but for its COMMIT: which rows are left, how many changes it made."""
        held = self._rows[number]
        free = [
            row for row in range(number, _OWN_ROWS * self._count, self._count) if row not in held
        ]
        new = dice.sample(free, min(len(free), dice.randint(1, 4)))
        old = dice.sample(sorted(held), min(len(held), 4))
        gone = set(old[: max(0, len(old) - 2)]) if len(held) > 30 else set()
        values = {name: f"'{signed(name, version)}'" for name in columns}
        changed = 0
        cursor.execute("BEGIN")
        if new:
            rows = ", ".join(f"({row}, {version}, {', '.join(values.values())})" for row in new)
            cursor.execute(f"INSERT INTO busy (id, version, {', '.join(values)}) VALUES {rows}")
            changed += len(new)
        if old:
            assignments = ", ".join(f"{name} = {value}" for name, value in values.items())
            ids = ", ".join(map(str, old))
            cursor.execute(
                f"UPDATE busy SET version = {version}, {assignments} WHERE id IN ({ids})"
            )
            changed += len(old)
        if gone:
            cursor.execute(f"DELETE FROM busy WHERE id IN ({', '.join(map(str, gone))})")
            changed += len(gone)
        return (held | set(new)) - gone, changed

    def _columns(self, cursor: Any) -> list[str]:
        cursor.execute("SELECT * FROM busy WHERE 1 = 0")
        return [column[0] for column in cursor.description if column[0] not in KEYS]


def _codes(error: BaseException) -> set[Any]:
    """An error's SQLSTATE and its number, as far as the driver gives them."""
    return {getattr(error, "sqlstate", None), *error.args[:1]}


def busy_rows(server: PrivateServer, database: str) -> dict[int, dict[str, Any]]:
    """By id, what the table has while its columns are those of ``TABLE``."""
    names = ("id", "version", "a", "b", "c")
    rows = server.execute(f"SELECT {', '.join(names)} FROM busy", database=database)
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


@dataclass
class Applied:
    """What a consumer holds that has applied a ring's changes of the table ``busy``.

    ``names`` are the columns after each change of the table that was announced, ``kinds`` the
    present ones; ``transactions`` has the count of changes by version, ``scns`` their scns in
    order.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    names: list[set[str]] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    transactions: dict[int, int] = field(default_factory=dict)
    scns: list[int] = field(default_factory=list)


Migrate = Callable[[dict[str, Any], dict[str, Kind]], None]
"""Do with a row what a change of its table has done; the kinds of the new columns by name."""


def _unchanged(row: dict[str, Any], kinds: dict[str, Kind]) -> None:
    raise AssertionError(f"no writer has changed the table; announced: {kinds}")


def applied(
    folder: Path, migrate: Migrate = _unchanged, *, defaults: Mapping[str, Any] | None = None
) -> Applied:
    """The ring of ``<data_dir>/<database>`` applied to an empty table, each frame examined.

    A row must come with the definition that was announced last and with its transaction's signature
    in every column, or with the column's default; no version of a row comes after a newer one.
    """
    reader = RegistryReader(folder / "schemas.jsonl")
    reader.refresh()
    found, newest, last = Applied(), dict[int, int](), Position(0, 0)
    window: set[int] = set()
    for view in ring_frames(folder):
        assert view.position > last, (view.position, last)
        last = view.position
        if view.op == Op.SCHEMA_CHANGE:
            assert view.after is not None
            changed = SourceSchema.from_json(json.loads(bytes(view.after)))
            if not changed.source.endswith(".busy"):
                continue
            kinds = {column.name: column.kind for column in changed.columns}
            if kinds == found.kinds:  # Only a type's readable name differs.
                continue
            found.kinds = kinds
            found.names.append(set(kinds))
            for row in found.rows.values():
                migrate(row, found.kinds)
        elif view.op == Op.END_OF_WINDOW and window:
            (version,) = window
            assert version not in found.transactions, version
            found.transactions[version] = view.event_count
            found.scns.append(view.scn)
            window.clear()
        if view.is_control:
            continue
        schema = reader.schemas.by_fingerprint(view.schema_fp)
        if not schema.source.endswith(".busy"):
            continue
        kinds = {column.name: column.kind for column in schema.columns}
        found.kinds = found.kinds or kinds
        assert kinds == found.kinds, f"{view.position}: not the definition that was announced last"
        key = int(schema.decode_key(view.key)["id"])
        if view.op == Op.DELETE:
            del found.rows[key]
            continue
        assert (key in found.rows) == (view.op == Op.UPDATE), (view.op, view.position)
        row = schema.decode_row(view.after or b"")
        version = row["version"]
        for name in kinds.keys() - KEYS:
            values = str(signed(name, version)), str((defaults or {}).get(name))
            assert str(row[name]) in values, (view.position, name, row)
        assert version > newest.get(key, -1), f"row {key} went back at {view.position}"
        newest[key] = version
        window.add(version)
        found.rows[key] = row
    return found


async def left_behind(
    writers: BusyWriters, primary: PrivateServer, replica: PrivateServer, stop: str, folder: Path
) -> int:
    """Kill the primary when the ring has transactions that the replica has not.

    ``stop`` is the replica's statement that ends its reading; returns the newest transaction.
    """
    await asyncio.to_thread(writers.each_commits, 10)
    await asyncio.to_thread(replica.execute, stop)
    await asyncio.to_thread(writers.each_commits, 10)
    newest = max(writers.committed)
    await eventually(lambda: newest in applied(folder).transactions, 60)
    await asyncio.to_thread(writers.kill, primary)
    return newest
