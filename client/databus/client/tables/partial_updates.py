"""Partial updates combined with the rows that they change, by the values of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.client.tables.arrow_rows import RowDecoder, RowsOfBytes
from databus.common.frame import frame_format


@dataclass(slots=True)
class _Row:
    """The last state of a key while partial updates arrive, and its unknown columns."""

    values: dict[str, Any] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)


def combined(
    blocks: Iterable[RowsOfBytes], hashes: npt.NDArray[np.uint64], decoder: RowDecoder
) -> Iterator[Any]:
    """Rows as record batches: whole ones in order, then one for each key with partial updates.

    ``hashes`` are those of these keys.  All frames of a key are in ``blocks``, oldest first.
    """
    rows_of: dict[bytes, _Row] = {}
    for data, columns, rows in blocks:
        touched = np.isin(columns.key_hash[rows], hashes)
        if not touched.all():
            yield decoder.batch(data, columns, rows[~touched])
        if touched.any():
            batch = decoder.batch(data, columns, rows[touched])
            for number, values in zip(rows[touched].tolist(), batch.to_pylist(), strict=True):
                one = frame_format.trusted_frame(data.data, int(columns.offset[number]))
                absent = set(decoder.absent_names(one))
                had = rows_of.setdefault(bytes(one.key), _Row(absent=absent))
                filled = {name: had.values.get(name) for name in absent if name in values}
                had.values = values | filled
                had.absent &= absent
    for row in rows_of.values():
        if "_absent" in row.values:
            row.values["_absent"] = sorted(row.absent) or None
    yield decoder.batch_of([row.values for row in rows_of.values()])
