"""A week of laps through a tiny ring, and a writer that is killed on its way.

At 200 events of 2.5 KB a second a ring of 256 MiB makes 1,181 laps in a week.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from databus.common.frame import frame_format
from tests.support import ring_storm
from tests.support.ring_storm import FRAMES, verify
from tests.support.windows import make_window

LAPS_OF_A_WEEK = 1181

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]


def test_every_byte_of_a_weeks_laps_is_right_or_the_reader_is_notified_that_it_fell_behind() -> (
    None
):
    seed = random.randrange(10**6)
    report = ring_storm.run(
        laps=1500, readers=6, kills=2, ring_bytes=1 << 15, seed=seed, deadline_s=300
    )
    assert report["laps"] >= LAPS_OF_A_WEEK
    for reader in report["readers"]:
        assert reader["frames"] > 0, report
    assert sum(reader["overtaken"] for reader in report["readers"]) > 0, report


@pytest.mark.parametrize("spoil", ["nothing", "swap", "repeat", "other bytes"])
def test_the_storms_own_check_notices_what_is_wrong(spoil: str) -> None:
    windows = [make_window(scn, [40, 40, 40]) for scn in (1, 2, 3)]
    true = b"".join(windows)
    notes = np.zeros((3 * FRAMES + 1, 2), dtype=np.uint64)
    ring_storm.note(notes, frame_format.scan(true), 3 * FRAMES)
    read = {
        "nothing": true,
        "swap": windows[1] + windows[0] + windows[2],
        "repeat": windows[0] + windows[1] + windows[1],
        "other bytes": windows[0] + make_window(2, [40, 39, 40]) + windows[2],
    }[spoil]
    if spoil == "nothing":
        assert verify(memoryview(read), 0, notes).scn == 3
        assert verify(memoryview(windows[1]), FRAMES, notes).scn == 2
    else:
        with pytest.raises(AssertionError):
            verify(memoryview(read), 0, notes)
