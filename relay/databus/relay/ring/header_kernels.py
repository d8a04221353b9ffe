"""Checks of one frame in the ring, compiled: is this a header, a frame, a pad?"""

from __future__ import annotations

from databus.common.compiled.kernels import (
    U8Array,
    crc32c,
    jit,
    load_u16,
    load_u32,
)

HEADER_BYTES = 72


FRAME_MAGIC = 0xDB05


FRAME_VERSION = 1


PAD_MAGIC = 0xDB05FADD


END_OF_WINDOW = 64


WALK_OK = 0


WALK_CUT = 1


WALK_MALFORMED = 2


WALK_TOO_LARGE = 3


WALK_NOT_GROWING = 4


WALK_PAD = 5


@jit
def is_after(hi: int, lo: int, seq: int, hi2: int, lo2: int, seq2: int) -> bool:
    """Whether position (hi, lo, seq) is greater than (hi2, lo2, seq2)."""
    if hi != hi2:
        return hi > hi2
    if lo != lo2:
        return lo > lo2
    return seq > seq2


@jit
def is_header(buf: U8Array, at: int) -> bool:
    """Whether the 72 bytes at ``at`` can be a frame's header."""
    length = load_u32(buf, at + 4)
    if (
        load_u16(buf, at + 8) != FRAME_MAGIC
        or buf[at + 10] != FRAME_VERSION
        or length < HEADER_BYTES
        or length & 7 != 0
    ):
        return False
    parts = (
        load_u32(buf, at + 56)
        + load_u32(buf, at + 60)
        + load_u32(buf, at + 64)
        + load_u32(buf, at + 68)
    )
    return length == (HEADER_BYTES + parts + 7) & ~7


@jit
def has_crc(buf: U8Array, at: int, length: int) -> bool:
    """Whether the frame of ``length`` bytes at ``at`` is as it was packed; all of it is there."""
    return crc32c(buf, at + 4, at + length) == load_u32(buf, at)


@jit
def is_frame(buf: U8Array, at: int) -> bool:
    """Whether a whole, undamaged frame lies at ``at``."""
    if at + HEADER_BYTES > len(buf) or not is_header(buf, at):
        return False
    length = load_u32(buf, at + 4)
    return at + length <= len(buf) and has_crc(buf, at, length)


@jit
def is_pad(buf: U8Array, at: int, lap_rest: int) -> bool:
    """Whether the bytes at ``at`` are the pad of the ``lap_rest`` bytes up to the lap's end."""
    return load_u32(buf, at) == PAD_MAGIC and load_u32(buf, at + 4) == lap_rest | 1
