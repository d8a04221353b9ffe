"""A consumer of a merge as a process: rows and checkpoint in one SQLite transaction.

It appends each event to a table without a key, so that an event that took effect twice is there
twice.  Arguments: the file, and the streams as JSON.
"""

from __future__ import annotations

import json
import sqlite3
import sys

from databus.client import (
    ApplicationCheckpoints,
    Checkpoint,
    Consumer,
    Event,
    MergedClient,
    encode_checkpoint,
)

TABLES = (
    "CREATE TABLE IF NOT EXISTS applied (n INTEGER PRIMARY KEY, database TEXT, scn INTEGER, "
    "seq INTEGER, op TEXT, id INTEGER)",
    "CREATE TABLE IF NOT EXISTS checkpoint (one INTEGER PRIMARY KEY, text TEXT)",
)


class Journal(Consumer):
    """Writes what it gets."""

    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA synchronous = OFF")
        for statement in TABLES:
            self.connection.execute(statement)

    def load(self) -> str | None:
        row = self.connection.execute("SELECT text FROM checkpoint").fetchone()
        return row and str(row[0])

    def onStartConsumption(self) -> None:
        self.connection.execute("BEGIN")

    def onDataEvent(self, event: Event) -> None:
        self.connection.execute(
            "INSERT INTO applied (database, scn, seq, op, id) VALUES (?, ?, ?, ?, ?)",
            (event.database, event.scn, event.seq, event.op, event.key.get("id")),
        )

    def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        text = encode_checkpoint(checkpoint)
        self.connection.execute("REPLACE INTO checkpoint VALUES (1, ?)", (text,))
        self.connection.execute("COMMIT")
        self.connection.execute("BEGIN")

    def onRollback(self, checkpoint: Checkpoint | None) -> None:
        self.connection.execute("ROLLBACK")
        self.connection.execute("BEGIN")


def main(path: str, streams: str) -> None:
    """Serve until a signal."""
    journal = Journal(path)
    MergedClient(
        streams=json.loads(streams),
        consumer=journal,
        checkpoints=ApplicationCheckpoints(journal.load),
        start="oldest",
        skew_s=1.5,
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
