"""Locations in the binlog, and the transactions before them."""

from __future__ import annotations

import asyncio

import pytest

from databus.relay.sources.mysql.gtid.binlog_locations import (
    BinlogLocation,
    BinlogLocations,
    EnclosedSnapshot,
)


def _locations(*passed: tuple[str, int, int], most: int = 100) -> BinlogLocations:
    locations = BinlogLocations(most)
    for file, offset, scn in passed:
        locations.passed(file, offset, scn)
    return locations


def test_a_location_that_the_stream_has_reached_is_known_exactly() -> None:
    locations = _locations(("b.000009", 100, 7), ("b.000009", 300, 9), ("b.000010", 4, 9))
    assert locations.around(BinlogLocation(9, 300)) == EnclosedSnapshot(9, 9)


def test_a_location_between_two_is_enclosed_and_only_certain_commits_are_visible() -> None:
    found = _locations(("b.000009", 100, 7), ("b.000010", 200, 12)).around(BinlogLocation(10, 50))
    assert found == EnclosedSnapshot(7, 12)
    assert found.sees(7, "") and not found.sees(8, "")


@pytest.mark.parametrize(
    "location", [BinlogLocation(9, 99), BinlogLocation(8, 500), BinlogLocation(10, 5)]
)
def test_nothing_is_known_of_locations_outside_of_what_was_passed(location: BinlogLocation) -> None:
    assert _locations(("b.000009", 100, 7), ("b.000010", 4, 9)).around(location) is None


def test_the_oldest_locations_are_dropped_and_the_newest_retained() -> None:
    locations = _locations(*(("b.000001", offset, offset) for offset in range(1, 30)), most=5)
    assert locations.around(BinlogLocation(1, 1)) is None
    assert locations.around(BinlogLocation(1, 29)) == EnclosedSnapshot(29, 29)


async def test_a_waiter_is_notified_when_the_stream_passes() -> None:
    locations = _locations(("b.000001", 10, 1))
    waiting = [
        asyncio.ensure_future(locations.wait_around(BinlogLocation(1, 20), 60)) for _ in range(2)
    ]
    await asyncio.sleep(0)
    locations.passed("b.000001", 15, 2)
    await asyncio.sleep(0)
    locations.passed("b.000001", 25, 4)
    assert await asyncio.gather(*waiting) == [EnclosedSnapshot(2, 4)] * 2


async def test_a_stream_that_does_not_pass_or_is_long_past_notifies_no_waiter() -> None:
    locations = _locations(("b.000001", 10, 1))
    assert await locations.wait_around(BinlogLocation(1, 20), 0.01) is None
    assert await locations.wait_around(BinlogLocation(1, 5), 60) is None
