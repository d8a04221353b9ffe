"""Rows of numbers that a kernel reads, in arrays with room for more.

A source adds a table when its first row comes.  To make the arrays of all tables again each time
would cost a database of thousands of tables minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from databus.common.compiled.kernels import I64Array


class KernelRows:
    """Rows of ``width`` numbers each.

    Invariants:
        I1. ``rows`` are all rows that were added, in one piece of memory.
        I2. n additions of one row copy at most 2n rows.

    Owner: the thread that reads the source.
    """

    def __init__(self, width: int) -> None:
        self._room: I64Array = np.zeros((8, width), dtype=np.int64)
        self._count = 0

    @property
    def rows(self) -> I64Array:
        """The rows; another array after an addition."""
        found: I64Array = self._room[: self._count]
        return found

    def add(self, rows: Sequence[Sequence[int]]) -> int:
        """Append rows; the number of the first one."""
        first, self._count = self._count, self._count + len(rows)
        if self._count > len(self._room):
            grown = np.zeros((2 * self._count, self._room.shape[1]), dtype=np.int64)
            grown[:first] = self._room[:first]
            self._room = grown
        if rows:
            self._room[first : self._count] = rows
        return first
