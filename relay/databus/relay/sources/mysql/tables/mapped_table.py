"""A table of the stream: its table map resolved into a schema, and its rows decoded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame.frame_format import Op
from databus.common.schema.source_names import join_source
from databus.common.schema.source_schema import Column, SourceSchema
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.mysql.protocol.binlog_events import EventType, TableMap, packed_int
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.rows.column_readers import (
    JSON,
    StreamColumn,
    column_of,
    stream_columns,
    stream_type,
)
from databus.relay.sources.mysql.rows.json_diffs import applied
from databus.relay.sources.mysql.rows.packed_decimals import Decoder
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain
from databus.relay.sources.mysql.tables.inferred_columns import completed
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue, MySqlTable

_PARTIAL_JSON = 1
_STORED_AS = {"uuid": "binary(16)", "inet6": "binary(16)", "inet4": "binary(4)", "json": "longtext"}

Row = tuple[Any, ...]


class CatalogueDiffers(Exception):
    """The loaded catalogue does not match the table in the stream."""


@dataclass(frozen=True)
class MappedTable:
    """Everything that turns the rows events of one table id into frames.

    Invariants:
        I1. ``columns`` are in the order of the row image, one for each of its columns.
        I2. ``body`` is its table map; another body is another table.
    """

    body: bytes
    schema: SourceSchema
    columns: tuple[StreamColumn, ...]
    decoders: tuple[Decoder, ...] = field(repr=False)
    key_indices: tuple[int, ...] = ()

    def key(self, row: Row) -> bytes:
        """Avro bytes of a row's key."""
        return self.schema.encode_key([row[index] for index in self.key_indices])

    def rows(
        self, body: memoryview, start: int, *, update: bool, partial: bool = False
    ) -> Iterator[tuple[Row, Row]]:
        """(row, row) of an insert or delete, (before, after) of an update, one by one.

        ``partial`` updates may have differences instead of JSON values.

        ``body`` is a rows event without header and checksum, its columns counted at ``start``.

        Raises:
            FormatError: the event does not fit the table map.
            UnsupportedChange: an image lacks columns.
        """
        where = self.schema.source
        count, at = packed_int(body, start)
        if count != len(self.columns):
            raise FormatError(
                f"{where}: a rows event has {count} columns, its table map {len(self.columns)}"
            )
        bitmap_bytes = (count + 7) // 8
        for _ in range(2 if update else 1):
            present = int.from_bytes(body[at : at + bitmap_bytes], "little")
            if present & (1 << count) - 1 != (1 << count) - 1:
                raise TableUncertain(
                    f"{where}: a row came without some of its columns; a session wrote with "
                    "binlog_row_image other than FULL"
                )
            at += bitmap_bytes
        try:
            while at < len(body):
                first, at = self._row(body, at, bitmap_bytes)
                if partial:
                    second, at = self._partial_row(body, at, bitmap_bytes, first)
                    yield first, second
                elif update:
                    second, at = self._row(body, at, bitmap_bytes)
                    yield first, second
                else:
                    yield first, first
        except (IndexError, ValueError) as error:
            raise FormatError(f"{where}: a row image is damaged at byte {at}: {error}") from error
        except (UnsupportedChange, FormatError) as error:
            raise type(error)(f"{where}: {error.message}") from None
        if at != len(body):
            raise FormatError(f"{where}: rows end at byte {at} of {len(body)}")

    def changes(
        self, rows: Iterable[tuple[Row, Row]], kind: int
    ) -> Iterator[tuple[Op, bytes, bytes | None, bytes | None]]:
        """Operation, key, before and after of each change in the ``rows`` of an event.

        An update of the key is a delete and an insert.
        """
        encode = self.schema.encode_row
        for before, after in rows:
            if kind == EventType.WRITE_ROWS:
                yield Op.INSERT, self.key(after), None, encode(after)
            elif kind == EventType.DELETE_ROWS:
                yield Op.DELETE, self.key(before), encode(before), None
            else:
                old_key, new_key = self.key(before), self.key(after)
                old_row, new_row = encode(before), encode(after)
                if old_key == new_key:
                    yield Op.UPDATE, new_key, old_row, new_row
                else:
                    yield Op.DELETE, old_key, old_row, None
                    yield Op.INSERT, new_key, None, new_row

    def _partial_row(
        self, body: memoryview, at: int, null_bytes: int, before: Row
    ) -> tuple[Row, int]:
        """A row after a change, with some JSON values given as differences to ``before``."""
        options, at = packed_int(body, at)
        if not options & _PARTIAL_JSON:
            return self._row(body, at, null_bytes)
        indexes = [index for index, column in enumerate(self.columns) if column.code == JSON]
        size = (len(indexes) + 7) // 8
        bits = int.from_bytes(body[at : at + size], "little")
        partial = [index for bit, index in enumerate(indexes) if bits >> bit & 1]
        return self._row(body, at + size, null_bytes, partial, before)

    def _row(
        self,
        body: memoryview,
        at: int,
        null_bytes: int,
        partial: Collection[int] = (),
        before: Row = (),
    ) -> tuple[Row, int]:
        """A row; the columns ``partial`` have a difference to their value in ``before``."""
        nulls = int.from_bytes(body[at : at + null_bytes], "little")
        at += null_bytes
        values: list[Any] = []
        for index, decode in enumerate(self.decoders):
            if nulls >> index & 1:
                values.append(None)
            elif index in partial:
                length = int.from_bytes(body[at : at + 4], "little")
                at += 4 + length
                values.append(applied(before[index], body[at - length : at]))
            else:
                value, at = decode(body, at)
                values.append(value)
        return tuple(values), at


