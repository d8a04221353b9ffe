"""The order of a merge against a plain model: all windows, sorted."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from databus.client.merged.merge_order import MergeOrder

DATABASES = {"a": "a", "b": "b", "b/mod:2:1": "b"}
LATEST_US = 1 << 60
TIMES = st.lists(st.integers(1, 12), max_size=8)


def model(times: dict[str, list[int]]) -> list[tuple[int, str, int, str]]:
    """Every window with the greatest commit time so far of its stream, sorted."""
    keys = []
    for name, commits in times.items():
        reached = 0
        for number, commit_us in enumerate(commits):
            reached = max(reached, commit_us)
            keys.append((reached, DATABASES[name], 10 * number + 10, name))
    return sorted(keys)


@given(st.fixed_dictionaries(dict.fromkeys(DATABASES, TIMES)), st.randoms(use_true_random=False))
def test_the_order_is_that_of_all_windows_sorted_whenever_they_come(
    times: dict[str, list[int]], random: Random
) -> None:
    choose = random.choice
    order = MergeOrder(DATABASES)
    left = {name: list(enumerate(commits)) for name, commits in times.items()}
    heads: set[str] = set()
    found = []
    while True:
        while (popped := order.pop()) is not None:
            name, key, is_late = popped
            assert not is_late
            heads.remove(name)
            found.append(tuple(key))
        without = [name for name in DATABASES if name not in heads]
        if not without or not (any(left.values()) or heads):
            break
        name = choose(without)
        if not left[name]:
            order.promise(name, LATEST_US, 0)
            if all(not left[one] for one in without) and not heads:
                break
            continue
        number, commit_us = left[name][0]
        if choose((True, False)):
            # A report that is true: nothing that was committed before is still to come.
            order.promise(name, min(one for _, one in left[name]), 10 * number)
        else:
            left[name].pop(0)
            order.offer(name, commit_us, 10 * number + 10)
            heads.add(name)
    assert found == model(times)


def test_a_stream_without_a_window_holds_back_only_what_it_may_precede() -> None:
    order = MergeOrder({"a": "a", "b": "b"})
    order.offer("a", 5, 1)
    assert order.pop() is None
    assert order.held_by() == ["b"]
    order.promise("b", 5, 7)  # At the same time the database a comes first.
    popped = order.pop()
    assert popped is not None
    assert tuple(popped[1]) == (5, "a", 1, "a")
    order.offer("b", 5, 8)
    assert order.pop() is None
    assert order.held_by() == ["a"]
    assert order.resolved_us == 5


def test_commit_times_that_go_back_are_lifted() -> None:
    order = MergeOrder({"a": "a"})
    times = []
    for scn, commit_us in enumerate((5, 3, 9, 1), start=1):
        order.offer("a", commit_us, scn)
        popped = order.pop()
        assert popped is not None
        times.append(popped[1].us)
    assert times == [5, 5, 9, 9]


def test_a_stream_that_is_left_behind_comes_late_until_it_has_caught_up() -> None:
    order = MergeOrder({"a": "a", "b": "b"})
    order.offer("a", 10, 1)
    order.leave("b")
    assert order.pop() == ("a", (10, "a", 1, "a"), False)
    assert order.resolved_us == 10
    order.offer("b", 4, 1)
    order.offer("a", 11, 2)
    popped = order.pop()
    assert popped is not None
    assert (popped[0], popped[1].us, popped[2]) == ("b", 10, True)
    assert order.is_left("b")
    assert order.pop() == ("a", (11, "a", 2, "a"), False)
    order.offer("b", 12, 2)
    assert not order.is_left("b")
    assert order.pop() is None
    assert order.held_by() == ["a"]


def test_a_wrong_report_does_not_reverse_the_order() -> None:
    order = MergeOrder({"a": "a", "b": "b"})
    order.offer("a", 10, 1)
    order.promise("b", 20, 0)
    assert order.pop() is not None
    order.offer("b", 7, 1)  # It was committed before all the same.
    order.promise("a", 30, 1)
    popped = order.pop()
    assert popped is not None
    assert popped[1].us == 20
