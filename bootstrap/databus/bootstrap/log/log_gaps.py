"""Gaps: ranges of the stream that the log has lost, and which requests they forbid.

A gap opens when the relay's oldest position has passed the log's checkpoint.  The log retains
everything that it had and continues after the gap.  The verifier then compares each source with
the database, and the relay emits only true differences, deletions included (table_verifier.py).
Until that is done the copy of the source is not served.  The single changes inside the range are
lost for good, so "every change" over it is always refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.seeding import REPAIRING, SEEDED, UNSEEDED
from databus.common.checkpoint import Position, decode_position
from databus.common.errors import LogTooYoung, NotSeeded

NOTE = "gaps"


@dataclass(frozen=True, slots=True)
class LogGap:
    """The changes in (``start``, ``stop``] are lost; ``is_repaired`` once all sources are."""

    start: Position
    stop: Position
    is_bridged: bool
    is_repaired: bool


def gaps_of(log: HotLog) -> list[LogGap]:
    """All gaps that the log has had, the oldest first."""
    return [
        LogGap(
            decode_position(one["from"]),
            decode_position(one["to"]),
            bool(one.get("bridged")),
            "repaired_us" in one,
        )
        for one in log.note(NOTE) or []
    ]


def can_be_bridged(log: HotLog) -> bool:
    """Whether there is a copy that a repair can start from."""
    states = (log.note("seeding") or {}).values()
    return any(one["state"] in (SEEDED, REPAIRING) for one in states)


def open_gap(log: HotLog, start: Position, stop: Position, now_us: int) -> None:
    """Continue after the gap with the copy as it is; every source is to be repaired."""
    record = _record(start, stop, now_us, bridged=True)
    log.bridge_to(stop, _notes(log, record, REPAIRING))


def restart_behind(log: HotLog, start: Position, stop: Position, now_us: int) -> None:
    """Continue after the gap with an empty log; every source is to be dumped again."""
    record = _record(start, stop, now_us, bridged=False)
    log.restart_at(stop, _notes(log, record, UNSEEDED))


def _notes(log: HotLog, record: dict[str, Any], state: str) -> dict[str, Any]:
    """The notes with one gap more, and every source in ``state``."""
    sources = log.note("seeding") or {}
    return {
        NOTE: [*(log.note(NOTE) or []), record],
        "seeding": {name: {"state": state} for name in sources},
    }


def close_gaps(log: HotLog, now_us: int) -> None:
    """Record that every source has been repaired."""
    records: list[dict[str, Any]] = log.note(NOTE) or []
    if any(one.get("bridged") and "repaired_us" not in one for one in records):
        log.put_note(NOTE, [{"repaired_us": now_us, **one} for one in records])


def require_every_change(log: HotLog, since: Position | None, until: Position) -> None:
    """Refuse "every change" of a range that touches a gap.

    Raises:
        LogTooYoung: with the position after which every change is retained.
    """
    touched = [
        gap
        for gap in gaps_of(log)
        if gap.is_bridged and gap.start < until and (since is None or since < gap.stop)
    ]
    if touched:
        gap = touched[-1]
        raise LogTooYoung(
            f"the changes after {gap.start} up to {gap.stop} are lost, their net changes are not; "
            f"request mode=net, or start from {gap.stop} on",
            oldest=gap.stop.to_json(),
        )


def require_repaired(log: HotLog, names: Sequence[str], since: Position) -> None:
    """Refuse a reader whose range covers a gap while one of its sources is not repaired.

    A reader that had been inside a gap, because it was ahead of the log, is always refused: a row
    that it has may have been deleted later in the gap, and the copy never had that row.

    Raises:
        NotSeeded: with the sources that are not repaired yet.
        LogTooYoung: the range begins inside a gap.
    """
    for gap in gaps_of(log):
        if gap.is_bridged and gap.start < since < gap.stop:
            raise LogTooYoung(
                f"the changes after {gap.start} up to {gap.stop} are lost, and your {since} lies "
                "between the two",
                oldest=gap.stop.to_json(),
            )
    if not any(gap.is_bridged and not gap.is_repaired and since < gap.stop for gap in gaps_of(log)):
        return
    states = log.note("seeding") or {}
    waiting = [name for name in names if states.get(name, {}).get("state") != SEEDED]
    if waiting:
        raise NotSeeded(
            f"the log has lost a range after {since}, and {', '.join(waiting[:5])} "
            "are being compared with the database; try again",
            sources=waiting,
        )


def _record(start: Position, stop: Position, now_us: int, *, bridged: bool) -> dict[str, Any]:
    return {
        "from": start.to_json(),
        "to": stop.to_json(),
        "at_us": now_us,
        "bridged": bridged,
    }
