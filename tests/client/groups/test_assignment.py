"""Which member gets which partition: balanced, with few moves, the same when it is asked again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.client.groups.assignment import UNOWNED, Assignment, assign
from databus.client.groups.resizing import covering, resized
from databus.common.checkpoint import (
    BootstrapCheckpoint,
    Checkpoint,
    OnlineCheckpoint,
    Position,
)
from databus.common.errors import StoreError, UsageError


def check(found: Assignment, members: list[str], departed: list[str]) -> None:
    """The invariants of an assignment."""
    counts = [found.owners.count(name) for name in members]
    assert sum(counts) == len(found.owners)
    assert max(counts) - min(counts) <= 1
    assert assign(found, members, departed) == found
    assert Assignment.decode(found.encode()) == found


def moves(before: Assignment, after: Assignment) -> Counter[int]:
    """The partitions that another member must begin."""
    pairs = zip(before.owners, after.owners, strict=True)
    return Counter(number for number, (old, new) in enumerate(pairs) if old != new)


@given(
    count=st.integers(1, 60),
    steps=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=25),
)
def test_any_coming_and_going_stays_balanced(count: int, steps: list[tuple[int, bool]]) -> None:
    members, departed = ["m0"], list[str]()
    found = assign(Assignment.of(count), members)
    for number, is_forgotten in steps:
        name = f"m{number}"
        if name not in members:
            members.append(name)
            departed = [one for one in departed if one != name]
        elif len(members) > 1:
            members.remove(name)
            departed = [] if is_forgotten else [name, *departed]
        found = assign(found, members, departed)
        check(found, members, departed)


@given(
    count=st.integers(1, 200),
    order=st.permutations(range(10)),
    keeps_name=st.booleans(),
    forgets=st.booleans(),
)
def test_a_rolling_restart_of_ten_members_moves_each_partition_at_most_twice(
    count: int, order: list[int], keeps_name: bool, forgets: bool
) -> None:
    members = [f"m{number}" for number in range(10)]
    found = Assignment.of(count)
    for number in range(1, 11):
        found = assign(found, members[:number])
    departed, moved = list[str](), Counter[int]()
    for number in order:
        old = members[number]
        left = [name for name in members if name != old]
        departed = [old] if forgets else [old, *departed]
        lent = assign(found, left, departed)
        check(lent, left, departed)
        members[number] = old if keeps_name else f"{old}-again"
        departed = [name for name in departed if name not in members]
        back = assign(lent, members, departed)
        check(back, members, departed)
        moved += moves(found, lent) + moves(lent, back)
        found = back
    assert max(moved.values()) <= 2


@given(count=st.integers(1, 200), size=st.integers(2, 10))
def test_when_a_member_leaves_only_its_partitions_move(count: int, size: int) -> None:
    members = [f"m{number}" for number in range(size)]
    before = assign(Assignment.of(count), members)
    after = assign(before, members[1:], [members[0]])
    assert set(moves(before, after)) == before.numbers_of(members[0])


@given(count=st.integers(1, 200), size=st.integers(1, 10))
def test_a_new_member_gets_its_share_and_nothing_else_moves(count: int, size: int) -> None:
    members = [f"m{number}" for number in range(size)]
    before = assign(Assignment.of(count), members)
    after = assign(before, [*members, "new"])
    assert set(moves(before, after)) == after.numbers_of("new")


def test_without_members_no_partition_is_owned_and_places_are_held() -> None:
    before = assign(Assignment.of(4), ["a", "b"])
    empty = assign(before, [], ["b", "a"])
    assert empty.owners == (UNOWNED,) * 4
    assert assign(empty, ["a", "b"], []) == before
    assert assign(empty, ["c"], ["b", "a"]).owners == ("c",) * 4


def test_a_damaged_assignment_is_refused() -> None:
    for text in ("", "[]", '{"members":["a"],"owners":[1],"homes":[0]}', '{"members":3}'):
        with pytest.raises(StoreError, match="damaged"):
            Assignment.decode(text)


# -- another number of partitions


@given(before=st.integers(1, 64), after=st.integers(1, 64), key=st.integers(0, 2**64 - 1))
def test_a_key_of_a_new_partition_was_in_one_that_covers_it(
    before: int, after: int, key: int
) -> None:
    assert key % before in covering(key % after, after, before)


def at(scn: int, clock: str = "c") -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", clock, Position(scn, 1))


def test_new_partitions_begin_at_the_least_checkpoint_of_those_that_cover_them() -> None:
    assert resized([at(5), at(3)], 4) == [at(5), at(3), at(5), at(3)]
    assert resized([at(5), at(3), at(9), at(4)], 2) == [at(5), at(3)]
    assert resized([at(5), at(3)], 3) == [at(3)] * 3
    assert resized([None, None], 3) == [None] * 3


def test_a_bootstrap_that_was_not_finished_begins_again_where_its_state_was_consistent() -> None:
    boot: Checkpoint = BootstrapCheckpoint(
        "shop", "c", Position(2), Position(9), "run", 7, Position(2)
    )
    assert resized([boot, at(5)], 1) == [OnlineCheckpoint("shop", "c", Position(2))]


def test_partitions_without_a_checkpoint_or_of_two_clocks_are_not_resized() -> None:
    with pytest.raises(UsageError, match=r"\[1\] of 2 have no checkpoint"):
        resized([at(5), None], 4)
    with pytest.raises(UsageError, match="clocks"):
        resized([at(5), at(5, "other")], 4)
