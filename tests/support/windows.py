"""Windows of frames made to measure, for tests that need a stream and no database."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder
from databus.relay.ring.ring import RingReader

SOURCE = 7


def make_window(scn: int, sizes: Sequence[int], *, first_seq: int = 0) -> bytes:
    """One whole window; ``sizes`` are the payload bytes of its events.

    The payload depends on scn and size alone, so the same window is made again byte by byte.
    """
    builder = WindowBuilder(scn, commit_us=1_700_000_000_000_000 + scn % 10**9, first_seq=first_seq)
    for size in sizes:
        payload = bytes((scn + at) & 0xFF for at in range(min(size, 251)))
        payload = (payload * (size // max(len(payload), 1) + 1))[:size]
        builder.event(Op.INSERT, SOURCE, 1, b"key", after=payload)
    return builder.end(f"t{scn}")


def endless_windows(seed: int, *, most_bytes: int, start_scn: int = 1) -> Iterator[bytes]:
    """The same windows for the same seed, with gaps in the scn and now and then a big one."""
    rng = random.Random(seed)
    scn = start_scn
    while True:
        count = rng.choice((0, 1, 1, 2, 3, 8, 40))
        most = rng.choice((0, 40, 300, most_bytes))
        yield make_window(scn, [rng.randint(0, most) for _ in range(count)])
        scn += rng.choice((1, 1, 1, 2, 1000))


def without_end(window: bytes) -> bytes:
    """``window`` as long as it has not ended: all frames but the last."""
    return b"".join(frame for _, frame in split_frames(window)[:-1])


def positions(block: bytes | memoryview) -> list[Position]:
    """Positions of the frames in ``block``, each checked with its CRC."""
    return [frame.position for frame in iter_frames(block)]


def split_frames(block: bytes | memoryview) -> list[tuple[Position, bytes]]:
    """(position, bytes) of the frames in ``block``, each checked with its CRC."""
    return [(frame.position, bytes(frame.bytes)) for frame in iter_frames(block)]


def read_from(reader: RingReader, position: Position, max_bytes: int = 1 << 20) -> bytes:
    """Everything after ``position``."""
    out = bytearray()
    ring_position = reader.find(position)
    while True:
        block, ring_position = reader.read(ring_position, max_bytes)
        if not block:
            return bytes(out)
        out += block
