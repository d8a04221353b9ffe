"""What a statement does to one captured table, and to what the relay gives of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from databus.cli.gate.migration_files import MigrationStatement
from databus.common.schema.source_schema import SourceSchema


class Reaction(StrEnum):
    """What the relay does with a table at a statement."""

    FOLLOWED = "followed"
    """The stream continues, under the new definition."""
    SUSPENDED = "suspended"
    """The table has no rows in the stream until it is resynchronised."""
    EMPTIED = "emptied"
    """The stream has a truncate event, and the table may be gone."""
    UNCERTAIN = "uncertain"
    """The statement is not understood."""


@dataclass(frozen=True, slots=True)
class TableEffect:
    """The effect on one table.

    ``before`` is None for a new table, ``after`` for one that is gone, has no key, or whose
    definition is not certain.  ``renamed`` has old and new names of columns.
    """

    source: str
    reaction: Reaction
    why: str = ""
    before: SourceSchema | None = None
    after: SourceSchema | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    is_gone: bool = False
    guesses: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class CaptureRules:
    """The part of a ``[[database]]`` that decides what the relay makes of a definition."""

    zero_dates: str = "error"
    special_values: str = "error"


class MigrationReader(Protocol):
    """Reads the statements of one kind of server.

    It retains what earlier statements set: the default schema.
    """

    def effects(
        self, statement: MigrationStatement, schemas: Mapping[str, SourceSchema]
    ) -> list[TableEffect]:
        """The effects on tables; ``schemas`` are the definitions before it, by source.

        Raises:
            NotUnderstood: the statement is not understood, and may affect any table.
        """
