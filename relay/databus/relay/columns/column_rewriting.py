"""Applies the rules for columns to the frames and chunks of a source.

One stage between every kind of source and the ring.  Frames of tables without a rule pass
unchanged; a batch without other frames is not even copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from databus.common.compiled.kernels import COMPILED, I64Array, U8Array
from databus.common.errors import FormatError, InternalError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    Buffer,
    FrameColumns,
    Op,
    trusted_frame,
)
from databus.common.schema.source_schema import SourceSchema
from databus.relay.columns import column_kernels as kernels
from databus.relay.columns.column_rules import Action, ColumnPlan, TablePlan
from databus.relay.columns.record_edits import (
    OTHER,
    edit_frame,
    edit_key,
    edit_row,
    put_text,
    shape_of,
)
from databus.relay.sources.contract import Batch, Chunk
from databus.relay.sources.row_buffers import Row, Rows

_HASH_GROWTH = 70
_BLOCK_BYTES = 64
_NOTHING: U8Array = np.frombuffer(b"", dtype=np.uint8)


class Rules(Protocol):
    """How rows are changed: a plan for each schema, and ops that are left out."""

    @property
    def skipped_ops(self) -> frozenset[int]:
        """The ops of changes that are left out."""

    def plan(self, schema: SourceSchema) -> TablePlan | None:
        """The plan for a table's schema; None if its rows stay unchanged."""


