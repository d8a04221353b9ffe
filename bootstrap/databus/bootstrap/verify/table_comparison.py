"""Compares a copy of a table with the table: by digests of rows, then row by row.  Pure.

The source's rows come as pairs of hashes (16 bytes a row), the copy's as frames.  A mismatch of
hashes is only a candidate: the two were not read at the same moment.  ``compare_row`` decides
about a candidate, from both sides read again around one moment.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.common.checkpoint import ORIGIN, Position
from databus.common.compiled.xxh3 import xxh3_64_of_each
from databus.common.errors import DatabusError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    HEADER_BYTES,
    Flag,
    FrameColumns,
    FrameView,
)
from databus.common.schema.source_schema import SchemaSet, SourceSchema

_U64 = npt.NDArray[np.uint64]


class TableComparison(enum.StrEnum):
    """What is wrong with a row of the copy."""

    EQUAL = "equal"
    CHANGED = "changed"
    MISSING = "missing"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys after ``after`` up to ``upto``, in the source's own order; None is no bound."""

    after: list[Any] | None
    upto: list[Any] | None


@dataclass(frozen=True, slots=True)
class ReturnedColumns:
    """Columns that a table had, lost and has again, all before ``until``: see docs/decisions/0057.

    A reader that dropped them has NULL where a row was not written again, whatever the copy has.
    """

    names: tuple[str, ...] = ()
    until: Position = ORIGIN

    def are_lost(self, frames: Sequence[FrameView], row: dict[str, Any]) -> bool:
        """Whether a reader may lack values that ``row``, the state after ``frames``, has."""
        if all(row.get(name) is None for name in self.names):
            return False
        whole = [view.position for view in frames if not view.flags & Flag.PARTIAL]
        return not whole or whole[-1] <= self.until


NONE_RETURNED = ReturnedColumns()


class TableDigests:
    """The digests of a table's rows, chunk by chunk, and which of them a copy has.

    Invariants:
        I1. A row of the source is left over, or a key of the copy becomes a candidate, if the
            two differ in it, up to a collision of both 64-bit hashes.
        I2. Equal bytes are an equal row only under schemas that give them to the same columns:
            renaming a column changes no byte.

    Owner: one task.  Memory: 21 bytes a row of the source, and the keys of the candidates.
    """

    def __init__(self) -> None:
        self.ranges: list[KeyRange] = []
        self.candidates: set[bytes] = set()
        self.returned = NONE_RETURNED
        self.has_other_keys = False
        self._parts: list[npt.NDArray[np.uint64]] = []
        self._schemas: list[SourceSchema] = []
        self._schema_of: list[int] = []
        self._hashes: _U64 = np.empty(0, dtype=np.uint64)
        self._digests: _U64 = np.empty(0, dtype=np.uint64)
        self._chunks: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._seen: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self._shared: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

    def add(self, pairs: npt.NDArray[np.uint64], keys: KeyRange, schema: SourceSchema) -> None:
        """Add a chunk: a key hash and a row digest of each row, its key range, its rows' schema."""
        self._parts.append(pairs)
        self.ranges.append(keys)
        if schema not in self._schemas[-1:]:
            self._schemas.append(schema)
        self._schema_of.append(len(self._schemas) - 1)

    def sort(self) -> None:
        """Every chunk is there: prepare for the copy's frames."""
        pairs = np.concatenate([np.empty((0, 2), dtype=np.uint64), *self._parts])
        chunks = np.repeat(np.arange(len(self._parts)), [len(part) for part in self._parts])
        order = np.argsort(pairs[:, 0], kind="stable")
        self._hashes, self._digests = pairs[order, 0], pairs[order, 1]
        self._chunks = chunks[order]
        self._seen = np.zeros(len(order), dtype=np.bool_)
        # Rows whose keys share a hash cannot be distinguished here.
        same = self._hashes[1:] == self._hashes[:-1]
        self._shared = np.zeros(len(order), dtype=np.bool_)
        self._shared[1:] |= same
        self._shared[:-1] |= same
        self._parts.clear()

    def __len__(self) -> int:
        return len(self._hashes)

    def range_of(self, key: bytes) -> KeyRange | None:
        """The chunk in which the source had this key; None if it had none."""
        at = self._row_of(key)
        return None if at is None else self.ranges[int(self._chunks[at])]

    def compare_key(self, schema: SourceSchema) -> None:
        """Note whether readers have rows of this definition under keys of another form."""
        form = schema.key_form
        self.has_other_keys |= any(one.key_form != form for one in self._schemas)

    def observe(self, columns: FrameColumns, data: memoryview, schemas: SchemaSet) -> None:
        """Take frames of the copy's state, and the schemas that they were written with.

        ``has_other_keys``: a row has a key of another form than the source's rows.
        """
        rows = columns.op < FIRST_CONTROL_OP
        for fingerprint in np.unique(columns.schema_fp[rows]).tolist():
            if fingerprint in schemas:
                self.compare_key(schemas.by_fingerprint(fingerprint))
        buffer = np.frombuffer(data, dtype=np.uint8)
        hashes = columns.key_hash
        if len(self._hashes):
            at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            known = self._hashes[at] == hashes
            self._seen[at[known]] = True
        else:
            at, known = np.zeros(len(hashes), dtype=np.int64), np.zeros(len(hashes), dtype=np.bool_)
        equal = known & ((columns.flags & int(Flag.PARTIAL)) == 0)
        equal &= columns.op < FIRST_CONTROL_OP
        if equal.any():
            starts, stops = row_bounds(columns)
            digests = xxh3_64_of_each(buffer, starts[equal], stops[equal])
            indices = at[equal]
            same = (self._digests[indices] == digests) & ~self._shared[indices]
            equal[equal] = same & self._are_alike(columns.schema_fp[equal], indices, schemas)
        if self.returned.names:
            for index in np.flatnonzero(equal).tolist():
                view = frame_format.trusted_frame(data, int(columns.offset[index]))
                row = schemas.by_fingerprint(view.schema_fp).decode_row(view.after or b"")
                equal[index] = not self.returned.are_lost([view], row)
        for index in np.flatnonzero(~equal & (columns.op < FIRST_CONTROL_OP)).tolist():
            start = int(columns.offset[index]) + HEADER_BYTES
            self.candidates.add(bytes(data[start : start + int(columns.key_len[index])]))

    def _are_alike(
        self, fingerprints: _U64, indices: npt.NDArray[np.intp], schemas: SchemaSet
    ) -> npt.NDArray[np.bool_]:
        """Whether rows of these schemas and those of the source's chunks have the same meaning."""
        alike = np.zeros(len(fingerprints), dtype=np.bool_)
        numbers = np.array(self._schema_of)[self._chunks[indices]]
        for fingerprint in np.unique(fingerprints).tolist():
            if fingerprint in schemas:
                meanings = _meanings(schemas.by_fingerprint(fingerprint))
                found = np.array([_meanings(schema) == meanings for schema in self._schemas])
                alike |= (fingerprints == fingerprint) & found[numbers]
        return alike

    def left_over(self) -> list[int]:
        """The chunks with rows whose keys the copy has not shown."""
        return [int(number) for number in np.unique(self._chunks[~self._seen])]

    def is_left_over(self, key: bytes) -> bool:
        """Whether the source has a row with this key that the copy has not shown."""
        at = self._row_of(key)
        return at is not None and not self._seen[at]

    def _row_of(self, key: bytes) -> int | None:
        wanted = np.uint64(frame_format.key_hash(key))
        at = int(np.searchsorted(self._hashes, wanted))
        return at if at < len(self._hashes) and self._hashes[at] == wanted else None


