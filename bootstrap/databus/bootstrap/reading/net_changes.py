"""Net changes: of all frames in a range, those that are the last state of their key.

The rule is the applier's: of each key, the last frame with a whole row and the partial frames
after it; a truncate removes what its source had before.

Memory.  Between the passes one bit a frame is stored.  The keys are read in as many passes as
there are ``PASS_ROWS`` rows in the range, and each pass takes the keys whose hash falls to it.
So a pass holds the keys and numbers of about ``PASS_ROWS`` rows, however large the range is, and
reads the key columns alone.  Frames are read once, at the end, one row group at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from databus.bootstrap.reading.frame_ranges import Mask, Unit
from databus.bootstrap.runs.parquet_runs import FrameBlock
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Flag, Op

PASS_ROWS = 2_000_000
"""Rows of which a pass holds the keys, approximately: 100 MB with keys of 20 bytes."""

_COLUMNS = ["scn", "seq", "source_id", "op", "flags", "key_hash", "key"]
_KEY = ["source_id", "key"]


class NetChanges:
    """The last states in a list of units.

    Invariants:
        I1. Keys are compared byte by byte; hashes only distribute the work.

    Owner: one reader; making it does all passes but the last.
    Raises: StoreError from reading.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        source_ids: npt.NDArray[np.uint32] | None = None,
        pass_rows: int = PASS_ROWS,
    ) -> None:
        self._units = units
        self._source_ids = source_ids
        self._edges = np.cumsum([0, *(unit.rows for unit in units)])
        self._bits = [np.zeros((unit.rows + 7) // 8, dtype=np.uint8) for unit in units]
        self._cuts: dict[int, int] = {}
        passes = 1 + int(self._edges[-1]) // pass_rows if units else 0
        for number in range(passes):
            self._mark(self._last_states(number, passes))

    def blocks(self) -> Iterator[tuple[Unit, FrameBlock, Mask]]:
        """Each block of frames that has a last state, and a mask of the last states."""
        for number, unit in enumerate(self._units):
            if self._bits[number].any():
                last = self._last_mask(number)
                at = 0
                for block in unit.blocks():
                    count = len(block.edges) - 1
                    yield unit, block, last[at : at + count]
                    at += count

    def _last_mask(self, number: int) -> Mask:
        rows = self._units[number].rows
        last: Mask = np.unpackbits(self._bits[number], count=rows).astype(np.bool_)
        if self._cuts:
            sources = self._units[number].table(["source_id"]).column(0).to_numpy()
            index = self._edges[number] + np.arange(rows)
            for source, cut in self._cuts.items():
                last &= (sources != source) | (index >= cut)
        return last

    def _last_states(self, number: int, passes: int) -> npt.NDArray[np.int64]:
        """The numbers of the rows that are last states, of the keys of one pass."""
        rows = pa.concat_tables(
            self._keys(at, unit, number, passes) for at, unit in enumerate(self._units)
        )
        whole = rows.filter(pc.invert(rows.column("partial")))
        last = whole.group_by(_KEY).aggregate([("index", "max")])
        found = [last.column("index_max").to_numpy()]
        partial = rows.filter(rows.column("partial"))
        if len(partial):
            joined = partial.join(last, keys=_KEY, join_type="left outer")
            index, before = joined.column("index"), joined.column("index_max")
            newer = pc.greater(index, pc.fill_null(before, -1))
            found.append(index.filter(newer).to_numpy())
        return np.sort(np.concatenate(found).astype(np.int64))

    def _keys(self, at: int, unit: Unit, number: int, passes: int) -> pa.Table:
        table = unit.table(_COLUMNS)
        scn, seq, source, op, flags, key_hash = (
            table.column(name).to_numpy() for name in _COLUMNS[:-1]
        )
        wanted = unit.is_wanted(scn, seq) & (op < FIRST_CONTROL_OP)
        if self._source_ids is not None:
            wanted &= np.isin(source, self._source_ids.astype(np.int64))
        first = int(self._edges[at])
        for row in np.flatnonzero(wanted & (op == Op.TRUNCATE)).tolist():
            self._cuts[int(source[row])] = max(first + row, self._cuts.get(int(source[row]), 0))
        if passes > 1:
            wanted &= key_hash.view(np.uint64) % np.uint64(passes) == number
        rows = np.flatnonzero(wanted)
        return pa.table(
            {
                "source_id": source[rows],
                "key": table.column("key").take(pa.array(rows)),
                "index": first + rows,
                "partial": (flags[rows] & int(Flag.PARTIAL)) != 0,
            }
        )

    def _mark(self, last: npt.NDArray[np.int64]) -> None:
        borders = np.searchsorted(last, self._edges)
        for number, unit in enumerate(self._units):
            rows = last[borders[number] : borders[number + 1]] - self._edges[number]
            if len(rows):
                mask = np.zeros(unit.rows, dtype=np.uint8)
                mask[rows] = 1
                self._bits[number] |= np.packbits(mask)
