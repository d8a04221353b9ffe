"""What to alter so that a target has the columns of a schema version.

Pure: two versions in, steps out.
"""

from __future__ import annotations

from dataclasses import dataclass

from databus.common.schema.source_schema import Column, Kind, SourceSchema

_ANY_TEXT = frozenset({Kind.STRING, Kind.JSON})
_NUMBERS = frozenset({Kind.INT, Kind.UINT64, Kind.DECIMAL, Kind.NUMERIC, Kind.FLOAT})
_EXACT = {
    (Kind.INT, Kind.NUMERIC),
    (Kind.INT, Kind.DECIMAL),
    (Kind.UINT64, Kind.NUMERIC),
    (Kind.UINT64, Kind.DECIMAL),
    (Kind.DECIMAL, Kind.NUMERIC),
    (Kind.DECIMAL, Kind.DECIMAL),
}


@dataclass(frozen=True, slots=True)
class StructureChange:
    """How one version becomes another."""

    added: tuple[Column, ...] = ()
    converted: tuple[Column, ...] = ()
    """Columns of another type, into which every old value can be converted."""
    replaced: tuple[Column, ...] = ()
    """Columns of another type whose old values are dropped: the stream gives the rows again."""
    dropped: tuple[Column, ...] = ()
    is_rekeyed: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be altered."""
        return self == StructureChange()


def structure_change(
    before: SourceSchema, after: SourceSchema, *, keeps_columns: bool = False
) -> StructureChange:
    """How ``before`` becomes ``after``; with ``keeps_columns`` nothing is dropped."""
    old = {column.name: column for column in before.columns}
    new = {column.name: column for column in after.columns}
    changed = [c for name, c in new.items() if name in old and not _is_same(old[name], c)]
    return StructureChange(
        added=tuple(column for name, column in new.items() if name not in old),
        converted=tuple(c for c in changed if _is_convertible(old[c.name], c)),
        replaced=tuple(c for c in changed if not _is_convertible(old[c.name], c)),
        dropped=()
        if keeps_columns
        else tuple(column for name, column in old.items() if name not in new),
        is_rekeyed=before.key != after.key or before.nullable_key != after.nullable_key,
    )


def shared_columns(rows: SourceSchema, table: SourceSchema) -> list[str]:
    """The columns of rows that a table has with the same type, in the order of the rows."""
    there = {column.name: column for column in table.columns}
    return [
        column.name
        for column in rows.columns
        if column.name in there and _is_same(column, there[column.name])
    ]


def _is_same(old: Column, new: Column) -> bool:
    if old.kind is not new.kind:
        return False
    is_decimal = new.kind is Kind.DECIMAL
    return not is_decimal or (old.precision, old.scale) == (new.precision, new.scale)


def _is_convertible(old: Column, new: Column) -> bool:
    if new.kind in _ANY_TEXT and old.kind in _ANY_TEXT | _NUMBERS and new.kind is Kind.STRING:
        return True
    if (old.kind, new.kind) not in _EXACT:
        return False
    if new.kind is not Kind.DECIMAL:
        return True
    digits = old.precision - old.scale if old.kind is Kind.DECIMAL else 20
    scale = old.scale if old.kind is Kind.DECIMAL else 0
    return new.scale >= scale and new.precision - new.scale >= digits
