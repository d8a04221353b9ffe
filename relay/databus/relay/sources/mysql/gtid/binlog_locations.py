"""The last scn before a location in MariaDB's binlog, as the stream has passed it.

The server identifies a snapshot by a binlog location.  To turn that into a GTID it reads the file
from its beginning: a second for a file of a gigabyte, for every chunk.  The stream passes the
same locations and records the last scn at each.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

MOST_LOCATIONS = 4096


@dataclass(frozen=True, slots=True, order=True)
class BinlogLocation:
    """A location in the binlog: a file number and an offset; file numbers grow."""

    file_number: int
    offset: int

    @staticmethod
    def of(file: str, offset: int) -> BinlogLocation:
        """The location in the file of this name, ``binlog.000012``.

        Raises:
            ValueError: the name has no number.
        """
        return BinlogLocation(int(file.rpartition(".")[2]), offset)


@dataclass(frozen=True, slots=True)
class LocatedSnapshot:
    """A snapshot whose location is known but not its scn; ``BinlogLocations`` or the server gives
    the scn."""

    file: str
    offset: int
    high: int = 0

    def sees(self, scn: int, txid: str) -> bool:
        """Nothing is known yet."""
        return False


@dataclass(frozen=True, slots=True)
class EnclosedSnapshot:
    """A snapshot after every commit up to ``low`` and before all those after ``high``.

    Some of the commits between the two may be visible; they count as not visible, because the
    stream has their changes.
    """

    low: int
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        """Whether a commit is certainly visible in the snapshot."""
        return scn <= self.low


class BinlogLocations:
    """The locations that a stream has passed, and the last scn before each.

    Invariants:
        I1. Locations and scns grow; at most the newest ``MOST_LOCATIONS`` are stored.

    Owner: the source's event loop.
    """

    def __init__(self, most: int = MOST_LOCATIONS) -> None:
        self._most = most
        self._locations: list[BinlogLocation] = []
        self._scns: list[int] = []
        self._came_on = asyncio.Event()

    def passed(self, file: str, offset: int, scn: int) -> None:
        """The stream is here, and every transaction up to ``scn`` is before it."""
        location = BinlogLocation.of(file, offset)
        if self._locations and self._locations[-1] >= location:
            return
        self._locations.append(location)
        self._scns.append(scn)
        if len(self._locations) >= 2 * self._most:
            del self._locations[: -self._most], self._scns[: -self._most]
        self._came_on.set()

    def around(self, location: BinlogLocation) -> EnclosedSnapshot | None:
        """The snapshot at a location; None while the stream is before it, or long past it."""
        before = bisect_right(self._locations, location) - 1
        after = bisect_left(self._locations, location)
        if before < 0 or after == len(self._locations):
            return None
        return EnclosedSnapshot(self._scns[before], self._scns[after])

    async def wait_around(self, location: BinlogLocation, most_s: float) -> EnclosedSnapshot | None:
        """The same, but wait up to ``most_s`` until the stream gets there."""
        if self._locations and self._locations[0] > location:
            return None
        try:
            async with asyncio.timeout(most_s):
                while (found := self.around(location)) is None:
                    self._came_on.clear()
                    await self._came_on.wait()
        except TimeoutError:
            return None
        return found
