"""Counts of what the HTTP workers do, in files that every worker can read.

A request for the metrics reaches any one of the workers; it answers for all of them.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from databus.common.errors import StoreError

COUNTERS = ("requests", "errors", "too_old", "ahead", "overtaken", "bytes", "events", "readers")
FOLDER = "workers"
_HEADER_BYTES = 4096


def _path(data_dir: Path, worker: int) -> Path:
    return data_dir / FOLDER / f"{worker}.tallies"


class WorkerTallies:
    """One worker's counts: a row for each database, a column for each of ``COUNTERS``.

    Invariants:
        I1. Every number is one aligned 64-bit word: readers see the old or the new one.

    Owner: one worker process; all others read.
    Durability: none; a worker begins at zero.
    """

    def __init__(self, data_dir: Path, worker: int, databases: Sequence[str]) -> None:
        self._data_path = _path(data_dir, worker)
        self._place: dict[tuple[str, str], int] = {}
        self._rows: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._map: mmap.mmap | None = None
        self._make(databases)

    def _make(self, databases: Sequence[str]) -> None:
        """Put a file with rows for these databases in the old one's place, its counts kept."""
        path = self._data_path
        header = json.dumps({"databases": list(databases)}).encode()
        if len(header) > _HEADER_BYTES:
            raise StoreError(f"{len(databases)} databases have names too long for {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_bytes(
            header.ljust(_HEADER_BYTES) + bytes(8 * len(COUNTERS) * max(1, len(databases)))
        )
        with beside.open("r+b") as file:
            new_map = mmap.mmap(file.fileno(), 0)
        rows = np.frombuffer(new_map, dtype=np.int64, offset=_HEADER_BYTES)
        places = {
            (database, counter): row * len(COUNTERS) + column
            for row, database in enumerate(databases)
            for column, counter in enumerate(COUNTERS)
        }
        for key in places.keys() & self._place.keys():
            rows[places[key]] = self._rows[self._place[key]]
        beside.replace(path)
        old_map, self._map, self._rows, self._place = self._map, new_map, rows, places
        if old_map is not None:
            old_map.close()

    def add_database(self, name: str) -> None:
        """Count for one more database; one that was removed goes on at its counts."""
        if (name, COUNTERS[0]) not in self._place:
            self._make([*dict.fromkeys(database for database, _ in self._place), name])

    def add(self, database: str, counter: str, count: int = 1) -> None:
        """Count; ``count`` is negative when a reader leaves."""
        self._rows[self._place[database, counter]] += count

    def close(self) -> None:
        """Unmap the file; its readers are gone, its other counts stay to be read."""
        for (_, counter), place in self._place.items():
            if counter == "readers":
                self._rows[place] = 0
        self._rows = np.empty(0, dtype=np.int64)
        if self._map is not None:
            self._map.close()
            self._map = None


def read_tallies(data_dir: Path, workers: int, database: str) -> dict[str, int]:
    """The sums over all workers for one database, by the names in ``COUNTERS``."""
    sums = dict.fromkeys(COUNTERS, 0)
    for worker in range(workers):
        try:
            content = _path(data_dir, worker).read_bytes()
        except FileNotFoundError:
            continue
        databases = json.loads(content[:_HEADER_BYTES])["databases"]
        if database not in databases:
            continue
        rows = np.frombuffer(content, dtype=np.int64, offset=_HEADER_BYTES)
        start = databases.index(database) * len(COUNTERS)
        for column, counter in enumerate(COUNTERS):
            sums[counter] += int(rows[start + column])
    return sums
