"""The definition of each table that a schema-change frame announced last.

A reader that begins at the ring's oldest frame gets all definitions from the registry, and takes
the current one from schema-change frames.  A source may come to rows of a definition that it has
not announced: a group without an scn altered the table, or a dump read it first.  Such a
definition is announced in a window of the relay's own, so that windows of the source keep their
seqs when they are read again (docs/decisions/0102).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from databus.common.frame.frame_format import FIRST_CONTROL_OP, FrameColumns, Op, source_id
from databus.common.schema.source_schema import SourceSchema
from databus.relay.ring.schema_registry import Registry


class AnnouncedDefinitions:
    """What readers of the ring know of each table's definition.

    Invariants:
        I1. A table of several versions is due once a row has another definition than the frame
            before it announced.  What was announced before a restart counts as unknown.

    Owner: the intake.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._announced: dict[int, int] = {}
        self._examined: set[int] = set()
        self._due: dict[int, SourceSchema] = {}

    def of(self, source: str) -> int | None:
        """The fingerprint of the definition that was announced last for a table, if it is known."""
        return self._announced.get(source_id(source))

    def follow(self, schemas: Iterable[SourceSchema]) -> None:
        """The stream comes to these versions: the next row of their tables is examined."""
        wanted = list(schemas)
        self._registry.follow(wanted)
        for schema in wanted:
            if self._registry.schemas.has_several(schema.source):
                self._examined.add(schema.source_id)

    def observe(self, columns: FrameColumns) -> None:
        """These frames are about to be appended."""
        announced: dict[int, int] = {}
        changes = np.flatnonzero(columns.op == Op.SCHEMA_CHANGE)
        if len(changes):
            prints = columns.schema_fp[changes].tolist()
            tables = columns.source_id[changes].tolist()
            known = self._registry.schemas
            self._registry.announce(known.by_fingerprint(one) for one in prints if one in known)
            self._announced.update(zip(tables, prints, strict=True))
            announced.update(zip(tables, changes.tolist(), strict=True))
            for table in tables:
                self._due.pop(table, None)
        if self._examined:
            self._examine(columns, announced)

    def _examine(self, columns: FrameColumns, announced: dict[int, int]) -> None:
        is_row = (columns.op < FIRST_CONTROL_OP) & (columns.op != Op.TRUNCATE)
        is_row &= np.isin(columns.source_id, list(self._examined))
        last = dict(zip(columns.source_id[is_row].tolist(), np.flatnonzero(is_row), strict=True))
        for table, at in last.items():
            self._examined.discard(table)
            fingerprint = int(columns.schema_fp[at])
            is_behind = at > announced.get(table, -1)
            if is_behind and self._announced.get(table) != fingerprint:
                self._due[table] = self._registry.schemas.by_fingerprint(fingerprint)

    def take_due(self) -> list[SourceSchema]:
        """The definitions that are to be announced now."""
        due, self._due = list(self._due.values()), {}
        return due

    def announce(self, schema: SourceSchema) -> None:
        """A window of the relay's own announces this definition.  The source may not have come to
        it: its next row is examined."""
        self._registry.announce((schema,))
        self._announced[schema.source_id] = schema.fingerprint
        self._examined.add(schema.source_id)
