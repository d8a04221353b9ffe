"""What an applier reports of a merge while it lasts: in the terminal, in the status, in metrics."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from databus.bootstrap.http.bootstrap_metrics import BootstrapCollector
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading.stored_database import OpenLogs, StoredDatabase
from databus.bootstrap.runs.apply_progress import NOTE, STALE_S, ApplyProgress, applier_document
from databus.bootstrap.runs.manifest import Store
from tests.bootstrap.model import CLOCK, START
from tests.support.waiting import eventually_sync

WHAT = {"kind": "delta", "runs": 5, "rows_in": 12_345, "bytes_in": 99}


@pytest.fixture
def metrics(tmp_path: Path) -> Any:
    """Reads one of the database's gauges."""
    log = HotLog(tmp_path / "shop" / "log")
    log.bind("shop", CLOCK, START)
    log.close()
    logs = OpenLogs()
    database = StoredDatabase("shop", tmp_path / "shop", logs)
    registry = CollectorRegistry()
    registry.register(BootstrapCollector(lambda: {"shop": database}))
    yield lambda name: registry.get_sample_value(f"databus_bootstrap_{name}", {"database": "shop"})
    logs.close()


def test_tasks_are_shown_while_they_run_and_at_their_end_well_or_not(
    tmp_path: Path, metrics: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "databus.bootstrap")
    storage = Store(tmp_path / "shop").storage
    progress = ApplyProgress("shop", storage, every_s=0.01)
    assert applier_document(storage) == {"state": "unknown"}
    done = 1

    def wait_until_noted(count: int) -> None:
        eventually_sync(
            lambda: applier_document(storage).get("tasks_done") == count, 30.0, "the note is new"
        )
        assert (metrics("applier_tasks_done"), metrics("applier_tasks")) == (count, 4)

    with progress.merging(WHAT, lambda: (done, 4)):
        wait_until_noted(1)
        done = 3
        wait_until_noted(3)
        assert WHAT.items() <= applier_document(storage).items()
        assert metrics("applier_failed") == 0
    words = [record.getMessage() for record in caplog.records]
    assert "shop: merging 5 runs of 12,345 rows into a delta" in words
    assert words.index("shop: 1 of 4 tasks") < words.index("shop: 3 of 4 tasks")
    assert applier_document(storage)["state"] == "idle"
    assert metrics("applier_tasks") == 0

    with pytest.raises(RuntimeError), progress.merging(WHAT, lambda: (0, 0)):
        raise RuntimeError("a torn file")
    assert applier_document(storage)["error"] == "a torn file"
    assert metrics("applier_failed") == 1


def test_one_that_fell_silent_in_a_merge_is_called_down(tmp_path: Path, metrics: Any) -> None:
    storage = Store(tmp_path / "shop").storage
    storage.write_note(NOTE, b'{"state": "merging", "at_us": %d}' % int(STALE_S * 1e6))
    assert applier_document(storage)["state"] == "down"
    assert metrics("applier_failed") == 1
    for damage in (b"", b"{}", b"[1]", b'{"at_us": "x"}'):
        storage.write_note(NOTE, damage)
        assert applier_document(storage)["state"] == "unknown"
