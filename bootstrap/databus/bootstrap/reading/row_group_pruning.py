"""A reader's filter, and the row groups that it selects nothing of, by their footers' statistics.

A footer has the least and the greatest value of a column in each row group.  What they can
decide, and what they cannot:

* sources: a group of one table, or of tables whose numbers all lie on one side of the requested
  ones.  Groups of a busy log mix tables, and most of those are read.
* ops: a group without any requested op, such as one of inserts alone.
* ``mod:``: hashes are spread over 64 bits, so that a group of a few different keys spans all
  remainders.  It can be left out if its hashes lie closer together than there are buckets: a
  group of one row, or of one key that changed again and again.
* ``hash:``: groups and files outside of its ranges of hashes: merged runs are in the order of
  hashes, and each of their files has a range of them.
* ``range:``: never.  It is about the number that a key begins with.  The key's hash contains
  nothing about it, and bytes of keys are not in the order of their numbers.

A window's end has the source 0, the hash 0 and an op above those of rows.  So of a segment's
groups in which a window ends, only those of tables with smaller numbers can be left out.  Merged
runs have no window ends: there a filter saves most.

Clustered files have the rows of one source and one bucket of hashes: the manifest alone decides
whether a file is opened.

``/bootstrap``, ``/changes`` and ``/snapshot`` decide here.  The planners leave out groups by
position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from databus.bootstrap.runs.parquet_runs import RowGroup, RunFile
from databus.common.filters.stream_filter import (
    HashPartition,
    Mask,
    Partition,
    RangePartition,
    StreamFilter,
)
from databus.common.frame.frame_format import FIRST_CONTROL_OP, FrameColumns, Op


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """One reader's filter, applied to frames and to row groups.

    Invariants:
        I1. A group that it excludes has no frame that the filter selects.  A footer without
            statistics excludes nothing.

    Owner: one reader; it is immutable.
    """

    filter: StreamFilter
    source_ids: npt.NDArray[np.uint32]
    """As for ``StreamFilter.mask``."""
    _numbers: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", frozenset(self.source_ids.tolist()))

    def mask(self, columns: FrameColumns, block: npt.NDArray[np.uint8]) -> Mask:
        """Which frames of ``block`` are selected; see ``StreamFilter.mask``."""
        return self.filter.mask(columns, block, self.source_ids)

    def may_open(self, file: RunFile) -> bool:
        """Whether a file may have rows of the requested sources and keys, by the manifest."""
        if file.source_id is None:
            return True
        if not self.filter.takes_every_source and file.source_id not in self._numbers:
            return False
        # The first bucket has the source's truncate, which concerns every partition.
        return not file.hashes[0] or may_hold(self.filter.partition, file.hashes)

    def may_match(self, group: RowGroup) -> bool:
        """Whether the filter may select a frame of the group.

        The end of a window belongs to the frames before it, so a reader that got a part of a window
        reads on until it ends.
        """
        if not self._may_hold_source(group):
            return False
        low, high = group.ops
        if high >= FIRST_CONTROL_OP:
            return True  # control frames of a source pass the other filters
        if self.filter.ops and not any(low <= op <= high for op in self.filter.ops):
            return False
        return self._may_hold_key(group)

    def may_decide(self, group: RowGroup) -> bool:
        """Whether the group may concern the keys that the filter selects.

        For a search for the last state of a key: a change with another op still replaces one with a
        requested op, so ops decide nothing.
        """
        return self._may_hold_source(group) and self._may_hold_key(group)

    def _may_hold_source(self, group: RowGroup) -> bool:
        if self.filter.takes_every_source:
            return True
        low, high = group.source_ids
        return bool(((self.source_ids >= low) & (self.source_ids <= high)).any())

    def _may_hold_key(self, group: RowGroup) -> bool:
        low, high = group.ops
        is_cut = low <= Op.TRUNCATE <= high  # a truncate concerns every partition
        return is_cut or may_hold(self.filter.partition, group.key_hashes)


def may_hold(partition: Partition | None, key_hashes: tuple[int, int] | None) -> bool:
    """Whether a partition may have a key whose hash lies in a file's or row group's range.

    Always for ``range:``: hashes contain nothing about it.
    """
    if key_hashes is None or partition is None or isinstance(partition, RangePartition):
        return True
    low, high = key_hashes
    if isinstance(partition, HashPartition):
        if low < 0 <= high:
            return True  # as unsigned numbers the range wraps
        first, last = (partition.bucket(limit % 2**64) for limit in key_hashes)
        return any(first <= bucket <= last for bucket in partition.buckets)
    if low < 0 <= high or high - low >= partition.count:
        return True  # as unsigned numbers the range wraps, or it has every remainder
    first = low % 2**64
    return any(
        (first + step) % partition.count in partition.buckets for step in range(high - low + 1)
    )
