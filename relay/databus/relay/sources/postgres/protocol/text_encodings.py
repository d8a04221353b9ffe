"""The encoding of a server's texts, and its name in Python.

The relay's sessions read texts as they are stored (``client_encoding = SQL_ASCII``).  A server that
converts texts would fail with the whole stream at the first text that it cannot convert.  So the
relay itself detects an invalid text, with its row and column.
"""

from __future__ import annotations

SINGLE_BYTE = {
    "LATIN1": "iso8859-1",
    "LATIN2": "iso8859-2",
    "LATIN3": "iso8859-3",
    "LATIN4": "iso8859-4",
    "LATIN5": "iso8859-9",
    "LATIN6": "iso8859-10",
    "LATIN7": "iso8859-13",
    "LATIN8": "iso8859-14",
    "LATIN9": "iso8859-15",
    "LATIN10": "iso8859-16",
    "ISO_8859_5": "iso8859-5",
    "ISO_8859_6": "iso8859-6",
    "ISO_8859_7": "iso8859-7",
    "ISO_8859_8": "iso8859-8",
    "KOI8R": "koi8-r",
    "KOI8U": "koi8-u",
    "WIN866": "cp866",
    "WIN874": "cp874",
    "WIN1250": "cp1250",
    "WIN1251": "cp1251",
    "WIN1252": "cp1252",
    "WIN1253": "cp1253",
    "WIN1254": "cp1254",
    "WIN1255": "cp1255",
    "WIN1256": "cp1256",
    "WIN1257": "cp1257",
    "WIN1258": "cp1258",
}
"""Encodings with one conversion table, which is the same in Python and in the server."""

UTF8 = "utf-8"
KNOWN = ("UTF8", *SINGLE_BYTE)


def codec_of(server_encoding: str, ascii_encoding: str = "UTF8") -> str | None:
    """Python's name for it; None if the server must convert its texts.

    An SQL_ASCII database has no encoding: its texts are read as ``ascii_encoding``.
    """
    if server_encoding == "SQL_ASCII":
        server_encoding = ascii_encoding
    return UTF8 if server_encoding == "UTF8" else SINGLE_BYTE.get(server_encoding)
