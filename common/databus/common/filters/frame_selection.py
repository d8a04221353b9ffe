"""Selects the frames of a block that pass a filter, window by window.

A window with such a frame retains its end, so that the reader sees it closed.  A window without
one leaves no byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from databus.common.compiled import kernels
from databus.common.filters.stream_filter import Mask, ModPartition, StreamFilter
from databus.common.frame.frame_format import FrameColumns
from databus.common.frame.header_layout import (
    END_OF_WINDOW,
    FIRST_CONTROL_OP,
    TRUNCATE,
    key_hash_of,
    op_of,
    source_of,
)


def close_windows(columns: FrameColumns, taken: Mask, *, in_window: bool) -> tuple[Mask, bool]:
    """``taken`` with the end of each window that has a taken frame.

    ``in_window``: an earlier block has a taken frame of the window in which this block begins.
    The second result is the same for the window in which this block ends.
    """
    ends = (columns.op == END_OF_WINDOW).nonzero()[0]
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


class HeaderFilter:
    """A filter that looks at headers alone, and the ends of windows, in one pass.

    It gives what ``StreamFilter.mask`` and ``close_windows`` give together, at a tenth of their
    cost for a block of a few frames.  At the tail every block is one.
    """

    def __init__(self, wanted: StreamFilter) -> None:
        """``wanted`` has no partition, or one by the remainder of the hash."""
        partition = wanted.partition
        if partition is not None and not isinstance(partition, ModPartition):
            raise TypeError(f"{partition} needs the mask of its filter")
        self._every_source = wanted.takes_every_source
        self._op_bits = sum(1 << int(op) for op in wanted.ops)
        self._modulus = 0 if partition is None else partition.count
        buckets = [] if partition is None else sorted(partition.buckets)
        self._buckets = np.array(buckets, dtype=np.int64)

    def choose(
        self,
        raw: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        source_ids: npt.NDArray[np.uint32],
        *,
        in_window: bool,
    ) -> tuple[Mask, int, bool]:
        """(which of the frames at ``offsets`` are taken, how many, ``in_window`` as it is after).

        ``source_ids`` are as for ``StreamFilter.mask``, ``in_window`` as for ``close_windows``.
        """
        mask = np.empty(len(offsets), dtype=np.bool_)
        count, in_window = _choose(
            raw, offsets, source_ids, self._every_source, self._op_bits, self._modulus,
            self._buckets, in_window, mask,
        )  # fmt: skip
        return mask, count, bool(in_window)


@kernels.jit
def _choose(
    raw: kernels.U8Array,
    offsets: kernels.I64Array,
    source_ids: npt.NDArray[np.uint32],
    every_source: bool,
    op_bits: int,
    modulus: int,
    buckets: kernels.I64Array,
    in_window: bool,
    mask: Mask,
) -> tuple[int, bool]:
    count = 0
    for index in range(len(offsets)):
        at = offsets[index]
        op = op_of(raw, at)
        if op == END_OF_WINDOW:
            take = in_window
            in_window = False
        else:
            source = source_of(raw, at)
            take = source != 0
            if take and not every_source:
                take = kernels.holds(source_ids, 0, len(source_ids), source)
            if take and op < FIRST_CONTROL_OP:
                if op_bits:
                    take = (op_bits >> op) & 1 == 1
                if take and modulus and op != TRUNCATE:
                    key_hash = key_hash_of(raw, at)
                    low = key_hash & 0xFFFFFFFF
                    if modulus & (modulus - 1):
                        high = (key_hash >> 32 & 0xFFFFFFFF) % modulus
                        bucket = (high * ((1 << 32) % modulus) + low) % modulus
                    else:
                        bucket = low & (modulus - 1)
                    take = kernels.holds(buckets, 0, len(buckets), bucket)
            in_window |= take
        mask[index] = take
        count += take
    return count, in_window


def gather(
    block: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> bytes | memoryview:
    """The frames at ``starts``, ascending, back to back; a view if they are adjacent already."""
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
    """Copy the pieces of ``block`` to ``out``; neighbours go together.

    Nothing is copied from or to beyond the two arrays.
    """
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
        if start < 0 or stop > len(block) or to + size > len(out):
            break
        kernels.copy(out, to, block, start, size)
        to += size
