"""What a sink writes: rows in commit order, or tables of Arrow columns.

Routes, columns, ``where`` and the transform are applied here, so that every sink has them.
"""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from databus.client.application.events import Event
from databus.client.sinks.sink_routes import Route, SinkRoutes
from databus.client.tables.data_batch import DataBatch
from databus.common.checkpoint import Position
from databus.common.errors import RowRefused
from databus.common.schema.source_schema import SourceSchema

BEGINNING = Position(-1, 0)
"""Before every position."""
_UNSET: Any = object()


class SinkRow:
    """One change on its way to a target.  A transform may set ``target``, ``key``, ``value``,
    ``before`` and ``op``; what it does not set is that of ``event``, decoded on access.

    A document of JSON is its text.
    """

    __slots__ = ("_before", "_is_changed", "_key", "_value", "columns", "event", "op", "target")

    def __init__(self, event: Event, route: Route) -> None:
        self.event = event
        """The change as the stream has it: position, window, schema, frame."""
        self.target = route.target
        """Where it goes."""
        self.op = event.op
        """c inserted, u updated, d deleted, r read by a dump, t truncated."""
        self.columns = route.columns
        """The columns that go there, besides those of the key; empty for all."""
        self._key = self._value = self._before = _UNSET
        self._is_changed = False

    @property
    def source(self) -> str:
        """The table that it comes from."""
        return self.event.source

    @property
    def position(self) -> Position:
        """(scn, seq): unique in the stream, and the same each time the change comes."""
        return self.event.position

    @property
    def key(self) -> dict[str, Any]:
        """The key's columns; empty for a truncate."""
        if self._key is _UNSET:
            value = None if self._is_changed else self.value
            if value is None:
                self._key = self.event.key
            else:
                self._key = {name: value[name] for name in self.event.schema.key}
        found: dict[str, Any] = self._key
        return found

    @key.setter
    def key(self, key: dict[str, Any]) -> None:
        self._key = key

    @property
    def value(self) -> dict[str, Any] | None:
        """The row after the change, without columns that the source left out; None after a
        delete."""
        if self._value is _UNSET:
            self._value = self._chosen(self.event.value)
        found: dict[str, Any] | None = self._value
        return found

    @value.setter
    def value(self, value: dict[str, Any] | None) -> None:
        self._value = value
        self._is_changed = True

    @property
    def before(self) -> dict[str, Any] | None:
        """The row before the change; None if the source does not give it."""
        if self._before is _UNSET:
            is_new = self.event.op in ("c", "r")
            self._before = None if is_new else self._chosen(self.event.before)
        found: dict[str, Any] | None = self._before
        return found

    @before.setter
    def before(self, before: dict[str, Any] | None) -> None:
        self._before = before

    def _chosen(self, row: dict[str, Any] | None) -> dict[str, Any] | None:
        if row is None or not self.columns:
            return row
        key = self.event.schema.key
        return {name: row[name] for name in row if name in self.columns or name in key}

    def __repr__(self) -> str:
        return f"<SinkRow {self.op} {self.source} -> {self.target} {self.position}>"


@dataclass(frozen=True, slots=True)
class SinkTable:
    """Changes of one source and one schema version, in commit order, as columns."""

    source: str
    target: str
    schema: SourceSchema
    """The columns that go to the target; the key is always among them."""
    is_bootstrap: bool
    arrow: Any
    """A ``pyarrow.RecordBatch`` as in ``DataBatch.arrow``: the columns of ``schema``, then
    ``_op``, ``_scn``, ``_seq``, ``_commit_time`` and ``_absent``."""


