"""The tokens of a statement, as the server's own lexer reads them.

A binlog has the text that a session sent.  Its meaning depends on the session's ``sql_mode``:
whether ``"t"`` is a name or a string, and whether a backslash is an escape.  The lexer drops
comments, except those that the server executes (``/*! ... */``, ``/*M! ... */``).  A server logs
those that it did not execute as ordinary comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

ANSI_QUOTES = 1 << 2
MSSQL = 1 << 10
NO_BACKSLASH_ESCAPES = 1 << 20
STRICT = 1 << 21 | 1 << 22
"""Bits of ``sql_mode`` in a QUERY event; they are the same in MariaDB and in MySQL."""


_MODE_BITS = {
    "ANSI_QUOTES": ANSI_QUOTES,
    "MSSQL": MSSQL,
    "NO_BACKSLASH_ESCAPES": NO_BACKSLASH_ESCAPES,
}


def sql_mode_of(names: str) -> int:
    """The bits of a list of modes that the lexer needs."""
    return sum(_MODE_BITS.get(name, 0) for name in names.split(","))


class NotUnderstood(Exception):
    """This lexer or grammar cannot read the text."""


class TokenKind(Enum):
    """The kind of a token: only a WORD can be a keyword; a NAME was quoted."""

    WORD = "word"
    NAME = "name"
    STRING = "string"
    SIGN = "sign"


@dataclass(frozen=True, slots=True)
class Token:
    """One token; ``text`` has no quotes and escapes."""

    kind: TokenKind
    text: str

    @property
    def keyword(self) -> str:
        """The word in upper case; "" for other tokens."""
        return self.text.upper() if self.kind is TokenKind.WORD else ""


_SPACE = re.compile(r"[ \t\n\v\f\r]+")
_WORD = re.compile(r"[0-9A-Za-z$_\x80-\U0010ffff]+")
_TO_LINE_END = re.compile(r"(?:#|--(?=[\x00-\x20\x7f]|\Z))[^\n]*(?:\n|\Z)")
_EXECUTED = re.compile(r"/\*(M)?!(?:[0-9]{5,6})?")
_PLAIN = re.compile(r"/\*.*?\*/", re.DOTALL)
_BACKSLASHED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"0": "\0", "n": "\n", "t": "\t", "r": "\r", "b": "\b", "Z": "\x1a"}
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
_QUOTED = {
    (quote, escapes): re.compile(
        rf"{quote}((?:[^{quote}\\]|{quote}{quote}|\\.)*){quote}(?!{quote})"
        if escapes
        else rf"{quote}((?:[^{quote}]|{quote}{quote})*){quote}(?!{quote})",
        re.DOTALL,
    )
    for quote in "'\"`"
    for escapes in (False, True)
}
_BRACKETED = re.compile(r"\[((?:[^\]]|\]\])*)\]")


def tokens_of(text: str, sql_mode: int, *, is_mysql: bool) -> tuple[Token, ...]:
    """The tokens of a statement that a server has executed.

    Raises:
        NotUnderstood: a quote or a comment has no end, or a character has two meanings.
    """
    found: list[Token] = []
    at = depth = 0
    while at < len(text):
        if match := _SPACE.match(text, at) or _TO_LINE_END.match(text, at):
            at = match.end()
        elif text.startswith("/*", at):
            match = _EXECUTED.match(text, at)
            if match is not None and not (match[1] and is_mysql):
                depth += 1
            else:
                match = _PLAIN.match(text, at)
                if match is None:
                    raise NotUnderstood("a comment has no end")
            at = match.end()
        elif depth and text.startswith("*/", at):
            depth -= 1
            at += 2
        else:
            token, at = _token(text, at, sql_mode, is_mysql=is_mysql)
            found.append(token)
    if depth:
        raise NotUnderstood("an executed comment has no end")
    return tuple(found)


def _token(text: str, at: int, sql_mode: int, *, is_mysql: bool) -> tuple[Token, int]:
    first = text[at]
    if first in "'\"`":
        return _quoted(text, at, sql_mode)
    if first == "[" and sql_mode & MSSQL and not is_mysql:
        match = _BRACKETED.match(text, at)
        if match is None:
            raise NotUnderstood("a bracket has no end")
        return Token(TokenKind.NAME, match[1].replace("]]", "]")), match.end()
    match = _WORD.match(text, at)
    if match is None:
        return Token(TokenKind.SIGN, first), at + 1
    if _NO_BREAK_SPACE in match[0]:
        raise NotUnderstood("a no-break space separates words in some character sets only")
    return Token(TokenKind.WORD, match[0]), match.end()


def _quoted(text: str, at: int, sql_mode: int) -> tuple[Token, int]:
    quote = text[at]
    is_name = quote == "`" or (quote == '"' and bool(sql_mode & ANSI_QUOTES))
    escapes = not is_name and not sql_mode & NO_BACKSLASH_ESCAPES
    match = _QUOTED[quote, escapes].match(text, at)
    if match is None:
        raise NotUnderstood(f"a quote {quote} has no end")
    value = match[1].replace(2 * quote, quote)
    if escapes:
        value = _BACKSLASHED.sub(lambda one: _ESCAPES.get(one[1], one[1]), value)
    return Token(TokenKind.NAME if is_name else TokenKind.STRING, value), match.end()
