"""The captured tables that a statement's effects concern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from databus.common.schema.source_names import join_source, split_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.ring.returning_columns import returned_words
from databus.relay.sources.announced_schemas import AnnouncedSchemas
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.statements import Effects
from databus.relay.sources.mysql.statements.token_reader import TableName
from databus.relay.sources.mysql.tables.dropped_columns import DroppedColumns
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue
from databus.relay.sources.mysql.tables.type_widening import retains_values


@dataclass(frozen=True, slots=True)
class UnseenChange:
    """Why the content of a table differs from the stream.

    ``rows_remain``: each row still exists under its key, with other values.
    """

    source: str
    why: str
    rows_remain: bool = False


def captured_names(
    settings: MySqlSettings, catalogue: Catalogue, announced: AnnouncedSchemas
) -> list[TableName]:
    """The captured tables that exist, or whose definition consumers have."""
    names = {(table.schema, table.name) for table in catalogue.values()}
    for source in announced.sources:
        names.add(split_source(source))
    return sorted(name for name in names if settings.captures(*name))


def sources_of(names: Iterable[TableName], settings: MySqlSettings) -> list[str]:
    """The captured ones among these tables, as consumers name them."""
    return [join_source(*name) for name in sorted(names) if settings.captures(*name)]


def changed_unseen(
    found: Effects,
    captured: Iterable[TableName],
    before: Mapping[str, SourceSchema],
    keys: Mapping[str, tuple[str, ...]],
    left: Mapping[str, SourceSchema],
    dropped: DroppedColumns,
) -> Iterator[UnseenChange]:
    """The captured tables whose rows a statement changed without an event.

    ``captured`` are those that exist or whose definition consumers have; others have no
    rows that could differ.  ``before`` and ``keys`` are the known definitions and keys before the
    statement, ``left`` the definitions that are certain after it.  ``dropped`` is updated by the
    statement.
    """
    for name in captured:
        source = join_source(*name)
        old, new = before.get(source), left.get(source)
        if name in found.emptied:
            dropped.forget(source)
        again = dropped.pass_statement(source, found.dropped.get(name, ()), old, new)
        if name in found.replaced:
            yield UnseenChange(source, found.replaced[name])
        elif new is not None and (why := changed_key(keys.get(source), new)):
            yield UnseenChange(source, why)
        elif new is not None and {column.lower() for column in new.key} & set(again):
            yield UnseenChange(source, returned_words(again))  # Rows have other keys.
        elif name in found.revalued:
            yield UnseenChange(source, found.revalued[name], rows_remain=True)
        elif name in found.converted and not retains_values(old, new):
            # The new type of a column in the key changes the keys of the same rows.
            rows_remain = old is not None and new is not None and _same_key(old, new)
            yield UnseenChange(source, found.converted[name], rows_remain=rows_remain)
        elif again:
            yield UnseenChange(source, returned_words(again), rows_remain=True)


def changed_key(old: tuple[str, ...] | None, new: SourceSchema) -> str:
    """Why rows that consumers have under the old key cannot be found by the new one; "" if they
    can."""
    if old is None or old == new.key:
        return ""
    return f"its key was ({', '.join(old)}) and is ({', '.join(new.key)})"


def _same_key(old: SourceSchema, new: SourceSchema) -> bool:
    return old.key_columns == new.key_columns
