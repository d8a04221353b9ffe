"""Rows that do not fit the ring: only their table is suspended, and no part of the row is written.

A frame takes at most a quarter of the ring.  This stage takes a larger frame out of the stream,
after the rules for columns, and suspends its table.  A resynchronisation would meet the same row
again, so the suspension waits until the stream shows that the row is gone or smaller, or until an
operator has altered the settings.  ``ruled_source.py`` puts this around every source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.frame.frame_format import (
    ALIGNMENT,
    FIRST_CONTROL_OP,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameColumns,
    FrameView,
    Op,
    trusted_frame,
)
from databus.common.schema.source_schema import SourceSchema
from databus.relay.columns.rule_suspensions import Sifted
from databus.relay.ring.ring_format import largest_frame_bytes
from databus.relay.sources.contract import Batch, Chunk
from databus.relay.sources.row_buffers import KEY_START, KEY_STOP, ROW_START, ROW_STOP
from databus.relay.sources.suspended_tables import SuspendedTables

MAX_KEYS, MAX_KEY_BYTES = 1000, 1024
"""Of further rows of a table, and of rows with longer keys, only the existence is recorded."""
_SHOWN_LETTERS = 100
_MIB = 1 << 20


@dataclass(slots=True)
class LargeRows:
    """Why a table stays suspended: the ``keys`` of rows that are too large, as in their frames.

    ``has_more``: there are others.  ``waits_for`` describes what ends it; empty once no known
    obstacle is left.
    """

    waits_for: str
    keys: set[bytes] = field(default_factory=set)
    has_more: bool = False

    def add(self, key: bytes) -> None:
        """The row with this key is too large."""
        if len(self.keys) < MAX_KEYS and len(key) <= MAX_KEY_BYTES:
            self.keys.add(key)
        else:
            self.has_more |= key not in self.keys

    @property
    def is_gone(self) -> bool:
        """Whether no large row is known any more."""
        return not self.keys and not self.has_more

    def to_json(self) -> list[Any]:
        """The document in the resume state."""
        return [self.waits_for, sorted(key.hex() for key in self.keys), self.has_more]


def decode_large(document: Mapping[str, Any]) -> dict[str, LargeRows]:
    """The tables in a resume state's document.

    Raises:
        FormatError: it is something else.
    """
    try:
        return {
            str(source): LargeRows(
                str(waits_for), {bytes.fromhex(key) for key in keys}, bool(has_more)
            )
            for source, (waits_for, keys, has_more) in document.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"{str(document)[:200]!r} is no record of large rows: {error}") from error


class RowLimit:
    """Takes frames that the ring cannot hold out of the stream.

    Invariants:
        I1. No frame that passes is larger than ``limit_bytes``.
        I2. From the first such frame, no row of its table passes until the table resumes.
        I3. The position of that frame does not depend on how frames are cut into batches.
        I4. A suspended table waits as long as a row is known that is too large;
            its frames in the stream are examined meanwhile.

    Owner: the task that reads the stream; other tasks may call ``require``.
    """

    def __init__(
        self, ring_bytes: int, tables: SuspendedTables, known: Mapping[str, LargeRows] | None = None
    ) -> None:
        self.limit_bytes = min(largest_frame_bytes(ring_bytes), MAX_FRAME_BYTES)
        self.large = dict(known or {})
        self._ring_bytes = ring_bytes
        self._tables = tables
        self._schemas: dict[int, SourceSchema] = {}

    def learn(self, schemas: Iterable[SourceSchema]) -> None:
        """Take the definitions of tables whose rows come."""
        self._schemas |= {schema.source_id: schema for schema in schemas}

    def passes(self, batch: Batch) -> bool:
        """Whether ``sift`` would leave the batch unchanged: it is small, and no table suspended."""
        return not self.large and len(batch.data) <= self.limit_bytes

    def sift(self, batch: Batch, columns: FrameColumns | None = None) -> Sifted:
        """The part of a batch that passes; ``columns`` are those of its frames, if known."""
        self.learn(batch.schemas)
        if not batch.data or self.passes(batch):
            return Sifted(batch, columns)
        columns = columns or frame_format.scan(batch.data, verify=False)
        before = len(self.large)
        left_out, has_changed = self._left_out(memoryview(batch.data), columns)
        if not left_out.any():
            return Sifted(batch, columns, has_changed=has_changed)
        data = columns.words[np.repeat(~left_out, columns.length >> 3)].tobytes()
        remaining = frame_format.scan(data, verify=False) if data else None
        return Sifted(replace(batch, data=data), remaining, len(self.large) > before, has_changed)

    def _left_out(self, data: memoryview, columns: FrameColumns) -> tuple[Any, bool]:
        """Which frames do not pass, and whether the recorded state has changed."""
        ids, ops, hashes = columns.source_id, columns.op, columns.key_hash
        is_row = ops < FIRST_CONTROL_OP
        is_too_large = columns.length > self.limit_bytes
        before = np.array(
            [frame_format.source_id(source) for source in self.large], dtype=ids.dtype
        )
        known = [frame_format.key_hash(key) for rows in self.large.values() for key in rows.keys]
        keys = np.concatenate((np.array(known, dtype=np.uint64), hashes[is_too_large]))
        is_told = (ops == Op.TRUNCATE) | (ops == Op.SCHEMA_CHANGE) | np.isin(hashes, keys)
        is_of_one = np.isin(ids, np.concatenate((before, ids[is_too_large])))
        left_out = is_row & np.isin(ids, before)
        has_changed = False
        for index in np.flatnonzero(is_too_large | (is_told & is_of_one)).tolist():
            view = trusted_frame(data, int(columns.offset[index]))
            schema = self._schemas.get(view.source_id)
            if schema is None:
                raise FormatError(f"a frame of {view.length} bytes at {view.position} has no table")
            if schema.source not in self.large:
                if not is_too_large[index]:
                    continue
                self._suspend(schema, view)
                left_out[index:] |= is_row[index:] & (ids[index:] == view.source_id)
            self._look(schema, view)
            has_changed = True
        return left_out | is_too_large, has_changed

    def _suspend(self, schema: SourceSchema, view: FrameView) -> None:
        why, waits_for = self._words(schema, bytes(view.key), view.length)
        self._tables.suspend(schema.source, view.scn, why, waits_for=waits_for)
        self.large[schema.source] = LargeRows(waits_for)

    def _look(self, schema: SourceSchema, view: FrameView) -> None:
        """Record what a frame shows about a suspended table's large rows."""
        rows, key = self.large[schema.source], bytes(view.key)
        if view.op == Op.TRUNCATE:
            rows.keys.clear()
            rows.has_more = False
        elif view.op == Op.SCHEMA_CHANGE:
            self._wait(schema.source, "")  # The column may be gone.
        elif view.op == Op.DELETE or _next_bytes(view) <= self.limit_bytes:
            rows.keys.discard(key)
        else:
            rows.add(key)
            self._wait(schema.source, rows.waits_for or self._words(schema, key, view.length)[1])
        if rows.is_gone:
            self._wait(schema.source, "")

    def _wait(self, source: str, what: str) -> None:
        self.large[source].waits_for = what
        self._tables.wait_for(source, what)

    def suspend_again(self, source: str, scn: int, problem: UnsupportedChange) -> None:
        """A read of the whole suspended table has met a row that is too large."""
        waits_for = str(problem.details["waits_for"])
        self._tables.suspend_again(source, scn, problem.message, waits_for=waits_for)
        rows = self.large.setdefault(source, LargeRows(waits_for))
        key = bytes.fromhex(str(problem.details["key"]))
        rows.add(key or bytes(MAX_KEY_BYTES + 1))
        self._wait(source, waits_for)

    def resumed(self) -> None:
        """Tables have resumed."""
        for source in self.large.keys() - self._tables.suspensions.keys():
            del self.large[source]

    def keys_of(self, source: str, schema: SourceSchema) -> list[list[Any]]:
        """The keys of the rows that are known to be too large, JSON-able."""
        rows = self.large.get(source)
        return [] if rows is None else [schema.key_json(key) for key in sorted(rows.keys)]

    def require(self, chunk: Chunk) -> None:
        """Check that each row of a chunk fits into a frame.

        Raises:
            UnsupportedChange: one row does not.
        """
        spans = chunk.rows.spans
        if not len(spans):
            return
        sizes = spans[:, KEY_STOP] - spans[:, KEY_START] + spans[:, ROW_STOP] - spans[:, ROW_START]
        worst = int(np.argmax(sizes))
        size_bytes = _aligned(HEADER_BYTES + int(sizes[worst]))
        if size_bytes <= self.limit_bytes:
            return
        key = chunk.rows[worst].key
        why, waits_for = self._words(chunk.schema, key, size_bytes)
        raise UnsupportedChange(
            f"{chunk.schema.source}: {why}. {waits_for}",
            source=chunk.schema.source,
            key=key.hex() if len(key) <= MAX_KEY_BYTES else "",
            waits_for=waits_for,
        )

    def _words(self, schema: SourceSchema, key: bytes, size_bytes: int) -> tuple[str, str]:
        """Why a table is suspended, and what ends that."""
        shown = str(schema.key_json(key)) if key else "its definition"
        if len(shown) > _SHOWN_LETTERS:
            shown = shown[:_SHOWN_LETTERS] + ".."
        why = (
            f"its row with the key {shown} takes a frame of {size_bytes:,} bytes, and the ring "
            f"holds frames of at most {self.limit_bytes:,} bytes, a quarter of "
            f"ring_bytes = {self._ring_bytes:,}"
        )
        wanted_mib = -(-4 * size_bytes // _MIB)
        waits_for = (
            f'Set ring_bytes = "{wanted_mib}MiB" or more, leave the large column out with '
            f"exclude_columns, or make the row smaller or delete it"
        )
        return why, waits_for


def _next_bytes(view: FrameView) -> int:
    """Bytes of the row's next change, if it stays as it is after this one."""
    before = view.after_len if view.before is not None else 0
    return _aligned(HEADER_BYTES + view.key_len + before + view.after_len)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
