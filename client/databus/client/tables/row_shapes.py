"""The rows of a batch by their shape, and the columns of those that have the same one.

A shape is a schema version, an op, and the parts that a frame has.  Rows of one shape in one block
are decoded together; which rows have values in which version is that of ``Event``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from databus.client.application.events import Decoding, Mode
from databus.client.application.frame_blocks import Block
from databus.common.compiled.kernels import I64Array
from databus.common.envelopes.value_columns import ValueColumn
from databus.common.frame.frame_format import HEADER_BYTES, OP_LETTERS, Flag, Op
from databus.common.schema.source_schema import SourceSchema

FEWEST = 8
"""Fewer rows are decoded as fast one by one."""
_PARTS = int(Flag.HAS_BEFORE | Flag.HAS_AFTER | Flag.PARTIAL)


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """Rows of one block that have the same schema version, op and parts.

    Raises: FormatError for bytes that are no such rows.
    """

    numbers: I64Array
    """Which rows of the batch they are."""
    block: Block
    rows: I64Array
    """Their indices in the block."""
    schema: SourceSchema
    op: str
    flags: int
    txids: list[str | None]
    """The transaction of each; None while its end has not come."""

    def take_columns(self, decoding: Decoding, mode: Mode) -> bool:
        """Whether columns have the values that events have."""
        return (
            len(self.rows) >= FEWEST
            and self.op != "t"
            and not self.flags & Flag.PARTIAL
            and not (self.op != "d" and not self.flags & Flag.HAS_AFTER)
            and decoding.is_written_as_read(self.schema, mode)
        )

    def key(self, decoding: Decoding) -> Mapping[str, ValueColumn]:
        """The columns of the keys."""
        columns = self.block.columns
        start = columns.offset[self.rows] + HEADER_BYTES
        return decoding.row_columns(self.schema, is_key=True).columns(
            self.block.data, start, start + columns.key_len[self.rows]
        )

    def before(self, decoding: Decoding) -> Mapping[str, ValueColumn] | None:
        """The columns of the rows before the change; None if the source does not give them."""
        if not self.flags & Flag.HAS_BEFORE:
            return None
        columns = self.block.columns
        start = (columns.offset + HEADER_BYTES + columns.key_len)[self.rows]
        return decoding.row_columns(self.schema).columns(
            self.block.data, start, start + columns.before_len[self.rows]
        )

    def after(self, decoding: Decoding) -> Mapping[str, ValueColumn] | None:
        """The columns of the rows after the change; None if there are none."""
        if not self.flags & Flag.HAS_AFTER:
            return None
        columns = self.block.columns
        start = columns.offset + HEADER_BYTES + columns.key_len + columns.before_len
        start = start[self.rows]
        return decoding.row_columns(self.schema).columns(
            self.block.data, start, start + columns.after_len[self.rows]
        )


def shaped_rows(
    decoding: Decoding, block: Block, rows: I64Array, first: int, txids: npt.NDArray[np.object_]
) -> Iterator[ShapedRows]:
    """Rows of one source in one block, by shape; the first one is row ``first`` of the batch."""
    schemas = decoding.schemas
    numbers = np.arange(first, first + len(rows))
    prints = block.columns.schema_fp[rows]
    shapes = block.op_column[rows].astype(np.int64) << 8 | (block.columns.flags[rows] & _PARTS)
    for fingerprint in np.unique(prints):
        of_version = prints == fingerprint
        schema = schemas.by_fingerprint(int(fingerprint))
        for shape in np.unique(shapes[of_version]).tolist():
            here = of_version & (shapes == shape)
            op = OP_LETTERS[Op(shape >> 8)]
            yield ShapedRows(
                numbers[here], block, rows[here], schema, op, shape & 0xFF, txids[here].tolist()
            )
