"""What answers count for the pace of their caller."""

from __future__ import annotations

import pytest

from databus.common.access.request_limits import BytePace


def record_pauses(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> list[int]:
    """The bytes of each part that is counted from now on; every pause takes ``pause_s``."""
    counted: list[int] = []

    def recorded(_: BytePace, sent_bytes: int) -> float:
        counted.append(sent_bytes)
        return pause_s

    monkeypatch.setattr(BytePace, "pause_s", recorded)
    return counted
