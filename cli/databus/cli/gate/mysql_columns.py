"""Columns as ``CREATE TABLE`` and ``ALTER TABLE`` of MariaDB and MySQL define them.

A type gets the name that the catalogue has for it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from databus.common.schema.source_schema import Column
from databus.relay.sources.mysql.rows.column_readers import catalogue_type, column_of
from databus.relay.sources.mysql.statements.lexer import NotUnderstood, Token, TokenKind
from databus.relay.sources.mysql.statements.token_reader import TokenReader, keywords, outer_words

_SYNONYMS = {
    "integer": "int",
    "int1": "tinyint",
    "int2": "smallint",
    "int3": "mediumint",
    "int4": "int",
    "int8": "bigint",
    "middleint": "mediumint",
    "bool": "tinyint",
    "boolean": "tinyint",
    "dec": "decimal",
    "numeric": "decimal",
    "fixed": "decimal",
    "real": "double",
    "float4": "float",
    "float8": "double",
    "character": "char",
    "varcharacter": "varchar",
    "long": "mediumtext",
}
_DEFAULT_SIZES = {"char": "(1)", "binary": "(1)", "bit": "(1)", "decimal": "(10,0)"}
_WITHOUT_ZERO = ("time", "datetime", "timestamp")
_KNOWN = keywords(
    """
    tinyint smallint mediumint int bigint float double decimal bit year date time datetime
    timestamp char varchar binary varbinary tinytext text mediumtext longtext tinyblob blob
    mediumblob longblob enum set json uuid inet6 inet4 vector geometry point linestring polygon
    multipoint multilinestring multipolygon geometrycollection geomcollection
    """
)


@dataclass(frozen=True, slots=True)
class DefinedColumn:
    """A column as a clause defines it, and its place; ``after`` is "" without one."""

    column: Column
    is_primary: bool = False
    is_first: bool = False
    after: str = ""


def defined_column(reader: TokenReader, zero_dates: str, *, is_mysql: bool) -> DefinedColumn:
    """Read a column's name and definition.

    Raises:
        NotUnderstood: the type is not known here.
        UnsupportedChange: the relay cannot capture it.
    """
    name = reader.identifier()
    is_serial = reader.keyword() == "SERIAL"
    type_name = _type_name(reader, is_mysql=is_mysql)
    words = outer_words(reader.rest)
    pairs = set(pairwise(words))
    is_primary = ("PRIMARY", "KEY") in pairs
    nullable = not (("NOT", "NULL") in pairs or is_primary or is_serial)
    column = column_of(name, type_name, nullable, zero_dates)
    after, is_first = _place(reader.rest)
    return DefinedColumn(column, is_primary, is_first, after)


def _place(tokens: Sequence[Token]) -> tuple[str, bool]:
    if len(tokens) >= 2 and tokens[-2].keyword == "AFTER":
        return tokens[-1].text, False
    return "", bool(tokens) and tokens[-1].keyword == "FIRST"


def _type_name(reader: TokenReader, *, is_mysql: bool) -> str:
    word = reader.keyword().lower()
    reader.at += 1
    if word == "serial":
        return "bigint unsigned"
    name = _SYNONYMS.get(word, word)
    if word in ("char", "character") and reader.accept("VARYING"):
        name = "varchar"
    if name == "double":
        reader.accept("PRECISION")
    if name not in _KNOWN:
        raise NotUnderstood(f"the type {word or 'of a column'} is not known here")
    size = _size(reader, name)
    words = outer_words(reader.rest)
    if "BYTE" in words[:1] or {"BINARY", "NATIONAL"} & _character_set(words):
        raise NotUnderstood(f"a {name} with CHARACTER SET binary")
    if name == "json":
        return "json"
    if name in ("text", "blob") and size:
        raise NotUnderstood(f"{name}{size} becomes a type of another size")
    if name == "float" and size and "," not in size and int(size[1:-1]) > 24:
        name = "double"
    if name == "vector":
        return "vector" if is_mysql else f"vector{size}"
    if name in _WITHOUT_ZERO and size == "(0)":
        size = ""
    if name == "decimal" and size and "," not in size:
        size = f"{size[:-1]},0)"
    sign = " unsigned" if {"UNSIGNED", "ZEROFILL"} & set(words) else ""
    return catalogue_type(f"{name}{size or _DEFAULT_SIZES.get(name, '')}{sign}")


def _character_set(words: list[str]) -> set[str]:
    return {
        words[index + 1]
        for index, word in enumerate(words[:-1])
        if word in ("SET", "CHARSET") and (word == "CHARSET" or words[index - 1] == "CHARACTER")
    }


def _size(reader: TokenReader, name: str) -> str:
    """The parentheses after a type, without spaces; labels in the catalogue's quotes."""
    if not reader.accept_sign("("):
        return ""
    parts = []
    while not reader.accept_sign(")"):
        reader.require(not reader.ended, ")")
        token = reader.rest[0]
        if token.kind is TokenKind.STRING:
            parts.append("'" + token.text.replace("'", "''") + "'")
        else:
            parts.append(token.text)
        reader.at += 1
    return f"({''.join(parts)})"
