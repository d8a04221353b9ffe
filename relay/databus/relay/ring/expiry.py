"""Which windows at the ring's head are older than a moment: compiled where numba is there."""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import U8Array, jit, load_u32
from databus.relay.ring.header_kernels import (
    END_OF_WINDOW,
    HEADER_BYTES,
    has_crc,
    is_header,
    is_pad,
)


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
        length = load_u32(ring, at + 4)
        if length & 1 and is_pad(ring, at, size - at):
            position += size - at
            continue
        if at + HEADER_BYTES > size or not is_header(ring, at) or at + length > size:
            break
        position += length
        frame_count += 1
        if ring[at + 11] == END_OF_WINDOW:
            high = load_u32(ring, at + 52)
            # The upper half carries the sign.
            commit_us = ((high - ((high & 0x80000000) << 1)) << 32) + load_u32(ring, at + 48)
            if commit_us >= limit_us or position > stop or not has_crc(ring, at, length):
                break
            found, last, frames, windows = position, at, frame_count, windows + 1
    return found, last, frames, windows


def warm_up() -> None:
    """Compile the kernel, or load it from the cache."""
    ring = np.zeros(256, dtype=np.uint8)
    ring.flags.writeable = False
    expired(ring, 0, 0, 0)
