"""The server's character sets, as decoders to text.

Python's codecs decode the Unicode encodings.  For every other character set the relay reads the
character of each code from the server, so that a value from the binlog equals the same value in a
SELECT: Python's codecs of the same names differ in some codes and lack thousands.  A code without
a character on the server is ``?`` in both.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

from databus.common.errors import UnsupportedChange
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain

_CODECS = {
    "utf8mb3": "utf-8",
    "utf8mb4": "utf-8",
    "utf8": "utf-8",
    "ucs2": "utf-16-be",
    "utf16": "utf-16-be",
    "utf16le": "utf-16-le",
    "utf32": "utf-32-be",
}


def _bytes(*ends: int) -> bytes:
    """The bytes of ranges, each given by its first and last byte."""
    return b"".join(
        bytes(range(first, last + 1)) for first, last in zip(ends[::2], ends[1::2], strict=True)
    )


_ASCII, _KATAKANA, _EUC = _bytes(0, 0x7F), _bytes(0xA1, 0xDF), _bytes(0xA1, 0xFE)
_SHIFTED = (_bytes(0x81, 0x9F, 0xE0, 0xFC), _bytes(0x40, 0x7E, 0x80, 0xFC))

_CODES: dict[str, tuple[tuple[bytes, ...], ...]] = {
    "big5": ((_ASCII,), (_bytes(0xA1, 0xF9), _bytes(0x40, 0x7E, 0xA1, 0xFE))),
    "cp932": ((_ASCII,), (_KATAKANA,), _SHIFTED),
    "eucjpms": ((_ASCII,), (_EUC, _EUC), (b"\x8e", _KATAKANA), (b"\x8f", _EUC, _EUC)),
    "euckr": ((_ASCII,), (_bytes(0x81, 0xFE), _bytes(0x41, 0x5A, 0x61, 0x7A, 0x81, 0xFE))),
    "gb2312": ((_ASCII,), (_bytes(0xA1, 0xF7), _EUC)),
    "gbk": ((_ASCII,), (_bytes(0x81, 0xFE), _bytes(0x40, 0x7E, 0x80, 0xFE))),
    "sjis": ((_ASCII,), (_KATAKANA,), _SHIFTED),
    "ujis": ((_ASCII,), (_EUC, _EUC), (b"\x8e", _KATAKANA), (b"\x8f", _EUC, _EUC)),
}
"""The codes that are well-formed on the server: the possible values of each byte."""


@dataclass(frozen=True, slots=True)
class Charset:
    """One character set: at most ``max_bytes`` a character.

    ``table`` has the server's characters: for a single-byte set all 256, for the multi-byte sets
    in ``_CODES`` one for each code, "" for other sets.
    """

    name: str
    max_bytes: int
    table: str = ""

    @property
    def is_utf8(self) -> bool:
        """Whether its bytes are UTF-8."""
        return _CODECS.get(self.name) == "utf-8"

    @property
    def is_single_byte(self) -> bool:
        """Whether ``table`` is indexed by a byte."""
        return bool(self.table) and self.max_bytes == 1

    @property
    def known(self) -> bool:
        """Whether its text can be decoded."""
        return bool(self.table) or self.name in _CODECS or self.name == "binary"

    def decoder(self) -> Callable[[bytes], str]:
        """The function from stored bytes to text; it raises TableUncertain for invalid text.

        Raises:
            UnsupportedChange: the character set is unknown.
        """
        if self.is_single_byte:
            table = self.table
            return lambda data: codecs.charmap_decode(data, "strict", table)[0]
        if self.table:
            return _by_codes(self.name, self.table)
        if self.name not in _CODECS:
            raise UnsupportedChange(
                f"the character set {self.name} cannot be decoded; convert the column to utf8mb4"
            )
        decode = codecs.getdecoder(_CODECS[self.name])
        narrow = self.name == "ucs2"

        def text(data: bytes) -> str:
            try:
                found = decode(data)[0]
            except UnicodeDecodeError:
                raise _no_text(self.name, data) from None
            if narrow and 2 * len(found) != len(data):
                raise _no_text(self.name, data)
            return found

        return text


def _no_text(name: str, data: bytes) -> TableUncertain:
    shown = data[:40].hex() + ("..." if len(data) > 40 else "")
    return TableUncertain(f"x'{shown}' is no {name} text; correct the row")


@functools.lru_cache(maxsize=16)
def _by_codes(name: str, table: str) -> Callable[[bytes], str]:
    """The decoder of a multi-byte set; ``table`` has the characters of its codes in order."""
    forms = _CODES[name]
    characters = dict(zip(_codes_of(name), table, strict=True))
    classes = (b"".join(b"[" + re.escape(allowed) + b"]" for allowed in form) for form in forms)
    codes_in = re.compile(b"|".join(classes) + b"|.", re.DOTALL).findall

    def text(data: bytes) -> str:
        if data.isascii():
            return data.decode("ascii")
        try:
            return "".join([characters[code] for code in codes_in(data)])
        except KeyError:
            raise _no_text(name, data) from None

    return text


def _codes_of(name: str) -> list[bytes]:
    return [bytes(code) for form in _CODES[name] for code in itertools.product(*form)]


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


def load_charsets(connection: MySqlConnection) -> Charsets:
    """All character sets and collations of the server."""
    sizes = {
        str(name): int(size)
        for name, size in connection.query(
            "SELECT CHARACTER_SET_NAME, MAXLEN FROM information_schema.CHARACTER_SETS"
        )
    }
    codes = {
        name: bytes(range(256)) if size == 1 else b"".join(_codes_of(name))
        for name, size in sizes.items()
        if name in _CODES or (size == 1 and name != "binary")
    }
    tables = connection.row(
        "SELECT " + ", ".join(f"CONVERT(_{n} x'{c.hex()}' USING utf8mb4)" for n, c in codes.items())
    )
    table_of = {name: str(table) for name, table in zip(codes, tables, strict=True)}
    charsets = {
        name: Charset(name, size, _whole(name, table_of.get(name, "")))
        for name, size in sizes.items()
    }
    rows = connection.query(
        "SELECT ID, CHARACTER_SET_NAME "
        "FROM information_schema.COLLATION_CHARACTER_SET_APPLICABILITY WHERE ID IS NOT NULL"
        if _has_collation_ids(connection)
        else "SELECT ID, CHARACTER_SET_NAME FROM information_schema.COLLATIONS"
    )
    return Charsets({int(number): charsets[str(name)] for number, name in rows if name in charsets})


def _whole(name: str, table: str) -> str:
    """The characters if each code has one; otherwise the set counts as unknown."""
    count = len(_codes_of(name)) if name in _CODES else 256
    return table if len(table) == count else ""


def _has_collation_ids(connection: MySqlConnection) -> bool:
    """MariaDB has the numbers in the other table since 10.10; they cannot be missing there."""
    return bool(
        connection.query(
            "SELECT 1 FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'information_schema' "
            "AND TABLE_NAME = 'COLLATION_CHARACTER_SET_APPLICABILITY' AND COLUMN_NAME = 'ID'"
        )
    )