def _meanings(schema: SourceSchema) -> list[Any]:
    """The meaning of a row's bytes, column after column."""
    return [(column.name, column.kind, column.avro_type) for column in schema.columns]


def row_bounds(columns: FrameColumns) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the rows after the change begin and end in the scanned block."""
    starts = columns.offset + HEADER_BYTES + columns.key_len + columns.before_len
    return starts, starts + columns.after_len


def folded(
    frames: Sequence[FrameView], schemas: SchemaSet, reader: SourceSchema
) -> dict[str, Any] | None:
    """The row that results from a whole state and later patches; None if there is none."""
    row: dict[str, Any] | None = None
    for view in frames:
        if view.after is None:
            row = None
            continue
        schema = schemas.by_fingerprint(view.schema_fp)
        read = schema.decode_row(view.after, reader=reader)
        absent = schema.absent_names(view.absent) if view.flags & Flag.PARTIAL else ()
        if row is None or not absent:
            row = read
        else:
            row.update({name: value for name, value in read.items() if name not in absent})
    return row


def compare_row(
    source_row: bytes | None,
    copy: Sequence[FrameView],
    schemas: SchemaSet,
    schema: SourceSchema,
    returned: ReturnedColumns = NONE_RETURNED,
) -> tuple[TableComparison, list[str]]:
    """Compare one row, both sides read around one moment; returns also the unequal columns."""
    row = folded(copy, schemas, schema)
    if source_row is None:
        return (TableComparison.EQUAL, []) if row is None else (TableComparison.EXTRA, [])
    if row is None:
        return TableComparison.MISSING, []
    try:
        if schema.encode_row(row) == source_row:
            if returned.are_lost(copy, row):
                return TableComparison.CHANGED, list(returned.names)
            return TableComparison.EQUAL, []
    except DatabusError:
        pass  # A column that may not be null any more has no value in an old row.
    truth = schema.decode_row(source_row)
    unequal = [name for name, value in truth.items() if not _same(value, row.get(name))]
    return TableComparison.CHANGED, unequal


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)


class WantedFrames:
    """Selects the frames of some keys from a stream of frames, in order; drops the others.

    Owner: one task.
    """

    def __init__(self, wanted: Collection[bytes]) -> None:
        self._wanted = frozenset(wanted)
        hashes = np.fromiter((frame_format.key_hash(key) for key in self._wanted), dtype=np.uint64)
        self._hashes = np.sort(hashes)
        self.found: dict[bytes, list[FrameView]] = {}

    def observe(self, block: bytes) -> None:
        """Select from whole frames, back to back."""
        columns = frame_format.scan(block, verify=False)
        for index in np.flatnonzero(np.isin(columns.key_hash, self._hashes)).tolist():
            view = frame_format.trusted_frame(memoryview(block), int(columns.offset[index]))
            key = bytes(view.key)
            if key in self._wanted:
                data = memoryview(bytes(view.bytes))
                self.found.setdefault(key, []).append(frame_format.trusted_frame(data, 0))
