"""A disk that forgets: a ring's file with what was not synced dropped or torn, sector by sector.

The ring's writer runs on a real file; what would have been on the medium at each moment is
known from the moments at which it called ``flush``.  A sector that was written since the last
flush that returned may be there, or not, each on its own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Self

import pytest

from databus.relay.ring.ring_file import RingFile

SECTOR_BYTES = 512


class TornStorage:
    """Watches the flushes of one ring's file; ``crash`` gives it as a power loss leaves it.

    Invariants:
        I1. ``_safe`` is what was in the file when the last flush that has returned began.
    """

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.flush_count = 0
        self._patch = patch
        self._safe = b""
        self._cut_at: int | None = None
        self._cut_image: bytes | None = None
        self._rng = random.Random(0)

    def __enter__(self) -> Self:
        flush = RingFile.flush

        def watched(file: RingFile) -> None:
            if file.path == self.path:
                self._flushing()
            flush(file)

        self._patch.setattr(RingFile, "flush", watched)
        self._safe = self.path.read_bytes()
        return self

    def _flushing(self) -> None:
        now = self.path.read_bytes()
        if self.flush_count == self._cut_at:
            self._cut_image = self._torn(now)
        self._safe = now
        self.flush_count += 1

    def cut_power_in_flush(self, number: int, rng: random.Random) -> None:
        """The power goes while the flush with this number, counted from 0, is under way."""
        self._cut_at, self._rng = number, rng

    @property
    def is_cut(self) -> bool:
        """Whether the power has gone."""
        return self._cut_image is not None

    def crash(self, rng: random.Random) -> bytes:
        """The file after the power loss that was ordered, or after one that comes now."""
        self._rng = rng
        return self._cut_image or self._torn(self.path.read_bytes())

    def _torn(self, now: bytes) -> bytes:
        share = self._rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        sectors = []
        for at in range(0, len(now), SECTOR_BYTES):
            retained = now if self._rng.random() < share else self._safe
            sectors.append(retained[at : at + SECTOR_BYTES])
        return b"".join(sectors)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
