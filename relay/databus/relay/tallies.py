"""Counts of what the HTTP workers do, in files that every worker can read.

A request for the metrics reaches any one of the workers; it answers for all of them.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
        path = _path(data_dir, worker)
        header = json.dumps({"databases": list(databases)}).encode()
        if len(header) > _HEADER_BYTES:
            raise StoreError(f"{len(databases)} databases have names too long for {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_bytes(
            header.ljust(_HEADER_BYTES) + bytes(8 * len(COUNTERS) * max(1, len(databases)))
        )
        with beside.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        beside.replace(path)
        self._rows = np.frombuffer(self._map, dtype=np.int64, offset=_HEADER_BYTES)
        self._place = {
            (database, counter): row * len(COUNTERS) + column
            for row, database in enumerate(databases)
            for column, counter in enumerate(COUNTERS)
        }

    def add(self, database: str, counter: str, count: int = 1) -> None:
        """Count; ``count`` is negative when a reader leaves."""
        self._rows[self._place[database, counter]] += count

    def close(self) -> None:
        """Unmap the file; its readers are gone, its other counts stay to be read."""
        for (_, counter), place in self._place.items():
            if counter == "readers":
                self._rows[place] = 0
        self._rows = np.empty(0, dtype=np.int64)
        self._map.close()


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
