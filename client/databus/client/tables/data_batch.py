"""Rows of one source as Arrow columns, for consumers that take many rows at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from databus.client.application.events import Decoding, Event, Mode, Window
from databus.client.application.frame_blocks import Block
from databus.client.tables.row_shapes import ShapedRows, shaped_rows
from databus.common.checkpoint import Position
from databus.common.compiled.kernels import I64Array
from databus.common.extras import imports_of_extra
from databus.common.schema.source_schema import SourceSchema

if TYPE_CHECKING:
    from databus.client.tables.arrow_rows import RowDecoder

RowsOfBlock = tuple[Block, I64Array]
"""A block, and the indices of rows in it."""


class BatchDecoding:
    """The decoders of batches, by schema version.

    Owner: one client.
    Raises: MissingDependency without pyarrow.
    """

    def __init__(self, decoding: Decoding) -> None:
        with imports_of_extra("export", package="pyarrow", needed_by="onDataBatch"):
            from databus.client.tables import arrow_rows
        self._arrow_rows = arrow_rows
        self._decoders: dict[int, RowDecoder] = {}
        self.decoding = decoding

    def decoder(self, reader: SourceSchema) -> RowDecoder:
        """The decoder of rows into the columns of this version."""
        found = self._decoders.get(reader.fingerprint)
        if found is None:
            found = self._decoders[reader.fingerprint] = self._arrow_rows.RowDecoder(
                reader,
                self.decoding.schemas.by_fingerprint,
                metadata=self._arrow_rows.METADATA.names,
            )
        return found


class DataBatch:
    """Rows of one source in commit order: of one window, of several, or of a part of one.

    ``len(batch)`` is the number of rows.
    """

    __slots__ = ("_arrow", "_decoding", "_parts", "_window", "mode", "schema", "source")

    def __init__(
        self,
        decoding: BatchDecoding,
        source: str,
        mode: Mode,
        parts: Sequence[RowsOfBlock],
        window: Window | None = None,
    ) -> None:
        self._decoding = decoding
        self._parts = parts
        self._window = window
        self._arrow: Any = None
        self.source = source
        """The table, as schema.table."""
        self.mode: Mode = mode
        """online, or bootstrap while a snapshot is being read."""
        self.schema = decoding.decoding.reader_of(source)
        """The version of the source whose columns the rows have: the newest, or the one of
        ``reader_schemas``."""

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self._parts)

    @property
    def first(self) -> Position:
        """The position of the first row."""
        block, rows = self._parts[0]
        return block.position(int(rows[0]))

    @property
    def last(self) -> Position:
        """The position of the last row."""
        block, rows = self._parts[-1]
        return block.position(int(rows[-1]))

    @property
    def arrow(self) -> Any:
        """The rows as a ``pyarrow.RecordBatch``.

        After the columns of ``schema`` it has ``_op`` (c, u, d, r, t), ``_scn``, ``_seq``,
        ``_commit_time`` and ``_absent`` (the columns that the source left out because they did not
        change).  A delete has the row before it, or its key and nulls; a truncate has nulls.

        Raises:
            FormatError: the bytes of a row are not of their schema.
            UnsupportedChange: a column's type has changed and a value does not fit, or a column
                is named as one of the five.
        """
        if self._arrow is None:
            decoder = self._decoding.decoder(self.schema)
            self._arrow = decoder.joined(
                [
                    (np.frombuffer(block.data, dtype=np.uint8), block.columns, rows)
                    for block, rows in self._parts
                ]
            )
        return self._arrow

    @property
    def versions(self) -> Iterator[tuple[SourceSchema, Any]]:
        """The rows as ``arrow`` has them, in pieces of one schema version, in order.

        A piece has the columns of the version that its rows were written with; in a bootstrap those
        of ``schema``.

        Raises:
            FormatError: the bytes of a row are not of their schema.
        """
        if self.mode == "bootstrap":
            yield self.schema, self.arrow
            return
        by_fingerprint = self._decoding.decoding.schemas.by_fingerprint
        pieces: list[tuple[int, Any]] = []
        for block, rows in self._parts:
            prints = block.columns.schema_fp[rows]
            edges = np.flatnonzero(prints[1:] != prints[:-1]) + 1
            data = np.frombuffer(block.data, dtype=np.uint8)
            for piece in np.split(rows, edges):
                fingerprint = int(block.columns.schema_fp[piece[0]])
                pieces.append((fingerprint, (data, block.columns, piece)))
        for fingerprint, run in itertools.groupby(pieces, key=lambda one: one[0]):
            schema = by_fingerprint(fingerprint)
            yield schema, self._decoding.decoder(schema).joined([piece for _, piece in run])

    @property
    def positions(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The scn and the seq of each row."""
        parts = [(block.columns, rows) for block, rows in self._parts]
        return (
            np.concatenate([columns.scn[rows] for columns, rows in parts]),
            np.concatenate([columns.seq[rows] for columns, rows in parts]),
        )

    def shapes(self) -> Iterator[ShapedRows]:
        """The rows by block, schema version, op and parts."""
        first = 0
        for number, (block, rows) in enumerate(self._parts):
            txids = self._txids(number)
            yield from shaped_rows(self._decoding.decoding, block, rows, first, txids)
            first += len(rows)

    def _txids(self, number: int) -> npt.NDArray[np.object_]:
        """The transaction of each row of a part."""
        block, rows = self._parts[number]
        scns = block.scn_column[rows]
        firsts = np.flatnonzero(np.append(True, scns[1:] != scns[:-1]))
        found = [
            (self._window or self._window_of(number, index)).txid for index in rows[firsts].tolist()
        ]
        counts = np.diff(np.append(firsts, len(rows)))
        return np.repeat(np.array(found, dtype=np.object_), counts)

    @property
    def decoding(self) -> Decoding:
        """How its rows become values."""
        return self._decoding.decoding

    def events(self) -> Iterator[Event]:
        """The rows one after another, as ``onDataEvent`` would receive them."""
        window = self._window
        for number, (block, rows) in enumerate(self._parts):
            for index in rows.tolist():
                if window is None or (
                    window is not self._window and window.scn != block.scns[index]
                ):
                    window = self._window_of(number, index)
                yield Event(block, index, window)

    def _window_of(self, number: int, index: int) -> Window:
        """The window that begins with a row of a part; its end may lie in a later part."""
        window = Window(self._decoding.decoding, self.mode, self._parts[number][0], index)
        for block, _ in self._parts[number:]:
            end = block.window_end(index)
            if end >= 0:
                if block.scns[end] == window.scn:
                    window.ended_by(block, end)
                break
            index = 0
        return window

    def __repr__(self) -> str:
        return f"<DataBatch {self.source} {len(self)} rows {self.first}..{self.last}>"
