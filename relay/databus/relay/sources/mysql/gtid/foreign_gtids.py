"""The last read GTIDs of MariaDB domains that are not followed, whose groups have no scn.

Within one server's binlog the numbers of a domain and a writing server grow.  So one number for
each such pair shows which groups were examined already, and which ones could not be read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

Pair = tuple[int, int]
"""Domain and server_id."""

_COUNT_BITS = 28
_ENTRY = struct.Struct("<IIQ")


def read_gtid_list(body: memoryview) -> dict[Pair, int]:
    """A GTID_LIST event: the last number of each domain and server before its file.

    Raises:
        struct.error: the event ends too early.
    """
    (count,) = struct.unpack_from("<I", body)
    count &= (1 << _COUNT_BITS) - 1
    found = (_ENTRY.unpack_from(body, 4 + _ENTRY.size * index) for index in range(count))
    return {(domain, server): number for domain, server, number in found}


def _parsed(state: str) -> Iterator[tuple[Pair, int]]:
    for gtid in filter(None, state.replace("\n", "").split(",")):
        domain, server, number = map(int, gtid.split("-"))
        yield (domain, server), number


class ForeignGtids:
    """The last number that was read of each domain and server.

    Owner: the decoder.
    """

    def __init__(self, state: str = "") -> None:
        """``state`` is in the server's form, ``7-1-812,9-3-7``."""
        self._last: dict[Pair, int] = {}
        self.latest: Pair = (-1, -1)
        for pair, number in _parsed(state):
            self.note(pair, number)

    def last(self, pair: Pair) -> int:
        """The last number; 0 if there is none."""
        return self._last.get(pair, 0)

    def note(self, pair: Pair, number: int) -> None:
        """Record that a group was read."""
        if number > self.last(pair):
            self._last[pair] = number

    def lacks(self, state: str, followed: int) -> bool:
        """Whether a state has unread groups of a pair that has read ones."""
        return any(
            0 < self.last(pair) < number for pair, number in _parsed(state) if pair[0] != followed
        )

    def unread(self, listed: Mapping[Pair, int], *, is_newest: bool) -> list[str]:
        """The unread ranges before a file, of pairs that have read groups.

        They count as read from here on.  ``is_newest``: no group that was read is after the
        beginning of this file.  A pair that it does not list then restarts at 1.
        """
        if is_newest:
            self._last = {pair: last for pair, last in self._last.items() if pair in listed}
        missed = []
        for pair, number in listed.items():
            if 0 < self.last(pair) < number:
                domain, server = pair
                missed.append(f"{domain}-{server}-{self.last(pair) + 1} to {number}")
                self._last[pair] = number
        return missed

    def encode(self) -> str:
        """The state in the form that ``__init__`` reads."""
        return ",".join(
            f"{domain}-{server}-{last}" for (domain, server), last in sorted(self._last.items())
        )
