"""Columns that statements dropped, or renamed, since a definition of their table was certain.

When the stream reads ``ALTER TABLE t DROP c``, the catalogue may have ``c`` again already, by a
later statement.  Then the definition without ``c`` is never announced, and the one after the later
statement can equal the one before the first.  So the name is stored until a definition is
certain: if that has the name, rows have other values under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from databus.common.schema.source_schema import SourceSchema


class DroppedColumns:
    """The dropped columns' names in lower case, by source.

    Invariants:
        I1. ``added_count`` grows with every name that must be stored for a restart.

    Owner: the stream's decoder.
    Durability: in the resume state, on disk before the window of the statement.
    """

    def __init__(self, stored: Mapping[str, Sequence[str]] | None = None) -> None:
        """``stored`` is a value of ``names``."""
        self._names = {source: frozenset(names) for source, names in (stored or {}).items()}
        self.added_count = 0

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names to store."""
        return {source: tuple(sorted(names)) for source, names in self._names.items()}

    def forget(self, source: str) -> None:
        """Remove a table's names: all its earlier rows are gone."""
        self._names.pop(source, None)

    def pass_statement(
        self,
        source: str,
        dropped: Iterable[str],
        old: SourceSchema | None,
        new: SourceSchema | None,
    ) -> list[str]:
        """Note a statement that dropped these columns; returns those that exist again.

        ``old`` is the announced definition, ``new`` the one after the statement; None if it is
        not certain.
        """
        before = self._names.get(source, frozenset())
        gone = frozenset(name.lower() for name in dropped)
        names = before | (gone if old is None else gone & _names(old))
        if new is not None:
            self._names.pop(source, None)
            return sorted(names & _names(new))
        if names != before:
            self._names[source] = names
            self.added_count += 1
        return []


def _names(schema: SourceSchema) -> frozenset[str]:
    return frozenset(column.name.lower() for column in schema.columns)
