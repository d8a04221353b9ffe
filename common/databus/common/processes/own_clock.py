"""The clock that leases are measured with inside one machine."""

from __future__ import annotations

import time


def own_clock_s() -> float:
    """Seconds by a clock that no one sets, and that also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
