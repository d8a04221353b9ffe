"""Plans the reading of splits: requests them, and the changes after their files.

These changes are requested once for a table, and go with the splits: as a rule they are few.  If
they are many, each reader requests its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from databus.client.splits.bucket_merge import bucket_range
from databus.client.splits.split_plan import Split, SplitPlan
from databus.client.tables.table_reader import BatchSpool, Range, TableReader
from databus.common.checkpoint import Position
from databus.common.errors import ClockMismatch
from databus.common.filters.frame_selection import gather
from databus.common.frame.frame_format import Op

TAIL_BYTES = 64 << 20
"""Changes of a table after its files, at most, that are sent with its splits."""


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """A split with everything that a reader of it needs.

    ``range`` has the same rows at the servers.  ``tail`` has the frames after the files; None: the
    reader requests them, ``tail_range``.  ``cut`` is the position of the last TRUNCATE in it.
    """

    split: Split
    range: Range
    storage: Mapping[str, str]
    lease: str
    lease_s: float
    tail_range: Range
    tail: bytes | None
    cut: Position | None


def planned_splits(
    reader: TableReader, requested: Range, least: int, tail_bytes: int = TAIL_BYTES
) -> list[PlannedSplit]:
    """The splits of a state or of net changes; none if the store has no files of them.

    Raises:
        DatabusError: of the request; ClockMismatch.
    """
    query = {"sources": reader.address.source, "least": str(least)}
    if requested.mode == "state":
        query["scn"] = str(requested.until)
    else:
        query["until"] = str(requested.until)
        if requested.since is not None:
            query["since"] = str(requested.since)
    plan = SplitPlan.from_json(reader.document("splits", query))
    if plan.clock != requested.clock:
        raise ClockMismatch(f"the range belongs to the clock {requested.clock}, not {plan.clock}")
    by_source: dict[str, list[Split]] = {}
    for split in plan.splits:
        by_source.setdefault(split.source, []).append(split)
    own = replace(requested, since=plan.since, until=plan.until)
    found: list[PlannedSplit] = []
    for source, splits in by_source.items():
        table = TableReader(replace(reader.address, source=source))
        found += _with_tails(table, plan, own, splits, tail_bytes)
    return found


def _with_tails(
    reader: TableReader, plan: SplitPlan, own: Range, splits: Sequence[Split], tail_bytes: int
) -> Iterator[PlannedSplit]:
    """The splits of one table with the changes after their files."""
    whole = Range("net", plan.files_end, plan.until, plan.clock)
    tails: list[bytes] | None = [b""] * len(splits)
    cut: Position | None = None
    if plan.files_end < plan.until:
        with contextlib.closing(reader.frames(whole)) as spool:
            tails, cut = _divided(spool, splits) if spool.size <= tail_bytes else (None, None)
    for number, split in enumerate(splits):
        partition = split.partition
        yield PlannedSplit(
            split=split,
            range=replace(own, partition=partition, truncates=split.is_first),
            storage=plan.storage,
            lease=plan.lease,
            lease_s=plan.lease_s,
            tail_range=replace(whole, partition=partition),
            tail=None if tails is None else tails[number],
            cut=cut,
        )


def _divided(spool: BatchSpool, splits: Sequence[Split]) -> tuple[list[bytes], Position | None]:
    """The frames of each split, which ascend by bucket; and the last TRUNCATE among all of them."""
    lows = np.array([bucket_range(split.bucket)[0] for split in splits], dtype=np.uint64)
    parts: list[list[bytes | memoryview]] = [[] for _ in splits]
    cut: Position | None = None
    for data, columns, _ in spool.blocks():
        is_truncate = columns.op == Op.TRUNCATE
        for row in np.flatnonzero(is_truncate).tolist():
            cut = max(cut or Position(0), Position(int(columns.scn[row]), int(columns.seq[row])))
        hashes = np.where(is_truncate, np.uint64(0), columns.key_hash)
        number = np.searchsorted(lows, hashes, side="right") - 1
        offset, length = columns.offset, columns.length.astype(np.int64)
        for one in np.unique(number).tolist():
            rows = np.flatnonzero(number == one)
            parts[one].append(bytes(gather(data, offset[rows], length[rows])))
    return [b"".join(part) for part in parts], cut
