"""Columns that a table has again: they were dropped or renamed, then added under the old name.

Earlier frames have the old column's values under that name.  A reader that resolves them by
name would show these values instead of the source's null or default.  So such a table is
suspended and resynchronised; docs/decisions/0057 has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence

from databus.common.schema.source_schema import SourceSchema


class ReturningColumns:
    """The column names of each table: those of all versions so far, and those of the last one.

    Owner: the registry's owner.
    """

    def __init__(self) -> None:
        self._ever: dict[str, set[str]] = {}
        self._last: dict[str, frozenset[str]] = {}
        self._followed: set[int] = set()

    def returning(self, schema: SourceSchema) -> list[str]:
        """The columns that an earlier version had, the last one lacks, and this one has again."""
        last = self._last.get(schema.source)
        if last is None:
            return []
        return sorted((_names(schema) & self._ever[schema.source]) - last)

    def has_followed(self, schema: SourceSchema) -> bool:
        """Whether the stream has reached this version before."""
        return schema.fingerprint in self._followed

    def follow(self, schema: SourceSchema) -> None:
        """The stream has reached this version."""
        names = _names(schema)
        self._ever.setdefault(schema.source, set()).update(names)
        self._last[schema.source] = names
        self._followed.add(schema.fingerprint)


def returned_words(names: Sequence[str]) -> str:
    """Why a table with these columns is suspended."""
    listed = ", ".join(names)
    return (
        f"it has the column {listed} again, which an earlier definition had: rows that were not "
        "changed since then have the earlier column's values in every copy"
    )


def _names(schema: SourceSchema) -> frozenset[str]:
    return frozenset(column.name for column in schema.columns)
