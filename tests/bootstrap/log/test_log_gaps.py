"""Which readers a gap refuses."""

from __future__ import annotations

import pytest

from databus.bootstrap.log import log_gaps
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.seeding import REPAIRING, SEEDED
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import LogTooYoung, NotSeeded
from tests.bootstrap.model import START

STOP = Position(START.scn + 100, 0)
NAMES = ["shop.orders"]


def set_state(log: HotLog, state: str) -> None:
    """Set the state of the one source."""
    log.put_note("seeding", {NAMES[0]: {"state": state}})


def test_a_reader_over_a_gap_waits_for_the_repair_and_one_from_inside_is_refused(
    log: HotLog,
) -> None:
    set_state(log, SEEDED)
    log_gaps.open_gap(log, START, STOP, 1)
    inside = [Position(START.scn, START.seq + 1), Position(STOP.scn - 1, 9)]
    outside = [ORIGIN, START]
    for since in outside:
        with pytest.raises(NotSeeded, match=r"shop\.orders are being compared"):
            log_gaps.require_repaired(log, NAMES, since)
    log_gaps.require_repaired(log, NAMES, STOP)
    for state in (REPAIRING, SEEDED):
        set_state(log, state)
        if state == SEEDED:
            log_gaps.close_gaps(log, 2)
        for since in inside:
            with pytest.raises(LogTooYoung, match=f"your {since} lies between the two") as error:
                log_gaps.require_repaired(log, NAMES, since)
            assert error.value.details["oldest"] == STOP.to_json()
    for since in (*outside, STOP):
        log_gaps.require_repaired(log, NAMES, since)
