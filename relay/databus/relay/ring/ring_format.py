"""The layout of the ring's file and of its index: fields, offsets, packing.

FORMAT.md is the specification; ``CONTROL_FIELDS``, ``STATE_FIELDS`` and ``LIVE_WORDS`` are its
tables in code.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import FormatError, ScnTooOld, StoreError

RING_NAME = "ring"
INDEX_NAME = "ring.index"
LOCK_NAME = "ring.lock"

RING_MAGIC = b"DBUSRING"
RING_VERSION = 1
PAD_MAGIC = 0xDB05FADD

CONTROL_OFFSETS = (0, 4096)
LIVE_OFFSET = 8192
SLOT_OFFSETS = (LIVE_OFFSET + 128, LIVE_OFFSET + 384)
DATA_OFFSET = 16384
PAGE_BYTES = 4096
MIN_RING_BYTES = PAGE_BYTES
MAX_FRAME_SHARE = 4
CLOCK_BYTES = 256

MAX_INDEX_ENTRIES = 16384
MIN_STEP_BYTES = 256

MODE_OVERWRITE = 0
MODE_BLOCK = 1


class RingField(NamedTuple):
    """One field; its offset is the sum of the sizes before it."""

    name: str
    code: str
    meaning: str


STATE_FIELDS: tuple[RingField, ...] = (
    RingField("head", "Q", "position of the oldest retained frame"),
    RingField("tail", "Q", "position after the last published frame"),
    RingField("synced", "Q", "position up to which the data was on disk at the last sync"),
    RingField("prev_scn", "Q", "scn of the position just before the oldest retained frame"),
    RingField("prev_seq", "Q", "its seq"),
    RingField("min_scn", "Q", "scn of the oldest retained frame; of prev if there is none"),
    RingField("min_seq", "Q", "its seq"),
    RingField("max_scn", "Q", "scn of the last published frame; of prev if there is none"),
    RingField("max_seq", "Q", "its seq"),
    RingField("min_commit_us", "q", "commit time of the oldest retained frame, 0 if none"),
    RingField("max_commit_us", "q", "commit time of the last published frame, 0 if none"),
    RingField("frames", "Q", "frames ever published"),
    RingField("windows", "Q", "end-of-window frames ever published"),
    RingField("evicted_frames", "Q", "frames ever evicted"),
    RingField("evicted_windows", "Q", "end-of-window frames ever evicted"),
)
CONTROL_FIELDS: tuple[RingField, ...] = (
    RingField("magic", "8s", "DBUSRING"),
    RingField("version", "I", "1"),
    RingField("mode", "I", "0 overwrite, 1 block"),
    RingField("sequence", "Q", "number of this copy; the larger one is newer"),
    RingField("ring_id", "Q", "random number of this ring file; the index repeats it"),
    RingField("ring_bytes", "Q", "bytes of the data area"),
    RingField("index_step_bytes", "Q", "at least this far apart are two entries of the index"),
    RingField("clock_len", "Q", "bytes of the clock identity"),
    RingField("clock", "256s", "clock identity, utf-8, zero-padded"),
    *STATE_FIELDS,
    RingField("crc", "Q", "CRC-32C of all bytes before it"),
)
LIVE_WORDS: tuple[RingField, ...] = (
    RingField("epoch", "Q", "slot epoch & 1 holds the state; stored last"),
    RingField("retired", "Q", "1: the file is about to be, or has been, replaced"),
)
SLOT_FIELDS: tuple[RingField, ...] = (
    RingField("origin", "Q", "xxh3_64 of the machine's boot and the file's inode"),
    *STATE_FIELDS,
    RingField("digest", "Q", "xxh3_64 of the epoch and all bytes before it; 0 in earlier releases"),
)
INDEX_FIELDS: tuple[RingField, ...] = (
    RingField("magic", "8s", "DBUSINDX"),
    RingField("version", "I", "1"),
    RingField("fanout", "I", "a lane has every fanout-th entry of the one below"),
    RingField("ring_id", "Q", "the ring that it belongs to"),
    RingField("ring_bytes", "Q", "bytes of that ring's data area"),
    RingField("step_bytes", "Q", "at least this far apart are two entries"),
    RingField("lanes", "Q", "number of lanes, at least 1"),
    RingField("crc", "Q", "CRC-32C of all bytes before it"),
)


def layout(fields: tuple[RingField, ...]) -> struct.Struct:
    """The little-endian struct of a table of fields."""
    return struct.Struct("<" + "".join(field.code for field in fields))


def offsets(fields: tuple[RingField, ...]) -> dict[str, int]:
    """Offset of each field from the start of its table."""
    return {
        field.name: struct.calcsize("<" + "".join(f.code for f in fields[:at]))
        for at, field in enumerate(fields)
    }


STATE = layout(STATE_FIELDS)
CONTROL = layout(CONTROL_FIELDS)
SLOT = layout(SLOT_FIELDS)
PAD = struct.Struct("<II")


class RingState(NamedTuple):
    """What the ring holds at one moment.

    ``head``, ``tail`` and ``synced`` are ring positions: bytes ever written, never wrapping.
    ``prev`` is the position just before the oldest retained frame, ``min`` that frame's and
    ``max`` the last published frame's; in an empty ring all three are equal.
    """

    head: int
    tail: int
    synced: int
    prev: Position
    min: Position
    max: Position
    min_commit_us: int
    max_commit_us: int
    frames: int
    windows: int
    evicted_frames: int
    evicted_windows: int

    @property
    def is_empty(self) -> bool:
        return self.head == self.tail

    def too_old(self, message: str, **details: Any) -> ScnTooOld:
        """The refusal of a reader at a position before ``prev``, with the served range."""
        return ScnTooOld(
            f"{message}; a bootstrap is needed",
            prev=self.prev.to_json(),
            min=self.min.to_json(),
            max=self.max.to_json(),
            **details,
        )


EMPTY_STATE = RingState(0, 0, 0, ORIGIN, ORIGIN, ORIGIN, 0, 0, 0, 0, 0, 0)


def flatten(state: RingState) -> tuple[int, ...]:
    """The values of ``STATE_FIELDS``."""
    return (*state[:3], *state.prev, *state.min, *state.max, *state[6:])


def unflatten(values: tuple[int, ...]) -> RingState:
    """The state with the values of ``STATE_FIELDS``."""
    head, tail, synced, prev_scn, prev_seq, min_scn, min_seq, max_scn, max_seq = values[:9]
    min_commit_us, max_commit_us, frames, windows, evicted_frames, evicted_windows = values[9:]
    return RingState(
        head,
        tail,
        synced,
        Position(prev_scn, prev_seq),
        Position(min_scn, min_seq),
        Position(max_scn, max_seq),
        min_commit_us,
        max_commit_us,
        frames,
        windows,
        evicted_frames,
        evicted_windows,
    )


class Control(NamedTuple):
    """One copy of the control page: what the ring is, and its state at the last sync."""

    mode: int
    sequence: int
    ring_id: int
    ring_bytes: int
    index_step_bytes: int
    clock: str
    state: RingState


def pack_control(control: Control) -> bytes:
    """The bytes of a control copy."""
    clock = control.clock.encode()
    if len(clock) > CLOCK_BYTES:
        raise StoreError(f"the clock identity has {len(clock)} bytes, at most {CLOCK_BYTES} fit")
    body = CONTROL.pack(
        RING_MAGIC,
        RING_VERSION,
        control.mode,
        control.sequence,
        control.ring_id,
        control.ring_bytes,
        control.index_step_bytes,
        len(clock),
        clock,
        *flatten(control.state),
        0,
    )[:-8]
    return body + struct.pack("<Q", google_crc32c.value(body))


def unpack_control(page: bytes, path: Path) -> Control | None:
    """The control copy in ``page``, or None if it is damaged.

    Raises:
        FormatError: the copy is whole, and of a version that this program does not read.
    """
    body = page[: CONTROL.size]
    if len(body) < CONTROL.size or body[:8] != RING_MAGIC:
        return None
    values = CONTROL.unpack(body)
    if values[-1] != google_crc32c.value(body[:-8]):
        return None
    if values[1] != RING_VERSION:
        raise FormatError(
            f"{path} is a ring of version {values[1]}; this program reads {RING_VERSION}"
        )
    _, _, mode, sequence, ring_id, ring_bytes, index_step_bytes, clock_len, clock = values[:9]
    return Control(
        mode,
        sequence,
        ring_id,
        ring_bytes,
        index_step_bytes,
        clock[:clock_len].decode(),
        unflatten(values[9:-1]),
    )


def whole_pages(ring_bytes: int) -> int:
    """``ring_bytes`` in whole pages."""
    if ring_bytes < MIN_RING_BYTES:
        raise StoreError(f"ring_bytes={ring_bytes} is less than the smallest, {MIN_RING_BYTES}")
    return -(-ring_bytes // PAGE_BYTES) * PAGE_BYTES


def largest_frame_bytes(ring_bytes: int) -> int:
    """How large a frame may be, in a ring that was made with this size."""
    return whole_pages(ring_bytes) // MAX_FRAME_SHARE


def step_bytes(ring_bytes: int) -> int:
    """Distance of index entries for a ring of this size: at most MAX_INDEX_ENTRIES of them."""
    return max(MIN_STEP_BYTES, -(-ring_bytes // MAX_INDEX_ENTRIES) + 7 & ~7)
