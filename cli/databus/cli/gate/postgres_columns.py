"""Types and columns as statements of PostgreSQL define them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import pairwise

from databus.cli.gate.migration_files import postgres_tokens
from databus.common.schema.source_schema import Column, Kind
from databus.relay.sources.mysql.statements.lexer import NotUnderstood
from databus.relay.sources.mysql.statements.token_reader import TokenReader, outer_words
from databus.relay.sources.postgres.tables import postgres_types

_OIDS = {name: oid for oid, name in postgres_types.NAMES.items()}
_SYNONYMS = {
    "int": "integer",
    "int4": "integer",
    "int2": "smallint",
    "int8": "bigint",
    "bool": "boolean",
    "float4": "real",
    "float8": "double precision",
    "decimal": "numeric",
    "varchar": "character varying",
    "char": "character",
    "bpchar": "character",
    "varbit": "bit varying",
    "timestamptz": "timestamp with time zone",
    "timetz": "time with time zone",
    "timestamp": "timestamp without time zone",
    "time": "time without time zone",
    "serial": "integer",
    "serial4": "integer",
    "bigserial": "bigint",
    "serial8": "bigint",
    "smallserial": "smallint",
    "serial2": "smallint",
}
_SERIALS = frozenset({"serial", "serial2", "serial4", "serial8", "bigserial", "smallserial"})
_FIRST_OF_USERS = 16384
_TEXTS = ("text", "character varying")


@dataclass(frozen=True, slots=True)
class SqlType:
    """A type: its plain name, what is in its parentheses, and whether it is built in.

    ``is_serial``: rows get a value from a sequence.
    """

    name: str
    sizes: tuple[int, ...] = ()
    is_array: bool = False
    is_built_in: bool = True
    is_serial: bool = False

    @property
    def shown(self) -> str:
        """As the catalogue writes it."""
        size = f"({','.join(map(str, self.sizes))})" if self.sizes else ""
        head, _, rest = self.name.partition(" with")
        shown = f"{head}{size} with{rest}" if rest and size else f"{self.name}{size}"
        return shown + ("[]" if self.is_array else "")

    @property
    def oid(self) -> int:
        """Its number, or one that stands for it."""
        if self.is_built_in and not self.is_array:
            return _OIDS[self.name]
        return _FIRST_OF_USERS + zlib.crc32(f"{self.name}[{self.is_array}]".encode())

    def column(self, name: str, nullable: bool, special_values: str) -> Column:
        """A column of the type, as consumers see it."""
        oid, modifier = self.oid, -1
        if self.name == "numeric" and self.sizes:
            scale = self.sizes[1] if len(self.sizes) > 1 else 0
            modifier = (self.sizes[0] << 16 | scale & 0x7FF) + 4
        made = postgres_types.column_of(name, oid, modifier, nullable, self.shown)
        if made.kind in postgres_types.SPECIAL_KINDS and special_values != "error":
            if special_values == "text":
                return replace(made, kind=Kind.STRING, precision=0, scale=0)
            return replace(made, nullable=True)
        return made

    def retains_file(self, new: SqlType) -> bool:
        """Whether the server changes a column to ``new`` without writing its rows again."""
        if self.is_array or new.is_array:
            return self == new
        if self.name in _TEXTS and new.name in _TEXTS:
            return not new.sizes or (bool(self.sizes) and self.sizes <= new.sizes)
        if self.name != new.name:
            return False
        if self.name == "numeric":
            scales = [(*one.sizes, 0)[1] if one.sizes else None for one in (self, new)]
            widens = not new.sizes or (bool(self.sizes) and self.sizes[0] <= new.sizes[0])
            return widens and (not new.sizes or scales[0] == scales[1])
        if self.name == "bit varying" or " time" in self.name or self.name.startswith("time"):
            return not new.sizes or (bool(self.sizes) and self.sizes <= new.sizes)
        return self.sizes == new.sizes


def stored_type(column: Column) -> SqlType:
    """The type of a column that consumers have."""
    try:
        return read_type(TokenReader(postgres_tokens(column.type_name), ""))
    except NotUnderstood:
        return SqlType(column.type_name, is_built_in=False)


def read_type(reader: TokenReader) -> SqlType:
    """Read a type.

    Raises:
        NotUnderstood: no type comes next.
    """
    word = reader.identifier()
    if reader.accept_sign("."):
        schema, word = word, reader.identifier()
        if schema != "pg_catalog":
            word = f"{schema}.{word}" if schema != "public" else word
    is_serial = word in _SERIALS
    if word in ("character", "char", "bit", "nchar") and reader.accept("VARYING"):
        word = {"bit": "bit varying"}.get(word, "character varying")
    if word == "double":
        reader.expect("PRECISION")
        word = "double precision"
    sizes = _sizes(reader)
    if word in ("time", "timestamp"):
        word = _with_zone(reader, word)
        sizes = sizes or _sizes(reader)
    name = _SYNONYMS.get(word, word)
    if name == "float":
        name = "real" if sizes and sizes[0] <= 24 else "double precision"
        sizes = ()
    if name in ("character", "bit") and not sizes:
        sizes = (1,)
    if name == "numeric" and len(sizes) == 1:
        sizes = (sizes[0], 0)
    is_array = False
    while reader.accept_sign("["):
        is_array = True
        while not reader.accept_sign("]"):
            reader.identifier()
    if reader.accept("ARRAY"):
        is_array = True
    return SqlType(name, sizes, is_array, name in _OIDS, is_serial)


def _with_zone(reader: TokenReader, word: str) -> str:
    for prefix in ("WITH", "WITHOUT"):
        if reader.accept(prefix, "TIME", "ZONE"):
            return f"{word} {prefix.lower()} time zone"
    return word


def _sizes(reader: TokenReader) -> tuple[int, ...]:
    if not reader.accept_sign("("):
        return ()
    found = []
    sign = 1
    while not reader.accept_sign(")"):
        if reader.accept_sign(","):
            continue
        if reader.accept_sign("-"):
            sign = -1
            continue
        text = reader.identifier()
        if not text.isdigit():
            raise NotUnderstood(f"({text} after a type")
        found.append(sign * int(text))
        sign = 1
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PostgresColumn:
    """A column as a clause defines it; ``fills``: rows that are there get a value in it."""

    name: str
    type: SqlType
    not_null: bool = False
    is_primary: bool = False
    is_generated: bool = False
    fills: bool = False


def read_column(reader: TokenReader) -> PostgresColumn:
    """Read a column's name and definition.

    Raises:
        NotUnderstood: it is none.
    """
    name = reader.identifier()
    found = read_type(reader)
    words = outer_words(reader.rest)
    pairs = set(pairwise(words))
    is_generated = "GENERATED" in words and "IDENTITY" not in words
    is_primary = ("PRIMARY", "KEY") in pairs
    fills = found.is_serial or "IDENTITY" in words
    if "DEFAULT" in words and ("BY", "DEFAULT") not in pairs and ("DEFAULT", "NULL") not in pairs:
        fills = True
    not_null = ("NOT", "NULL") in pairs or is_primary or found.is_serial or "IDENTITY" in words
    return PostgresColumn(name, found, not_null, is_primary, is_generated, fills)
