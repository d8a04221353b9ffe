"""Finds the windows at the ring's head that are older than a moment: compiled if numba exists."""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import U8Array, jit
from databus.common.frame.header_layout import (
    END_OF_WINDOW,
    commit_us_of,
    has_crc,
    op_of,
)
from databus.relay.ring.ring_kernels import step_at


@jit
def expired(ring: U8Array, head: int, stop: int, limit_us: int) -> tuple[int, int, int, int]:
    """Walk from ``head`` over whole windows, as long as each ended before ``limit_us``.

    A window's time is the commit time of its end-of-window frame.  The walk ends at the first
    window that is not earlier, at one that has no end before ring position ``stop``, at bytes
    that are no frame, and at a damaged end.

    Returns (end of the last window passed or ``head``, offset of its last frame or -1, frames,
    windows passed).
    """
    size = len(ring)
    position, frame_count = head, 0
    found, last, frames, windows = head, -1, 0, 0
    while position < stop:
        at = position % size
        length = step_at(ring, at)
        if length < 0:
            position -= length
            continue
        if length == 0:
            break
        position += length
        frame_count += 1
        if op_of(ring, at) == END_OF_WINDOW:
            if commit_us_of(ring, at) >= limit_us or position > stop:
                break
            if not has_crc(ring, at, length):
                break
            found, last, frames, windows = position, at, frame_count, windows + 1
    return found, last, frames, windows


def warm_up() -> None:
    """Compile the kernel, or load it from the cache."""
    ring = np.zeros(256, dtype=np.uint8)
    ring.flags.writeable = False
    expired(ring, 0, 0, 0)
