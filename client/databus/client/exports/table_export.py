"""Brings an open table up to the stream: everything at first, then the changes.

A table's position is in the table's own metadata and changes in the same commit as its rows.  So
an export that is killed leaves the table either unchanged or complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from databus.client.tables.arrow_rows import RowDecoder
from databus.client.tables.table_reader import Range, TableReader
from databus.common.checkpoint import Position
from databus.common.errors import BadRequest, LogTooYoung, UnsupportedChange

GONE = "_databus_gone"
"""Column of ``TableChanges.rows`` in a merge: the row was deleted."""


@dataclass(frozen=True, slots=True)
class ExportMark:
    """The position up to which a table has the stream of a clock."""

    clock: str
    position: Position


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The rows that replace those with their keys, and the keys of deleted rows."""

    rows: Any
    gone: Any

    @property
    def keys(self) -> Any:
        """All changed keys."""
        return pa.concat_tables([self.rows.select(self.gone.column_names), self.gone])


class OpenTable(Protocol):
    """One table of a format.

    Invariants:
        I1. ``replace`` and ``apply`` are one commit each, rows and mark together.
    """

    def mark(self) -> ExportMark | None:
        """The table's position; None if no export made it, or it does not exist."""

    def schema(self) -> Any:
        """Its Arrow schema."""

    def rows_of(self, keys: Any) -> list[Mapping[str, Any]]:
        """The rows that have one of these keys, an Arrow table of key columns."""

    def replace(self, schema: Any, batches: Iterator[Any], mark: ExportMark) -> int:
        """Replace all rows by these; returns how many."""

    def apply(self, schema: Any, changes: TableChanges, mark: ExportMark) -> None:
        """Apply changes; ``schema`` may have columns that the table does not have yet."""


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """What an export did: ``whole``, ``changes`` or ``nothing``, and up to where."""

    kind: str
    upserted: int
    deleted: int
    position: Position


def export(
    reader: TableReader,
    open_table: Callable[[Sequence[str]], OpenTable],
    until: Position,
    *,
    rewrite: bool = False,
    since: Position | None = None,
) -> ExportOutcome:
    """Bring one table up to ``until``; ``open_table`` gives it for key columns.

    With ``since`` the changes after that position are applied, again if the table has them.

    The table is written whole if it does not exist, if its clock is another one, if a column was
    dropped or changed its type, after a truncate, if the changes are no longer retained, and
    with ``rewrite``.

    Raises:
        UnsupportedChange: the table's key may be null.
        BadRequest: the table's position is before ``since``: changes would be missing.
    """
    source = reader.schema()
    if source.nullable_key:
        raise UnsupportedChange(
            f"{source.source} has no key of its own, and rows whose key is null cannot be found "
            "again in a table; leave it out with --source, or give it a primary key"
        )
    decoder = RowDecoder(source, reader.schema_of)
    table = open_table(source.key)
    mark = None if rewrite else table.mark()
    new_mark = ExportMark(reader.clock, until)
    if mark is not None and mark.clock == reader.clock and _fits(table.schema(), decoder.schema):
        if since is not None and since > mark.position:
            raise BadRequest(
                f"{source.source} is at {mark.position}: without the changes from there to "
                f"{since} it would be no state of the source; use --since auto"
            )
        begin = mark.position if since is None else since
        if mark.position > until or begin >= until:
            return ExportOutcome("nothing", 0, 0, mark.position)
        try:
            changes = _changes(reader, table, begin, until)
        except LogTooYoung:
            changes = None
        if changes is not None:
            if not changes.rows.num_rows and not changes.gone.num_rows:
                return ExportOutcome("nothing", 0, 0, mark.position)
            table.apply(decoder.schema, changes, new_mark)
            return ExportOutcome("changes", changes.rows.num_rows, changes.gone.num_rows, until)
    state = Range("state", None, until, reader.clock)
    count = table.replace(decoder.schema, reader.batches(state, decoder), new_mark)
    return ExportOutcome("whole", count, 0, until)


def _fits(ours: Any, theirs: Any) -> bool:
    """Whether only columns were added."""
    return all(
        field.name in theirs.names and theirs.field(field.name).type == field.type for field in ours
    )


def _changes(
    reader: TableReader, table: OpenTable, since: Position, until: Position
) -> TableChanges | None:
    """The net changes; None if the table was truncated."""
    source = reader.schema()
    decoder = RowDecoder(source, reader.schema_of, metadata=["_op", "_absent"])
    changed = Range("net", since, until, reader.clock)
    found = pa.Table.from_batches(reader.batches(changed, decoder), schema=decoder.schema)
    ops = found.column("_op").to_pylist()
    if "t" in ops:
        return None
    is_gone = pa.array([op == "d" for op in ops], type=pa.bool_())
    gone = found.filter(is_gone).select(list(source.key))
    present = found.filter(pa.compute.invert(is_gone))
    partial = present.filter(pa.compute.is_valid(present.column("_absent")))
    rows = present.filter(pa.compute.is_null(present.column("_absent")))
    plain = rows.drop_columns(["_op", "_absent"])
    if partial.num_rows:
        filled = _filled(partial.to_pylist(), table, partial.select(list(source.key)), source.key)
        plain = pa.concat_tables([plain, pa.Table.from_pylist(filled, schema=plain.schema)])
    return TableChanges(plain, gone)


def _filled(
    rows: list[dict[str, Any]], table: OpenTable, keys: Any, key: Sequence[str]
) -> list[dict[str, Any]]:
    """Partial rows, their absent columns filled from the table."""
    had = {tuple(row[name] for name in key): row for row in table.rows_of(keys)}
    for row in rows:
        before = had.get(tuple(row[name] for name in key), {})
        for name in row["_absent"]:
            row[name] = before.get(name)
    return rows


def without(rows: Any, keys: Any) -> Any:
    """The rows whose key is not among ``keys``."""
    return rows.join(keys, keys=keys.column_names, join_type="left anti")


def among(rows: Any, keys: Any) -> Any:
    """The rows whose key is among ``keys``."""
    return rows.join(keys, keys=keys.column_names, join_type="left semi")
