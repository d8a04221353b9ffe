"""A migration as statements, with the lines at which they begin.

The text is cut at semicolons outside of quotes, comments and dollar quotes.  Nothing here knows
what a statement means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from databus.relay.sources.mysql.statements.lexer import NotUnderstood, Token, TokenKind

_MYSQL_PARTS = re.compile(
    r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|`(?:[^`]|``)*`"
    r"|/\*.*?\*/|(?:\#|--(?=\s|\Z))[^\n]*",
    re.DOTALL,
)
_POSTGRES_PARTS = re.compile(
    r"\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\""
    r"|(?<![\w$])\$(?P<tag>[A-Za-z_\x80-\U0010ffff]?\w*)\$.*?\$(?P=tag)\$|/\*.*?\*/|--[^\n]*",
    re.DOTALL,
)
_OPENS = re.compile(r"['\"`]|/\*")
_DELIMITER = re.compile(r"\s*delimiter[ \t]+(\S+)[^\n]*(?:\n|\Z)", re.IGNORECASE)
_BLANK = re.compile(r"(?:\s+|/\*(?!M?!).*?\*/|(?:\#|--)[^\n]*)*", re.DOTALL)
_WORD = re.compile(r"[\w$\x80-\U0010ffff]+")


@dataclass(frozen=True, slots=True)
class MigrationStatement:
    """One statement of a file; ``problem``: why its end is not certain."""

    file: str
    line: int
    text: str
    problem: str = ""


def read_migration(file: str, text: str, *, is_postgres: bool) -> list[MigrationStatement]:
    """The statements of a file, in order."""
    return list(_cut(file, text, is_postgres=is_postgres))


def _cut(file: str, text: str, *, is_postgres: bool) -> Iterator[MigrationStatement]:
    parts = _POSTGRES_PARTS if is_postgres else _MYSQL_PARTS
    delimiter = ";"
    start = at = 0

    def statement(end: int, problem: str = "") -> Iterator[MigrationStatement]:
        blank = _BLANK.match(text, start, end)
        first = blank.end() if blank is not None else start
        if found := text[first:end].strip():
            yield MigrationStatement(file, text.count("\n", 0, first) + 1, found, problem)

    while at < len(text):
        if not is_postgres and at == start and (named := _DELIMITER.match(text, at)):
            delimiter = named[1]
            start = at = named.end()
        elif match := parts.match(text, at):
            at = match.end()
        elif text.startswith(delimiter, at):
            yield from statement(at)
            start = at = at + len(delimiter)
        elif _OPENS.match(text, at):
            yield from statement(len(text), f"a {text[at : at + 2]!r} has no end")
            return
        elif word := _WORD.match(text, at):
            # A word before a quote: only E'...' belongs to the quote, and is matched above.
            at = word.end()
        else:
            at += 1
    yield from statement(len(text))


def postgres_tokens(text: str) -> list[Token]:
    """The tokens of a statement as PostgreSQL reads it: unquoted names are in lower case.

    Raises:
        NotUnderstood: a quote or a comment has no end.
    """
    found: list[Token] = []
    at = 0
    while at < len(text):
        match = _POSTGRES_PARTS.match(text, at)
        if match is not None:
            part = match[0]
            if part[0] == '"':
                found.append(Token(TokenKind.NAME, part[1:-1].replace('""', '"')))
            elif not part.startswith(("--", "/*")):
                found.append(Token(TokenKind.STRING, part))
            if part.startswith("/*") and "/*" in part[2:]:
                raise NotUnderstood("a comment is inside of a comment")
            at = match.end()
        elif _OPENS.match(text, at):
            raise NotUnderstood(f"a {text[at : at + 2]!r} has no end")
        elif word := _WORD.match(text, at):
            found.append(Token(TokenKind.WORD, word[0].lower()))
            at = word.end()
        else:
            if not text[at].isspace():
                found.append(Token(TokenKind.SIGN, text[at]))
            at += 1
    return found
