"""Shares of one whole, held by threads."""

from __future__ import annotations

import threading

from databus.bootstrap.merging.memory_budget import Budget


def test_shares_that_are_held_at_once_never_exceed_the_whole_and_all_get_theirs() -> None:
    budget = Budget()
    lock = threading.Lock()
    held: list[float] = []
    most: list[float] = []

    def merge(share: float) -> None:
        for _ in range(50):
            with budget.share(share):
                with lock:
                    held.append(share)
                    most.append(sum(min(one, 1.0) for one in held))
                with lock:
                    held.remove(share)

    shares = [0.3, 0.3, 0.6, 0.9, 7.0, 0.0]
    threads = [threading.Thread(target=merge, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(most) == 50 * len(shares)
    assert max(most) <= 1.0 + 1e-9


def test_a_request_for_more_than_is_left_waits_and_one_that_needs_nothing_does_not() -> None:
    budget = Budget()
    began = threading.Event()

    def merge() -> None:
        with budget.share(0.5):
            began.set()

    with budget.share(0.6):
        thread = threading.Thread(target=merge)
        thread.start()
        with budget.share(0.0):
            assert not began.is_set()
    thread.join(60)
    assert began.is_set()
