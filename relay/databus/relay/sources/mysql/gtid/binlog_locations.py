"""Which transactions lie before a place in MariaDB's binlog: what the stream has shown of it.

The server names a snapshot by a place, and can turn that into a GTID only by reading the file
from its beginning: a second for a file of a gigabyte, for every chunk.  The stream passes the
same places, and knows how far the transactions had come at each.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

MOST_PLACES = 4096


@dataclass(frozen=True, slots=True, order=True)
class BinlogLocation:
    """A place in the binlog; the files' numbers grow."""

    file_number: int
    offset: int

    @staticmethod
    def of(file: str, offset: int) -> BinlogLocation:
        """The place in a file by its name, ``binlog.000012``.

        Raises:
            ValueError: the name has no number.
        """
        return BinlogLocation(int(file.rpartition(".")[2]), offset)


@dataclass(frozen=True, slots=True)
class LocatedSnapshot:
    """A snapshot of which the server has told the place alone; ``BinlogLocations`` or the server
    has the rest."""

    file: str
    offset: int
    high: int = 0

    def sees(self, scn: int, txid: str) -> bool:
        """Nothing is known yet."""
        return False


@dataclass(frozen=True, slots=True)
class EnclosedSnapshot:
    """A snapshot after every commit up to ``low`` and before all those after ``high``.

    Of the commits between the two it may show some; they count as not shown, for the stream
    carries what they did.
    """

    low: int
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        """Whether a commit certainly shows in the snapshot."""
        return scn <= self.low


class BinlogLocations:
    """The places that a stream has come by, and the last scn before each.

    Invariants:
        I1. Places and scns grow; of the oldest, what is above ``MOST_PLACES`` is forgotten.

    Owner: the source's event loop.
    """

    def __init__(self, most: int = MOST_PLACES) -> None:
        self._most = most
        self._places: list[BinlogLocation] = []
        self._scns: list[int] = []
        self._came_on = asyncio.Event()

    def passed(self, file: str, offset: int, scn: int) -> None:
        """The stream stands here, and every transaction up to ``scn`` lies before."""
        place = BinlogLocation.of(file, offset)
        if self._places and self._places[-1] >= place:
            return
        self._places.append(place)
        self._scns.append(scn)
        if len(self._places) >= 2 * self._most:
            del self._places[: -self._most], self._scns[: -self._most]
        self._came_on.set()

    def around(self, place: BinlogLocation) -> EnclosedSnapshot | None:
        """The snapshot at a place; None while the stream is before it, or long past it."""
        before = bisect_right(self._places, place) - 1
        after = bisect_left(self._places, place)
        if before < 0 or after == len(self._places):
            return None
        return EnclosedSnapshot(self._scns[before], self._scns[after])

    async def wait_around(self, place: BinlogLocation, most_s: float) -> EnclosedSnapshot | None:
        """The same, but the stream may come there within ``most_s``."""
        if self._places and self._places[0] > place:
            return None
        try:
            async with asyncio.timeout(most_s):
                while (found := self.around(place)) is None:
                    self._came_on.clear()
                    await self._came_on.wait()
        except TimeoutError:
            return None
        return found
