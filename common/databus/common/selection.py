"""Cutting the frames that a reader wants out of a block, window by window.

A window of which anything is taken keeps its end, so that the reader sees it closed; a window
of which nothing is taken leaves no byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from databus.common import kernels
from databus.common.filters import Mask
from databus.common.frame import FrameColumns, Op

_END = int(Op.END_OF_WINDOW)  # a plain number: comparing with an enum's member is slow


def close_windows(columns: FrameColumns, taken: Mask, *, in_window: bool) -> tuple[Mask, bool]:
    """``taken`` with the end of each window of which a frame is taken.

    ``in_window`` says that the window in which the block begins has been taken from before;
    the same is returned for the window in which the block ends.
    """
    ends = (columns.op == _END).nonzero()[0]
    if not len(ends):
        return taken, in_window or bool(taken.any())
    counts = taken.cumsum()
    until_end = counts[ends]
    wanted = until_end > 0
    wanted[1:] = until_end[1:] > until_end[:-1]
    wanted[0] |= in_window
    mask = taken.copy()
    mask[ends] = wanted
    return mask, bool(counts[-1] > until_end[-1])


def gather(
    block: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> bytes | memoryview:
    """The frames at ``starts``, ascending, back to back; a view where they lie so already."""
    total = int(lengths.sum())
    if not total:
        return b""
    first = int(starts[0])
    if int(starts[-1] + lengths[-1]) - first == total:
        return block[first : first + total].data
    return copy_of(block, starts, lengths)


def copy_of(
    block: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> memoryview:
    """The frames at ``starts``, ascending, back to back, in memory of their own."""
    out = np.empty(int(lengths.sum()), dtype=np.uint8)
    _copy(block, starts, lengths, out)
    return out.data


@kernels.jit
def _copy(
    block: kernels.U8Array,
    starts: kernels.I64Array,
    lengths: kernels.I64Array,
    out: kernels.U8Array,
) -> None:
    """Copy the pieces of ``block`` to ``out``; neighbours go together."""
    to = 0
    index = 0
    count = len(starts)
    while index < count:
        start = starts[index]
        stop = start + lengths[index]
        index += 1
        while index < count and starts[index] == stop:
            stop += lengths[index]
            index += 1
        size = stop - start
        out[to : to + size] = block[start:stop]
        to += size
