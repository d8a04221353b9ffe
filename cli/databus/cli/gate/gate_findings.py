"""The findings of the gate, by statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from databus.cli.gate.migration_files import MigrationStatement
from databus.cli.gate.table_effects import TableEffect


class FindingKind(StrEnum):
    """What a finding is about.  All but ``NOTE`` are breaks."""

    SUSPENDED = "suspended"
    """The relay gives no rows of the table until it is resynchronised."""
    EMPTIED = "emptied"
    """Consumers see all rows of the table go."""
    COLUMNS = "columns"
    """A column is gone, has another name, or another kind."""
    RESOLUTION = "resolution"
    """A reader with the old version cannot read new rows."""
    SINK = "sink"
    """A route of a sink does not fit any more."""
    REGISTRY = "registry"
    """A subject of a schema registry refuses the new version."""
    CONSUMER = "consumer"
    """A class of an application does not fit the rows."""
    UNKNOWN = "unknown"
    """The statement is not understood: it may break anything."""
    NOTE = "note"
    """Worth a look, and no break."""


BREAKS = tuple(kind for kind in FindingKind if kind is not FindingKind.NOTE)


@dataclass(frozen=True, slots=True)
class GateFinding:
    """One finding: what it is about, why, and what to do."""

    kind: FindingKind
    subject: str
    why: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class TableReport:
    """One table of a statement: the change in words, and whether readers resolve it.

    ``forward``: why a reader with the old version cannot read new rows.  ``backward``: why one with
    the new version cannot read old rows.
    """

    effect: TableEffect
    changes: Sequence[str] = ()
    forward: Sequence[str] = ()
    backward: Sequence[str] = ()
    findings: Sequence[GateFinding] = ()


@dataclass(frozen=True, slots=True)
class StatementReport:
    """One statement."""

    statement: MigrationStatement
    tables: Sequence[TableReport] = ()
    findings: Sequence[GateFinding] = field(default_factory=tuple)

    def all_findings(self) -> list[GateFinding]:
        """Those of the statement, and of its tables."""
        return [*self.findings, *(one for table in self.tables for one in table.findings)]

    def to_json(self, allowed: Sequence[FindingKind]) -> dict[str, Any]:
        """As JSON."""
        return {
            "file": self.statement.file,
            "line": self.statement.line,
            "statement": self.statement.text,
            "tables": [
                {
                    "source": table.effect.source,
                    "reaction": table.effect.reaction.value,
                    "reason": table.effect.why,
                    "changes": list(table.changes),
                    "forward": list(table.forward),
                    "backward": list(table.backward),
                    "schema": None if table.effect.after is None else table.effect.after.to_json(),
                }
                for table in self.tables
            ],
            "findings": [
                {
                    "kind": one.kind.value,
                    "is_break": is_break(one, allowed),
                    "subject": one.subject,
                    "why": one.why,
                    "cure": one.cure,
                }
                for one in self.all_findings()
            ],
        }


def is_break(finding: GateFinding, allowed: Sequence[FindingKind]) -> bool:
    """Whether a finding fails the check."""
    return finding.kind is not FindingKind.NOTE and finding.kind not in allowed
