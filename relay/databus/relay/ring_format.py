"""The ring's file: where everything lies in it, and how its shared fields are read and written.

FORMAT.md is the specification, ``CONTROL_FIELDS``, ``STATE_FIELDS`` and ``LIVE_WORDS`` are its
tables in code.  What is not here: what the frames mean, and when anything may be overwritten.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np
import xxhash

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import FormatError, StoreError
from databus.common.kernels import U8Array

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
CLOCK_BYTES = 256

MODE_OVERWRITE = 0
MODE_BLOCK = 1


class Field(NamedTuple):
    """One field; its place is the sum of those before it."""

    name: str
    code: str
    meaning: str


STATE_FIELDS: tuple[Field, ...] = (
    Field("head", "Q", "position of the oldest retained frame"),
    Field("tail", "Q", "position after the last published frame"),
    Field("synced", "Q", "position up to which the data was on disk at the last sync"),
    Field("prev_scn", "Q", "scn of the position just before the oldest retained frame"),
    Field("prev_seq", "Q", "its seq"),
    Field("min_scn", "Q", "scn of the oldest retained frame; of prev if there is none"),
    Field("min_seq", "Q", "its seq"),
    Field("max_scn", "Q", "scn of the last published frame; of prev if there is none"),
    Field("max_seq", "Q", "its seq"),
    Field("min_commit_us", "q", "commit time of the oldest retained frame, 0 if none"),
    Field("max_commit_us", "q", "commit time of the last published frame, 0 if none"),
    Field("frames", "Q", "frames ever published"),
    Field("windows", "Q", "end-of-window frames ever published"),
    Field("evicted_frames", "Q", "frames ever evicted"),
    Field("evicted_windows", "Q", "end-of-window frames ever evicted"),
)
CONTROL_FIELDS: tuple[Field, ...] = (
    Field("magic", "8s", "DBUSRING"),
    Field("version", "I", "1"),
    Field("mode", "I", "0 overwrite, 1 block"),
    Field("sequence", "Q", "number of this copy; the larger one is newer"),
    Field("ring_id", "Q", "random number of this ring file; the index repeats it"),
    Field("ring_bytes", "Q", "bytes of the data area"),
    Field("index_step_bytes", "Q", "at least this far apart are two entries of the index"),
    Field("clock_len", "Q", "bytes of the clock identity"),
    Field("clock", "256s", "clock identity, utf-8, zero-padded"),
    *STATE_FIELDS,
    Field("crc", "Q", "CRC-32C of all bytes before it"),
)
LIVE_WORDS: tuple[Field, ...] = (
    Field("epoch", "Q", "slot epoch & 1 holds the state; stored last"),
    Field("retired", "Q", "1: the file is about to be, or has been, replaced"),
)
SLOT_FIELDS: tuple[Field, ...] = (
    Field("origin", "Q", "xxh3_64 of the machine's boot and the file's inode"),
    *STATE_FIELDS,
)
INDEX_FIELDS: tuple[Field, ...] = (
    Field("magic", "8s", "DBUSINDX"),
    Field("version", "I", "1"),
    Field("fanout", "I", "a lane has every fanout-th entry of the one below"),
    Field("ring_id", "Q", "the ring that it belongs to"),
    Field("ring_bytes", "Q", "bytes of that ring's data area"),
    Field("step_bytes", "Q", "at least this far apart are two entries"),
    Field("lanes", "Q", "number of lanes, at least 1"),
    Field("crc", "Q", "CRC-32C of all bytes before it"),
)


def layout(fields: tuple[Field, ...]) -> struct.Struct:
    """The little-endian struct of a table of fields."""
    return struct.Struct("<" + "".join(field.code for field in fields))


def offsets(fields: tuple[Field, ...]) -> dict[str, int]:
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
    """What the ring holds, at one moment.

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


