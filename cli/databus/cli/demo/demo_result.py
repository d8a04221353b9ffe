"""The demo's result: each consumer's tables compared with the source, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from databus.cli.demo.demo_consumer import ShopMirror
from databus.cli.demo.shop import Rows, Shop, ShopDifference, differences


@dataclass(frozen=True, slots=True)
class ConsumerResult:
    """The result of one consumer."""

    name: str
    rows: int
    events: int
    moves: tuple[str, ...]
    rollbacks: int
    regressions: int
    differences: tuple[ShopDifference, ...]

    @property
    def equal(self) -> bool:
        """No row differs, and none ever went back in time."""
        return not self.differences and not self.regressions


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of all consumers."""

    source_rows: int
    transactions: int
    kinds: dict[str, int]
    consumers: tuple[ConsumerResult, ...]

    @property
    def equal(self) -> bool:
        """Whether every consumer's tables equal the source's."""
        return all(consumer.equal for consumer in self.consumers) and self.source_rows > 0


def compare(
    expected: dict[str, Rows], mirrors: Sequence[ShopMirror], shop: Shop, transactions: int
) -> DemoResult:
    """Compare every mirror with the source's rows."""
    return DemoResult(
        source_rows=_count(expected),
        transactions=transactions,
        kinds=dict(shop.counts),
        consumers=tuple(
            ConsumerResult(
                name=mirror.name,
                rows=_count(mirror.tables),
                events=mirror.events,
                moves=tuple(mirror.moves),
                rollbacks=mirror.rollbacks,
                regressions=mirror.regressions,
                differences=tuple(differences(expected, mirror.tables)),
            )
            for mirror in mirrors
        ),
    )


def show(result: DemoResult, console: Console) -> None:
    """Print it, with numbers."""
    table = Table(title="\nThe result", title_justify="left")
    for column in ("", "rows", "events", "read from @ scn", "rows that differ"):
        table.add_column(column, justify="left" if column in ("", "read from @ scn") else "right")
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in result.kinds.items())
    table.add_row("source", f"{result.source_rows:,}", "", f"{result.transactions:,} tx", "")
    for consumer in result.consumers:
        table.add_row(
            consumer.name,
            f"{consumer.rows:,}",
            f"{consumer.events:,}",
            " → ".join(consumer.moves),
            f"{len(consumer.differences):,}",
        )
    console.print(table)
    console.print(f"  transactions: {kinds}", highlight=False)
    for consumer in result.consumers:
        if consumer.regressions:
            console.print(f"  {consumer.name}: {consumer.regressions} rows went back in time")
        for item in consumer.differences[:5]:
            console.print(
                f"  {consumer.name}: {item.source} {item.key}: source has {item.expected}, "
                f"consumer has {item.found}",
                highlight=False,
            )
    if result.equal:
        console.print(
            "  [bold green]EQUAL[/]: every consumer's tables are the source's, row by row"
        )
    else:
        console.print("  [bold red]DIFFERENT[/]: see above")


def _count(tables: dict[str, Rows]) -> int:
    return sum(map(len, tables.values()))
