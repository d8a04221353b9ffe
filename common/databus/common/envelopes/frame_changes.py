"""Frames as the changes that an envelope takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from databus.common.envelopes.row_change import RowChange
from databus.common.envelopes.row_types import PRODUCTS, Product
from databus.common.frame.frame_format import (
    OP_LETTERS,
    Buffer,
    FrameView,
    Op,
    with_txids,
)
from databus.common.schema.source_schema import SourceSchema


def product_of(clock: str) -> Product:
    """The database behind a stream, by the stream's clock."""
    name = clock.partition(":")[0]
    return next((product for product in PRODUCTS if product == name), "generator")


class FrameChanges:
    """Reads blocks of whole frames.

    ``txid`` comes from the window's end, so it is None if that is in another block.

    Owner: one task.
    Raises: UnknownSchema and FormatError.
    """

    def __init__(self, schema_of: Callable[[int], SourceSchema]) -> None:
        self._schema_of = schema_of
        self._orders: Counter[str] = Counter()

    def read(self, block: Buffer) -> Iterator[tuple[FrameView, RowChange | None]]:
        """Each frame of an undamaged block; a control frame has no change."""
        for frame, txid in with_txids(block, verify=False):
            if frame.is_control:
                if frame.op == Op.END_OF_WINDOW:
                    self._orders.clear()
                yield frame, None
            else:
                yield frame, self._change(frame, txid)

    def _change(self, frame: FrameView, txid: str | None) -> RowChange:
        schema = self._schema_of(frame.schema_fp)
        self._orders[schema.source] += 1
        before, after = frame.before, frame.after
        return RowChange(
            schema=schema,
            op=OP_LETTERS[frame.op],
            scn=frame.scn,
            seq=frame.seq,
            commit_us=frame.commit_us,
            key=schema.decode_key(frame.key) if frame.key_len else None,
            before=None if before is None else schema.decode_row(before),
            after=None if after is None else schema.decode_row(after),
            absent=schema.absent_names(frame.absent) if frame.absent_len else (),
            txid=txid or None,
            source_order=self._orders[schema.source],
        )
