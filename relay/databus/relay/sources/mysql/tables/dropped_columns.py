"""Columns that statements dropped, or renamed, since a definition of their table was certain.

The catalogue that is asked behind ``ALTER TABLE t DROP c`` may have ``c`` again already, by a
statement that the stream comes to later.  Then the definition without ``c`` is never announced, and
the one behind the later statement can be the same as the one before the first.  So the name is
remembered until a definition is certain: if it has the name, rows have other values under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from databus.common.schema.source_schema import SourceSchema


class DroppedColumns:
    """Their names in small letters, by source.

    Invariants:
        I1. ``added_count`` grows with every name that a later start must not lack.

    Owner: the stream's decoder.
    Durability: in the resume state, on disk before the window of the statement.
    """

    def __init__(self, kept: Mapping[str, Sequence[str]] | None = None) -> None:
        """``kept`` is what ``names`` gave."""
        self._names = {source: frozenset(names) for source, names in (kept or {}).items()}
        self.added_count = 0

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """What is to be kept."""
        return {source: tuple(sorted(names)) for source, names in self._names.items()}

    def forget(self, source: str) -> None:
        """No row is there any more that was written before."""
        self._names.pop(source, None)

    def pass_statement(
        self,
        source: str,
        dropped: Iterable[str],
        old: SourceSchema | None,
        new: SourceSchema | None,
    ) -> list[str]:
        """A statement that dropped these columns has come by; returns those that are there again.

        ``old`` is the definition that consumers know, ``new`` the one behind the statement; None
        where it is not certain.
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
