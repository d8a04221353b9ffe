"""Counters of the HTTP workers' work for each database.

A request for the metrics reaches any one of the workers; that one answers for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from databus.relay.serving.counters.counter_file import CounterFile, counter_path, read_rows

COUNTERS = ("requests", "errors", "too_old", "ahead", "overtaken", "bytes", "events", "readers")
_KIND = "tallies"


class WorkerCounters:
    """One worker's counts: a row for each database, a column for each of ``COUNTERS``.

    Owner: one worker process; all others read.
    Durability: none; a worker begins at zero.
    """

    def __init__(self, data_dir: Path, worker: int, databases: Sequence[str]) -> None:
        self._file = CounterFile(counter_path(data_dir, worker, _KIND), len(COUNTERS))
        self._offsets: dict[tuple[str, str], int] = {}
        self._make(databases, [])

    def _make(self, databases: Sequence[str], counts: Sequence[int]) -> None:
        """Begin a file with a row for each database; the first rows start at ``counts``."""
        rest = len(databases) * len(COUNTERS) - len(counts)
        self._file.replace(databases, [*counts, *(0 for _ in range(rest))])
        self._offsets = {
            (database, counter): row * len(COUNTERS) + column
            for row, database in enumerate(databases)
            for column, counter in enumerate(COUNTERS)
        }

    def add_database(self, name: str) -> None:
        """Count for one more database; one that was removed continues at its counts."""
        if (name, COUNTERS[0]) not in self._offsets:
            known = dict.fromkeys(database for database, _ in self._offsets)
            self._make([*known, name], list(self._file.numbers))

    def add(self, database: str, counter: str, count: int = 1) -> None:
        """Count; ``count`` is negative when a reader leaves."""
        self._file.numbers[self._offsets[database, counter]] += count

    def close(self) -> None:
        """Unmap the file; its readers are gone, its other counts stay to be read."""
        for (_, counter), offset in self._offsets.items():
            if counter == "readers":
                self._file.numbers[offset] = 0
        self._file.close()


def read_counters(data_dir: Path, workers: int, database: str) -> dict[str, int]:
    """The sums over all workers for one database, by the names in ``COUNTERS``."""
    sums = dict.fromkeys(COUNTERS, 0)
    for worker in range(workers):
        for name, counts in read_rows(counter_path(data_dir, worker, _KIND), len(COUNTERS)):
            if name == database:
                for counter, count in zip(COUNTERS, counts, strict=True):
                    sums[counter] += count
    return sums
