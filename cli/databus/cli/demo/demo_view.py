"""The demo's picture: figure 3 of the paper, with live positions.

One line of source time (SCN) with the position of the source, the ranges of the ring, the
bootstrap's log and the snapshot, and the position of each consumer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Span:
    """The range of a store: SCNs from ``low`` (exclusive) to ``high``; None if it is empty."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer as the picture shows it."""

    name: str
    mode: str
    scn: int
    events: int
    rate: float
    moves: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that one drawing shows; rates are events a second."""

    title: str
    step: str
    source_scn: int
    transactions: int
    transaction_rate: float
    ring: Span
    log: Span
    snapshot_scn: int | None
    consumers: tuple[ConsumerState, ...]
    notes: tuple[str, ...] = field(default=())
    base_scn: int = 0


def draw(picture: Picture) -> RenderableType:
    """The picture for a terminal of 110 columns or more."""
    scale = _Scale(picture.base_scn, max(picture.source_scn, picture.base_scn + 1))
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="bold", no_wrap=True, min_width=13)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row(
        "source",
        scale.point(picture.source_scn, "▼", "green"),
        f"scn {picture.source_scn:,}, {picture.transactions:,} transactions, "
        f"{picture.transaction_rate:,.0f}/s",
    )
    table.add_row("relay ring", scale.span(picture.ring, "cyan"), _range(picture.ring))
    table.add_row("bootstrap log", scale.span(picture.log, "blue"), _range(picture.log))
    snapshot = Span(picture.base_scn, picture.snapshot_scn) if picture.snapshot_scn else Span()
    table.add_row(
        "snapshot",
        scale.span(snapshot, "magenta"),
        f"up to {picture.snapshot_scn:,}" if picture.snapshot_scn else "not yet",
    )
    for consumer in picture.consumers:
        colour = _MODE_COLOURS.get(consumer.mode, "white")
        text = Text.assemble(
            (consumer.mode, colour),
            f" at {consumer.scn:,}, {consumer.events:,} events, {consumer.rate:,.0f}/s",
        )
        table.add_row(consumer.name, scale.point(consumer.scn, "▲", colour), text)
    body: list[RenderableType] = [Text(picture.step, style="italic"), Text(), table, Text()]
    for consumer in picture.consumers:
        if consumer.moves:
            body.append(Text(f"  {consumer.name}: {consumer.moves}", style="dim"))
    body += [Text(note, style="dim") for note in picture.notes]
    return Panel(Group(*body), title=picture.title, title_align="left", expand=True)


_MODE_COLOURS = {
    "relay": "green",
    "bootstrap": "yellow",
    "asleep": "red",
    "waiting": "white",
    "done": "green",
}


def _range(span: Span) -> str:
    return "empty" if span.low is None or span.high is None else f"{span.low:,} .. {span.high:,}"


class _Scale:
    """Maps SCNs from ``low`` to ``high`` to a line of fixed width."""

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._size = high - low

    def _cell(self, scn: int) -> int:
        cell = (scn - self._low) * (_BAR_WIDTH - 1) // self._size
        return max(0, min(_BAR_WIDTH - 1, cell))

    def point(self, scn: int, mark: str, colour: str) -> Text:
        cell = self._cell(scn)
        return Text.assemble(
            ("·" * cell, "dim"), (mark, colour), ("·" * (_BAR_WIDTH - 1 - cell), "dim")
        )

    def span(self, span: Span, colour: str) -> Text:
        if span.low is None or span.high is None:
            return Text("·" * _BAR_WIDTH, style="dim")
        first, last = self._cell(span.low), self._cell(span.high)
        return Text.assemble(
            ("·" * first, "dim"),
            ("█" * (last - first + 1), colour),
            ("·" * (_BAR_WIDTH - 1 - last), "dim"),
        )
