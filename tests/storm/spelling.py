"""The many ways to write one statement: letter cases, comments, quotes, executable comments."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_PLAIN = re.compile(r"[a-z][a-z0-9_]*\Z")
_RESERVED = {"order", "select", "table", "group", "rank", "user", "key", "check", "default"}
_TOKEN = r"(?P<id>`(?:[^`]|``)*`)|(?P<space>\s+)|(?P<word>[A-Za-z_][\w$]*)|(?P<other>.)"
_STRING = {
    True: r"(?P<string>'(?:[^']|'')*')|",
    False: r"(?P<string>'(?:[^'\\]|''|\\.)*')|",
}


@dataclass(frozen=True, slots=True)
class Modes:
    """What a session's settings change in how a statement must be written."""

    ansi_quotes: bool = False
    no_backslash: bool = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a product allows: ``identifier`` is its quote, ``executable`` its special comments."""

    identifier: str = "`"
    hash_comments: bool = True
    executable: tuple[str, ...] = ("/*!", "/*!40000", "/*!50100")
    nested: bool = False


def quoted(name: str) -> str:
    """An identifier in backticks; ``respell`` writes it as the dialect has it."""
    return "`" + name.replace("`", "``") + "`"


def respell(rng: random.Random, sql: str, dialect: Dialect, modes: Modes) -> str:
    """The same statement, written otherwise; identifiers in ``sql`` stand in backticks."""
    if rng.random() < 0.35:
        return "".join(_quote(text, dialect, modes) for _, text in _tokens(sql, modes))
    letters = rng.choice((str.upper, str.lower, str.capitalize, str))
    odd = rng.choice((0.0, 0.1, 0.5))
    unquoted = rng.random() < 0.4
    tokens = _tokens(sql, modes)
    out: list[str] = []
    for index, (kind, text) in enumerate(tokens):
        if kind == "word":
            out.append(letters(text))
        elif kind == "id":
            name = text[1:-1]
            is_plain = unquoted and _PLAIN.match(name) and name not in _RESERVED
            out.append(name if is_plain else _quote(text, dialect, modes))
        elif kind == "space":
            beside = [tokens[i][0] for i in (index - 1, index + 1) if 0 <= i < len(tokens)]
            is_free = beside.count("id") == 1 and not unquoted and "other" not in beside
            out.append(_space(rng, odd, dialect, is_free=is_free))
        else:
            out.append(text)
    found = "".join(out)
    return _around(rng, found, odd, dialect)


def _tokens(sql: str, modes: Modes) -> list[tuple[str, str]]:
    pattern = re.compile(_STRING[modes.no_backslash] + _TOKEN, re.DOTALL)
    return [(found.lastgroup or "", found[0]) for found in pattern.finditer(sql)]


def _quote(text: str, dialect: Dialect, modes: Modes) -> str:
    if not text.startswith("`") or (dialect.identifier == "`" and not modes.ansi_quotes):
        return text
    name = text[1:-1].replace("``", "`").replace('"', '""')
    return f'"{name}"'


def _space(rng: random.Random, odd: float, dialect: Dialect, *, is_free: bool) -> str:
    if rng.random() >= odd:
        return " "
    if is_free and rng.random() < 0.3:
        return ""
    return rng.choice(_spaces(dialect))


def _spaces(dialect: Dialect) -> list[str]:
    found = ["\n", "\t", "  ", "/**/", " /* TRUNCATE TABLE t1 */ ", " -- it's `so`\n", "\r\n"]
    if dialect.hash_comments:
        found.append(" # TABLE t2\n")
    if dialect.nested:
        found.append(" /* a /* nested */ one */ ")
    return found


def _around(rng: random.Random, sql: str, odd: float, dialect: Dialect) -> str:
    if odd and rng.random() < 0.3:
        sql = rng.choice(_spaces(dialect)) + sql
    if odd and rng.random() < 0.2:
        sql += rng.choice((" ", "/* end */", " -- end", ""))
    if dialect.executable and "*/" not in sql and "--" not in sql and rng.random() < 0.05:
        sql = f"{rng.choice(dialect.executable)} {sql} */"
    return sql
