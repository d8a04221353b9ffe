"""How far a dump is and how fast it advances: for the API, the status and the metrics."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from databus.relay.dumps.dump_records import Dump

RATE_WINDOW_S = 10.0


class DumpProgress:
    """Measures the running dump.

    Owner: the fetcher's loop.
    """

    def __init__(self) -> None:
        self._dump_id = ""
        self._marks: deque[tuple[float, int]] = deque()
        self._sent_rows = self._dropped_rows = self._chunks = 0

    def count(self, sent_rows: int, dropped_rows: int) -> None:
        """A chunk of any dump was recorded."""
        self._chunks += 1
        self._sent_rows += sent_rows
        self._dropped_rows += dropped_rows

    def totals(self) -> dict[str, int]:
        """The totals since the fetcher began."""
        return {
            "chunks": self._chunks,
            "sent_rows": self._sent_rows,
            "dropped_rows": self._dropped_rows,
        }

    def begin(self, dump: Dump) -> None:
        """The dump starts, or resumes after a pause."""
        self._dump_id = dump.id
        self._marks.clear()
        self.settled(dump)

    def rest(self, dump: Dump) -> None:
        """The dump is paused or has ended."""
        if self._dump_id == dump.id:
            self._dump_id = ""

    def settled(self, dump: Dump) -> None:
        """A chunk of it was recorded."""
        if self._dump_id != dump.id:
            return
        now_s = time.monotonic()
        self._marks.append((now_s, _rows_read(dump)))
        while len(self._marks) > 2 and now_s - self._marks[0][0] > RATE_WINDOW_S:
            self._marks.popleft()

    def document(self, dump: Dump) -> dict[str, Any]:
        """Rows and chunks so far, rows expected, rows a second, seconds left; null: unknown."""
        tables = dump.tables or []
        rates = self._rows_per_s() if self._dump_id == dump.id else None
        estimates = [
            table.rows + table.dropped if table.done else table.estimated_rows for table in tables
        ]
        expected = None
        if tables and None not in estimates:
            # The rows themselves have overtaken an estimate that was too low.
            expected = sum(
                max(estimate or 0, table.rows + table.dropped)
                for estimate, table in zip(estimates, tables, strict=True)
            )
        read = _rows_read(dump)
        eta_s = (expected - read) / rates if rates and expected is not None else None
        return {
            "tables": len(tables),
            "tables_done": sum(table.done for table in tables),
            "rows_read": read,
            "estimated_rows": expected,
            "rows_per_s": None if rates is None else round(rates, 1),
            "eta_s": None if eta_s is None else round(eta_s, 1),
        }

    def _rows_per_s(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(last_s - first_s, 1e-6)


def _rows_read(dump: Dump) -> int:
    return sum(table.rows + table.dropped for table in dump.tables or ())
