"""What statements do to tables: the lexer, and the function from a statement to its effects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.mysql.statements import (
    Effects,
    Knowledge,
    NotUnderstood,
    RoutineBody,
    Statement,
    StatementDialect,
    effects_of,
    sql_mode_of,
    tokens_of,
)
from databus.relay.sources.mysql.tables.type_widening import is_widening, retains_values

MARIADB, MYSQL = StatementDialect(), StatementDialect(is_mysql=True)
ANSI, NO_BACKSLASH = sql_mode_of("ANSI_QUOTES"), sql_mode_of("NO_BACKSLASH_ESCAPES")
CAPTURED = [("shop", name) for name in ("t", "u", "p", "p_old", "p_new", "a-b")]
EVERYTHING = {name for _, name in CAPTURED}


def effects(
    text: str, dialect: StatementDialect = MARIADB, sql_mode: int = 0, **known: Any
) -> Effects:
    knowledge = Knowledge(**known)
    return effects_of(Statement("shop", text, sql_mode), dialect, CAPTURED, knowledge)


def shop(names: Iterable[tuple[str, str]]) -> set[str]:
    """The captured tables among these."""
    return {name for schema, name in names if (schema, name) in CAPTURED}


def words(text: str, sql_mode: int = 0, *, is_mysql: bool = False) -> list[str]:
    return [token.text for token in tokens_of(text, sql_mode, is_mysql=is_mysql)]


# -- the lexer


@pytest.mark.parametrize(
    ("text", "sql_mode", "found"),
    [
        ("a`b``c`.`d`", 0, ["a", "b`c", ".", "d"]),
        ("'it''s' 'a\\'b' \"x\"", 0, ["it's", "a'b", "x"]),
        ("'a\\' b", NO_BACKSLASH, ["a\\", "b"]),
        ("a--b -- c\n--\td\ne", 0, ["a", "-", "-", "b", "e"]),
        ("a # b ` ' \" /*\nc", 0, ["a", "c"]),
        ("a /* ` ' # -- */ b/**/c", 0, ["a", "b", "c"]),
        ("/*!40101 a /* b */ c */ d", 0, ["a", "c", "d"]),
        ("/*!a*//*!999999b*/", 0, ["a", "b"]),
        ("'/* x */' `-- y`", 0, ["/* x */", "-- y"]),
        ("_utf8mb4'é' N'x' x'41' 1.5e3 @v", 0,
         ["_utf8mb4", "é", "N", "x", "x", "41", "1", ".", "5e3", "@", "v"]),
        ("ünïcode$1 2t", 0, ["ünïcode$1", "2t"]),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_server(text: str, sql_mode: int, found: list[str]) -> None:
    assert words(text, sql_mode) == found


def test_a_comment_for_mariadb_is_none_for_mysql() -> None:
    assert words("a /*M! b */ /*M!100100 c */") == ["a", "b", "c"]
    assert words("a /*M! b */", is_mysql=True) == ["a"]


@pytest.mark.parametrize(
    "text", ["a 'b", "a `b", "/* a", "/*! a", 'a "b\\"', "a\N{NO-BREAK SPACE}b"]
)
def test_what_has_no_end_or_two_meanings_is_not_understood(text: str) -> None:
    with pytest.raises(NotUnderstood):
        tokens_of(text, 0, is_mysql=False)
    assert shop(effects(f"TRUNCATE {text}").replaced), "and never concerns no table"


@given(st.text(alphabet="abtu `'\"\\/*!-#\n.,();=0\xe9", max_size=40), st.sampled_from([0, ANSI]))
def test_any_text_has_effects_or_concerns_every_table(text: str, sql_mode: int) -> None:
    found = effects(text, sql_mode=sql_mode)
    try:
        tokens = tokens_of(text, sql_mode, is_mysql=False)
    except NotUnderstood:
        assert found.replaced
    else:
        assert not tokens or found.replaced or tokens[0].keyword in ("DO", "SET")


# -- spellings

GAPS = st.sampled_from(
    [" ", "\n", "\t ", "/**/", " /* x ' ` */ ", " # y\n", " -- z `\n", "/*! */", " /*!40000*/ "]
)
STATEMENTS: list[tuple[list[str], int]] = [
    (["TRUNCATE", "TABLE", "`t`"], 0),
    (["TRUNCATE", "`t`"], 0),
    (["TRUNCATE", "TABLE", "shop", ".", "t"], 0),
    (["TRUNCATE", "TABLE", '"t"'], ANSI),
    (["SET", "STATEMENT", "max_statement_time", "=", "1", "FOR", "TRUNCATE", "t"], 0),
    (["DROP", "TABLE", "IF", "EXISTS", "`t`", ",", "`u`"], 0),
    (["RENAME", "TABLE", "p", "TO", "p_old", ",", "shop", ".", "`p_new`", "TO", "p"], 0),
    (["ALTER", "ONLINE", "TABLE", "IF", "EXISTS", "t", "ADD", "c", "INT", "DEFAULT", "1"], 0),
    (["ALTER", "TABLE", "t", "EXCHANGE", "PARTITION", "p0", "WITH", "TABLE", "u"], 0),
    (["CREATE", "OR", "REPLACE", "TABLE", "t", "(", "id", "INT", ")"], 0),
    (["DELETE", "FROM", "`a-b`", "WHERE", "id", "=", "'it''s'"], 0),
    (["INSERT", "INTO", "other", ".", "t", "SELECT", "*", "FROM", "u"], 0),
]


@given(st.data(), st.sampled_from(range(len(STATEMENTS))))
def test_comments_spaces_cases_and_quotes_do_not_change_effects(
    data: st.DataObject, number: int
) -> None:
    tokens, sql_mode = STATEMENTS[number]
    plain = effects(" ".join(tokens), sql_mode=sql_mode)
    spelled = data.draw(GAPS)
    for token in tokens:
        if token.isupper():
            token = data.draw(st.sampled_from([token, token.lower(), token.title()]))
        elif token.isidentifier() and data.draw(st.booleans()):
            token = f"`{token}`"
        spelled += token + data.draw(GAPS)
    if data.draw(st.booleans()):
        spelled = f"/*!40000 {spelled.replace('/*!40000*/', ' ').replace('/*! */', ' ')}*/"
    found = effects(spelled, sql_mode=sql_mode)
    assert (found.emptied, found.replaced.keys()) == (plain.emptied, plain.replaced.keys())
    assert plain.emptied or plain.replaced or plain.revalued


# -- definitions


@pytest.mark.parametrize(
    ("text", "emptied", "replaced"),
    [
        ("TRUNCATE t", {"t"}, set()),
        ("TRUNCATE other.t", set(), set()),
        ("TRUNCATE `T`", set(), set()),
        ("DROP TABLE t, other.u", {"t"}, set()),
        ("DROP TEMPORARY TABLE t", set(), set()),
        ("DROP DATABASE shop", EVERYTHING, set()),
        ("DROP DATABASE Shop", set(), set()),
        ("RENAME TABLE p TO p_old, p_new TO p", {"p_new"}, {"p", "p_old"}),
        ("RENAME TABLE p TO x, x TO p", set(), set()),
        ("RENAME TABLE other.x TO p", set(), {"p"}),
        ("RENAME TABLE p TO other.p", {"p"}, set()),
        ("RENAME TABLE IF EXISTS p TO u", set(), {"p", "u"}),
        ("ALTER TABLE p RENAME u", {"p"}, {"u"}),
        ("ALTER TABLE p RENAME TO u, ADD c INT", {"p"}, {"u"}),
        ("ALTER TABLE t EXCHANGE PARTITION p0 WITH TABLE u", set(), {"t", "u"}),
        ("ALTER TABLE t CONVERT PARTITION p0 TO TABLE u", set(), {"t", "u"}),
        ("ALTER TABLE t CONVERT TABLE u TO PARTITION p0 VALUES LESS THAN (3)", {"u"}, {"t"}),
        ("ALTER TABLE t TRUNCATE PARTITION p0", set(), {"t"}),
        ("ALTER TABLE t DROP PARTITION p0, p1", set(), {"t"}),
        ("ALTER TABLE t DISCARD TABLESPACE", set(), {"t"}),
        ("ALTER TABLE t IMPORT PARTITION p0 TABLESPACE", set(), {"t"}),
        ("ALTER TABLE t REORGANIZE PARTITION p0 INTO (PARTITION a VALUES IN (1))", set(), set()),
        ("ALTER TABLE t ADD c INT, ADD INDEX (c), ENGINE=InnoDB, ALGORITHM=COPY", set(), set()),
        ("ALTER TABLE t ADD c INT DEFAULT NULL COMMENT 'not null default 1'", set(), set()),
        ("ALTER TABLE t ADD COLUMN (c INT, d INT DEFAULT 0)", set(), {"t"}),
        ("ALTER TABLE t ADD c INT NOT NULL", set(), {"t"}),
        ("ALTER TABLE t DROP b, ADD b TINYINT", set(), {"t"}),
        ("ALTER TABLE t DROP INDEX b, ADD INDEX c (v)", set(), set()),
        ("ALTER TABLE t ADD c INT AS (id + 1)", set(), {"t"}),
        ("ALTER TABLE t ADD c TIMESTAMP", set(), {"t"}),
        ("ALTER TABLE t ADD id BIGINT AUTO_INCREMENT PRIMARY KEY", set(), {"t"}),
        ("ALTER TABLE t ADD period INT DEFAULT 1", set(), {"t"}),
        ("ALTER TABLE t ADD CONSTRAINT x CHECK (v > 0)", set(), set()),
        ("ALTER TABLE t RENAME COLUMN a TO b", set(), {"t"}),
        ("ALTER TABLE t CHANGE a b INT", set(), {"t"}),
        ("ALTER TABLE t RENAME INDEX a TO b, DROP COLUMN c", set(), set()),
        ("ALTER TABLE t ALTER c SET DEFAULT 7, COMMENT = 'x'", set(), set()),
        ("ALTER TABLE t CONVERT TO CHARACTER SET utf8mb4", set(), set()),
        ("ALTER TABLE t ENGINE = BLACKHOLE", set(), {"t"}),
        ("ALTER TABLE t UNION = (u)", set(), {"t", "u"}),
        ("ALTER TABLE other.m UNION (shop.t, `u`)", set(), {"t", "u"}),
        ("ALTER TABLE other.m UNION = ()", set(), set()),
        ("ALTER IGNORE TABLE t ADD UNIQUE (v)", set(), {"t"}),
        ("ALTER TABLE t FROBNICATE", set(), {"t"}),
        ("CREATE TABLE t (id INT) ENGINE=InnoDB PARTITION BY HASH (id)", set(), set()),
        ("CREATE TABLE t LIKE u", set(), set()),
        ("CREATE TABLE t (id INT) WITH SYSTEM VERSIONING", set(), set()),
        ("CREATE TABLE t SELECT * FROM u", set(), {"t"}),
        ("CREATE TABLE t (id INT) ENGINE=InnoDB AS (SELECT * FROM u)", set(), {"t"}),
        ("CREATE TABLE t TABLE u", set(), {"t"}),
        ("CREATE TABLE t (id INT) ENGINE=MERGE UNION=(u)", set(), {"t", "u"}),
        ("CREATE TABLE other.m (id INT) INSERT_METHOD=LAST UNION (u) ENGINE=MERGE", set(), {"u"}),
        ("CREATE TABLE x SELECT 1 UNION ((SELECT 2))", set(), set()),
        ("CREATE TABLE x SELECT 1 UNION (SELECT id FROM t)", set(), set()),
        ("CREATE OR REPLACE TABLE t (id INT)", {"t"}, set()),
        ("CREATE OR REPLACE TABLE t SELECT 1 AS id", {"t"}, {"t"}),
        ("CREATE TEMPORARY TABLE t (id INT)", set(), set()),
        ("REPAIR TABLE t, u", set(), {"t", "u"}),
        ("FROB TABLE t", set(), {"t"}),
        ("FROB", set(), EVERYTHING),
        ("IMPORT TABLE FROM 'x.sdi'", set(), EVERYTHING),
        ("SET STATEMENT sql_mode='ANSI_QUOTES' FOR TRUNCATE TABLE \"t\"", set(), {"t"}),
    ],
)
def test_what_a_statement_does(text: str, emptied: set[str], replaced: set[str]) -> None:
    found = effects(text)
    assert (shop(found.emptied), shop({*found.replaced, *found.revalued})) == (emptied, replaced)


@pytest.mark.parametrize(
    "text",
    [
        "BEGIN", "COMMIT", "SAVEPOINT t", "GRANT ALL ON shop.t TO x", "SET PASSWORD = 'x'",
        "CREATE USER t", "CREATE VIEW t2 AS SELECT * FROM t", "DROP VIEW x", "FLUSH TABLES",
        "CREATE DEFINER=`a`@`%` TRIGGER x BEFORE INSERT ON t FOR EACH ROW DELETE FROM u",
        "CREATE OR REPLACE DEFINER = CURRENT_USER() SQL SECURITY INVOKER VIEW v AS SELECT 1",
        "CREATE ALGORITHM=UNDEFINED DEFINER=`a`@`%` SQL SECURITY DEFINER VIEW v AS SELECT 1",
        "CREATE ALGORITHM=MERGE VIEW v AS SELECT 1", "DROP PROCEDURE IF EXISTS t",
        "ANALYZE TABLE t", "OPTIMIZE TABLE t", "ALTER DATABASE shop CHARACTER SET utf8mb4",
        "CREATE DATABASE shop", "RENAME USER a TO b", "ALTER EVENT e DISABLE", "/* only */", "",
        "CREATE UNIQUE INDEX i ON t (v)", "DROP INDEX i ON t",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dialect", [MARIADB, MYSQL])
def test_what_changes_no_rows(text: str, dialect: StatementDialect) -> None:
    found = effects(text, dialect)
    assert not (found.emptied or found.replaced or found.converted or found.revalued)


def test_a_conversion_is_left_to_the_types() -> None:
    assert shop(effects("ALTER TABLE t MODIFY v BIGINT").converted) == {"t"}
    assert shop(effects("ALTER TABLE t CHANGE v V BIGINT AFTER id").converted) == {"t"}
    assert shop(effects("ALTER TABLE t CONVERT TO CHARACTER SET latin1").converted) == {"t"}


def test_names_are_folded_where_the_server_does() -> None:
    folding = StatementDialect(folds_names=True)
    assert effects("TRUNCATE Shop.T", folding).emptied == {("shop", "t")}
    assert shop(effects("DROP DATABASE SHOP", folding).emptied) == EVERYTHING
    stored = effects_of(Statement("Shop", "DROP TABLE orders"), folding, [("Shop", "Orders")])
    assert stored.emptied == {("Shop", "Orders")}


def test_a_truncation_that_may_mean_a_temporary_table_is_none_of_the_table() -> None:
    found = effects_of(Statement("shop", "TRUNCATE t", 0, True), MARIADB, CAPTURED)
    assert (found.emptied, shop(found.replaced)) == (set(), {"t"})


# -- rows


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("INSERT INTO t VALUES (1)", {"t"}),
        ("INSERT LOW_PRIORITY IGNORE t SELECT * FROM u", {"t"}),
        ("INSERT INTO other.t SELECT * FROM t", set()),
        ("REPLACE `a-b` SET id = 1", {"a-b"}),
        ("UPDATE t SET v = (SELECT 1 FROM u)", {"t"}),
        ("UPDATE t AS x JOIN u ON x.id = u.id SET x.v = 1", {"t", "u"}),
        ("DELETE FROM t WHERE id IN (SELECT id FROM u)", {"t"}),
        ("DELETE t FROM t JOIN u USING (id)", {"t", "u"}),
        ("DELETE FROM t USING t JOIN u USING (id)", {"t", "u"}),
        ("LOAD DATA LOCAL INFILE 'u' REPLACE INTO TABLE `t` (id)", {"t"}),
        ("WITH x AS (SELECT 1) DELETE FROM t", {"t"}),
        ("CALL anything()", EVERYTHING),
        ("UPDATE seen SET v = 1", {"t"}),
        ("INSERT INTO other.fires VALUES (1)", {"u"}),
        ("DELETE FROM p", {"p", "p_old"}),
        ("SELECT f()", {"p_new"}),
        ("INSERT INTO other.x VALUES (f())", {"p_new"}),
        ("SELECT hidden()", EVERYTHING),
        ("SELECT 1", set()),
        ("INSERT INTO merged VALUES (1)", {"a-b"}),
    ],
)
def test_a_change_of_rows_reaches(text: str, reached: set[str]) -> None:
    found = effects(
        text,
        views={("shop", "seen"): RoutineBody("shop", "select `shop`.`t`.`v` from `shop`.`t`")},
        triggers={("other", "fires"): [RoutineBody("shop", "insert into u values (new.id)")]},
        children={("shop", "p"): frozenset({("other", "between")}),
                  ("other", "between"): frozenset({("shop", "p_old")})},
        routines={("shop", "f"): RoutineBody("shop", "begin call g(); return 1; end"),
                  ("shop", "g"): RoutineBody("shop", "delete from shop.p_new"),
                  ("shop", "hidden"): RoutineBody("shop", None)},
        merged={("shop", "merged"): frozenset({("shop", "a-b")})},
    )  # fmt: skip
    assert shop(found.replaced) == reached
    assert effects_of(Statement("shop", text), MARIADB, CAPTURED).needs_knowledge


def test_what_the_account_cannot_see_may_reach_every_table() -> None:
    found = effects("INSERT INTO other.x VALUES (1)", unseen="GRANT TRIGGER")
    assert shop(found.replaced) == EVERYTHING
    assert "GRANT TRIGGER" in found.replaced["shop", "t"]


# -- types


@pytest.mark.parametrize(
    ("old", "new", "retains"),
    [
        ("int", "int", True),
        ("int", "bigint", True),
        ("int unsigned", "bigint unsigned", True),
        ("int", "int unsigned", False),
        ("bigint", "int", False),
        ("varchar(10)", "varchar(20)", True),
        ("varchar(20)", "varchar(10)", False),
        ("varchar(20)", "char(20)", False),
        ("text", "longtext", True),
        ("datetime", "datetime(6)", True),
        ("datetime(6)", "datetime", False),
        ("enum('a')", "enum('a','b')", True),
        ("enum('a','b')", "enum('b','a')", False),
        ("decimal(8,2)", "decimal(8,1)", False),
        ("timestamp", "datetime", False),
    ],
)
def test_a_wider_type_retains_values(old: str, new: str, retains: bool) -> None:
    assert is_widening(old, new) is retains


def test_only_known_clauses_retain_values_and_only_nullable_columns_retain_nulls() -> None:
    def table(*, nullable: bool) -> SourceSchema:
        return SourceSchema("s.t", (Column("v", Kind.INT, nullable, 0, 0, "int"),), ("v",))

    assert retains_values(table(nullable=False), table(nullable=True))
    assert not retains_values(table(nullable=True), table(nullable=False))
    assert not retains_values(None, table(nullable=True))
