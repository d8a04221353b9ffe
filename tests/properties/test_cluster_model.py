"""Every order of events in a small cluster: election, pauses, takeovers, copies and readers.

The world has two relays and one reader.  A leader's append is two steps, for a process may be
paused between the look at its lease and the store.  ``LeaderTerm`` is the production code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from databus.common.checkpoint import ORIGIN, Position
from databus.relay.capture.leader_term import LeaderTerm

COMMITS = 2
TERMS = 3


class Window(NamedTuple):
    """A window in a ring: a commit's (epoch 0), or one of a leader's own."""

    at: Position
    epoch: int


class ModelRelay(NamedTuple):
    """``pending`` has passed the look at the lease, and is not stored yet."""

    ring: tuple[Window, ...] = ()
    term: LeaderTerm | None = None
    lease_holds: bool = False
    pending: Window | None = None
    has_own: bool = False

    @property
    def last(self) -> Position:
        return self.ring[-1].at if self.ring else ORIGIN


class World(NamedTuple):
    """``holder`` is the relay that has the leader's node, ``acked`` what the source discarded."""

    committed: int = 0
    epoch: int = 0
    holder: int = -1
    acked: int = 0
    relays: tuple[ModelRelay, ModelRelay] = (ModelRelay(), ModelRelay())
    position: Position = ORIGIN
    read: frozenset[Window] = frozenset()

    def with_relay(self, number: int, relay: ModelRelay, **changes: object) -> World:
        relays = tuple(relay if n == number else one for n, one in enumerate(self.relays))
        return self._replace(relays=relays, **changes)


class Rules(NamedTuple):
    """What the system relies on; a test takes each away to see that the model notices."""

    has_barrier: bool = True
    looks_at_lease: bool = True
    lease_ends_first: bool = True
    acks_what_is_followed: bool = True


def steps(world: World, rules: Rules) -> Iterator[World]:
    if world.committed < COMMITS:
        yield world._replace(committed=world.committed + 1)
    for number in (0, 1):
        yield from _lease_steps(world, number, rules)
        yield from _leader_steps(world, number, rules)
        yield from _follower_steps(world, number)
        yield from _reader_steps(world, number)


def _lease_steps(world: World, number: int, rules: Rules) -> Iterator[World]:
    relay = world.relays[number]
    if relay.term is not None and relay.lease_holds:
        yield world.with_relay(number, relay._replace(lease_holds=False))
    if world.holder == number and not (rules.lease_ends_first and relay.lease_holds):
        yield world._replace(holder=-1)
    if relay.term is not None and world.holder != number and relay.pending is None:
        yield world.with_relay(number, relay._replace(term=None, lease_holds=False))
    if world.holder < 0 and world.epoch < TERMS and relay.term is None:
        # The source's position is asked for after the node was made.
        shown_scn = world.committed if rules.has_barrier else -1
        term = LeaderTerm(world.epoch + 1, "", shown_scn)
        if relay.last.scn < world.acked:
            return  # The source has discarded what follows: SourcePositionLost.
        relay = relay._replace(term=term, lease_holds=True, has_own=False)
        yield world.with_relay(number, relay, holder=number, epoch=world.epoch + 1)


def _leader_steps(world: World, number: int, rules: Rules) -> Iterator[World]:
    relay = world.relays[number]
    if relay.term is None:
        return
    if relay.pending is not None:
        stored = relay._replace(ring=(*relay.ring, relay.pending), pending=None)
        yield world.with_relay(number, stored)
        return
    if rules.looks_at_lease and not relay.lease_holds:
        return
    if relay.last.scn < world.committed:
        commit = Window(Position(relay.last.scn + 1), 0)
        yield world.with_relay(number, relay._replace(pending=commit))
    if not relay.has_own and relay.last.scn and relay.term.admits(relay.last):
        after = relay.term.after(relay.last)
        own = Window(Position(after.scn, after.seq + 1), relay.term.epoch)
        yield world.with_relay(number, relay._replace(pending=own, has_own=True))
    other = world.relays[1 - number]
    ackable = other.last.scn if other.last >= relay.last else other.last.scn - 1
    if not rules.acks_what_is_followed:
        ackable = relay.last.scn
    if relay.lease_holds and min(ackable, relay.last.scn) > world.acked:
        yield world._replace(acked=min(ackable, relay.last.scn))


def _follower_steps(world: World, number: int) -> Iterator[World]:
    relay, leader = world.relays[number], world.relays[1 - number]
    if relay.term is None and leader.term is not None and world.holder == 1 - number:
        following = next((one for one in leader.ring if one.at > relay.last), None)
        if following is not None:
            yield world.with_relay(number, relay._replace(ring=(*relay.ring, following)))


def _reader_steps(world: World, number: int) -> Iterator[World]:
    ring = world.relays[number].ring
    following = next((one for one in ring if one.at > world.position), None)
    if following is not None:
        yield world._replace(position=following.at, read=world.read | {following})


def violation(world: World) -> str:
    """What a world has that must not be; "": nothing."""
    for relay in world.relays:
        if any(one.at >= other.at for one, other in zip(relay.ring, relay.ring[1:], strict=False)):
            return "a ring is out of order"
    commits = sorted(one.at.scn for one in world.read if not one.epoch)
    if commits != list(range(1, world.position.scn + 1)):
        return "the reader has missed a commit"
    for relay in world.relays:
        for one in relay.ring:
            # What an earlier term has begun is begun again: only the newest term's windows count.
            is_missed = one.at <= world.position and one not in world.read
            if one.epoch == world.epoch and is_missed:
                return "the reader has missed a window of the leader's own"
    if max(relay.last.scn for relay in world.relays if relay.term is None or world.holder < 0
           ) < world.acked if world.holder < 0 else False:  # fmt: skip
        return "no relay that can lead has what the source discarded"
    if world.holder >= 0 and world.relays[1 - world.holder].last.scn < world.acked:
        return "only the leader has what the source discarded"
    return ""


def explore(rules: Rules) -> tuple[str, int]:
    """The first violation, and the number of worlds that were seen."""
    seen = {World()}
    todo = [World()]
    while todo:
        world = todo.pop()
        found = violation(world)
        if found:
            return found, len(seen)
        for following in steps(world, rules):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return "", len(seen)


def test_no_order_of_events_loses_a_window_or_discards_what_only_a_leader_has() -> None:
    found, count = explore(Rules())
    assert not found
    assert count > 10_000


@pytest.mark.parametrize(
    "rule", ["has_barrier", "looks_at_lease", "lease_ends_first", "acks_what_is_followed"]
)
def test_the_model_notices_a_rule_that_is_missing(rule: str) -> None:
    found, _ = explore(Rules()._replace(**{rule: False}))
    assert found