def _boot_identity() -> str:
    """Names the running kernel: memory shared through files lives as long as it does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class RingFile:
    """The ring's file, mapped: its data area, control copies and live fields.

    Invariants:
        I1. ``epoch`` names the slot that holds the state; the other one may be half-written.
        I2. Epoch and state only change together, by ``publish``: fill the other slot, fence,
            store the epoch.  A process killed in between leaves the old state standing.
        I3. Of the two control copies at least one is whole at any time.

    Owner: one writer process; readers map it read-only.
    Durability: ``publish`` outlives the process, ``write_control`` and ``flush`` the machine.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            status = os.fstat(fd)
            self.inode = (status.st_dev, status.st_ino)
            if status.st_size <= DATA_OFFSET:
                raise StoreError(f"{path} has {status.st_size} bytes and is no ring; move it away")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self.map = mmap.mmap(fd, status.st_size, access=access)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.view = memoryview(self.map)
        self._words = self.view[LIVE_OFFSET : LIVE_OFFSET + 16].cast("Q")
        self._lock = threading.Lock()
        whole = np.frombuffer(self.map, dtype=np.uint8)
        whole.flags.writeable = False
        self.data: U8Array = whole[DATA_OFFSET:]
        self.data_bytes = status.st_size - DATA_OFFSET
        boot = _boot_identity()
        origin = f"{boot} {self.inode[0]} {self.inode[1]}" if boot else ""
        self.origin = xxhash.xxh3_64_intdigest(origin.encode()) if origin else 0

    def close(self) -> None:
        """Unmap the file; views of it must be gone."""
        self.data = np.empty(0, dtype=np.uint8)
        self._words.release()
        self.view.release()
        self.map.close()
        os.close(self.fd)

    def fence(self) -> None:
        """Order the stores and loads before it with those after it, on any processor.

        Each lock operation is an atomic instruction: on x86 one drains the store buffer, on
        ARM the release of the first pair is ordered before the acquire of the second.
        """
        lock = self._lock
        lock.acquire()
        lock.release()
        lock.acquire()
        lock.release()

    # -- live fields --

    def publish(self, state: RingState) -> None:
        """Make ``state`` the one that readers see."""
        epoch = self._words[0] + 1 & 0xFFFFFFFFFFFFFFFF
        SLOT.pack_into(self.map, SLOT_OFFSETS[epoch & 1], self.origin, *flatten(state))
        self.fence()
        self._words[0] = epoch
        self.fence()

    def snapshot(self) -> RingState:
        """The state at one moment between the call and its return."""
        return unflatten(self._slot()[1:])

    def live_state(self) -> RingState | None:
        """The live state, or None if another boot, or another file copied here, wrote it."""
        values = self._slot()
        return unflatten(values[1:]) if self.origin and values[0] == self.origin else None

    def _slot(self) -> tuple[int, ...]:
        while True:
            epoch = self._words[0]
            self.fence()
            values = SLOT.unpack_from(self.map, SLOT_OFFSETS[epoch & 1])
            self.fence()
            if self._words[0] == epoch:
                return values

    @property
    def epoch(self) -> int:
        """Grows whenever the state has changed."""
        return self._words[0]

    @property
    def retired(self) -> bool:
        """Whether the writer replaces, or has replaced, the file by another."""
        return self._words[1] != 0

    def set_retired(self, retired: bool) -> None:
        """Tell the readers to look for another file at the path."""
        self._words[1] = int(retired)

    # -- control copies --

    def read_controls(self) -> tuple[Control | None, Control | None]:
        """Both control copies, None where one is damaged."""
        first, second = (
            unpack_control(bytes(self.view[at : at + CONTROL.size]), self.path)
            for at in CONTROL_OFFSETS
        )
        return first, second

    def newest_control(self) -> Control:
        """The newer whole control copy.

        Raises:
            StoreError: both are damaged.
        """
        copies = [copy for copy in self.read_controls() if copy is not None]
        if not copies:
            raise StoreError(
                f"both control copies of {self.path} are damaged; move the ring's folder away "
                f"to begin with an empty ring"
            )
        return max(copies, key=lambda copy: copy.sequence)

    def write_control(self, control: Control) -> None:
        """Write the copy that ``control.sequence`` chooses, and put it on disk."""
        at = CONTROL_OFFSETS[control.sequence & 1]
        self.view[at : at + CONTROL.size] = pack_control(control)
        self.flush()

    def flush(self) -> None:
        """Put everything that has been written to the mapped file on disk."""
        os.fdatasync(self.fd)

    # -- data area --

    def write(self, position: int, block: memoryview) -> None:
        """Copy ``block`` to ``position``; it does not reach past the end of the lap."""
        at = DATA_OFFSET + position % self.data_bytes
        self.view[at : at + len(block)] = block

    def write_pad(self, position: int) -> int:
        """Mark the rest of the lap from ``position`` on as empty; return its bytes."""
        pad_bytes = self.data_bytes - position % self.data_bytes
        at = DATA_OFFSET + position % self.data_bytes
        PAD.pack_into(self.map, at, PAD_MAGIC, pad_bytes | 1)
        return pad_bytes

    def write_stop(self, position: int) -> None:
        """Make sure that what lies at ``position`` is not taken for a frame."""
        PAD.pack_into(self.map, DATA_OFFSET + position % self.data_bytes, 0, 0)

    def copy(self, position: int, size: int) -> bytes:
        """A copy of ``size`` bytes at ``position``, all in one lap."""
        at = DATA_OFFSET + position % self.data_bytes
        return self.map[at : at + size]


def make_file(path: Path, size: int) -> None:
    """Create a file of zeros with all its blocks allocated, so that no store can fail later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise StoreError(f"{path} cannot get {size} bytes on disk: {error.strerror}") from error
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    """Put the names in ``directory`` on disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