class Rewriter:
    """Applies the rules of one database to its source's frames, or those of one reader to frames.

    Invariants:
        I1. A frame leaves with the scn and seq that it came with; frames of skipped operations
            do not leave, and ends of windows do, with the counts of the source.
            So a window that is read again gives the same frames.
        I2. A row leaves only if its schema is known and its plan was applied: an unknown
            schema is an error, never a way around the rules.
        I3. Rows of a chunk and of the stream with one key before have one key after.

    Owner: one event loop.
    Raises: UnsupportedChange if a rule cannot be applied to a schema; FormatError for a row
        that does not match its schema.
    """

    def __init__(self, rules: Rules, *, compiled: bool = COMPILED) -> None:
        self._rules = rules
        self._compiled = compiled
        self._skipped_ops = rules.skipped_ops
        self._plans: dict[int, TablePlan | None] = {}
        self._pass = np.zeros(0, dtype=np.uint64)
        self._tables = _KernelTables([])

    def learn(self, schema: SourceSchema) -> SourceSchema:
        """The schema as consumers see it; after this call its rows may come."""
        return self.learn_all((schema,))[0]

    def learn_all(self, schemas: Iterable[SourceSchema]) -> list[SourceSchema]:
        """Each of the schemas as consumers see it, in their order."""
        known = list(schemas)
        fresh = [schema for schema in known if schema.fingerprint not in self._plans]
        if fresh:
            self._plans |= {schema.fingerprint: self._rules.plan(schema) for schema in fresh}
            unchanged = [fp for fp, plan in self._plans.items() if plan is None]
            self._pass = np.array(unchanged, dtype=np.uint64)
            self._tables = _KernelTables([plan for plan in self._plans.values() if plan])
        plans = [self._plans[schema.fingerprint] for schema in known]
        return [plan.after if plan else one for one, plan in zip(known, plans, strict=True)]

    def seen(self, schemas: Iterable[SourceSchema]) -> list[SourceSchema]:
        """Each schema as consumers see it, once."""
        found = {schema.fingerprint: schema for schema in self.learn_all(schemas)}
        return list(found.values())

    def plan_of(self, schema: SourceSchema) -> TablePlan | None:
        """The plan for a schema; None if its rows stay unchanged."""
        self.learn(schema)
        return self._plans[schema.fingerprint]

    # -- the stream --

    def batch(self, batch: Batch, columns: FrameColumns | None = None) -> Batch:
        """A batch after the rules; ``columns`` are its frames' if they are known."""
        schemas = tuple(self.seen(batch.schemas)) if batch.schemas else ()
        data = bytes(self.frames(batch.data, columns)) if batch.data else batch.data
        return dataclasses.replace(batch, data=data, schemas=schemas)

    def frames(self, data: Buffer, columns: FrameColumns | None = None) -> Buffer:
        """Whole frames after the rules; ``data`` itself if no plan concerns any of them."""
        columns = columns or frame_format.scan(data, verify=False)
        ops = columns.op
        rows = ops < FIRST_CONTROL_OP
        fingerprints, counts = np.unique(columns.schema_fp[rows], return_counts=True)
        planned = ~np.isin(fingerprints, self._pass)
        changes = np.flatnonzero(ops == Op.SCHEMA_CHANGE)
        skips = bool(self._skipped_ops) and bool(np.isin(ops, list(self._skipped_ops)).any())
        if not (skips or planned.any() or len(changes)):
            return data
        growth = self._growth(fingerprints[planned], counts[planned])
        return self._edit(data, columns, changes, growth)

    def _growth(self, fingerprints: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64]) -> int:
        """The greatest number of bytes that the frames can grow by."""
        growth = 0
        for fingerprint, count in zip(fingerprints.tolist(), counts.tolist(), strict=True):
            plan = self._plans.get(fingerprint)
            if plan is None:
                raise InternalError(f"rows of schema {fingerprint:016x} came before the schema")
            growth += count * _frame_growth(plan)
        return growth

    def _edit(
        self, data: Buffer, columns: FrameColumns, changes: npt.NDArray[np.int64], growth: int
    ) -> bytes:
        parts, first = [], 0
        for change in changes.tolist():
            parts.append(self._edit_rows(data, columns.offset[first:change], growth))
            parts.append(self._edit_change(data, int(columns.offset[change])))
            first = change + 1
        parts.append(self._edit_rows(data, columns.offset[first:], growth))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _edit_change(self, data: Buffer, offset: int) -> bytes:
        """The frame that announces a new schema, with the schema that consumers see."""
        view = trusted_frame(memoryview(data), offset)
        schema = self.learn(SourceSchema.from_json(json.loads(bytes(view.after or b""))))
        return schema.change_frame(view.scn, view.seq, view.commit_us)

    def _edit_rows(self, data: Buffer, offsets: I64Array, growth: int) -> bytes:
        if not len(offsets):
            return b""
        if not self._compiled or self._tables.needs_python:
            return self._edit_slowly(data, offsets)
        last = int(offsets[-1])
        length = trusted_frame(memoryview(data), last).length
        size = last + length - int(offsets[0]) + growth
        out = np.empty(-(-size // 8) * 8, dtype=np.uint8)
        end = self._tables.edit_frames(data, offsets, out, _bits(self._skipped_ops))
        if end < 0:
            view = trusted_frame(memoryview(data), int(offsets[-1 - end]))
            # The reference names what is wrong with it, without the values.
            self._edit_one(view)
            raise FormatError(f"the row at {view.position} is damaged")
        return out[:end].tobytes()

    def _edit_slowly(self, data: Buffer, offsets: I64Array) -> bytes:
        view = memoryview(data)
        return b"".join(self._edit_one(trusted_frame(view, offset)) for offset in offsets.tolist())

    def _edit_one(self, view: frame_format.FrameView) -> bytes:
        if view.op in self._skipped_ops:
            return b""
        plan = None if view.is_control else self._plans[view.schema_fp]
        return bytes(view.bytes) if plan is None else edit_frame(plan, view)

    # -- dumps --

    def chunk(self, chunk: Chunk) -> Chunk:
        """A chunk's schema and rows after the rules; not its keys for the next chunk."""
        plan = self.plan_of(chunk.schema)
        if plan is None:
            return chunk
        rows = None
        if self._compiled and not self._tables.needs_python and len(chunk.rows):
            rows = self._tables.edit_rows(chunk.rows, plan)
        if rows is None:
            rows = Rows.of(
                Row(edit_key(plan, row.key), edit_row(plan, row.row)) for row in chunk.rows
            )
        return dataclasses.replace(chunk, schema=plan.after, rows=rows)


def _bits(ops: frozenset[int]) -> int:
    return sum(1 << op for op in ops)


def _frame_growth(plan: TablePlan) -> int:
    """The most that one frame grows by: two images and the key."""
    row = sum(map(_value_growth, plan.columns))
    return 2 * row + sum(map(_value_growth, plan.key_plans())) + 8


def _value_growth(plan: ColumnPlan) -> int:
    if plan.action is Action.HASH:
        return _HASH_GROWTH
    if plan.action is Action.MASK:
        return len(put_text(plan.text.encode())) + 1
    return 1


class _KernelTables:
    """The plans of all tables as the kernel's arrays.

    Invariants:
        I1. ``tables`` has a line for each plan; its columns and its key's columns are in
            ``columns``, masks in ``blob``.
    """

    def __init__(self, plans: list[TablePlan]) -> None:
        self.needs_python = False
        self._numbers = {plan.before.fingerprint: number for number, plan in enumerate(plans)}
        lines: list[list[int]] = []
        self._columns: list[list[int]] = []
        self._blob = bytearray(b"\0")
        for plan in plans:
            line = [0] * kernels.T_FIELDS
            line[kernels.T_BEFORE] = plan.before.signed_fingerprint
            line[kernels.T_AFTER] = plan.after.signed_fingerprint
            line[kernels.T_COLUMN] = len(self._columns)
            line[kernels.T_COLUMNS] = len(plan.columns)
            line[kernels.T_LEFT] = len(plan.after.columns)
            self._add(zip(plan.before.columns, plan.columns, strict=True))
            line[kernels.T_KEY] = len(self._columns)
            line[kernels.T_KEYS] = len(plan.before.key)
            line[kernels.T_KEY_HASHED] = int(plan.key_is_hashed)
            self._add(zip(plan.before.key_columns, plan.key_plans(), strict=True))
            lines.append(line)
        self.tables: I64Array = np.array(lines, dtype=np.int64).reshape(-1, kernels.T_FIELDS)
        self.columns: I64Array = np.array(self._columns, dtype=np.int64).reshape(
            -1, kernels.C_FIELDS
        )
        self.blob: U8Array = np.frombuffer(bytes(self._blob), dtype=np.uint8)
        self._most_hashes = max(map(_hash_count, plans), default=0)
        self._keyed = _keyed_sha256(plans[0].salt if plans else b"")

    def _add(self, columns: Iterable[tuple[Any, ColumnPlan]]) -> None:
        for column, plan in columns:
            shape = shape_of(column)
            self.needs_python = self.needs_python or shape == OTHER
            a, b = plan.length, 0
            if plan.action is Action.MASK:
                text = put_text(plan.text.encode())
                a, b = len(self._blob), len(text)
                self._blob += text
            self._columns.append([shape, int(column.nullable), int(plan.action), a, b])

    def edit_frames(self, data: Buffer, offsets: I64Array, out: U8Array, dropped_ops: int) -> int:
        """See the kernel."""
        raw = np.frombuffer(data, dtype=np.uint8)
        raw.flags.writeable = False  # the kernel is compiled for this type

        def edit(hashes: U8Array, texts: U8Array, ends: I64Array) -> int:
            return kernels.edit_frames(
                raw, offsets, out, 0, self.tables, self.columns, self.blob, hashes, texts, ends,
                dropped_ops,
            )  # fmt: skip

        return self._with_hashes(edit, len(offsets), len(out))

    def edit_rows(self, rows: Rows, plan: TablePlan) -> Rows | None:
        """The rows of a chunk after the rules; None if one of them is damaged."""
        out = np.empty(rows.size_bytes + len(rows) * _frame_growth(plan) + 1, dtype=np.uint8)
        spans = np.empty((len(rows), 4), dtype=np.int64)
        table = self._numbers[plan.before.fingerprint]

        def edit(hashes: U8Array, texts: U8Array, ends: I64Array) -> int:
            return kernels.edit_rows(
                rows.data, rows.spans, out, spans, self.tables, table, self.columns, self.blob,
                hashes, texts, ends,
            )  # fmt: skip

        return Rows.at(out, spans) if self._with_hashes(edit, len(rows), len(out)) >= 0 else None

    def _with_hashes(
        self, edit: Callable[[U8Array, U8Array, I64Array], int], row_count: int, size_bytes: int
    ) -> int:
        """Run the kernel, once more if there is something to be hashed."""
        most = row_count * self._most_hashes
        texts = np.empty(size_bytes + most * kernels.NUMBER_ROOM if most else 0, dtype=np.uint8)
        ends = np.zeros(1 + most, dtype=np.int64)
        stop = edit(_NOTHING, texts, ends)
        count = int(ends[0])
        if stop < 0 or not count:
            return stop
        hashes = self._hashes(texts[: int(ends[count])].tobytes(), ends[1 : count + 1].tolist())
        ends[0] = 0
        return edit(np.frombuffer(hashes, dtype=np.uint8), texts, ends)

    def _hashes(self, texts: bytes, ends: Iterable[int]) -> bytes:
        """HMAC-SHA256 of each text, in hexadecimal digits, back to back."""
        keyed_inner, keyed_outer = self._keyed
        found, begin = [], 0
        for end in ends:
            inner, outer = keyed_inner.copy(), keyed_outer.copy()
            inner.update(texts[begin:end])
            outer.update(inner.digest())
            found.append(outer.digest())
            begin = end
        return b"".join(found).hex().encode()


def _hash_count(plan: TablePlan) -> int:
    """How many hashes a frame can have: two images and the key."""
    row = sum(one.action is Action.HASH for one in plan.columns)
    return 2 * row + sum(one.action is Action.HASH for one in plan.key_plans())


def _keyed_sha256(key: bytes) -> tuple[Any, Any]:
    """HMAC's inner and outer hash after the key: ``hmac`` takes twice as long for each value."""
    if len(key) > _BLOCK_BYTES:
        key = hashlib.sha256(key).digest()
    key = key.ljust(_BLOCK_BYTES, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in key) for pad in (0x36, 0x5C))
    return hashlib.sha256(inner), hashlib.sha256(outer)
