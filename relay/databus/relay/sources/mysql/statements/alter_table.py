"""The effects of an ALTER TABLE on the existing rows.

The binlog has the statement and no row events.  A clause that leaves every value of every column
unchanged needs no event.  A clause that changes values, or may change them, suspends the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from databus.relay.sources.mysql.statements.lexer import NotUnderstood, Token, TokenKind
from databus.relay.sources.mysql.statements.token_reader import (
    TableName,
    TokenReader,
    keywords,
    outer_words,
)

_KEPT_BY_ENGINES = keywords(
    """
    INNODB MYISAM ARIA ROCKSDB TOKUDB ARCHIVE NDB NDBCLUSTER MEMORY HEAP
    """
)
"""Engines whose tables store rows themselves; ALTER TABLE to such an engine retains the rows."""
_OPTIONS = keywords(
    """
    ALGORITHM LOCK FORCE ENGINE TYPE AUTO_INCREMENT AVG_ROW_LENGTH CHECKSUM TABLE_CHECKSUM
    COMMENT COMPRESSION CONNECTION DELAY_KEY_WRITE ENCRYPTION ENCRYPTED ENCRYPTION_KEY_ID
    IETF_QUOTES INSERT_METHOD KEY_BLOCK_SIZE MAX_ROWS MIN_ROWS PACK_KEYS PAGE_CHECKSUM
    PAGE_COMPRESSED PAGE_COMPRESSION_LEVEL PASSWORD ROW_FORMAT SEQUENCE STATS_AUTO_RECALC
    STATS_PERSISTENT STATS_SAMPLE_PAGES TRANSACTIONAL AUTOEXTEND_SIZE SECONDARY_ENGINE
    ENGINE_ATTRIBUTE SECONDARY_ENGINE_ATTRIBUTE SECONDARY_LOAD SECONDARY_UNLOAD START
    DEFAULT CHARACTER CHARSET COLLATE ORDER ENABLE DISABLE WITH WITHOUT TABLESPACE DATA
    INDEX STORAGE NOWAIT WAIT
    """
)
_KEPT_PARTITIONS = keywords(
    """
    COALESCE REORGANIZE REBUILD OPTIMIZE ANALYZE CHECK PARTITION REMOVE
    """
)
_NOT_COLUMNS = keywords(
    """
    INDEX KEY UNIQUE FULLTEXT SPATIAL CONSTRAINT CHECK FOREIGN PRIMARY PARTITION
    """
)
_ADDS_VALUES = keywords(
    """
    NOT AS GENERATED AUTO_INCREMENT SERIAL PRIMARY TIMESTAMP
    """
)


_NOT_NAMES = frozenset(
    word.lower()
    for word in keywords(
        """
        COLUMN IF NOT EXISTS INDEX KEY CONSTRAINT PRIMARY FOREIGN UNIQUE PARTITION CHECK PERIOD
        FOR SYSTEM VERSIONING DEFAULT NULL
        """
    )
)


@dataclass(slots=True)
class Altered:
    """The effects of an ALTER TABLE besides the new definition.

    ``rows`` is the clause that adds or removes rows, or may; ``values`` the clause that changes
    values of rows, all of which remain.  ``types`` names columns whose values are unchanged only
    if both the old and the new type can represent them.  ``dropped`` are the columns that the
    statement drops or renames.
    """

    rows: str = ""
    values: str = ""
    types: str = ""
    renamed_to: TableName | None = None
    emptied: list[TableName] = field(default_factory=list)
    replaced: list[TableName] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def alterations(reader: TokenReader) -> Altered:
    """Read the clauses after the table's name.

    Raises:
        NotUnderstood: a clause is not known.
    """
    found = Altered()
    if reader.accept("WAIT"):
        reader.identifier()
    reader.accept("NOWAIT")
    parts = [part for part in reader.parts() if part]
    for part in parts:
        _clause(reader.of_part(part), found)
    if again := _dropped_and_added(parts):
        found.values = f"DROP {again}, ADD {again} gives rows another value"
    return found


def _dropped_and_added(parts: Sequence[Sequence[Token]]) -> str:
    """A name that one clause drops and another one adds; "" if there is none."""
    named: dict[str, set[str]] = {"DROP": set(), "ADD": set()}
    for part in parts:
        if part[0].keyword in named:
            words = [token.text.lower() for token in part[1:] if token.kind is not TokenKind.SIGN]
            named[part[0].keyword].update(words)
    return next(iter(sorted((named["DROP"] & named["ADD"]) - _NOT_NAMES)), "")


def _clause(reader: TokenReader, found: Altered) -> None:
    tokens = reader.rest
    word = reader.keyword()
    reader.at += 1
    shown = " ".join(token.text for token in tokens[:4])
    if word == "ADD":
        if _adds_values(reader):
            found.values = f"ADD {reader.rest[0].text if reader.rest else ''} gives rows a value"
    elif word in ("MODIFY", "CHANGE"):
        _redefine(word, reader, found)
    elif word == "ALTER":
        pass  # a default, the visibility of an index or a check
    elif word == "DROP":
        if reader.keyword() in ("PARTITION", "SYSTEM"):
            found.rows = shown
        elif not _is_no_column(reader.rest):
            reader.accept("COLUMN")
            reader.accept("IF", "EXISTS")
            found.dropped.append(reader.identifier())
    elif word == "RENAME":
        _rename(reader, found)
    elif word == "CONVERT":
        _convert(reader, found)
    elif word == "EXCHANGE":
        while not reader.ended and not reader.accept("WITH", "TABLE"):
            reader.at += 1
        found.rows = shown
        found.replaced.append(reader.table())
    elif word in _KEPT_PARTITIONS or word in _OPTIONS:
        if not _options_retain_rows(tokens):
            found.rows = shown
    else:
        # DISCARD, IMPORT, TRUNCATE PARTITION, REPAIR PARTITION, UNION, and unknown clauses.
        found.rows = shown


def _adds_values(reader: TokenReader) -> bool:
    """Whether existing rows get a value other than NULL in an added column."""
    if reader.accept("SYSTEM", "VERSIONING"):
        return True
    if _is_no_column(reader.rest):
        return False
    reader.accept("COLUMN")
    reader.accept("IF", "NOT", "EXISTS")
    if reader.sign() == "(":
        inner = list(reader.rest)
        end = _closing(inner)
        columns = TokenReader(inner[1:end], "").parts()
        return any(_has_value(column) for column in columns)
    return _has_value(list(reader.rest))


def _is_no_column(tokens: Sequence[Token]) -> bool:
    """Whether this clause concerns an index, a constraint or a partition."""
    word = tokens[0].keyword if tokens else ""
    after = tokens[1].keyword if len(tokens) > 1 else ""
    if word == "PERIOD":
        return after == "FOR"
    if word == "VECTOR":
        return after in ("INDEX", "KEY")
    return word in _NOT_COLUMNS


def _closing(tokens: Sequence[Token]) -> int:
    depth = 0
    for index, token in enumerate(tokens):
        if token.kind is TokenKind.SIGN:
            depth += (token.text == "(") - (token.text == ")")
            if not depth:
                return index
    raise NotUnderstood("parentheses do not match")


def _has_value(column: list[Token]) -> bool:
    """Whether an added column has a value other than NULL in existing rows."""
    if not column:
        return True
    if _is_no_column(column):
        return False
    words = outer_words(column[1:])
    if _ADDS_VALUES & set(words):
        return True
    return any(
        word == "DEFAULT" and words[index + 1 : index + 2] != ["NULL"]
        for index, word in enumerate(words)
    )


def _redefine(word: str, reader: TokenReader, found: Altered) -> None:
    reader.accept("COLUMN")
    reader.accept("IF", "EXISTS")
    old = reader.identifier()
    new = reader.identifier() if word == "CHANGE" else old
    if old.lower() != new.lower():
        found.values = f"CHANGE {old} {new} gives the values another name"
        found.dropped.append(old)
    elif {"AS", "GENERATED", "AUTO_INCREMENT"} & set(outer_words(reader.rest)):
        found.values = f"{word} {old} computes its values"
    else:
        found.types = f"{word} {old} converts its values"


def _rename(reader: TokenReader, found: Altered) -> None:
    if reader.accept("COLUMN"):
        old = reader.identifier()
        found.values = f"RENAME COLUMN {old} gives the values another name"
        found.dropped.append(old)
    elif not reader.accept_any("INDEX", "KEY"):
        reader.accept_any("TO", "AS") or reader.accept_sign("=")
        found.renamed_to = reader.table()


def _convert(reader: TokenReader, found: Altered) -> None:
    if reader.accept("PARTITION"):
        reader.identifier()
        reader.expect("TO")
        reader.expect("TABLE")
        found.rows = "CONVERT PARTITION TO TABLE"
        found.replaced.append(reader.table())
    elif reader.accept("TABLE"):
        found.rows = "CONVERT TABLE TO PARTITION"
        found.emptied.append(reader.table())
    else:
        reader.expect("TO")
        if not (reader.accept("CHARSET") or reader.accept("CHARACTER", "SET")):
            raise NotUnderstood("expected CHARACTER SET")
        if reader.keyword() != "UTF8MB4":
            found.types = "CONVERT TO CHARACTER SET converts its texts"


def _options_retain_rows(tokens: Sequence[Token]) -> bool:
    words = outer_words(tokens)
    if {"UNION", "DISCARD", "IMPORT", "EXCHANGE", "TRUNCATE"} & set(words):
        return False
    return stores_own_rows(tokens)


def stores_own_rows(tokens: Sequence[Token]) -> bool:
    """Whether the named ENGINE stores rows itself."""
    for index, token in enumerate(tokens):
        if token.keyword in ("ENGINE", "TYPE"):
            after = [one for one in tokens[index + 1 : index + 3] if one.text != "="]
            if not after or after[0].text.upper() not in _KEPT_BY_ENGINES:
                return False
    return True
