"""MySQL's sets of GTIDs, and their numbers as scns: pure functions.

A MySQL GTID is the UUID of the server that first wrote the transaction, and a number that this
server increments.  An scn has the generation, which is the UUID's index among the configured
ones, in the upper 16 bits and the number in the lower 48.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Mapping, Sequence

from databus.common.errors import FormatError

NUMBER_BITS = 48
_NUMBER = (1 << NUMBER_BITS) - 1
_UUID = re.compile("([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")

Intervals = tuple[tuple[int, int], ...]
"""Numbers in ascending intervals, both ends included."""

GtidSet = dict[str, Intervals]
"""Intervals by UUID; a tagged GTID's are under ``uuid:tag``."""


def scn_of(generation: int, number: int) -> int:
    """The scn of a GTID number of a generation."""
    if not 0 <= number <= _NUMBER:
        raise FormatError(f"GTID number {number} does not fit in {NUMBER_BITS} bits")
    return generation << NUMBER_BITS | number


def generation_of(scn: int) -> int:
    """The generation that an scn belongs to."""
    return scn >> NUMBER_BITS


def number_of(scn: int) -> int:
    """The GTID number of an scn."""
    return scn & _NUMBER


def parse_gtid_set(text: str) -> GtidSet:
    """A set as MySQL writes it, such as ``<uuid>:1-5:7,<uuid>:1-9:tag:1-3``."""
    found: dict[str, list[tuple[int, int]]] = {}
    for part in filter(None, text.replace("\n", "").split(",")):
        name, *pieces = part.strip().split(":")
        owner = name.lower()
        for piece in pieces:
            first, _, last = piece.partition("-")
            if first.isdigit():
                found.setdefault(owner, []).append((int(first), int(last or first)))
            else:
                owner = f"{name.lower()}:{piece.lower()}"
    return {owner: tuple(sorted(intervals)) for owner, intervals in found.items()}


def parse_owned(text: str) -> GtidSet:
    """The numbers of ``@@gtid_owned``: ``<uuid>:24#13:23#12<uuid>:tag:7#14``.

    There is no separator between one UUID's numbers and the next UUID.  Tagged ones are left out.
    """
    owned: GtidSet = {}
    _, *found = _UUID.split(text.lower())
    for name, pieces in zip(found[::2], found[1::2], strict=True):
        for piece in pieces.strip(":,\n ").split(":"):
            number = piece.partition("#")[0]
            if not number.isdigit():
                break  # A tag: the numbers after it are tagged.
            owned[name] = union(owned.get(name, ()), ((int(number), int(number)),))
    return owned


def holds(intervals: Intervals, number: int) -> bool:
    """Whether a number is in one of the intervals."""
    return any(first <= number <= last for first, last in intervals)


def clipped(intervals: Intervals, last: int) -> Intervals:
    """The numbers up to ``last``."""
    return tuple((low, min(high, last)) for low, high in intervals if low <= last)


def union(one: Intervals, other: Intervals) -> Intervals:
    """The numbers of both, in the fewest intervals."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted((*one, *other)):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return tuple(joined)


def common(one: Intervals, other: Intervals) -> Intervals:
    """The numbers that are in both."""
    return tuple(
        (max(low, first), min(high, last))
        for low, high in one
        for first, last in other
        if max(low, first) <= min(high, last)
    )


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """The numbers that are in none of ``others``."""
    left = list(intervals)
    for first, last in others:
        parts = [((low, min(high, first - 1)), (max(low, last + 1), high)) for low, high in left]
        left = [part for pair in parts for part in pair if part[0] <= part[1]]
    return tuple(left)


def largest(intervals: Intervals) -> int:
    """The largest number, 0 if there is none."""
    return max((last for _, last in intervals), default=0)


def head_of(executed: Mapping[str, Intervals], uuids: Sequence[str]) -> int:
    """The scn of the newest GTID of the last generation that has any; 0 if none has."""
    for generation in reversed(range(len(uuids))):
        number = largest(executed.get(uuids[generation], ()))
        if number:
            return scn_of(generation, number)
    return 0


def tagged_in(gtids: GtidSet, uuids: Sequence[str]) -> GtidSet:
    """The tagged GTIDs of these servers."""
    return {name: gtids[name] for name in gtids if ":" in name and name.partition(":")[0] in uuids}


def foreign_in(gtids: GtidSet, uuids: Sequence[str]) -> GtidSet:
    """Those of other servers than these."""
    return {name: gtids[name] for name in gtids if name.partition(":")[0] not in uuids}


def seen_at(
    executed: GtidSet,
    purged: GtidSet,
    uuids: Sequence[str],
    scn: int,
    ends: Sequence[int] = (),
) -> GtidSet:
    """The executed GTIDs that the server need not send to a reader at ``scn``.

    These are, of earlier generations, the numbers up to their ``ends``, or all if those are not
    known; of the scn's generation, those up to its number; of later ones, none; of servers that
    are not configured, all.  Of tagged GTIDs of configured servers, only the purged ones: the
    caller adds those that have been read.
    """
    seen = dict(executed)
    for name in tagged_in(executed, uuids):
        seen[name] = purged.get(name, ())
    known = (*ends[: generation_of(scn)], *(None for _ in uuids))
    for generation, name in enumerate(uuids):
        if generation == generation_of(scn):
            seen[name] = clipped(executed.get(name, ()), number_of(scn))
        elif generation > generation_of(scn):
            seen[name] = ()
        elif (end := known[generation]) is not None:
            seen[name] = clipped(executed.get(name, ()), end)
    return {name: intervals for name, intervals in seen.items() if intervals}


def as_text(gtids: GtidSet) -> str:
    """A set in the form that ``parse_gtid_set`` reads."""
    return ",".join(
        f"{name}:" + ":".join(f"{first}-{last}" for first, last in intervals)
        for name, intervals in sorted(gtids.items())
        if intervals
    )


_TAGGED = 1


def encode_gtid_set(gtids: GtidSet) -> bytes:
    """A set in the form of COM_BINLOG_DUMP_GTID: the old one, unless it holds tagged GTIDs."""
    tagged = any(":" in name for name in gtids)
    count = _TAGGED << 56 | len(gtids) << 8 | _TAGGED if tagged else len(gtids)
    encoded = [struct.pack("<Q", count)]
    for name, intervals in sorted(gtids.items()):
        owner, _, tag = name.partition(":")
        encoded.append(uuid.UUID(owner).bytes)
        if tagged:
            encoded.append(bytes([len(tag) << 1]) + tag.encode())
        encoded.append(struct.pack("<Q", len(intervals)))
        encoded += [struct.pack("<QQ", first, last + 1) for first, last in intervals]
    return b"".join(encoded)
