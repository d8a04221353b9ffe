"""What a status shows of an SQLite file's definitions, examined again only when one has changed.

It does not decide what is captured (``sqlite_tables``).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from databus.relay.sources.contract import Finding, left_out
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite import sqlite_triggers as triggers


class ShownDefinitions:
    """The tables that have triggers, and why others cannot be captured.

    Invariants:
        I1. Between two changes of a definition, a call of ``read`` looks at no table.

    Owner: the thread that reads the log.
    Raises: sqlite3.Error.
    """

    def __init__(self, examine: Callable[[sqlite3.Connection], list[Finding]]) -> None:
        """``examine`` gives the findings of all tables."""
        self._examine = examine
        self._version = -1
        self._shown: tuple[list[str], list[str]] = [], []

    def read(self, db: sqlite3.Connection) -> tuple[list[str], list[str]]:
        """The names of the tables with triggers, and a message for each that is left out."""
        version = log.schema_version(db)
        if self._version != version:
            names = sorted({trigger.table for trigger in triggers.ours(db)})
            self._shown = names, [left_out(one) for one in self._examine(db) if one.table]
            self._version = version
        return self._shown
