"""Another number of partitions: where each of the new ones begins.

Pure.  A key is in the partition ``hash % count``.  The keys of a new partition were in those old
ones whose numbers are congruent modulo the greatest common divisor of both counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from databus.common.checkpoint import Checkpoint, OnlineCheckpoint
from databus.common.errors import UsageError


def covering(number: int, count: int, count_before: int) -> range:
    """The old partitions that have keys of the new partition ``number``."""
    step = math.gcd(count, count_before)
    return range(number % step, count_before, step)


def resized(before: Sequence[Checkpoint | None], count: int) -> list[Checkpoint | None]:
    """The checkpoint at which each of ``count`` partitions begins: the least of those before.

    Nothing is lost.  What an old partition had finished after that checkpoint comes again, in
    order, as after a restart.  A bootstrap that was not finished begins again.

    Raises:
        UsageError: some partitions have no checkpoint, or they are of different clocks.
    """
    missing = [number for number, one in enumerate(before) if one is None]
    if len(missing) == len(before):
        return [None] * count
    if missing:
        raise UsageError(
            f"the partitions {missing} of {len(before)} have no checkpoint yet, so it is not known "
            f"where {count} partitions would begin: let the group run until each has one"
        )
    found = [one for one in before if one is not None]
    clocks = sorted({one.clock for one in found})
    if len(clocks) > 1:
        raise UsageError(
            f"the checkpoints of the partitions are of the clocks {clocks}, which cannot be "
            "compared: let the group run until all are of one"
        )
    return [
        _least([found[old] for old in covering(new, count, len(found))]) for new in range(count)
    ]


def _least(checkpoints: list[Checkpoint]) -> Checkpoint:
    least = min(checkpoints, key=lambda one: one.position)
    return OnlineCheckpoint(least.database, least.clock, least.position)
