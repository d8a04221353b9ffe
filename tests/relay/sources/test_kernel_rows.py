"""Arrays of tables for a kernel: what is added is there, and little is copied."""

from __future__ import annotations

import numpy as np

from databus.relay.sources.kernel_rows import KernelRows


def test_rows_that_are_added_one_by_one_are_in_one_array() -> None:
    rows = KernelRows(3)
    for number in range(1000):
        assert rows.add([[number, -number, 7]]) == number
    assert rows.add([]) == 1000
    assert rows.add([[1, 2, 3], [4, 5, 6]]) == 1000
    expected = [[number, -number, 7] for number in range(1000)] + [[1, 2, 3], [4, 5, 6]]
    assert rows.rows.tolist() == expected
    assert rows.rows.flags.c_contiguous and rows.rows.reshape(-1).base is not None


def test_few_additions_copy_what_is_there() -> None:
    rows = KernelRows(1)
    memory = []
    for number in range(4000):
        rows.add([[number]])
        memory.append(rows.rows.__array_interface__["data"][0])
    moved = np.count_nonzero(np.diff(memory))
    assert moved <= 10
