"""Suspends tables that a rule for columns does not fit; nothing of them is written.

A rule that fits every table at the first start may not fit a table that is made or altered later,
for example a mask on a column that is that table's key.  This module takes its frames out before
the rules are applied to the others.  ``ruled_source.py`` stores the suspension, and resumes the
table when all of it is read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.common.compiled.kernels import I64Array
from databus.common.errors import FormatError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FIRST_CONTROL_OP, FrameColumns, Op, trusted_frame
from databus.common.schema.source_schema import SourceSchema
from databus.relay.columns.column_rules import ColumnRules
from databus.relay.sources.contract import Batch, ResumeState
from databus.relay.sources.suspended_tables import (
    SuspendedTables,
    SuspensionState,
    TableSuspension,
    decode_suspensions,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RuledResumeState:
    """The resume state of a source with rules, with the source's own resume state in it.

    ``digest`` is that of the rules.  ``suspended`` are the tables that the rules did not fit, or of
    which a row did not fit into a frame of ``limit_bytes``; the latter are in ``large``, as JSON.
    The source's part is ``inner``, or ``text`` until the source has given one.
    """

    digest: str = ""
    suspended: Mapping[str, TableSuspension] = field(default_factory=dict)
    inner: ResumeState | None = None
    text: str = ""
    limit_bytes: int = 0
    large: Mapping[str, list[Any]] = field(default_factory=dict)

    def encode(self) -> str:
        """As JSON; the source's own resume state if there is nothing else."""
        text = self.inner.encode() if self.inner is not None else self.text
        if not self.digest and not self.suspended:
            return text
        tables = SuspensionState(self.suspended).encode()
        ruled: dict[str, Any] = {"by": self.digest, "tables": tables}
        if self.large:
            ruled |= {"limit_bytes": self.limit_bytes, "large": self.large}
        return json.dumps({"ruled": ruled, "source": text})


