"""Net changes: of all frames in a range, those that are the last state of their key.

The rule is the applier's: of each key, the last frame with a whole row and the partial frames
after it; a truncate removes what its source had before.

Memory and time.  The key columns are read once.  Keys of a large range go to a temporary file,
which ``key_spool`` divides by hash, and each part is processed on its own: so the memory is that
of the keys and numbers of about ``PASS_ROWS`` rows, and one bit a frame, however large the range
is.  Frames are read once, at the end, one row group at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from databus.bootstrap.reading.frame_ranges import Mask, Unit
from databus.bootstrap.reading.key_spool import KeySpool
from databus.client.splits.frame_tables import FrameBlock
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Flag, Op

PASS_ROWS = 500_000
"""Rows whose keys are in memory at once, approximately: 25 MB with keys of 20 bytes, and about
four times as much while they are grouped."""

MOST_PARTS = 256
"""Parts at most; of a range with more rows each has more than ``PASS_ROWS``."""

_COLUMNS = ["scn", "seq", "source_id", "op", "flags", "key_hash", "key"]
_KEY = ["source_id", "key"]


class NetChanges:
    """The last states in some units, which have ``rows`` rows at most; None among them is no unit.

    Invariants:
        I1. Keys are compared byte by byte; hashes only distribute the work.
        I2. A step of ``reading`` reads one unit, or processes one part of the keys.

    Owner: one reader, which exhausts ``reading`` and then calls ``blocks``.
    Raises: StoreError from reading, or if the disk has no room for the keys.
    """

    def __init__(
        self,
        units: Iterable[Unit | None],
        rows: int,
        *,
        source_ids: npt.NDArray[np.uint32] | None = None,
        pass_rows: int = PASS_ROWS,
    ) -> None:
        self._due = units
        self._units: list[Unit] = []
        self._source_ids = source_ids
        self._edges = [0]
        self._bits: list[npt.NDArray[np.uint8]] = []
        self._cuts: dict[int, int] = {}
        self._parts = min(MOST_PARTS, 1 + rows // pass_rows)

    def reading(self) -> Iterator[None]:
        """Find the last states, in steps."""
        with KeySpool(self._parts) as spool:
            for unit in self._due:
                if unit is not None:
                    spool.add(*self._keys(unit))
                    self._units.append(unit)
                    self._edges.append(self._edges[-1] + unit.rows)
                    self._bits.append(np.zeros((unit.rows + 7) // 8, dtype=np.uint8))
                yield
            for rows in spool.parts():
                self._mark(self._last_states(rows))
                yield

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

    def _last_states(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        """The numbers of the rows that are last states, of all rows of some keys."""
        whole = rows.filter(pc.invert(rows.column("partial")))
        last = whole.group_by(_KEY, use_threads=False).aggregate([("index", "max")])
        found = [last.column("index_max").to_numpy()]
        partial = rows.filter(rows.column("partial"))
        if len(partial):
            joined = partial.join(last, keys=_KEY, join_type="left outer")
            index, before = joined.column("index"), joined.column("index_max")
            newer = pc.greater(index, pc.fill_null(before, -1))
            found.append(index.filter(newer).to_numpy())
        return np.sort(np.concatenate(found).astype(np.int64))

    def _keys(self, unit: Unit) -> tuple[pa.Table, npt.NDArray[np.uint64]]:
        """The wanted rows of the next unit: source, key, number and kind; and the keys' hashes."""
        table = unit.table(_COLUMNS)
        scn, seq, source, op, flags, key_hash = (
            table.column(name).to_numpy() for name in _COLUMNS[:-1]
        )
        wanted = unit.is_wanted(scn, seq) & (op < FIRST_CONTROL_OP)
        if self._source_ids is not None:
            wanted &= np.isin(source, self._source_ids.astype(np.int64))
        first = self._edges[-1]
        for row in np.flatnonzero(wanted & (op == Op.TRUNCATE)).tolist():
            self._cuts[int(source[row])] = max(first + row, self._cuts.get(int(source[row]), 0))
        rows = np.flatnonzero(wanted)
        found = pa.table(
            {
                "source_id": source[rows],
                "key": table.column("key").take(pa.array(rows)),
                "index": first + rows,
                "partial": (flags[rows] & int(Flag.PARTIAL)) != 0,
            }
        )
        return found, key_hash[rows].view(np.uint64)

    def _mark(self, last: npt.NDArray[np.int64]) -> None:
        borders = np.searchsorted(last, self._edges)
        for number, unit in enumerate(self._units):
            rows = last[borders[number] : borders[number + 1]] - self._edges[number]
            if len(rows):
                mask = np.zeros(unit.rows, dtype=np.uint8)
                mask[rows] = 1
                self._bits[number] |= np.packbits(mask)