class SinkBatch:
    """Rows of whole windows, or of a part of one; ``len(batch)`` counts them before routing.

    Owner: the sink's ``write``; a batch may be read several times, and in any thread.
    """

    def __init__(
        self,
        batches: Sequence[DataBatch],
        routes: SinkRoutes,
        written: tuple[Position, Position] | None = None,
        chosen: frozenset[Position] | None = None,
    ) -> None:
        self._batches = batches
        self._routes = routes
        self._written = written
        self._chosen = chosen

    def __len__(self) -> int:
        return sum(map(len, self._batches)) if self._chosen is None else len(self._chosen)

    def after(self, position: Position, since: Position = BEGINNING) -> SinkBatch:
        """The batch without the rows of the stream from behind ``since`` up to a position.

        For a sink whose commit took effect although it was reported as failed.  Rows at or before
        ``since``, the checkpoint at its start, come only if dead letters are replayed.  Rows of a
        bootstrap remain: they do not come in the order of their positions.
        """
        return SinkBatch(self._batches, self._routes, (since, position), self._chosen)

    def only(self, positions: Collection[Position]) -> SinkBatch:
        """The batch with the rows at these positions alone."""
        return SinkBatch(self._batches, self._routes, self._written, frozenset(positions))

    def rows(self) -> Iterator[SinkRow]:
        """The rows in commit order; in a bootstrap, in the order in which they came.

        Raises:
            RowRefused: ``where`` cannot be decided, or the transform failed.
        """
        for event in self.events():
            route = self._routes.of(event.source)
            if route is None:
                continue
            row = self._routes.row(route, SinkRow(event, route))
            if row is not None:
                yield row

    def tables(self) -> Iterator[SinkTable]:
        """The rows by source and schema version.

        The order of rows of different sources is lost.  A transform may change values and leave
        rows out; it cannot add columns here.

        Raises:
            RowRefused: ``where`` cannot be decided, or the transform failed.
            FormatError: the bytes of a row are not of their schema.
        """
        by_source: dict[tuple[str, bool], list[DataBatch]] = {}
        for batch in self._batches:
            by_source.setdefault((batch.source, batch.mode == "bootstrap"), []).append(batch)
        for (source, is_bootstrap), batches in by_source.items():
            route = self._routes.of(source)
            if route is None:
                continue
            for schema, pieces in _runs(self._pieces(batches, route)):
                chosen = _chosen_schema(schema, route)
                arrow = _joined(pieces)
                if len(chosen.columns) < len(schema.columns):
                    names = [column.name for column in chosen.columns]
                    arrow = arrow.select([*names, *arrow.schema.names[len(schema.columns) :]])
                yield SinkTable(source, route.target, chosen, is_bootstrap, arrow)

    def _pieces(
        self, batches: Sequence[DataBatch], route: Route
    ) -> Iterator[tuple[SourceSchema, Any]]:
        for batch in batches:
            for schema, whole in batch.versions:
                arrow = whole
                if self._written is not None and batch.mode == "online":
                    arrow = whole.filter(_is_outside(whole, *self._written))
                if self._chosen is not None:
                    arrow = arrow.filter(_is_among(arrow, self._chosen))
                if self._routes.changes_rows(route):
                    yield schema, self._changed_rows(batch, route, schema, arrow)
                else:
                    yield schema, arrow

    def _changed_rows(
        self, batch: DataBatch, route: Route, schema: SourceSchema, arrow: Any
    ) -> Any:
        """The rows of a piece after ``where`` and the transform."""
        import pyarrow as pa

        wanted = set(zip(arrow["_scn"].to_pylist(), arrow["_seq"].to_pylist(), strict=True))
        plain = Route(batch.source)  # ``tables`` chooses the columns.
        texts = {field.name for field in arrow.schema if field.type == pa.string()}
        rows = []
        for event in batch.events():
            if (event.scn, event.seq) not in wanted:
                continue
            row = self._routes.row(route, SinkRow(event, plain))
            if row is None:
                continue
            values = row.value if row.value is not None else (row.before or row.key)
            absent = sorted(event.absent.difference(values))
            rows.append(
                {name: _arrow_value(value, name in texts) for name, value in values.items()}
                | {"_op": row.op, "_scn": event.scn, "_seq": event.seq}
                | {"_commit_time": event.commit_time, "_absent": absent or None}
            )
        try:
            return pa.RecordBatch.from_pylist(rows, schema=arrow.schema)
        except pa.ArrowException as error:
            raise RowRefused(
                f"the transform gave {schema.source} a value that does not fit its column: {error}"
            ) from error

    def events(self) -> Iterator[Event]:
        """The events of the rows, before routing.

        Those of whole online windows come by position, as several sources share them.
        """
        for event in self._all_events():
            if self._chosen is None or event.position in self._chosen:
                yield event

    def _all_events(self) -> Iterator[Event]:
        for run in self.runs():
            if run[0].mode == "online":
                yield from self._in_order(run)
            else:
                yield from run[0].events()

    def runs(self) -> Iterator[list[DataBatch]]:
        """The batches that come after one another; online ones that come together share a run, in
        which rows come by position."""
        for mode, batches in itertools.groupby(self._batches, key=lambda one: one.mode):
            if mode == "online":
                yield list(batches)
            else:
                yield from ([one] for one in batches)

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows of its runs."""
        return self._written is None and self._chosen is None

    @property
    def routes(self) -> SinkRoutes:
        """Where its rows go."""
        return self._routes

    def _in_order(self, batches: Sequence[DataBatch]) -> Iterable[Event]:
        """The events of online batches by position; within one they are already in this order."""
        events: Iterable[Event] = itertools.chain.from_iterable(one.events() for one in batches)
        if self._written is not None:
            since, position = self._written
            events = (one for one in events if not since < one.position <= position)
        if len({batch.source for batch in batches}) <= 1:
            return events
        return sorted(events, key=lambda event: (event.scn, event.seq))


def _is_outside(arrow: Any, since: Position, position: Position) -> Any:
    import pyarrow.compute as pc

    return pc.or_(_is_after(arrow, position), pc.invert(_is_after(arrow, since)))


def _is_after(arrow: Any, position: Position) -> Any:
    import pyarrow.compute as pc

    scn, seq = arrow["_scn"], arrow["_seq"]
    is_same = pc.and_(pc.equal(scn, position.scn), pc.greater(seq, position.seq))
    return pc.or_(pc.greater(scn, position.scn), is_same)


def _is_among(arrow: Any, positions: Collection[Position]) -> Any:
    import pyarrow as pa

    pairs = zip(arrow["_scn"].to_pylist(), arrow["_seq"].to_pylist(), strict=True)
    return pa.array([Position(scn, seq) in positions for scn, seq in pairs], pa.bool_())


def _chosen_schema(schema: SourceSchema, route: Route) -> SourceSchema:
    if not route.columns:
        return schema
    wanted = route.columns | set(schema.key)
    return replace(schema, columns=tuple(one for one in schema.columns if one.name in wanted))


def _runs(
    pieces: Iterator[tuple[SourceSchema, Any]],
) -> Iterator[tuple[SourceSchema, list[Any]]]:
    """The pieces, those of one version after another together."""
    run: list[Any] = []
    before: SourceSchema | None = None
    for schema, piece in pieces:
        if before is not None and schema.fingerprint != before.fingerprint:
            yield before, run
            run = []
        before = schema
        run.append(piece)
    if before is not None:
        yield before, run


def _joined(pieces: list[Any]) -> Any:
    import pyarrow as pa

    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_batches(pieces)


def _arrow_value(value: Any, is_text: bool) -> Any:
    """A decoded value as Arrow columns hold it."""
    if isinstance(value, dt.time):
        return value.isoformat("microseconds")
    if isinstance(value, dt.timedelta):
        return value // dt.timedelta(microseconds=1)
    return str(value) if is_text and isinstance(value, uuid.UUID | decimal.Decimal) else value