def resolve(
    table: TableMap,
    body: bytes,
    catalogue: Catalogue,
    charsets: Charsets,
    zero_dates: str,
    *,
    final: bool,
    keys: ConfiguredKeys = NO_KEYS,
) -> MappedTable:
    """The table of a table map.

    Names, types, signs and the primary key come from the stream.  The catalogue adds what the
    stream does not have (UUID, INET4, INET6, JSON; a unique index as key), for columns whose
    definitions match.

    Raises:
        CatalogueDiffers: the catalogue describes another table, and ``final`` is not set.
        UnsupportedChange: a type cannot be converted, or the table has no key.
    """
    source = join_source(table.schema, table.table)
    known = catalogue.get(source)
    types = [stream_type(table, index, charsets) for index in range(len(table.names))]
    if not final and (known is None or not _agrees(table, types, known)):
        raise CatalogueDiffers(source)
    specials = known.specials if known else {}
    columns = tuple(
        _column(source, name, type_name, specials.get(name), nullable, zero_dates)
        for name, type_name, nullable in zip(table.names, types, table.nullable, strict=True)
    )
    schema = SourceSchema(source, columns, *_key(table, known, keys))
    found = stream_columns(table, columns, charsets, zero_dates)
    return MappedTable(
        body,
        schema,
        found,
        tuple(column.decoder() for column in found),
        tuple(table.names.index(name) for name in schema.key),
    )


def _column(
    source: str, name: str, type_name: str, special: str | None, nullable: bool, zero_dates: str
) -> Column:
    if special and _STORED_AS[special] == type_name:
        type_name = special
    try:
        return column_of(name, type_name, nullable, zero_dates)
    except UnsupportedChange as error:
        raise TableUncertain(f"{source}: {error.message}") from None


def resolve_nameless(
    found: TableMap,
    body: bytes,
    known: MySqlTable,
    charsets: Charsets,
    zero_dates: str,
    keys: ConfiguredKeys = NO_KEYS,
) -> MappedTable:
    """The table of a table map without column names; ``known`` is its certain definition.

    Raises:
        TableUncertain: the table map has another definition.
        UnsupportedChange: a type cannot be converted, or the table has no key.
    """
    whole = completed(found, known, charsets)
    try:
        return resolve(
            whole, body, {known.source: known}, charsets, zero_dates, final=False, keys=keys
        )
    except CatalogueDiffers:
        raise TableUncertain(
            f"the binlog has other types for {known.source} than the definition that was read "
            "for it, and no names of its columns (binlog_row_metadata is not FULL)"
        ) from None


def _agrees(table: TableMap, types: list[str], known: MySqlTable) -> bool:
    described = [
        (c.name, _STORED_AS.get(c.type_name, c.type_name), c.nullable) for c in known.columns
    ]
    stored = [_STORED_AS.get(type_name, type_name) for type_name in types]
    streamed = list(zip(table.names, stored, table.nullable, strict=True))
    return described == streamed and _primary_key(table) in ((), known.key)


def _primary_key(table: TableMap) -> tuple[str, ...]:
    return tuple(table.names[index] for index in table.primary_key)


def _key(
    table: TableMap, known: MySqlTable | None, keys: ConfiguredKeys
) -> tuple[tuple[str, ...], bool]:
    """The key, and whether it is a configured one."""
    primary = _primary_key(table)
    if primary:
        return primary, False
    own = known.key if known and not known.key_is_configured else ()
    if own and set(own) <= set(table.names):
        return own, False
    source = join_source(table.schema, table.table)
    configured = keys.of(source, table.names)
    if configured:
        return configured, True
    raise TableUncertain(
        f"{source} has no primary key and no unique index without nulls, so its rows cannot be "
        f"identified; ALTER TABLE {source} ADD PRIMARY KEY (...), or leave it out of sources"
    )
