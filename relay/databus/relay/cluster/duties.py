"""Which relay leads a database, and which relays follow it.  Pure.

Every relay of the cluster computes the same from the same facts, so it does not matter which one
stores the result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import FormatError


class Duty(NamedTuple):
    """The relays of one database, by name; no leader: none is there."""

    leader: str = ""
    followers: tuple[str, ...] = ()

    @property
    def relays(self) -> tuple[str, ...]:
        """All of them."""
        return (self.leader, *self.followers) if self.leader else self.followers


Assignment = Mapping[str, Duty]


@dataclass(frozen=True, slots=True)
class RingCopy:
    """A relay's ring of a database.

    ``is_current``: it follows closely enough to take over at once.  ``is_refused``: as a leader,
    this relay found that the source has no longer what follows its position.
    """

    position: Position = ORIGIN
    is_current: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class RelayThere:
    """A relay that is there, with its rings of the databases that it is configured for."""

    name: str
    copies: Mapping[str, RingCopy] = field(default_factory=dict)


def assign(before: Assignment, members: Sequence[RelayThere], followers: int) -> dict[str, Duty]:
    """The assignment for the relays that are there.

    1. A leader that is there stays, and so does a follower.
    2. If the leader is gone, the relay with the most in its ring leads: a follower if one is there.
    3. Databases without enough followers get the relays that have the least to do.
    4. If a relay leads two databases more than another, that one takes over one that it follows,
       once it is current; it becomes a follower first.  One move at a time.
    """
    there = {member.name: member for member in members}
    names = sorted({database for member in members for database in member.copies})
    duties = {}
    for database in names:
        able = [member for member in members if database in member.copies]
        duties[database] = _kept(database, before.get(database, Duty()), able)
    for database in names:
        if not duties[database].leader:
            duties[database] = _led(database, duties, there)
    for database in names:
        duties[database] = _followed(database, duties, there, followers)
    _balance(duties, there, followers)
    return duties


def _kept(database: str, duty: Duty, able: Sequence[RelayThere]) -> Duty:
    copies = {member.name: member.copies[database] for member in able}
    followers = tuple(name for name in duty.followers if name in copies)
    leader = duty.leader if duty.leader in copies else ""
    if leader and copies[leader].is_refused:
        better = [name for name in copies if copies[name].position > copies[leader].position]
        if any(not copies[name].is_refused for name in better):
            followers, leader = (*followers, leader), ""
    return Duty(leader, followers)


def _loads(duties: Assignment) -> tuple[Counter[str], Counter[str]]:
    """How many databases each relay leads, and how many it has."""
    led = Counter(duty.leader for duty in duties.values() if duty.leader)
    return led, Counter(name for duty in duties.values() for name in duty.relays)


def _led(database: str, duties: Assignment, there: Mapping[str, RelayThere]) -> Duty:
    duty, (led, _) = duties[database], _loads(duties)

    def rank(name: str) -> tuple[bool, Position, bool, int, str]:
        copy = there[name].copies[database]
        return (copy.is_refused, _reversed(copy.position), name not in duty.followers, led[name],
                name)  # fmt: skip

    leader = min((name for name in there if database in there[name].copies), key=rank)
    return Duty(leader, tuple(name for name in duty.followers if name != leader))


def _reversed(position: Position) -> Position:
    return Position(-position.scn, -position.seq)


def _followed(
    database: str, duties: Assignment, there: Mapping[str, RelayThere], followers: int
) -> Duty:
    duty, (_, all_) = duties[database], _loads(duties)
    free = sorted(
        (name for name in there if database in there[name].copies and name not in duty.relays),
        key=lambda name: (all_[name], name),
    )
    missing = max(0, followers - len(duty.followers))
    return Duty(duty.leader, (*duty.followers, *free[:missing]))


def _balance(duties: dict[str, Duty], there: Mapping[str, RelayThere], followers: int) -> None:
    """Rule 4: end the move that has begun, or begin one."""
    led, _ = _loads(duties)

    def leads_more(duty: Duty, name: str) -> bool:
        return led[duty.leader] - led[name] >= 2

    for database, duty in duties.items():
        for name in sorted(duty.followers, key=lambda name: led[name]):
            if leads_more(duty, name) and there[name].copies[database].is_current:
                others = [other for other in duty.followers if other != name]
                duties[database] = Duty(name, (duty.leader, *others)[:followers])
                return
    for database, duty in duties.items():
        is_moving = any(leads_more(duty, name) for name in duty.followers)
        if not is_moving:
            duties[database] = Duty(duty.leader, duty.followers[:followers])
        elif len(duty.followers) > followers:
            return
    for name in sorted(there, key=lambda name: (led[name], name)):
        for database, duty in duties.items():
            follows = any(
                name in one.followers for one in duties.values() if one.leader == duty.leader
            )
            if leads_more(duty, name) and database in there[name].copies and not follows:
                duties[database] = Duty(duty.leader, (*duty.followers, name))
                return


def encode(assignment: Assignment) -> bytes:
    """As it is stored."""
    document = {
        name: {"leader": duty.leader, "followers": list(duty.followers)}
        for name, duty in sorted(assignment.items())
    }
    return json.dumps({"v": 1, "databases": document}).encode()


def decode(content: bytes) -> dict[str, Duty]:
    """What ``encode`` gave; nothing if nothing was stored.

    Raises:
        FormatError: it is something else.
    """
    try:
        databases = json.loads(content)["databases"] if content else {}
        return {
            str(name): Duty(str(duty["leader"]), tuple(map(str, duty["followers"])))
            for name, duty in databases.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"the assignment of the cluster is damaged: {error!r}") from error
