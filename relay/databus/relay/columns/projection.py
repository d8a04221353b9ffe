"""``columns=`` for frames: rows with some of their columns, under a smaller schema.

A rule for columns does this for all readers in the fetcher; a projection does it for the readers
that request it, when frames are sent: the same kernel leaves values out of the Avro rows and
seals the frames again.  The smaller schema is a version like any other, identified by its
fingerprint; ``/register`` returns it for a request with the same columns.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from databus.common.frame.frame_format import Buffer
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from databus.relay.columns.column_rewriting import Rewriter
from databus.relay.columns.column_rules import UNCHANGED, Action, ColumnPlan, TablePlan

MAX_PROJECTIONS = 32
PROJECTED_BLOCK_BYTES = 256 << 10
"""How much is rewritten at once: it blocks the event loop."""

_DROPPED = ColumnPlan(Action.DROP)


class Projection:
    """The columns of the key and the requested others, as rules for a ``Rewriter``."""

    skipped_ops: frozenset[int] = frozenset()

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted

    def plan(self, schema: SourceSchema) -> TablePlan | None:
        """The plan for a table's columns; None if all of them stay."""
        names = self.wanted | set(schema.key)
        plans = tuple(UNCHANGED if column.name in names else _DROPPED for column in schema.columns)
        if all(plan is UNCHANGED for plan in plans):
            return None
        columns = tuple(column for column in schema.columns if column.name in names)
        return TablePlan(schema, replace(schema, columns=columns), plans, b"")


class ProjectedFrames:
    """A ``Format``: frames with some of the columns.

    Owner: one task; the rewriter is shared with readers of the same columns.  By the time rows
    are rendered, ``schemas`` has their schemas.
    Raises: FormatError if a row does not match its schema.
    """

    content_type = FRAMES_TYPE
    block_bytes = PROJECTED_BLOCK_BYTES

    def __init__(self, rewriter: Rewriter, schemas: SchemaSet) -> None:
        self._rewriter = rewriter
        self._schemas = schemas
        self._known = 0

    def render(self, block: Buffer) -> Buffer:
        """The frames with fewer columns."""
        if len(self._schemas) != self._known:
            self._rewriter.learn_all(self._schemas)
            self._known = len(self._schemas)
        return self._rewriter.frames(block)


class Projections:
    """The rewriters of one database; readers of the same columns get the same one.

    Invariants:
        I1. At most ``MAX_PROJECTIONS`` are cached, those that were requested last.

    Owner: one worker's event loop.
    """

    def __init__(self) -> None:
        self._rewriters: OrderedDict[frozenset[str], Rewriter] = OrderedDict()

    def of(self, columns: frozenset[str]) -> Rewriter:
        """The rewriter of frames to these columns, once it has learned their schemas."""
        rewriter = self._rewriters.get(columns)
        if rewriter is None:
            rewriter = self._rewriters[columns] = Rewriter(Projection(columns))
            if len(self._rewriters) > MAX_PROJECTIONS:
                self._rewriters.popitem(last=False)
        self._rewriters.move_to_end(columns)
        return rewriter
