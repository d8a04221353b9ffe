"""Which relay leads and follows: sticky, balanced, one move at a time."""

from __future__ import annotations

import random

from databus.common.checkpoint import Position
from databus.relay.cluster.duties import Duty, RelayThere, RingCopy, assign, decode, encode

DATABASES = ("books", "gen", "shop")


def relays(*names: str, scn: int = 5, is_current: bool = True) -> list[RelayThere]:
    copy = RingCopy(Position(scn), is_current)
    return [RelayThere(name, dict.fromkeys(DATABASES, copy)) for name in names]


def settled(before: dict[str, Duty], members: list[RelayThere], followers: int) -> dict[str, Duty]:
    """The assignment after as many rounds as it takes."""
    for _ in range(50):
        after = assign(before, members, followers)
        if after == before:
            return after
        before = after
    raise AssertionError("it never settles")


def led(duties: dict[str, Duty]) -> dict[str, int]:
    leaders = [duty.leader for duty in duties.values()]
    return {name: leaders.count(name) for name in sorted(set(leaders))}


def test_each_database_has_one_leader_and_as_many_followers_as_there_can_be() -> None:
    for count in range(1, 5):
        members = relays(*"abcd"[:count])
        duties = settled({}, members, 2)
        for duty in duties.values():
            assert len(set(duty.relays)) == min(3, count)
        assert max(led(duties).values()) - min(led(duties).values()) <= 1


def test_nothing_moves_while_nothing_changes_and_a_relay_that_comes_back_gets_its_share() -> None:
    duties = settled({}, relays("a", "b", "c"), 1)
    assert assign(duties, relays("a", "b", "c"), 1) == duties
    without = settled(duties, relays("a", "b"), 1)
    for name, duty in duties.items():
        if duty.leader != "c":
            assert without[name].leader == duty.leader
    again = settled(without, relays("a", "b", "c"), 1)
    assert led(again) == {"a": 1, "b": 1, "c": 1}
    moved = [name for name in DATABASES if again[name].leader != without[name].leader]
    assert len(moved) == 1


def test_the_follower_with_the_most_in_its_ring_leads_next() -> None:
    before = {"shop": Duty("a", ("b", "c"))}
    members = [
        RelayThere("b", {"shop": RingCopy(Position(7))}),
        RelayThere("c", {"shop": RingCopy(Position(9, 1))}),
    ]
    assert assign(before, members, 2)["shop"] == Duty("c", ("b",))
    refused = [
        RelayThere("b", {"shop": RingCopy(Position(7), is_refused=True)}),
        RelayThere("c", {"shop": RingCopy(Position(9))}),
    ]
    assert assign({"shop": Duty("b", ("c",))}, refused, 2)["shop"] == Duty("c", ("b",))


def test_a_leader_moves_only_to_a_relay_that_follows_closely() -> None:
    before = dict.fromkeys(DATABASES, Duty("a"))
    late = [*relays("a"), *relays("b", scn=0, is_current=False)]
    waiting = settled(before, late, 0)
    assert led(waiting) == {"a": 3}
    assert [duty.followers for duty in waiting.values()].count(("b",)) == 1
    assert led(settled(waiting, relays("a", "b"), 0)) == {"a": 2, "b": 1}


def test_any_sequence_of_comings_and_goings_settles() -> None:
    rng = random.Random(7)
    duties: dict[str, Duty] = {}
    for _ in range(300):
        names = rng.sample("abcde", rng.randint(1, 5))
        followers = rng.randint(0, 3)
        duties = settled(duties, relays(*names), followers)
        for duty in duties.values():
            assert set(duty.relays) <= set(names)
            assert len(duty.followers) == min(followers, len(names) - 1)
        assert max(led(duties).values()) - min(led(duties).values()) <= 1 or len(led(duties)) == 1


def test_it_survives_its_encoding() -> None:
    duties = settled({}, relays("a", "b"), 1)
    assert decode(encode(duties)) == duties
    assert decode(b"") == {}
