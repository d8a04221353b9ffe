"""Which member of a group gets which partition.

Pure.  A member that leaves keeps a place for a while: its partitions are lent to the others, and
return when it is there again, or another member in its place.  So in a rolling restart each
partition moves twice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from databus.common.errors import StoreError

UNOWNED = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The members by partition.

    Invariants:
        I1. The numbers of partitions of two members that are there differ by at most one.
        I2. ``assign`` changes nothing when it is called again with the same members.
    """

    owners: tuple[str, ...]
    """The member that each partition is assigned to, or ``UNOWNED``."""
    homes: tuple[str, ...]
    """The member in whose place each partition is: the owner, or a departed one that lent it."""

    @classmethod
    def of(cls, count: int) -> Assignment:
        """``count`` partitions without an owner."""
        return cls((UNOWNED,) * count, (UNOWNED,) * count)

    def numbers_of(self, member: str) -> frozenset[int]:
        """The partitions that are assigned to a member."""
        return frozenset(n for n, owner in enumerate(self.owners) if owner == member)

    def encode(self) -> str:
        """The assignment as one line of JSON, each name once."""
        names = sorted({*self.owners, *self.homes})
        index = {name: number for number, name in enumerate(names)}
        document = {
            "members": names,
            "owners": [index[name] for name in self.owners],
            "homes": [index[name] for name in self.homes],
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Assignment:
        """The assignment that ``encode`` wrote.

        Raises:
            StoreError: the text is not such a line.
        """
        try:
            document = json.loads(text)
            names = document["members"]
            owners, homes = (
                tuple(str(names[number]) for number in document[key]) for key in ("owners", "homes")
            )
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"the assignment {text[:80]!r} of a group is damaged") from error
        return cls(owners, homes)


def assign(
    before: Assignment, members: Collection[str], departed: Sequence[str] = ()
) -> Assignment:
    """The assignment to ``members``, with as few moves as the balance permits.

    ``departed`` are the members whose places are still held, the latest first.  A member without
    a place takes the first of them.
    """
    live = sorted(set(members))
    owners = [owner if owner in live else UNOWNED for owner in before.owners]
    homes = _places(before, owners, live, departed)
    if not live:
        return Assignment(tuple(owners), tuple(homes))
    wanted = [home if home in live else owner for home, owner in zip(homes, owners, strict=True)]
    result = _balanced(wanted, owners, homes, live)
    held = [
        home if home != UNOWNED and home not in live else owner
        for home, owner in zip(homes, result, strict=True)
    ]
    return Assignment(tuple(result), tuple(held))


def _places(
    before: Assignment, owners: list[str], live: list[str], departed: Sequence[str]
) -> list[str]:
    """The homes, after members without a place have taken those of departed ones."""
    known = {*live, *departed}
    homes = [
        home if home in known else owner for home, owner in zip(before.homes, owners, strict=True)
    ]
    vacant = [name for name in departed if name in homes and name not in live]
    for name in [one for one in live if one not in homes][: len(vacant)]:
        left = vacant.pop(0)
        homes = [name if home == left else home for home in homes]
    return homes


def _balanced(wanted: list[str], owners: list[str], homes: list[str], live: list[str]) -> list[str]:
    """``wanted``, but no member has more than its share, and every partition has an owner."""
    numbers: dict[str, list[int]] = {name: [] for name in live}
    pool: list[int] = []
    for number, name in enumerate(wanted):
        (numbers[name] if name != UNOWNED else pool).append(number)
    share, extra = divmod(len(wanted), len(live))
    largest = sorted(live, key=lambda name: (-len(numbers[name]), name))
    room = {}
    for rank, name in enumerate(largest):
        limit = share + (rank < extra)
        # A partition that is lent, or that has not come yet, is given up first.
        ranked = sorted((homes[n] != name, owners[n] != name, n) for n in numbers[name])
        pool += [number for _, _, number in ranked[limit:]]
        room[name] = limit - min(limit, len(numbers[name]))
    result = list(wanted)
    for number in sorted(pool):
        owner = owners[number]
        if not room.get(owner):
            owner = min(live, key=lambda name: (-room[name], name))
        result[number] = owner
        room[owner] -= 1
    return result
