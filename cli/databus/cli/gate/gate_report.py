"""Prints the reports of a check, as text or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from databus.cli.gate.gate_findings import FindingKind, StatementReport, is_break

_SHOWN = 100


def print_json(
    database: str,
    reports: Sequence[StatementReport],
    allowed: Sequence[FindingKind],
    readers: Sequence[str],
) -> None:
    """One object for the whole check."""
    breaks = break_count(reports, allowed)
    document = {
        "database": database,
        "breaks": breaks,
        "readers": list(readers),
        "statements": [report.to_json(allowed) for report in reports],
    }
    print(json.dumps(document, indent=2))


def print_text(
    database: str,
    reports: Sequence[StatementReport],
    allowed: Sequence[FindingKind],
    readers: Sequence[str],
) -> None:
    """A block for each statement that concerns a captured table, then the sum."""
    for report in reports:
        for line in _lines(report, allowed):
            print(line)
    kinds = Counter(
        one.kind.value
        for report in reports
        for one in report.all_findings()
        if is_break(one, allowed)
    )
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"database {database}: {len(reports)} statements, breaks: {listed or 'none'}")
    if kinds and readers:
        print(f"readers that the relay has seen: {', '.join(readers)}")


def break_count(reports: Sequence[StatementReport], allowed: Sequence[FindingKind]) -> int:
    """The number of findings that fail the check."""
    return sum(is_break(one, allowed) for report in reports for one in report.all_findings())


def _lines(report: StatementReport, allowed: Sequence[FindingKind]) -> Iterator[str]:
    if not report.tables and not report.findings:
        return
    statement = report.statement
    text = " ".join(statement.text.split())
    yield f"{statement.file}:{statement.line}: {text[:_SHOWN]}{'...' if text[_SHOWN:] else ''}"
    for table in report.tables:
        yield f"  {table.effect.source}: {table.effect.reaction}"
        for change in table.changes:
            yield f"    {change}"
        for name, reasons in (("forward", table.forward), ("backward", table.backward)):
            if reasons:
                yield f"    not {name} compatible: {'; '.join(reasons)}"
    for one in report.all_findings():
        mark = "BREAK" if is_break(one, allowed) else "note"
        yield f"  {mark} ({one.kind}) {one.subject}: {one.why}"
        if one.cure and mark == "BREAK":
            yield f"    {one.cure}"
