"""Selects row changes by a predicate, and caches the decisions for the next reader.

The predicate is applied to the row of an insert or a dumped row, to the row before a delete, and
to both rows of an update.  An update is selected if the row was in or is in, so that the owner of
a copy learns of rows that leave.  If the source gives no image before, the key replaces it.
A change that cannot be decided, because a column that matters is not in the image, is selected.
A source that has not all of the predicate's columns is left out; a column that only other
versions of the table have is NULL.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from databus.common.errors import BadFilter
from databus.common.filters.predicate import (
    Predicate,
    compile_predicate,
    unknown_column,
)
from databus.common.filters.row_rule import RowRule, names_of, row_rule
from databus.common.filters.stream_filter import Mask
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    FrameColumns,
    trusted_frame,
)
from databus.common.frame.header_layout import gathered
from databus.common.schema.source_schema import SchemaSet
from databus.relay.ring.ring_reader import RingReader
from databus.relay.serving.filter.predicate_kernels import LEFT_OUT, TAKEN, UNDECIDED
from databus.relay.serving.filter.predicate_program import Program, compile_program
from databus.relay.serving.header_cache import CachedHeaders

FILTERED_BLOCK_BYTES = 128 << 10
"""How much is filtered at once: it blocks the event loop."""
CHUNK_BYTES = 64 << 10
MAX_CHUNKS = 256
MAX_ROW_FILTERS = 32
MAX_LISTED = 1 << 20
"""How many matches on frames of cached headers a filter stores, a byte each."""
MAX_BY_HAND = 512
"""How many rows of cached headers are decided one by one: it blocks the event loop."""
MAX_CHECKED = 256

Matches = npt.NDArray[np.int8]


class SlowRowsError(Exception):
    """Too many rows of cached headers need Python one by one; read them block by block."""


class _Rule(NamedTuple):
    """How rows of one version are filtered.  ``program`` decides most of it, many rows at once."""

    row_rule: RowRule
    program: Program | None = None


class RowFilter:
    """Applies one predicate to the frames of one database, for all readers that use it.

    Invariants:
        I1. A match depends on the frame's bytes and the known schemas alone, so it may be
            cached under the frame's ring position, which is never used twice.
        I2. At most ``MAX_CHUNKS`` pieces of the ring have matches, 8 KiB each; of cached headers
            ``MAX_LISTED`` matches are stored, and one part's more.
        I3. A match on cached headers is stored only if its frames were in the ring until then.

    Owner: one worker's event loop.
    """

    def __init__(self, predicate: Predicate, schemas: SchemaSet) -> None:
        self.predicate = predicate
        self.decided_count = 0
        self._schemas = schemas
        self._known_schemas = -1
        self._checked: set[tuple[str, ...]] = set()
        self._rules: dict[int, _Rule] = {}
        self._chunks: OrderedDict[int, Matches] = OrderedDict()
        self._listed: OrderedDict[tuple[int, int], Matches] = OrderedDict()
        self._listed_count = 0
        self._is_slow = False

    @property
    def uses_cached_headers(self) -> bool:
        """Whether most rows so far were decided without Python."""
        return not self._is_slow

    def check(self, sources: Sequence[str]) -> None:
        """Refuse a predicate that none of these sources can answer.

        Raises:
            BadFilter: a column is in none of them, no source has all the columns, or in the
                newest version of one that has, two things do not compare.
        """
        self._forget_old_rules()
        if tuple(sources) in self._checked:
            return
        columns = {source: self._column_names(source) for source in sources}
        everywhere = set().union(*columns.values())
        for name in self.predicate.names:
            if columns and not any(name.among(names) for names in columns.values()):
                raise unknown_column(name, everywhere)
        fitting = [source for source in sources if self._fits(columns[source])]
        if columns and not fitting:
            wanted = ", ".join(name.text for name in self.predicate.names)
            raise BadFilter(f"where: no source of {', '.join(sources)} has all of {wanted}")
        for source in fitting:
            latest = self._schemas.latest(source)
            if latest is not None:
                compile_predicate(self.predicate, latest.columns, columns[source])
        if len(self._checked) < MAX_CHECKED:
            self._checked.add(tuple(sources))

    def refine(
        self,
        taken: Mask,
        columns: FrameColumns,
        block: npt.NDArray[np.uint8],
        ring_position: int | None,
    ) -> Mask:
        """``taken`` without the rows that the predicate excludes.

        ``ring_position`` is that of the block's first byte; None: nothing is cached.
        """
        self._forget_old_rules()
        rows = np.flatnonzero(taken & (columns.op < FIRST_CONTROL_OP))
        if not len(rows):
            return taken
        offsets = columns.offset[rows]
        matches = np.full(len(rows), UNDECIDED, dtype=np.int8)
        if ring_position is None:
            self._decide(block, offsets, matches)
        else:
            positions = offsets + ring_position
            chunks = positions // CHUNK_BYTES
            starts = np.flatnonzero(np.diff(chunks, prepend=chunks[0] - 1)).tolist()
            for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
                known = self._chunk(int(chunks[start]))
                slots = (positions[start:stop] % CHUNK_BYTES) >> 3
                part = known[slots]
                self._decide(block, offsets[start:stop], part)
                known[slots] = part
                matches[start:stop] = part
        mask = taken.copy()
        mask[rows] = matches == TAKEN
        return mask

    def refine_cached(self, cached_headers: CachedHeaders, ring: RingReader, taken: Mask) -> Mask:
        """``taken`` without the rows of cached headers that the predicate excludes.

        Raises:
            ReaderOvertaken: the writer may have overwritten one of them.
            SlowRowsError: too many rows need Python.
        """
        self._forget_old_rules()
        rows = np.flatnonzero(taken & (cached_headers.columns.op < FIRST_CONTROL_OP))
        if not len(rows):
            return taken
        key = cached_headers.start, cached_headers.stop
        known = self._listed.get(key)
        unknown = rows if known is None else rows[known[rows] == UNDECIDED]
        if known is None:
            known = np.full(len(cached_headers.offsets), UNDECIDED, dtype=np.int8)
        if len(unknown):
            known[unknown] = self._cached_matches(cached_headers, ring, unknown)
        self._store(key, known)
        mask = taken.copy()
        mask[rows] = known[rows] == TAKEN
        return mask

    def _cached_matches(
        self, cached_headers: CachedHeaders, ring: RingReader, chosen: npt.NDArray[np.int64]
    ) -> Matches:
        """The matches on the chosen frames of cached headers."""
        matches = np.full(len(cached_headers.offsets), UNDECIDED, dtype=np.int8)
        fingerprints = cached_headers.columns.schema_fp[chosen]
        self._by_program(
            cached_headers.file.data, cached_headers.offsets, chosen, fingerprints, matches
        )
        cached_headers.require_retained(ring)
        left = chosen[matches[chosen] == UNDECIDED]
        if len(left) > MAX_BY_HAND:
            self._is_slow = True
            raise SlowRowsError
        if len(left):
            lengths = cached_headers.columns.length[left].astype(np.int64)
            copies = memoryview(cached_headers.fetch(ring, left, lengths))
            for index, offset in zip(left, np.cumsum(lengths) - lengths, strict=True):
                frame = trusted_frame(copies, int(offset))
                is_taken = self._rule_of(frame.schema_fp).row_rule.takes(frame)
                matches[index] = TAKEN if is_taken else LEFT_OUT
        self.decided_count += len(chosen)
        return matches[chosen]

    def _store(self, key: tuple[int, int], matches: Matches) -> None:
        if key not in self._listed:
            self._listed_count += len(matches)
        self._listed[key] = matches
        self._listed.move_to_end(key)
        while self._listed_count > MAX_LISTED and len(self._listed) > 1:
            self._listed_count -= len(self._listed.popitem(last=False)[1])

    def _decide(
        self, block: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], matches: Matches
    ) -> None:
        """Decide the unknown matches."""
        unknown = np.flatnonzero(matches == UNDECIDED)
        self.decided_count += len(unknown)
        whole_words = block[: len(block) & ~7].view(np.uint64)
        fingerprints = gathered(whole_words, offsets[unknown], "schema_fp")
        self._by_program(block, offsets, unknown, fingerprints, matches)
        unknown = unknown[matches[unknown] == UNDECIDED]
        view = block.data
        for index, offset in zip(unknown.tolist(), offsets[unknown].tolist(), strict=True):
            frame = trusted_frame(view, offset)
            is_taken = self._rule_of(frame.schema_fp).row_rule.takes(frame)
            matches[index] = TAKEN if is_taken else LEFT_OUT

    def _by_program(
        self,
        block: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        unknown: npt.NDArray[np.int64],
        fingerprints: npt.NDArray[np.uint64],
        matches: Matches,
    ) -> None:
        """Decide those unknown matches that need no Python."""
        found = set(fingerprints.tolist())
        for fingerprint in found:
            rule = self._rule_of(fingerprint)
            chosen = unknown if len(found) == 1 else unknown[fingerprints == fingerprint]
            if rule.row_rule.test is None:
                matches[chosen] = TAKEN if rule.row_rule.otherwise else LEFT_OUT
            elif rule.program is not None:
                rule.program.match(block, offsets, chosen, matches)

    def _chunk(self, number: int) -> Matches:
        found = self._chunks.get(number)
        if found is None:
            found = self._chunks[number] = np.full(CHUNK_BYTES >> 3, UNDECIDED, dtype=np.int8)
            if len(self._chunks) > MAX_CHUNKS:
                self._chunks.popitem(last=False)
        else:
            self._chunks.move_to_end(number)
        return found

    def _forget_old_rules(self) -> None:
        """A new version of a table may bring a column that was unknown."""
        if self._known_schemas != len(self._schemas):
            self._known_schemas = len(self._schemas)
            self._checked.clear()
            self._rules.clear()
            self._chunks.clear()
            self._listed.clear()
            self._listed_count = 0
            self._is_slow = False

    def _column_names(self, source: str) -> set[str]:
        """The names in all versions of a source."""
        return names_of(schema for schema in self._schemas if schema.source == source)

    def _fits(self, names: set[str]) -> bool:
        return all(name.among(names) is not None for name in self.predicate.names)

    def _rule_of(self, fingerprint: int) -> _Rule:
        return self._rules.get(fingerprint) or self._rule(fingerprint)

    def _rule(self, fingerprint: int) -> _Rule:
        schema = self._schemas.by_fingerprint(fingerprint)
        names = self._column_names(schema.source)
        found = row_rule(self.predicate, schema, names)
        is_open = found.test is not None
        program = compile_program(self.predicate, schema, names) if is_open else None
        rule = _Rule(found, program)
        self._rules[fingerprint] = rule
        return rule


class RowFilters:
    """The row filters of one database; readers with the same predicate get the same one.

    Invariants:
        I1. At most ``MAX_ROW_FILTERS`` are cached, those that were requested last.

    Owner: one worker's event loop.
    """

    def __init__(self, schemas: SchemaSet) -> None:
        self._schemas = schemas
        self._row_filters: OrderedDict[str, RowFilter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._row_filters)

    def of(self, predicate: Predicate) -> RowFilter:
        """The row filter of a predicate."""
        row_filter = self._row_filters.get(predicate.text)
        if row_filter is None:
            row_filter = self._row_filters[predicate.text] = RowFilter(predicate, self._schemas)
            if len(self._row_filters) > MAX_ROW_FILTERS:
                self._row_filters.popitem(last=False)
        self._row_filters.move_to_end(predicate.text)
        return row_filter
