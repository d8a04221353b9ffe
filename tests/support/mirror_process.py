"""A consumer as a process of its own: ``python -m tests.support.mirror_process SETTINGS``.

It maintains a copy of the source's tables in SQLite, in the same transaction as its checkpoint,
so that it can be killed at any moment, and writes down what must never happen: a row that
goes back in time outside a replay, a window of which only a part is to be seen, and a checkpoint
that lies before what is here.
"""

from __future__ import annotations

import json
import pickle
import sqlite3
import sys
from pathlib import Path
from typing import Any

from databus.cli.demo.shop import Rows
from databus.client import ApplicationCheckpoints, Consumer, DatabusClient
from databus.client.application.events import Event, Window
from databus.common import checkpoint as checkpoints
from databus.common.checkpoint import ORIGIN, Checkpoint, OnlineCheckpoint, Position

_TABLES = """
CREATE TABLE state (source TEXT, key BLOB, row BLOB, scn INTEGER, seq INTEGER,
    PRIMARY KEY (source, key));
CREATE TABLE facts (name TEXT PRIMARY KEY, value);
CREATE TABLE faults (what TEXT);
"""


class StoredMirror(Consumer):
    """A copy of the shop's tables in an SQLite file.

    Invariants:
        I1. The file holds the state at the checkpoint that lies in it, whatever was killed.
    """

    def __init__(self, path: str) -> None:
        _create(Path(path))
        self._db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self._db.execute("PRAGMA synchronous = OFF")
        self._mode = ""
        self._reload()
        self._db.execute("BEGIN")

    def _reload(self) -> None:
        self._newest: dict[tuple[str, bytes], Position] = {}
        self._given = ORIGIN
        self._orders: set[Any] = set()
        self._lines: dict[Any, int] = {}
        for source, key, scn, seq in self._db.execute("SELECT source, key, scn, seq FROM state"):
            self._newest[source, key] = Position(scn, seq)
            self._count(source, pickle.loads(key), +1)

    def load(self) -> Checkpoint | None:
        """The checkpoint that lies with the state."""
        row = self._db.execute("SELECT value FROM facts WHERE name = 'checkpoint'").fetchone()
        return checkpoints.decode(row[0]) if row else None

    def onDataEvent(self, event: Event) -> None:
        key = pickle.dumps(tuple(event.key.values()))
        row_key, position = (event.source, key), event.position
        newest = self._newest.get(row_key)
        if newest is not None and position < newest:
            self._fault(f"{row_key} went back from {newest} to {position} ({self._mode})")
        self._newest[row_key] = self._given = position
        held = self._db.execute(
            "SELECT row FROM state WHERE source = ? AND key = ?", (event.source, key)
        ).fetchone()
        if event.op == "d":
            if held is not None:
                self._count(event.source, tuple(event.key.values()), -1)
                self._db.execute(
                    "DELETE FROM state WHERE source = ? AND key = ?", (event.source, key)
                )
            return
        if held is None:
            self._count(event.source, tuple(event.key.values()), +1)
        old = pickle.loads(held[0]) if held and event.absent else {}
        row = pickle.dumps({**old, **(event.value or {})})
        self._db.execute(
            "INSERT OR REPLACE INTO state VALUES (?, ?, ?, ?, ?)",
            (event.source, key, row, position.scn, position.seq),
        )

    def onStartDataEventSequence(self, window: Window) -> None:
        self._mode = window.mode
        self._fact(f"windows_{window.mode}", +1)

    def onEndDataEventSequence(self, window: Window) -> None:
        if window.mode != "online" or window.is_dump:
            return
        torn = [order for order in self._orders if not self._lines.get(order)]
        torn += [
            order for order, count in self._lines.items() if count and order not in self._orders
        ]
        if torn:
            self._fault(f"window {window.scn} is torn: orders without their lines: {torn[:5]}")

    def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        if isinstance(checkpoint, OnlineCheckpoint) and checkpoint.position < self._given:
            self._fault(f"the checkpoint {checkpoint.position} lies before {self._given}")
        self._db.execute(
            "INSERT OR REPLACE INTO facts VALUES ('checkpoint', ?)",
            (checkpoints.encode(checkpoint),),
        )
        self._db.execute("COMMIT")
        self._db.execute("BEGIN")

    def onRollback(self, checkpoint: Checkpoint | None) -> None:
        self._db.execute("ROLLBACK")
        self._reload()
        self._db.execute("BEGIN")
        self._fact("rollbacks", +1)

    def _count(self, source: str, key: tuple[Any, ...], change: int) -> None:
        if source.endswith(".orders"):
            (self._orders.add if change > 0 else self._orders.discard)(key[0])
        elif source.endswith(".order_lines"):
            self._lines[key[0]] = self._lines.get(key[0], 0) + change

    def _fact(self, name: str, change: int) -> None:
        self._db.execute(
            "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + ?",
            (name, change, change),
        )

    def _fault(self, what: str) -> None:
        self._db.execute("INSERT INTO faults VALUES (?)", (what,))


def _create(path: Path) -> None:
    """Make the file whole before it has its name: a test may look into it at any moment, and
    the switch to WAL fails at once if another process does."""
    if path.exists():
        return
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    db = sqlite3.connect(new, isolation_level=None)
    db.executescript("PRAGMA journal_mode = WAL;" + _TABLES)
    db.close()
    new.rename(path)


def stored_rows(path: Path) -> dict[str, Rows]:
    """What the mirror's file holds now, by source and key."""
    found: dict[str, Rows] = {}
    if not path.exists():
        return found
    with sqlite3.connect(path, timeout=30) as db:
        for source, key, row in db.execute("SELECT source, key, row FROM state"):
            found.setdefault(source, {})[pickle.loads(key)] = pickle.loads(row)
    db.close()
    return found


def stored_facts(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The mirror's counters, and what it saw that must not be; nothing before it has begun."""
    if not path.exists():
        return {}, []
    with sqlite3.connect(path, timeout=30) as db:
        facts = dict(db.execute("SELECT name, value FROM facts"))
        faults = [what for (what,) in db.execute("SELECT what FROM faults")]
    db.close()
    return facts, faults


def main(settings: dict[str, Any]) -> None:
    """Consume until killed."""
    mirror = StoredMirror(settings["path"])
    DatabusClient(
        database="shop",
        relays=settings["relays"],
        bootstraps=settings["bootstraps"],
        consumer=mirror,
        checkpoints=ApplicationCheckpoints(mirror.load),
        start=settings["start"],
        **{"checkpoint_every_s": 0.05, **settings.get("options", {})},
    ).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
