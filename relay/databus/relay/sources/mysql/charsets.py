"""The server's character sets, as decoders to text.

Multi-byte character sets are decoded by Python's codecs.  For every single-byte character set
the server itself is asked for its 256 characters, so that a value from the binlog cannot
differ from the same value in a SELECT.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

from databus.common.errors import FormatError, UnsupportedChange
from databus.relay.sources.mysql.connection import Connection

_CODECS = {
    "utf8mb3": "utf-8",
    "utf8mb4": "utf-8",
    "utf8": "utf-8",
    "ucs2": "utf-16-be",
    "utf16": "utf-16-be",
    "utf16le": "utf-16-le",
    "utf32": "utf-32-be",
    "big5": "big5",
    "cp932": "cp932",
    "eucjpms": "euc_jp",
    "euckr": "euc_kr",
    "gb2312": "gb2312",
    "gbk": "gbk",
    "sjis": "shift_jis",
    "ujis": "euc_jp",
}


@dataclass(frozen=True, slots=True)
class Charset:
    """One character set: at most ``max_bytes`` a character.

    ``table`` holds the 256 characters of a single-byte set, "" for the others.
    """

    name: str
    max_bytes: int
    table: str = ""

    @property
    def is_utf8(self) -> bool:
        """Whether its bytes are UTF-8 as they are."""
        return _CODECS.get(self.name) == "utf-8"

    @property
    def known(self) -> bool:
        """Whether its text can be decoded here."""
        return bool(self.table) or self.name in _CODECS or self.name == "binary"

    def decoder(self) -> Callable[[bytes], str]:
        """The function from stored bytes to text.

        Raises:
            UnsupportedChange: nobody here knows the character set.
        """
        if self.table:
            table = self.table
            return lambda data: codecs.charmap_decode(data, "strict", table)[0]
        if self.name not in _CODECS:
            raise UnsupportedChange(
                f"the character set {self.name} cannot be decoded; convert the column to utf8mb4"
            )
        decode = codecs.getdecoder(_CODECS[self.name])

        def text(data: bytes) -> str:
            try:
                return decode(data)[0]
            except UnicodeDecodeError as error:
                raise FormatError(f"not {self.name} text: {error}") from None

        return text


class Charsets:
    """The character sets of one server by collation number and by name."""

    def __init__(self, by_collation: dict[int, Charset]) -> None:
        self._by_collation = by_collation
        self._by_name = {charset.name: charset for charset in by_collation.values()}

    def of_collation(self, collation: int) -> Charset:
        """The character set that a collation's number belongs to.

        Raises:
            UnsupportedChange: the server has no such collation.
        """
        try:
            return self._by_collation[collation]
        except KeyError:
            raise UnsupportedChange(f"collation {collation} is unknown to the server") from None

    def collation_of(self, name: str) -> int:
        """The number of a collation of this character set.

        Raises:
            UnsupportedChange: the server has no such character set.
        """
        for collation, charset in self._by_collation.items():
            if charset.name == name:
                return collation
        raise UnsupportedChange(f"the character set {name} is unknown to the server")

    def named(self, name: str) -> Charset | None:
        """The character set of this name."""
        return self._by_name.get(name)


def load_charsets(connection: Connection) -> Charsets:
    """All character sets and collations of the server."""
    sizes = {
        str(name): int(size)
        for name, size in connection.query(
            "SELECT CHARACTER_SET_NAME, MAXLEN FROM information_schema.CHARACTER_SETS"
        )
    }
    single = [name for name, size in sizes.items() if size == 1 and name != "binary"]
    all_bytes = bytes(range(256)).hex()
    tables = connection.row(
        "SELECT " + ", ".join(f"CONVERT(_{name} x'{all_bytes}' USING utf8mb4)" for name in single)
    )
    table_of = {name: str(table) for name, table in zip(single, tables, strict=True)}
    charsets = {
        name: Charset(
            name, size, table_of.get(name, "") if len(table_of.get(name, "")) == 256 else ""
        )
        for name, size in sizes.items()
    }
    rows = connection.query(
        "SELECT ID, CHARACTER_SET_NAME "
        "FROM information_schema.COLLATION_CHARACTER_SET_APPLICABILITY WHERE ID IS NOT NULL"
        if _has_collation_ids(connection)
        else "SELECT ID, CHARACTER_SET_NAME FROM information_schema.COLLATIONS"
    )
    return Charsets({int(number): charsets[str(name)] for number, name in rows if name in charsets})


def _has_collation_ids(connection: Connection) -> bool:
    """MariaDB 10.10 moved the numbers to the other table, where they cannot be missing."""
    return bool(
        connection.query(
            "SELECT 1 FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'information_schema' "
            "AND TABLE_NAME = 'COLLATION_CHARACTER_SET_APPLICABILITY' AND COLUMN_NAME = 'ID'"
        )
    )
