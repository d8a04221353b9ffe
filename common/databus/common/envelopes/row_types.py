"""The rows and keys of a table as structs, by the database that owns the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from databus.common.envelopes.column_types import ColumnType, ValueModes, by_kind
from databus.common.envelopes.connect_types import ConnectType, struct
from databus.common.envelopes.mysql_column_types import mysql_column_type
from databus.common.envelopes.postgres_column_types import postgres_column_type
from databus.common.envelopes.value_columns import each_present
from databus.common.schema.source_schema import Column, SourceSchema

Product = Literal["mariadb", "mysql", "postgresql", "sqlite", "generator"]
PRODUCTS: tuple[Product, ...] = ("mariadb", "mysql", "postgresql", "sqlite", "generator")
UNAVAILABLE = "__debezium_unavailable_value"
"""What an envelope has in a column that the source left out because it did not change."""


def column_type(column: Column, product: Product, modes: ValueModes) -> ColumnType:
    """The type of a column, null included, and what makes its values."""
    if product in ("mariadb", "mysql"):
        kind, convert = mysql_column_type(column, modes, is_mariadb=product == "mariadb")
    elif product == "postgresql":
        kind, convert = postgres_column_type(column, modes)
    else:
        kind, convert = by_kind(column, modes)
    return kind.as_optional(column.nullable), convert


class RowTypes:
    """Types and values of one version of a table.

    Owner: the envelope that made it.
    """

    def __init__(
        self, schema: SourceSchema, prefix: str, product: Product, modes: ValueModes
    ) -> None:
        types = [(one.name, *column_type(one, product, modes)) for one in schema.columns]
        fields = tuple((name, kind) for name, kind, _ in types)
        self._convert = [(name, convert) for name, _, convert in types if convert is not None]
        self._kinds = dict(fields)
        self.row = struct(f"{prefix}.Value", *fields).as_optional()
        key = [(one.name, *column_type(one, product, modes)) for one in schema.key_columns]
        self._convert_key = [(name, convert) for name, _, convert in key if convert is not None]
        self.key = struct(f"{prefix}.Key", *((name, kind) for name, kind, _ in key))

    def row_value(self, row: Mapping[str, Any], absent: tuple[str, ...] = ()) -> dict[str, Any]:
        """The struct of a whole row."""
        found = dict(row)
        for name in absent:
            found[name] = None
        for name, convert in self._convert:
            found[name] = each_present(convert, found[name])
        for name in absent:
            found[name] = self._unavailable(self._kinds[name])
        return found

    def key_value(self, key: Mapping[str, Any]) -> dict[str, Any]:
        """The struct of a key."""
        found = dict(key)
        for name, convert in self._convert_key:
            found[name] = each_present(convert, found[name])
        return found

    def row_of_key(self, key: Mapping[str, Any]) -> dict[str, Any]:
        """A row of which only the key is known."""
        return {name: kind.zero() for name, kind in self._kinds.items()} | self.key_value(key)

    def _unavailable(self, kind: ConnectType) -> Any:
        if kind.type == "string":
            return UNAVAILABLE
        if kind.type == "bytes":
            return UNAVAILABLE.encode()
        if kind.items is not None and kind.items.type == "string":
            return [UNAVAILABLE]
        return kind.zero()


def legal_topic(name: str) -> str:
    """A name with the characters that Kafka does not allow in a topic replaced by ``_``."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
