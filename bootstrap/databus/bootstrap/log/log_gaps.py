"""Gaps: ranges of the stream that the log has lost, and what they keep readers from.

A gap opens when the relay's oldest position has passed the log's checkpoint.  The log goes on
behind it with everything that it had; each source is then compared with the database, and only true
differences are emitted through the relay, deletions included (table_verifier.py).  Until that is
done its copy is not served.  What exactly happened inside the range nobody knows any more, so
"every change" over it is refused for good.
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
    """What happened in (``start``, ``stop``] is lost; ``is_repaired`` once all sources are."""

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
    """Go on behind the gap with the copy as it is; every source is to be repaired."""
    states = log.note("seeding") or {}
    log.bridge_to(
        stop,
        {
            NOTE: [*(log.note(NOTE) or []), _record(start, stop, now_us, bridged=True)],
            "seeding": {name: {"state": REPAIRING} for name in states},
        },
    )


def restart_behind(log: HotLog, start: Position, stop: Position, now_us: int) -> None:
    """Go on behind the gap with nothing; every source is to be dumped anew."""
    states = log.note("seeding") or {}
    log.restart_at(
        stop,
        {
            NOTE: [*(log.note(NOTE) or []), _record(start, stop, now_us, bridged=False)],
            "seeding": {name: {"state": UNSEEDED} for name in states},
        },
    )


def close_gaps(log: HotLog, now_us: int) -> None:
    """Note that every source has been repaired."""
    records: list[dict[str, Any]] = log.note(NOTE) or []
    if any(one.get("bridged") and "repaired_us" not in one for one in records):
        log.put_note(NOTE, [{"repaired_us": now_us, **one} for one in records])


def require_every_change(log: HotLog, since: Position | None, until: Position) -> None:
    """Refuse "every change" of a range that touches a gap.

    Raises:
        LogTooYoung: with the position from which on every change is kept.
    """
    touched = [
        gap
        for gap in gaps_of(log)
        if gap.is_bridged and gap.start < until and (since is None or since < gap.stop)
    ]
    if touched:
        gap = touched[-1]
        raise LogTooYoung(
            f"what happened after {gap.start} up to {gap.stop} is lost, its net changes are not; "
            f"ask for mode=net, or from {gap.stop} on",
            oldest=gap.stop.to_json(),
        )


def require_repaired(log: HotLog, names: Sequence[str], since: Position) -> None:
    """Refuse a reader whose way leads over a gap while a source of its own is not repaired.

    Raises:
        NotSeeded: with the sources that are waited for.
    """
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
