"""The merge of one bucket: the rows of one source with key hashes in one range.  Pure functions.

Rows of a clustered file ascend by (hash, not a TRUNCATE, key, scn, seq).  A TRUNCATE counts as hash
0, so that it precedes every row of its source.  Hashes are compared as unsigned numbers.  In this
order a bucket is a contiguous range of rows, and two halves of a bucket are two buckets: a file is
split, or read in part, without sorting.

Spark's workers need not have this package: ``spark_merges`` ships the module by value.
So its functions use numpy, pyarrow, ``partial_rows``, which is shipped with it, and constants of
this module alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from databus.client.splits.frame_tables import SCHEMA
from databus.client.splits.partial_rows import Layouts, folded
from databus.common.frame.frame_format import Flag, Op

U64Array = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

HASH_BITS = 64
_DELETE, _TRUNCATE = int(Op.DELETE), int(Op.TRUNCATE)
_PARTIAL, _HAS_AFTER = int(Flag.PARTIAL), int(Flag.HAS_AFTER)


def places(table: Any) -> U64Array:
    """The hash by which each row is ordered: that of its key, 0 for a TRUNCATE."""
    hashes: U64Array = table.column("key_hash").to_numpy().view(np.uint64)
    is_truncate = table.column("op").to_numpy() == _TRUNCATE
    return np.where(is_truncate, np.uint64(0), hashes) if is_truncate.any() else hashes


def bucket_range(bucket: str) -> tuple[int, int]:
    """The least and the greatest hash of a bucket, which is named by its leading bits."""
    return int(bucket.ljust(HASH_BITS, "0"), 2), int(bucket.ljust(HASH_BITS, "1"), 2)


def within(table: Any, bucket: str, after: tuple[int, int] = (0, 0)) -> Any:
    """The rows of a table in order that lie in a bucket and, by position, after ``after``."""
    if bucket and table.num_rows:
        low, high = (np.uint64(limit) for limit in bucket_range(bucket))
        at = places(table)
        first = int(np.searchsorted(at, low, side="left"))
        table = table.slice(first, int(np.searchsorted(at, high, side="right")) - first)
    if after == (0, 0) or not table.num_rows:
        return table
    later = is_after(table, after)
    return table if later.all() else table.filter(pa.array(later))


def is_after(table: Any, position: tuple[int, int]) -> Mask:
    """Which rows have a position after ``position``."""
    scn, seq = (table.column(name).to_numpy() for name in ("scn", "seq"))
    found: Mask = (scn > position[0]) | ((scn == position[0]) & (seq > position[1]))
    return found


def merged(
    inputs: Sequence[Iterable[Any]],
    *,
    base: bool,
    cut: tuple[int, int] | None = None,
    layouts: Layouts | None = None,
) -> Iterator[Any]:
    """The rows of a compacted run out of several inputs in order, as tables in order.

    Of each key, the last row that is not PARTIAL and every PARTIAL one after it.  ``cut`` is the
    position of the last TRUNCATE of the source: rows before it are dropped.  A ``base`` has neither
    deletes nor truncates, and by ``layouts`` its PARTIAL rows are folded into the whole row before
    them.  Inputs are tables or record batches of rows in order; they may come in any sequence,
    because rows are compared by (scn, seq).

    Memory is that of one table of each input, and of the rows of one key.
    """
    cursors = [_Cursor(iter(one)) for one in inputs]
    while True:
        for cursor in cursors:
            if not cursor.rows:
                cursor.fill()
        cursors = [cursor for cursor in cursors if cursor.rows]
        if not cursors:
            return
        # More rows of an input's last hash may follow in it.
        bounds = [cursor.last for cursor in cursors if not cursor.is_done]
        parts = [cursor.take(min(bounds) if bounds else None) for cursor in cursors]
        found = [part for part in parts if part.num_rows]
        if found:
            result = _reduced(found, base=base, cut=cut, layouts=layouts or {})
            if result.num_rows:
                yield result
        for cursor in cursors:
            if cursor.rows and not cursor.is_done and cursor.last == min(bounds):
                cursor.fill()


class _Cursor:
    """The rows of one input that have been read and not merged."""

    def __init__(self, tables: Iterator[Any]) -> None:
        self._tables = tables
        self._table: Any = None
        self._places: U64Array = np.empty(0, dtype=np.uint64)
        self.is_done = False

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self._places)

    @property
    def last(self) -> int:
        """The hash of the last of them."""
        return int(self._places[-1])

    def fill(self) -> None:
        """Read on until there are more rows, or the input ends."""
        for found in self._tables:
            if found.num_rows:
                table = (
                    pa.Table.from_batches([found]) if isinstance(found, pa.RecordBatch) else found
                )
                table = table.cast(
                    SCHEMA
                )  # Spark states that a column which it filters has no nulls
                if self.rows:
                    self._table = pa.concat_tables([self._table, table])
                    self._places = np.concatenate([self._places, places(table)])
                else:
                    self._table, self._places = table, places(table)
                return
        self.is_done = True

    def take(self, bound: int | None) -> Any:
        """The rows whose hash is less than ``bound``; all of them without one."""
        count = self.rows
        if bound is not None:
            count = int(np.searchsorted(self._places, np.uint64(bound), side="left"))
        found = self._table.slice(0, count)
        self._table, self._places = self._table.slice(count), self._places[count:]
        return found


def _reduced(
    parts: Sequence[Any], *, base: bool, cut: tuple[int, int] | None, layouts: Layouts
) -> Any:
    """The rows that remain of some hashes, of which ``parts`` have every row; in order."""
    table = pa.concat_tables(parts).combine_chunks()
    at = places(table)
    is_sorted = len(parts) == 1
    order = np.arange(len(at)) if is_sorted else np.argsort(at, kind="stable")
    ordered = at if is_sorted else at[order]
    begins = np.ones(len(at), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    op = table.column("op").to_numpy()[order]
    if not begins.all():
        order, begins = _in_keys(table, order, begins)
        op = table.column("op").to_numpy()[order]
        keep = _last_states(table.column("flags").to_numpy()[order], begins)
    else:
        keep = np.ones(len(at), dtype=np.bool_)
    if cut is not None:
        scn, seq = (table.column(name).to_numpy()[order] for name in ("scn", "seq"))
        is_old = (scn < cut[0]) | ((scn == cut[0]) & (seq <= cut[1]))
        keep &= ~is_old | ((op == _TRUNCATE) & (scn == cut[0]) & (seq == cut[1]))
    if base:
        keep &= (op != _DELETE) & (op != _TRUNCATE)
    if is_sorted and keep.all() and (order[1:] > order[:-1]).all():
        found = table
    else:
        found = table.take(pa.array(order[keep]))
    if base and layouts and not begins.all():
        return _with_folded(found, np.cumsum(begins)[keep], layouts)
    return found


def _with_folded(table: Any, keys: npt.NDArray[Any], layouts: Layouts) -> Any:
    """The rows, of each key as few as possible; ``keys`` numbers the keys."""
    flags = table.column("flags").to_numpy().copy()
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    stops = np.append(starts[1:], len(keys))
    # What follows a key's first row is PARTIAL, and folded into that if it is whole.
    is_candidate = (stops - starts > 1) & (flags[starts] & _PARTIAL == 0)
    frames = table.column("frame")
    is_made = np.zeros(len(keys), dtype=np.bool_)
    keep = np.ones(len(keys), dtype=np.bool_)
    made: list[bytes] = []
    for start, stop in zip(
        starts[is_candidate].tolist(), stops[is_candidate].tolist(), strict=True
    ):
        result = folded(frames.slice(start, stop - start).to_pylist(), layouts)
        at = stop - len(result)
        if at > start:
            keep[start:at] = False
            is_made[at] = True
            made.append(result[0])
    if not made:
        return table
    flags[is_made] = _HAS_AFTER
    frames = pc.replace_with_mask(frames, pa.array(is_made), pa.array(made, pa.binary()))
    for name, column in (("flags", pa.array(flags)), ("frame", frames)):
        table = table.set_column(
            table.schema.get_field_index(name), table.schema.field(name), column
        )
    return table.filter(pa.array(keep))


def _in_keys(table: Any, order: Indices, begins: Mask) -> tuple[Indices, Mask]:
    """The order with the rows of equal hashes by key and position, and where keys begin."""
    shares = ~begins
    shares[:-1] |= ~begins[1:]
    slots = np.flatnonzero(shares)
    rows = table.select(["op", "key", "scn", "seq"]).take(pa.array(order[slots]))
    groups = np.cumsum(begins)[slots]
    rows = rows.append_column("group", pa.array(groups))
    is_row = pc.not_equal(rows.column("op"), pa.scalar(_TRUNCATE, pa.int32()))
    rows = rows.append_column("is_row", pc.cast(is_row, pa.int8()))
    same = _same_keys(rows, groups)
    if not (same & _ascending(rows))[np.diff(groups, prepend=-1) == 0].all():
        names = ("group", "is_row", "key", "scn", "seq")
        by_key = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in names])
        order = order.copy()
        order[slots] = order[slots][by_key.to_numpy()]
        same = _same_keys(rows.take(by_key), groups)
    begins = begins.copy()
    begins[slots] = ~same
    return order, begins


def _same_keys(rows: Any, groups: npt.NDArray[Any]) -> Mask:
    """Which rows have the hash and the key of the row before them."""
    same: Mask = np.zeros(len(groups), dtype=np.bool_)
    key, is_row = rows.column("key").combine_chunks(), rows.column("is_row").to_numpy()
    same[1:] = pc.equal(key[1:], key[:-1]).to_numpy(zero_copy_only=False)
    same[1:] &= (groups[1:] == groups[:-1]) & (is_row[1:] == is_row[:-1])
    return same


def _ascending(rows: Any) -> Mask:
    """Which rows have a position after that of the row before them."""
    scn, seq = (rows.column(name).to_numpy() for name in ("scn", "seq"))
    found: Mask = np.ones(len(scn), dtype=np.bool_)
    found[1:] = (scn[1:] > scn[:-1]) | ((scn[1:] == scn[:-1]) & (seq[1:] > seq[:-1]))
    return found


def _last_states(flags: npt.NDArray[Any], begins: Mask) -> Mask:
    """Of each key's rows, in order, the last whole one and what follows it."""
    starts = np.flatnonzero(begins)
    index = np.arange(len(begins))
    whole = np.where((flags & _PARTIAL) == 0, index, -1)
    last = np.maximum.reduceat(whole, starts)
    keep: Mask = index >= np.repeat(last, np.diff(np.append(starts, len(begins))))
    return keep
