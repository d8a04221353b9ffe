"""The time up to which a database is resolved: never later than what the ring covers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from databus.relay.capture.intake import Intake
from databus.relay.processes.fetcher_status import FetcherStatus
from databus.relay.ring.data_folder import DatabaseFolder
from databus.relay.ring.ring import Ring
from databus.relay.ring.schema_registry import Registry
from databus.relay.sources.contract import Batch
from tests.support.capture import database_config


class Asked:
    """A source of which only the status is asked."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.asked_us = 0

    async def status(self) -> dict[str, Any]:
        self.asked_us = time.time_ns() // 1000
        return self.facts

    async def committed_scn(self) -> int | None:
        self.asked_us = time.time_ns() // 1000
        found: int | None = self.facts["scn"]
        return found


async def test_a_database_is_resolved_when_the_ring_has_what_it_had(tmp_path: Path) -> None:
    folder = DatabaseFolder.of(tmp_path, "shop")
    ring = Ring.create(folder.path, 1 << 16, clock="test:1")
    registry = Registry(folder.registry)
    intake = Intake(ring, registry)
    status = FetcherStatus(database_config("shop", "generator://"), folder)

    def resolved_us() -> int | None:
        found: int | None = status.document(intake, {})["resolved_us"]
        return found

    try:
        assert resolved_us() is None
        source = Asked(scn=10)
        before_us = time.time_ns() // 1000
        await status.ask(source)  # type: ignore[arg-type]  # no more than a status
        assert resolved_us() is None
        intake.take(Batch(b"", (), 9))
        assert resolved_us() is None
        intake.take(Batch(b"", (), 10))
        first_us = resolved_us()
        assert first_us is not None
        assert before_us <= first_us <= source.asked_us  # The time before the question.
        await status.ask(Asked(current_scn=12))  # type: ignore[arg-type]  # no more than a status
        assert resolved_us() == first_us
        intake.take(Batch(b"", (), 15))
        second_us = resolved_us() or 0
        assert second_us > first_us
        await status.ask_committed(Asked(scn=15))  # type: ignore[arg-type]  # only an scn
        third_us = resolved_us() or 0
        assert third_us > second_us
        await status.ask_committed(Asked(scn=None))  # type: ignore[arg-type]  # only an scn
        await status.ask_committed(Asked(scn=16))  # type: ignore[arg-type]  # only an scn
        assert resolved_us() == third_us
        # The answer is waited for, however often the source is asked.
        await status.ask_committed(Asked(scn=99))  # type: ignore[arg-type]  # only an scn
        intake.take(Batch(b"", (), 16))
        assert (resolved_us() or 0) > third_us
    finally:
        registry.close()
        ring.close()


@pytest.mark.parametrize("facts", [{}, {"scn": 3, "resolved_us": None}, {"scn": None}])
async def test_a_source_that_cannot_tell_is_never_resolved(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    folder = DatabaseFolder.of(tmp_path, "shop")
    ring = Ring.create(folder.path, 1 << 16, clock="test:1")
    registry = Registry(folder.registry)
    intake = Intake(ring, registry)
    status = FetcherStatus(database_config("shop", "generator://"), folder)
    try:
        await status.ask(Asked(**facts))  # type: ignore[arg-type]  # no more than a status
        intake.take(Batch(b"", (), 10))
        assert status.document(intake, {})["resolved_us"] is None
    finally:
        registry.close()
        ring.close()


async def test_a_chained_relay_passes_on_what_its_parent_reports(tmp_path: Path) -> None:
    folder = DatabaseFolder.of(tmp_path, "shop")
    ring = Ring.create(folder.path, 1 << 16, clock="test:1")
    registry = Registry(folder.registry)
    intake = Intake(ring, registry)
    status = FetcherStatus(database_config("shop", "generator://"), folder)
    try:
        await status.ask(Asked(scn=3, resolved_us=77))  # type: ignore[arg-type]  # only a status
        intake.take(Batch(b"", (), 3))
        assert status.document(intake, {})["resolved_us"] == 77
    finally:
        registry.close()
        ring.close()
