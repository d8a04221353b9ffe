"""Retired runs that a reader needs: it notes them as if it had begun before they retired.

A reader's note retains what retires after the reader began.  A plan may also name runs that retired
before, as long as they are on disk: for a state before the last merge, for every change of a merged
range, or for a checkpoint inside such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from databus.bootstrap.runs.manifest import Manifest, Store

Retain = Callable[[int], None]
"""Notes that a reader needs what retired at this time, in microseconds, or later."""


def are_retained(
    store: Store, planned: Manifest, used: Collection[str], retain: Retain | None
) -> bool:
    """Whether the runs ``used`` of a plan stay while their reader is open.

    A run that retired before is noted with ``retain``; False if it has been deleted meanwhile.  In
    a folder the manifest's lock decides which was first; on S3 a deletion that has just begun is
    found when the reader opens the file.  Without ``retain`` such a run may be deleted.
    """
    retired_us = [one.retired_us for one in planned.retired if one.run.id in used]
    if not retired_us or retain is None:
        return True
    with store.storage.switching():
        retain(min(retired_us))
        now = store.read()
    return all(now.find(run_id) for run_id in used)
