"""``columns=`` for frames: rows with some of their columns, as rows of a smaller schema.

What a rule for columns does for all readers in the fetcher, this does for those who ask, on
the way out: the same kernel leaves values out of the Avro rows and seals the frames anew.  The
smaller schema is a version like any other, known by its fingerprint; ``/register`` gives it to
whoever asks for the same columns.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from databus.common.frame.frame_format import Buffer
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from databus.relay.columns.column_rewriting import Rewriter
from databus.relay.columns.column_rules import KEPT, Action, ColumnPlan, TablePlan

MAX_PROJECTIONS = 32
PROJECTED_BLOCK_BYTES = 256 << 10
"""How much is worth rewriting at once: it holds the event loop."""

_DROPPED = ColumnPlan(Action.DROP)


class Projection:
    """The columns of the key, and those wanted of the others, as rules for a ``Rewriter``."""

    skipped_ops: frozenset[int] = frozenset()

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted

    def plan(self, schema: SourceSchema) -> TablePlan | None:
        """What becomes of a table's columns; None where all of them are kept."""
        names = self.wanted | set(schema.key)
        plans = tuple(KEPT if column.name in names else _DROPPED for column in schema.columns)
        if all(plan is KEPT for plan in plans):
            return None
        columns = tuple(column for column in schema.columns if column.name in names)
        return TablePlan(schema, replace(schema, columns=columns), plans, b"")


class ProjectedFrames:
    """A ``Format``: frames with some of the columns.

    Owner: one task; the rewriter is shared with readers of the same columns.  ``schemas`` has
    those of all rows that are rendered, by the time they are.
    Raises: FormatError where a row is not one of its schema.
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
        I1. At most ``MAX_PROJECTIONS`` are kept, those that were asked for last.

    Owner: one worker's event loop.
    """

    def __init__(self) -> None:
        self._rewriters: OrderedDict[frozenset[str], Rewriter] = OrderedDict()

    def of(self, columns: frozenset[str]) -> Rewriter:
        """What rewrites frames to these columns, once it has learned their schemas."""
        rewriter = self._rewriters.get(columns)
        if rewriter is None:
            rewriter = self._rewriters[columns] = Rewriter(Projection(columns))
            if len(self._rewriters) > MAX_PROJECTIONS:
                self._rewriters.popitem(last=False)
        self._rewriters.move_to_end(columns)
        return rewriter
