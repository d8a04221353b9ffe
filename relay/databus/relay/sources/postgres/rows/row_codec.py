"""Converts PostgreSQL's text values to the Avro bytes of a table's rows and keys.

Rows of the stream and rows of a chunk have the same encoder, so that both have equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.postgres.protocol import text_encodings
from databus.relay.sources.postgres.protocol.pgoutput_messages import UNCHANGED, Value
from databus.relay.sources.postgres.tables import postgres_types
from databus.relay.sources.postgres.tables.postgres_tables import widened


class RowCodec:
    """Encodes the rows of one table.

    Invariants:
        I1. ``schema`` is the schema of the last ``row``'s bytes.  A null in a column that is NOT
            NULL in the catalogue makes the column nullable.

    Owner: the task that reads the rows.
    Raises: UnsupportedChange for a value that cannot be captured, with table and column.
    """

    def __init__(
        self, schema: SourceSchema, special_values: str, encoding: str = text_encodings.UTF8
    ) -> None:
        """``encoding`` is the encoding of texts."""
        self.schema, self.encoding = schema, encoding
        self._special_is_null = special_values == "null"
        self._parsers = [
            postgres_types.parser_of(column.kind, encoding) for column in schema.columns
        ]
        names = [column.name for column in schema.columns]
        self.key_indexes = [names.index(name) for name in schema.key]
        # Columns of a configured key can be null; those of the table's own key cannot.
        self._strict_indexes = [] if schema.nullable_key else self.key_indexes
        self._required = self._required_indexes()

    def key(self, row: Sequence[Value]) -> bytes:
        """The key's bytes of a row in column order; other columns are ignored."""
        found: list[object] = []
        for index in self.key_indexes:
            text = row[index]
            if text is None and self.schema.nullable_key:
                found.append(None)
                continue
            if text is None or text is UNCHANGED:
                raise UnsupportedChange(
                    f"a row of {self.schema.source} came without its key column "
                    f"{self.schema.columns[index].name}; its replica identity does not hold it"
                )
            found.append(self._parse(index, text, is_key=index in self._strict_indexes))
        return self.schema.encode_key(found)

    def row(self, row: Sequence[Value]) -> tuple[bytes, bytes]:
        """The row's bytes, and the bitmap of its absent columns (b"" if there are none)."""
        if len(row) != len(self._parsers):
            raise FormatError(
                f"a row of {self.schema.source} has {len(row)} columns, expected "
                f"{len(self._parsers)}"
            )
        parsed: list[object] = []
        absent = []
        for index, text in enumerate(row):
            if text is None:
                parsed.append(None)
            elif text is UNCHANGED:
                absent.append(index)
                column = self.schema.columns[index]
                parsed.append(None if column.nullable else postgres_types.PLACEHOLDERS[column.kind])
            else:
                parsed.append(self._parse(index, text, is_key=index in self._strict_indexes))
        nulls = {index for index in self._required if parsed[index] is None}
        if nulls:
            self._widen(nulls)
        bitmap = frame_format.pack_bitmap(absent, len(row)) if absent else b""
        return self.schema.encode_row(parsed), bitmap

    def _parse(self, index: int, text: bytes, *, is_key: bool) -> object:
        try:
            return self._parsers[index](text)
        except postgres_types.SpecialValue as error:
            if self._special_is_null and not is_key:
                return None
            raise self._refusal(
                index,
                f'{error}; set special_values = "null" in the database\'s options to capture '
                'such values as null (not in a key), or "text" for all of these types as text',
            ) from None
        except ValueError as error:
            raise self._refusal(index, str(error)) from None

    def _refusal(self, index: int, why: str) -> UnsupportedChange:
        column = self.schema.columns[index]
        return UnsupportedChange(
            f"{self.schema.source}.{column.name} ({column.type_name}): {why}",
            source=self.schema.source,
            column=column.name,
        )

    def _widen(self, nulls: set[int]) -> None:
        if nulls.intersection(self._strict_indexes):
            raise self._refusal(min(nulls), "a key column is null")
        self.schema = widened(self.schema, {self.schema.columns[index].name for index in nulls})
        self._required = self._required_indexes()

    def _required_indexes(self) -> list[int]:
        return [index for index, column in enumerate(self.schema.columns) if not column.nullable]
