"""Counts by client; the relay holds no other state of its readers.

A reader may give a name, in the header ``Databus-Client`` or the parameter ``client``.  The
name does not change its answer: its bytes and its progress are counted under the
name.  A worker's counts are lost when it ends; only graphs depend on them.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from databus.common.errors import BadRequest
from databus.relay.serving.counters.counter_file import CounterFile, counter_path, read_rows

UNNAMED = "unnamed"
OTHERS = "others"
MAX_CLIENTS = 100
"""The most names that each worker counts for a database."""
IDLE_S = 3600.0
"""How long a name has its row after its last answer, if other names need one."""
COUNTED = ("requests", "too_old", "overtaken", "bytes", "events", "readers")
_COLUMNS = (*COUNTED, "scn", "commit_us", "seen_us")
_KIND = "clients"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@/-]{0,63}")
_READERS = _COLUMNS.index("readers")
_BYTES, _EVENTS, _SCN, _COMMIT, _SEEN = map(
    _COLUMNS.index, ("bytes", "events", "scn", "commit_us", "seen_us")
)


def parse_client(name: str | None) -> str:
    """The name under which a reader is counted.

    Raises:
        BadRequest: it is no valid name.
    """
    if not name:
        return UNNAMED
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"client={name[:80]!r} is no name: write up to 64 letters, digits and _.:@/-, the "
            "first a letter or digit",
            parameter="client",
        )
    return name


class ClientCounter:
    """The row of one client of one database.

    Owner: the table that made it.
    """

    __slots__ = ("_table", "offset")

    def __init__(self, table: ClientCounters, offset: int) -> None:
        self._table = table
        self.offset = offset

    def add(self, counter: str, count: int = 1) -> None:
        """Count; ``count`` is negative when a reader leaves."""
        self._table.numbers[self.offset + _COLUMNS.index(counter)] += count

    def sent(self, size_bytes: int, events: int, scn: int, commit_us: int) -> None:
        """Count what was sent, and how far it reaches."""
        numbers, offset = self._table.numbers, self.offset
        numbers[offset + _BYTES] += size_bytes
        numbers[offset + _EVENTS] += events
        if commit_us:
            numbers[offset + _SCN] = scn - (1 << 64) if scn >> 63 else scn
            numbers[offset + _COMMIT] = commit_us


class ClientCounters:
    """One worker's counts by client.

    Invariants:
        I1. For each database at most ``MAX_CLIENTS`` names have rows, and ``OTHERS``, where
            all other names are counted.
        I2. A row is given to another name only when it has had no reader for ``IDLE_S``; its
            counts go to ``OTHERS``, so that the sum over a database never falls.

    Owner: one worker process; all others read.
    Durability: none; a worker begins at zero.
    """

    def __init__(
        self, data_dir: Path, worker: int, *, now_s: Callable[[], float] = time.time
    ) -> None:
        self._file = CounterFile(counter_path(data_dir, worker, _KIND), len(_COLUMNS))
        self._rows: dict[tuple[str, str], ClientCounter] = {}
        self._now_s = now_s
        self._file.replace([], [])

    @property
    def numbers(self) -> memoryview[int]:
        """All rows, one after the other."""
        return self._file.numbers

    @contextlib.contextmanager
    def answering(self, database: str, client: str) -> Iterator[ClientCounter]:
        """Around an answer to a client: counts it as a request and, meanwhile, as a reader."""
        row = self._row(database, client)
        row.add("requests")
        row.add("readers")
        try:
            yield row
        finally:
            row.add("readers", -1)
            self.numbers[row.offset + _SEEN] = int(self._now_s() * 1e6)

    def _row(self, database: str, client: str) -> ClientCounter:
        row = self._rows.get((database, client))
        if row is None and client != OTHERS:
            named = [key for key in self._rows if key[0] == database and key[1] != OTHERS]
            if len(named) < MAX_CLIENTS or self._give_up_idle(database, named):
                return self._add(database, client)
            row = self._row(database, OTHERS)
        return row or self._add(database, client)

    def _add(self, database: str, client: str) -> ClientCounter:
        row = self._rows[database, client] = ClientCounter(self, len(self.numbers))
        self._write([*self.numbers, *(0 for _ in _COLUMNS)])
        return row

    def _give_up_idle(self, database: str, named: list[tuple[str, str]]) -> bool:
        """Free the row that has been idle for longest, if any has been for long enough."""
        numbers = self.numbers
        idle = [key for key in named if not numbers[self._rows[key].offset + _READERS]]
        if not idle:
            return False
        oldest = min(idle, key=lambda key: numbers[self._rows[key].offset + _SEEN])
        seen_s = numbers[self._rows[oldest].offset + _SEEN] / 1e6
        if self._now_s() - seen_s < IDLE_S:
            return False
        others = self._row(database, OTHERS)
        gone = self._rows.pop(oldest).offset
        for column in range(len(COUNTED)):
            self.numbers[others.offset + column] += self.numbers[gone + column]
        left = list(self.numbers)
        del left[gone : gone + len(_COLUMNS)]
        for row in self._rows.values():
            row.offset -= len(_COLUMNS) if row.offset > gone else 0
        self._write(left)
        return True

    def _write(self, numbers: list[int]) -> None:
        by_offset = sorted(self._rows, key=lambda key: self._rows[key].offset)
        self._file.replace([json.dumps(key) for key in by_offset], numbers)

    def close(self) -> None:
        """Unmap the file; its readers are gone, its other counts stay to be read."""
        for row in self._rows.values():
            self.numbers[row.offset + _READERS] = 0
        self._file.close()


@dataclass(slots=True)
class ClientCounts:
    """What all workers have counted for one client: ``counts`` by the names in ``COUNTED``.

    ``scn`` and ``commit_us`` are the position that was sent last, and its commit time; zero
    if nothing was sent.
    """

    counts: dict[str, int]
    scn: int = 0
    commit_us: int = 0
    seen_us: int = 0

    def add(self, numbers: list[int]) -> None:
        """Add one worker's row; the row with the later position gives the position."""
        for counter, number in zip(COUNTED, numbers, strict=False):
            self.counts[counter] += number
        if numbers[_COMMIT] >= self.commit_us:
            self.scn, self.commit_us = numbers[_SCN] & (1 << 64) - 1, numbers[_COMMIT]
        self.seen_us = max(self.seen_us, numbers[_SEEN])

    def lag_us(self, newest_us: int) -> int | None:
        """How far the last sent commit time is behind the ring's newest."""
        return max(0, newest_us - self.commit_us) if self.commit_us else None

    def to_json(self, newest_us: int) -> dict[str, Any]:
        """The counts as in /v1/status."""
        return {
            **self.counts,
            "scn": self.scn if self.commit_us else None,
            "lag_us": self.lag_us(newest_us),
            "last_end_us": self.seen_us or None,
        }


def read_clients(data_dir: Path, workers: int, database: str) -> dict[str, ClientCounts]:
    """The sums over all workers for the clients of one database, by name, in its order."""
    found: dict[str, ClientCounts] = {}
    for worker in range(workers):
        for key, numbers in read_rows(counter_path(data_dir, worker, _KIND), len(_COLUMNS)):
            of, client = json.loads(key)
            if of == database:
                counts = found.setdefault(client, ClientCounts(dict.fromkeys(COUNTED, 0)))
                counts.add(numbers)
    return dict(sorted(found.items()))