def decode_ruled(text: str) -> RuledResumeState:
    """The resume state in a text: that of ``RuledResumeState.encode``, or of a source without
    rules.

    Raises:
        FormatError: it looks like the first, but is damaged.
    """
    if not is_ruled(text):
        return RuledResumeState(text=text)
    try:
        document = json.loads(text)
        ruled = document["ruled"]
        suspended = decode_suspensions(str(ruled["tables"])).suspended
        large, limit_bytes = dict(ruled.get("large", {})), int(ruled.get("limit_bytes", 0))
        text = str(document["source"])
        return RuledResumeState(
            str(ruled["by"]), suspended, text=text, limit_bytes=limit_bytes, large=large
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{text[:200]!r} is no state of a source with rules: {error}") from error


def is_ruled(text: str) -> bool:
    """Whether a resume state is that of a source with rules."""
    return text.startswith('{"ruled"')


@dataclass(frozen=True, slots=True)
class Sifted:
    """A batch without the frames of suspended tables.

    ``columns`` are those of its frames, None if it has none; ``has_suspended``: it suspended a
    table; ``has_changed``: the stored state of a suspended table changed.
    """

    batch: Batch
    columns: FrameColumns | None = None
    has_suspended: bool = False
    has_changed: bool = False


class UnfitTables:
    """Takes frames without a plan out of the stream.

    Invariants:
        I1. Nothing of a schema that the rules do not fit passes: no row, and no definition.
        I2. From the first frame of such a schema, no row of its table passes, whatever that
            row's schema, until ``tables`` resumes the table.
        I3. The position of that frame depends on the frames and not on how they are cut into
            batches: a window that is read again suspends the table at the same position.
        I4. Frames that pass are unchanged: scn, seq and the counts of ends stay.

    Owner: the task that reads the stream.
    """

    def __init__(
        self,
        database: str,
        rules: ColumnRules,
        tables: SuspendedTables | None = None,
        large: Container[str] = (),
    ) -> None:
        """``large`` are tables in ``tables`` that another stage leaves out, for a row's size."""
        self.tables = tables or SuspendedTables({})
        self._large = large
        self._in_window = False
        self._last = b""
        self._database = database
        self._rules = rules
        self._known: set[int] = set()
        self._unfit: dict[int, tuple[str, str]] = {}

    def begin(self) -> None:
        """The stream begins, between two windows."""
        self._in_window, self._last = False, b""

    def passed(self, data: bytes) -> None:
        """Count frames that pass without ``sift``."""
        self._last = data or self._last

    @property
    def in_window(self) -> bool:
        """Whether the frames so far end inside a window."""
        if self._last:
            self._in_window = _is_open(frame_format.scan(self._last, verify=False))
            self._last = b""
        return self._in_window

    def sift(self, batch: Batch) -> Sifted:
        """The part of a batch that passes."""
        if not batch.data:
            return Sifted(self._with_schemas(batch, batch.schemas))
        columns = frame_format.scan(batch.data, verify=False)
        ops = columns.op
        announced = [
            self._announced(batch.data, int(columns.offset[change]))
            for change in np.flatnonzero(ops == Op.SCHEMA_CHANGE).tolist()
            if int(columns.schema_fp[change]) not in self._known
        ]
        # A table that was fixed can be dumped before it has a row.
        batch = self._with_schemas(batch, (*batch.schemas, *announced))
        self._in_window, self._last = _is_open(columns), b""
        if not self._unfit and not self.tables.suspensions:
            return Sifted(batch, columns)
        before = len(self.tables.suspensions)
        left_out = self._left_out(columns, ops)
        has_suspended = len(self.tables.suspensions) > before
        if not left_out.any():
            return Sifted(batch, columns, has_suspended)
        data = columns.words[np.repeat(~left_out, columns.length >> 3)].tobytes()
        remaining = frame_format.scan(data, verify=False) if data else None
        return Sifted(replace(batch, data=data), remaining, has_suspended)

    def problem(self, schema: SourceSchema) -> str:
        """Why the rules do not fit a table, and how to fix that; "" if they do."""
        fingerprint = schema.fingerprint
        if fingerprint not in self._known:
            self._known.add(fingerprint)
            if problem := self._rules.problem(schema):
                self._unfit[fingerprint] = (schema.source, problem)
        return self._unfit[fingerprint][1] if fingerprint in self._unfit else ""

    def _with_schemas(self, batch: Batch, schemas: tuple[SourceSchema, ...]) -> Batch:
        fitting = tuple(schema for schema in schemas if not self.problem(schema))
        return batch if fitting == batch.schemas else replace(batch, schemas=fitting)

    @staticmethod
    def _announced(data: bytes, offset: int) -> SourceSchema:
        """The definition in a frame, which may come before any row of it and before its schema."""
        view = trusted_frame(memoryview(data), offset)
        return SourceSchema.from_json(json.loads(bytes(view.after or b"")))

    def _left_out(self, columns: FrameColumns, ops: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Which frames do not pass; their tables are suspended."""
        is_row = ops < FIRST_CONTROL_OP
        left_out = np.zeros(len(columns), dtype=np.bool_)
        suspended = self.tables.suspensions.keys()
        before = [
            frame_format.source_id(source) for source in suspended if source not in self._large
        ]
        if self._unfit:
            left_out = np.isin(columns.schema_fp, np.array(list(self._unfit), dtype=np.uint64))
            left_out &= is_row | (ops == Op.SCHEMA_CHANGE)
        ids = columns.source_id
        for source, first in self._suspend(columns, np.flatnonzero(left_out)):
            left_out[first:] |= is_row[first:] & (ids[first:] == frame_format.source_id(source))
        if before:
            left_out |= is_row & np.isin(ids, np.array(before, dtype=ids.dtype))
        return left_out

    def _suspend(self, columns: FrameColumns, unfit: I64Array) -> list[tuple[str, int]]:
        """Suspend the tables of these frames; returns the newly suspended, each with its frame."""
        found = []
        fingerprints, firsts = np.unique(columns.schema_fp[unfit], return_index=True)
        order = sorted(zip(unfit[firsts].tolist(), fingerprints.tolist(), strict=True))
        for first, fingerprint in order:
            source, why = self._unfit[fingerprint]
            if source not in self.tables.suspensions:
                _log.warning("database %s: %s is suspended: %s", self._database, source, why)
                self.tables.suspend(source, int(columns.scn[first]), why)
                found.append((source, first))
        return found


def _is_open(columns: FrameColumns) -> bool:
    return int(columns.op[-1]) != Op.END_OF_WINDOW
