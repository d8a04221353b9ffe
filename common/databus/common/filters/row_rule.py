"""How a predicate decides one version of a table: whether a row is in a copy, and whether it was.

``predicate`` says what the text means.  This module chooses the images of a change to which it is
applied, and what follows where an image lacks a column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from databus.common.errors import BadFilter
from databus.common.filters.predicate import Predicate, Test, compile_predicate
from databus.common.frame.frame_format import FrameView, Op
from databus.common.schema.source_schema import SourceSchema


@dataclass(frozen=True, slots=True)
class RowRule:
    """A predicate over the rows of one version; without ``test`` the answer is ``otherwise``."""

    schema: SourceSchema
    test: Test | None
    otherwise: bool = True

    def takes(self, frame: FrameView) -> bool:
        """Whether a reader that has a copy needs the change: the row is in or was in.

        A change that cannot be decided is needed.
        """
        if self.test is None:
            return self.otherwise
        if frame.op == Op.TRUNCATE:
            return True
        if frame.op != Op.DELETE and self.is_in(frame) is not False:
            return True
        return frame.op in (Op.UPDATE, Op.DELETE) and self.was_in(frame) is not False

    def is_in(self, frame: FrameView) -> bool | None:
        """Whether the row after an insert, an update or a dump is in.

        None: a column that matters is neither in the row nor in the one before.
        """
        row = self.schema.decode_row(frame.after or b"")
        if frame.absent_len:
            before = frame.before
            old = None if before is None else self.schema.decode_row(before)
            for name in self.schema.absent_names(frame.absent):
                if old is None:
                    del row[name]
                else:
                    row[name] = old[name]
        return self._holds(row)

    def was_in(self, frame: FrameView) -> bool | None:
        """Whether the row before an update or a delete was in; its key stands for it if the source
        gives no more.

        None: a column that matters is not there.
        """
        before = frame.before
        if before is not None:
            return self._holds(self.schema.decode_row(before))
        return self._holds(self.schema.decode_key(frame.key) if frame.key_len else {})

    def _holds(self, row: dict[str, Any]) -> bool | None:
        if self.test is None:
            return self.otherwise
        try:
            return self.test(row) is True
        except KeyError:
            return None


def names_of(versions: Iterable[SourceSchema]) -> set[str]:
    """The names of the columns of all versions of a source."""
    return {column.name for schema in versions for column in schema.columns}


def row_rule(predicate: Predicate, schema: SourceSchema, names: set[str]) -> RowRule:
    """The rule for one version of a source whose versions have the columns ``names``.

    A column that only other versions have is NULL.  A source that lacks a column is left out.  A
    version in which two things do not compare cannot be decided, so every change of it is needed.
    """
    if any(name.among(names) is None for name in predicate.names):
        return RowRule(schema, None, otherwise=False)
    try:
        return RowRule(schema, compile_predicate(predicate, schema.columns, names))
    except BadFilter:
        return RowRule(schema, None)
