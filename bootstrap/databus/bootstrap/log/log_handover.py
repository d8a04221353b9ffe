"""The handover from the hot log to the runs: what the log has dropped is in the manifest.

The order of sealing ensures it (files, manifest, then the log drops).  Only an outside change can
break it: the manifest was deleted or restored from an older copy, or ``store`` names another
location.  What is left then looks like a young database, and a state built from it would miss rows
without an error.  So all code that plans with a manifest, adds to it, or deletes runs that it does
not name calls this module first.

The log has the authoritative position.  The store holds a copy of it (``Store.note_dropped``) for
processes that do not have the log: the applier, and ``databus runs`` on another machine.
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
    """Whether nothing that belongs to the log lies before its start: it began there, or restarted
    there after a gap."""
    start = log.state().start
    noted = log.note("origin")
    restarts = {gap.stop for gap in log_gaps.gaps_of(log) if not gap.is_bridged}
    return start in restarts or (noted is not None and decode_position(noted) == start)


def dropped(log: HotLog, store: Store, manifest: Manifest) -> Position | None:
    """The position up to which runs must have what the log dropped; None if nothing.

    A log older than the note of origins may have begun where it starts now.  It has not if there
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
        # The log first: whatever it drops later is in the manifest already.
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
    """The problems that ``databus inspect`` and ``databus runs`` show of a log on this machine."""
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
