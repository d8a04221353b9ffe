"""The ring's file, mapped: reads and writes its shared fields and its data area.

It does not interpret frames, and does not decide what may be overwritten.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from pathlib import Path

import numpy as np
import xxhash

from databus.common.compiled.kernels import U8Array
from databus.common.errors import FormatError, StoreError, SyncFailed
from databus.common.storage.durable_files import sync_path
from databus.relay.ring.folder_locks import take_lock
from databus.relay.ring.ring_format import (
    CONTROL,
    CONTROL_OFFSETS,
    DATA_OFFSET,
    LIVE_OFFSET,
    LOCK_NAME,
    PAD,
    PAD_MAGIC,
    PAGE_BYTES,
    SLOT,
    SLOT_OFFSETS,
    Control,
    RingState,
    flatten,
    pack_control,
    step_bytes,
    unflatten,
    unpack_control,
)

REWRITE_BYTES = 1 << 20
_DIGEST = struct.Struct("<Q")
_DIGEST_AT = SLOT.size - _DIGEST.size


def _boot_identity() -> str:
    """Identifies the running kernel: memory shared through files lives as long as it does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class RingFile:
    """The ring's file, mapped: its data area, control copies and live fields.

    Invariants:
        I1. ``epoch`` names the slot that holds the state; the other one may be half-written.
        I2. Epoch and state only change together, by ``publish``: fill the other slot, fence,
            store the epoch.  A process killed in between leaves the old state valid.
        I3. Of the two control copies at least one is whole at any time.

    Owner: one writer process; readers map it read-only.
    Durability: ``publish`` outlives the process, ``write_control`` and ``flush`` the machine.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            self.inode = (status.st_dev, status.st_ino)
            if status.st_size <= DATA_OFFSET or status.st_size % PAGE_BYTES:
                raise StoreError(
                    f"{path} has {status.st_size} bytes and is no ring, or was cut: a ring has "
                    f"whole pages of {PAGE_BYTES} bytes, more than {DATA_OFFSET}; move it away"
                )
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self.map = mmap.mmap(fd, status.st_size, access=access)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.view = memoryview(self.map)
        self._words = self.view[LIVE_OFFSET : LIVE_OFFSET + 16].cast("Q")
        self._lock = threading.Lock()
        self._hold_lock = threading.Lock()
        self._hold_count = 0
        self._is_closed = False
        self.changeable: U8Array = np.frombuffer(self.map, dtype=np.uint8)[DATA_OFFSET:]
        """The data area, which the writer may change."""
        self.data: U8Array = self.changeable[:]
        """The same data area, read-only."""
        self.data.flags.writeable = False
        self.data_bytes = status.st_size - DATA_OFFSET
        boot = _boot_identity()
        origin = f"{boot} {self.inode[0]} {self.inode[1]}" if boot else ""
        self.origin = xxhash.xxh3_64_intdigest(origin.encode()) if origin else 0

    def hold(self) -> bool:
        """Hold the file mapped until ``release``, from any thread; False if it is closed."""
        with self._hold_lock:
            self._hold_count += not self._is_closed
            return not self._is_closed

    def release(self) -> None:
        """The end of a ``hold``; views that were made meanwhile must be gone."""
        with self._hold_lock:
            self._hold_count -= 1
            is_last = self._is_closed and not self._hold_count
        if is_last:
            self._unmap()

    def close(self) -> None:
        """Unmap the file once no holder is left; views of it must be gone."""
        with self._hold_lock:
            self._is_closed = True
            is_held = self._hold_count > 0
        if not is_held:
            self._unmap()

    def _unmap(self) -> None:
        self.data = self.changeable = np.empty(0, dtype=np.uint8)
        self._words.release()
        self.view.release()
        self.map.close()
        os.close(self.fd)

    def require_in_place(self) -> None:
        """Check that the mapped file is still the one at its path, and as long as it was.

        Raises:
            StoreError: it was moved away, deleted, replaced or cut.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise StoreError(
                f"{self.path} was moved away or deleted while it was open ({error.strerror}); "
                f"leave the folders of a running relay where they are"
            ) from error
        if (status.st_dev, status.st_ino) != self.inode:
            raise StoreError(
                f"{self.path} was replaced by another file while it was open; stop the relay "
                f"before you restore a copy"
            )
        if status.st_size != DATA_OFFSET + self.data_bytes:
            raise StoreError(
                f"{self.path} was cut to {status.st_size} bytes while it was open; it had "
                f"{DATA_OFFSET + self.data_bytes}"
            )

    def fence(self) -> None:
        """Order the stores and loads before it with those after it, on any processor.

        Each lock operation is an atomic instruction: on x86 one drains the store buffer, on
        ARM the release of the first pair is ordered before the acquire of the second.  The
        argument, and the test that tries every reordering: docs/decisions/0019.
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
        at = SLOT_OFFSETS[epoch & 1]
        SLOT.pack_into(self.map, at, self.origin, *flatten(state), 0)
        _DIGEST.pack_into(self.map, at + _DIGEST_AT, self._digest(epoch))
        self.fence()
        self._words[0] = epoch
        self.fence()

    def snapshot(self) -> RingState:
        """The state at one moment between the call and its return.

        Raises:
            FormatError: the live page is damaged.
        """
        epoch, values = self._slot()
        if values is None:
            at = SLOT_OFFSETS[epoch & 1]
            raise FormatError(
                f"{self.path} is damaged in its live page: slot {epoch & 1} at offset {at} of the "
                f"file has another digest than its fields and the epoch {epoch} at offset "
                f"{LIVE_OFFSET}; restart the relay"
            )
        return unflatten(values[1:-1])

    def live_state(self) -> RingState | None:
        """The live state; None if another boot wrote it, or another file that was copied here.

        A state that is impossible, because it was damaged, counts as none.
        """
        values = self._slot()[1]
        if values is None or not self.origin or values[0] != self.origin:
            return None
        state = unflatten(values[1:-1])
        return state if 0 <= state.tail - state.head <= self.data_bytes else None

    @property
    def has_damaged_state(self) -> bool:
        """Whether readers of this boot may have seen a state that cannot be read any more."""
        origins = [SLOT.unpack_from(self.map, at)[0] for at in SLOT_OFFSETS]
        return self._slot()[1] is None and self.origin in origins

    @property
    def is_live(self) -> bool:
        """Whether a writer of this boot has opened the file, as far as can be known."""
        return not self.origin or self.live_state() is not None

    def _slot(self) -> tuple[int, tuple[int, ...] | None]:
        """(the epoch, the fields of its slot; None if they are damaged)."""
        while True:
            epoch = self._words[0]
            self.fence()
            values = SLOT.unpack_from(self.map, SLOT_OFFSETS[epoch & 1])
            digest = self._digest(epoch)
            self.fence()
            if self._words[0] == epoch:
                return epoch, values if values[-1] in (0, digest) else None

    def _digest(self, epoch: int) -> int:
        """The digest that the slot of ``epoch`` must end with."""
        at = SLOT_OFFSETS[epoch & 1]
        digest = xxhash.xxh3_64_intdigest(self.view[at : at + _DIGEST_AT], epoch)
        return digest or 1

    @property
    def epoch(self) -> int:
        """Grows whenever the state has changed."""
        return self._words[0]

    @property
    def retired(self) -> bool:
        """Whether the writer replaces, or has replaced, the file by another."""
        return self._words[1] != 0

    def set_retired(self, retired: bool) -> None:
        """Make the readers look for another file at the path."""
        self._words[1] = int(retired)

    # -- control copies --

    def read_controls(self) -> tuple[Control | None, Control | None]:
        """Both control copies, None for a damaged one."""
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
        """Write the copy that ``control.sequence`` selects, and sync it to disk."""
        at = CONTROL_OFFSETS[control.sequence & 1]
        self.view[at : at + CONTROL.size] = pack_control(control)
        self.flush()

    def flush(self) -> None:
        """Sync everything that was written to the mapped file to disk.

        Raises:
            SyncFailed: the disk refused.  The kernel reports that once and then treats the pages as
                written: a later flush does not cover them.
        """
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise SyncFailed(
                f"{self.path} could not be written to disk: {error.strerror}; nothing after its "
                f"last sync is acknowledged"
            ) from error

    # -- data area --

    def file_offset(self, position: int) -> int:
        """The file offset of a ring position."""
        return DATA_OFFSET + position % self.data_bytes

    def write(self, position: int, block: memoryview) -> None:
        """Copy ``block`` to ``position``; it does not reach past the end of the lap."""
        at = self.file_offset(position)
        self.view[at : at + len(block)] = block

    def rewrite(self, position: int, stop: int) -> None:
        """Write the bytes in [position, stop) once more, so that the next flush writes them too.

        After a flush that failed, the kernel treats pages as written that are not on disk.
        """
        while position < stop:
            at = self.file_offset(position)
            size = min(stop - position, self.data_bytes - position % self.data_bytes, REWRITE_BYTES)
            self.view[at : at + size] = bytes(self.view[at : at + size])
            position += size

    def write_pad(self, position: int) -> int:
        """Mark the rest of the lap from ``position`` on as empty; returns its bytes.

        It is filled with zeros, so that a search for frames after damage finds no frame of an
        older lap in it.
        """
        pad_bytes = self.data_bytes - position % self.data_bytes
        self.write(position, memoryview(PAD.pack(PAD_MAGIC, pad_bytes | 1).ljust(pad_bytes, b"\0")))
        return pad_bytes

    def write_stop(self, position: int) -> None:
        """Make the bytes at ``position`` no frame."""
        PAD.pack_into(self.map, self.file_offset(position), 0, 0)

    def damage(self, position: int, found: bytes | None = None) -> FormatError:
        """The error for a ring position that has neither a frame nor the lap's pad.

        ``found`` is what a copy of these bytes holds, if a copy was examined.
        """
        lap_rest = self.data_bytes - position % self.data_bytes
        got = self.copy(position, min(24, lap_rest)) if found is None else found[:24]
        pad = PAD.pack(PAD_MAGIC, lap_rest | 1).hex()
        return FormatError(
            f"{self.path} is damaged at ring position {position}, offset "
            f"{self.file_offset(position)} of the file: expected a frame, whose length is that of "
            f"its parts and whose CRC is right, or the pad {pad} of the {lap_rest} bytes up to the "
            f"lap's end, got {got.hex()}; check the file by databus inspect ring"
        )

    def copy(self, position: int, size: int) -> bytes:
        """A copy of ``size`` bytes at ``position``, all in one lap."""
        at = self.file_offset(position)
        return self.map[at : at + size]


def make_file(path: Path, size: int) -> None:
    """Create a file of zeros with all its blocks allocated, so that no store can fail later.

    Raises:
        StoreError: the disk has too little room; allocated blocks are freed.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            path.unlink()
            free = os.statvfs(path.parent)
            raise StoreError(
                f"{path} cannot get {size} bytes on disk: {error.strerror} (free are "
                f"{free.f_bavail * free.f_frsize}); lower ring_bytes, or free some"
            ) from error
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    """Sync the names in ``directory`` to disk."""
    try:
        sync_path(directory)
    except OSError as error:
        raise SyncFailed(f"{directory} could not be written to disk: {error.strerror}") from error


def make_ring(path: Path, ring_bytes: int, clock: str, mode: int, state: RingState) -> None:
    """Write a ring file with both control copies, and rename it once it is whole."""
    unfinished = path.with_suffix(".unfinished")
    make_file(unfinished, DATA_OFFSET + ring_bytes)
    file = RingFile(unfinished, writable=True)
    try:
        control = Control(
            mode, 0, secrets.randbits(64), ring_bytes, step_bytes(ring_bytes), clock, state
        )
        file.publish(state)
        file.write_control(control)
        file.write_control(control._replace(sequence=1))
    finally:
        file.close()
    unfinished.replace(path)
    sync_directory(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove the leftovers of an interrupted replacement."""
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def lock_ring(folder: Path) -> int:
    """Take the writer's lock of a ring; see ``take_lock``."""
    return take_lock(folder / LOCK_NAME, f"the ring in {folder}")
