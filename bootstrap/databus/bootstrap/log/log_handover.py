"""The handover from the hot log to the runs: what the log has dropped, the manifest has.

The order of sealing keeps it (files, manifest, then the log drops), so it is broken from outside
alone: by a manifest that was deleted or put back from an older copy, or by a ``store`` that names
another place.  What is left then looks like a young database, and a state made of it would be
short without anybody noticing.  So whoever plans with a manifest, adds to it, or deletes what it
does not name, asks here first.

The log itself knows best.  The store keeps a copy of what it knows (``Store.note_dropped``) for
those who do not have the log: the applier, and ``databus runs`` on another machine.
"""

from __future__ import annotations

from pathlib import Path

from databus.bootstrap.log import log_gaps
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.seeding import SEEDED
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.common.checkpoint import Position, decode_position
from databus.common.errors import StoreError


def begins_here(log: HotLog) -> bool:
    """Whether nothing that belongs to the log lies before its start: it began there, or began
    again there behind a gap."""
    start = log.state().start
    noted = log.note("origin")
    restarts = {gap.stop for gap in log_gaps.gaps_of(log) if not gap.is_bridged}
    return start in restarts or (noted is not None and decode_position(noted) == start)


def dropped(log: HotLog, store: Store, manifest: Manifest) -> Position | None:
    """Up to where runs must have what the log dropped; None if it dropped nothing.

    A log of before origins were noted may have begun where it starts now.  It has not if there
    are runs, or if a source was whole before the start: its rows had come into the log.
    """
    start = log.state().start
    if begins_here(log):
        return None
    states = (log.note("seeding") or {}).values()
    whole = [one["end"] for one in states if one["state"] == SEEDED and one.get("end")]
    is_known = bool(log.note("origin") or manifest.chain)
    if is_known or any(decode_position(end) < start for end in whole):
        return start
    return store.dropped()


def require(log: HotLog, store: Store, manifest: Manifest) -> None:
    """Refuse a manifest that does not have what the log dropped.

    Raises:
        StoreError: with both positions, and what can be done.
    """
    store.require_reach(manifest, dropped(log, store, manifest))


def read(log: HotLog, store: Store) -> tuple[Position, Manifest]:
    """Where the log starts, and the manifest, which has everything before that.

    Raises:
        StoreError: it has not; see ``require``.
    """
    while True:
        # The log first: what it drops afterwards is in the manifest before.
        start = log.state().start
        manifest = store.read()
        try:
            require(log, store, manifest)
        except StoreError:
            if log.state().start == start:
                raise
        else:
            return start, manifest


def problems(log_folder: Path, store: Store) -> list[str]:
    """What ``databus inspect`` and ``databus runs`` say of a log in this process's reach."""
    if not (log_folder / "data.mdb").exists():
        return []
    log = HotLog(log_folder, read_only=True)
    try:
        if not log.is_new():
            read(log, store)
    except StoreError as error:
        return [error.message]
    finally:
        log.close()
    return []
