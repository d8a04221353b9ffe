"""Keep a full-text index of a shop's products in SQLite, always equal to PostgreSQL.

python search_index.py RELAY_URL BOOTSTRAP_URL
"""

from __future__ import annotations

import sqlite3
import sys

from databus.client import (
    ApplicationCheckpoints,
    Checkpoint,
    Consumer,
    DatabusClient,
    Event,
    Window,
    encode_checkpoint,
)


class SearchIndex(Consumer):
    """Writes rows and checkpoint in one transaction, so that every change takes effect once."""

    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(path)
        self.db.execute("CREATE VIRTUAL TABLE IF NOT EXISTS products USING fts5(name, description)")
        self.db.execute("CREATE TABLE IF NOT EXISTS progress (id INTEGER PRIMARY KEY, place TEXT)")
        self.mode = ""

    def load(self) -> str | None:
        """The checkpoint of the last transaction, where the client continues."""
        row = self.db.execute("SELECT place FROM progress").fetchone()
        return row[0] if row else None

    def onStartDataEventSequence(self, window: Window) -> None:
        if window.mode != self.mode:
            self.mode = window.mode
            print("reading from the", "bootstrap server" if self.mode == "bootstrap" else "relay")

    def onDataEvent(self, event: Event) -> None:
        if event.op == "t":
            self.db.execute("DELETE FROM products")
        elif event.value is None:
            self.db.execute("DELETE FROM products WHERE rowid = ?", (event.key["id"],))
        else:
            row = (event.key["id"], event.value["name"], event.value["description"])
            self.db.execute(
                "REPLACE INTO products (rowid, name, description) VALUES (?, ?, ?)", row
            )

    def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        self.db.execute("REPLACE INTO progress VALUES (1, ?)", (encode_checkpoint(checkpoint),))
        self.db.commit()

    def onRollback(self, checkpoint: Checkpoint | None) -> None:
        self.db.rollback()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a real stdout
    index = SearchIndex("search.db")
    DatabusClient(
        database="shop",
        sources=["public.products"],
        relays=[sys.argv[1]],
        bootstraps=[sys.argv[2]],
        consumer=index,
        checkpoints=ApplicationCheckpoints(index.load),
        start="bootstrap",  # a new index gets the whole table first
    ).run()
