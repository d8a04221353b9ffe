"""Delta debugging over the steps of a failed case."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.storm.script import Step

Fails = Callable[[list[Step]], bool]


def shrunk(steps: list[Step], fails: Fails, budget_s: float) -> list[Step]:
    """A part of ``steps`` that fails still, of which no single step can be left out.

    After ``budget_s`` it is the smallest that was found so far.
    """
    deadline_s = time.monotonic() + budget_s
    parts = 2
    while len(steps) > 1:
        size = max(1, len(steps) // parts)
        for start in range(0, len(steps), size):
            if time.monotonic() > deadline_s:
                return steps
            rest = steps[:start] + steps[start + size :]
            if rest and fails(rest):
                steps, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(parts * 2, len(steps))
    return steps
