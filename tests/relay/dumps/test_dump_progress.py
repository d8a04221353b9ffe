"""How far a dump is and how fast it comes on, by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from databus.relay.dumps import dump_progress
from databus.relay.dumps.dump_progress import RATE_WINDOW_S, DumpProgress
from databus.relay.dumps.dump_records import Dump, TableProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``clock.now_s`` is the time."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(dump_progress, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_the_time_that_is_left_is_what_the_rows_that_are_left_need_at_the_present_pace(
    clock: SimpleNamespace,
) -> None:
    done = TableProgress("s.a", done=True, rows=90, dropped=10, estimated_rows=5000)
    table = TableProgress("s.b", estimated_rows=1000)
    dump, progress = Dump("1", ["*"], tables=[done, table]), DumpProgress()
    progress.begin(dump)
    assert progress.document(dump) == {
        "tables": 2,
        "tables_done": 1,
        "rows_read": 100,
        "estimated_rows": 1100,
        "rows_per_s": None,
        "eta_s": None,
    }
    clock.now_s += 2
    table.rows, table.dropped = 180, 20
    progress.settled(dump)
    found = progress.document(dump)
    assert (found["rows_read"], found["rows_per_s"], found["eta_s"]) == (300, 100, 8)
    # The pace is that of the last seconds: what came before has no part in it.
    for _ in range(5):
        clock.now_s += RATE_WINDOW_S / 2
        table.rows += 10
        progress.settled(dump)
    found = progress.document(dump)
    assert (found["rows_read"], found["rows_per_s"], found["eta_s"]) == (350, 2, 375)
    # Another dump has no pace, and neither has one that rests.
    assert progress.document(Dump("2", ["*"], tables=[table]))["rows_per_s"] is None
    progress.rest(dump)
    found = progress.document(dump)
    assert (found["rows_read"], found["rows_per_s"], found["eta_s"]) == (350, None, None)


def test_an_estimate_that_was_too_low_is_overtaken_and_one_that_is_not_known_makes_none(
    clock: SimpleNamespace,
) -> None:
    table = TableProgress("s.a", estimated_rows=10)
    dump, progress = Dump("1", ["*"], tables=[table]), DumpProgress()
    progress.begin(dump)
    clock.now_s += 1
    table.rows = 30
    progress.settled(dump)
    found = progress.document(dump)
    assert (found["estimated_rows"], found["rows_per_s"], found["eta_s"]) == (30, 30, 0)
    table.estimated_rows = None
    found = progress.document(dump)
    assert (found["estimated_rows"], found["rows_per_s"], found["eta_s"]) == (None, 30, None)
