"""The ring: the relay's bounded, preallocated, mmapped log of frames.

One writer process, any number of reader processes; readers map the same files and never write
to them.  Ring positions count bytes ever written and never wrap; the offset in the data area is
``position % ring_bytes``.  FORMAT.md has the layout; in reading order: ring_format.py,
ring_file.py, ring_writer.py, scn_index.py, ring_reader.py, ring_recovery.py, ring_check.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import StoreError
from databus.common.private import make_folder
from databus.relay.ring.ring_file import lock_ring, make_ring
from databus.relay.ring.ring_format import (
    EMPTY_STATE,
    MODE_BLOCK,
    MODE_OVERWRITE,
    RING_NAME,
    RingState,
    whole_pages,
)
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.ring_writer import RingWriter

__all__ = ["Ring", "RingReader", "RingState", "RingWriter"]


class Ring:
    """Creates and opens the ring in a folder."""

    @staticmethod
    def create(
        directory: Path | str,
        ring_bytes: int,
        *,
        clock: str = "",
        start: Position = ORIGIN,
        block: bool = False,
    ) -> RingWriter:
        """Make a new, empty ring that begins after ``start``, and open it for writing.

        ``ring_bytes`` is rounded up to whole pages.  With ``block`` nothing is evicted that
        has not been released.

        Raises:
            StoreError: there is a ring already, or no room on disk.
            StoreBusy: another process writes there.
        """
        folder = Path(directory)
        make_folder(folder)
        lock = lock_ring(folder)
        try:
            if (folder / RING_NAME).exists():
                raise StoreError(f"there is a ring in {folder} already; open it, or move it away")
            mode = MODE_BLOCK if block else MODE_OVERWRITE
            state = EMPTY_STATE._replace(prev=start, min=start, max=start)
            make_ring(folder / RING_NAME, whole_pages(ring_bytes), clock, mode, state)
            return RingWriter(folder, lock)
        except BaseException:
            os.close(lock)
            raise

    @staticmethod
    def open_writer(
        directory: Path | str,
        ring_bytes: int | None = None,
        *,
        clock: str | None = None,
        start: Position = ORIGIN,
        block: bool = False,
    ) -> RingWriter:
        """Open the ring for writing, in any state that a crash left; make it if it is missing.

        A ring of another size is rebuilt with the newest windows that fit.  ``start`` and
        ``block`` only matter to a new ring.

        Raises:
            StoreBusy: another process has it open for writing.
            ClockMismatch: it holds another clock's stream than ``clock``.
            StoreError: no control copy is whole, or it is missing and ring_bytes is None.
        """
        folder = Path(directory)
        if not (folder / RING_NAME).exists():
            if ring_bytes is None:
                raise StoreError(f"there is no ring in {folder}; give ring_bytes to make one")
            return Ring.create(folder, ring_bytes, clock=clock or "", start=start, block=block)
        lock = lock_ring(folder)
        try:
            writer = RingWriter(folder, lock)
        except BaseException:
            os.close(lock)
            raise
        try:
            writer.require_clock(clock)
            if ring_bytes is not None and whole_pages(ring_bytes) != writer.ring_bytes:
                writer.resize(whole_pages(ring_bytes))
        except BaseException:
            writer.close()
            raise
        return writer

    @staticmethod
    def open_reader(directory: Path | str) -> RingReader:
        """Map the ring for reading.

        Raises:
            StoreError: there is none, or it is damaged.
        """
        return RingReader(Path(directory))
