"""Blocks of the ring that several readers of one worker need at the same moment.

Every commit wakes all followers, and all are at the same position: the first reads and copies,
the others get its copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from databus.common.checkpoint import Position
from databus.common.frame.frame_format import FIRST_CONTROL_OP, FrameColumns, scan, trusted_frame
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_reader import RingReader

MAX_BLOCKS = 4


class BlockFacts(NamedTuple):
    """What readers of a block need: its frames, the last of them, how many are rows."""

    columns: FrameColumns
    last: Position
    commit_us: int
    row_count: int


class SharedReads:
    """``RingReader.read`` with a cache of the last results.

    Invariants:
        I1. A result is returned again only while nothing has been published or evicted since its
            read, so that a new read would give the same.
        I2. At most ``MAX_BLOCKS`` blocks are cached.

    Owner: one worker's event loop.
    Raises: as ``RingReader.read``.
    """

    def __init__(self) -> None:
        self.read_count = 0
        self._answers: dict[tuple[int, int], tuple[memoryview, int]] = {}
        self._facts: dict[int, tuple[memoryview, BlockFacts]] = {}
        self._epoch = -1
        self._file: RingFile | None = None

    def read(self, ring: RingReader, position: int, max_bytes: int) -> tuple[memoryview, int]:
        """Whole frames from ring ``position`` on and the position after them."""
        file = ring.file
        epoch = file.epoch
        if epoch != self._epoch or file is not self._file or file.retired:
            self._answers.clear()
            self._facts.clear()
            self._epoch, self._file = epoch, file
        answer = self._answers.get((position, max_bytes))
        if answer is None:
            answer = ring.read(position, max_bytes)
            self.read_count += 1
            if ring.file is file and file.epoch == epoch and len(self._answers) < MAX_BLOCKS:
                self._answers[position, max_bytes] = answer
        return answer

    def facts(self, block: memoryview) -> BlockFacts:
        """The facts about a block of ``read``, looked up once for all readers that get it."""
        known = self._facts.get(id(block))
        if known is not None and known[0] is block:
            return known[1]
        columns = scan(block, verify=False)
        frame = trusted_frame(block, int(columns.offset[-1]))
        row_count = int(np.count_nonzero(columns.op < FIRST_CONTROL_OP))
        facts = BlockFacts(columns, frame.position, frame.commit_us, row_count)
        if len(self._facts) >= MAX_BLOCKS:
            self._facts.clear()
        self._facts[id(block)] = block, facts
        return facts
