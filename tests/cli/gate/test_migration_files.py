"""Files are cut into statements where the server's own client cuts them."""

from __future__ import annotations

import pytest

from databus.cli.gate.migration_files import postgres_tokens, read_migration
from databus.relay.sources.mysql.statements.lexer import NotUnderstood


def cut(text: str, *, is_postgres: bool = False) -> list[tuple[int, str]]:
    found = read_migration("m.sql", text, is_postgres=is_postgres)
    assert not any(one.problem for one in found)
    return [(one.line, one.text) for one in found]


def test_semicolons_in_quotes_and_comments_end_nothing() -> None:
    text = "-- a; b\nALTER TABLE `a;b` ADD c INT; # x;\n/* ; */ UPDATE t SET v = 'it''s;\\';';\n\n;"
    assert cut(text) == [
        (2, "ALTER TABLE `a;b` ADD c INT"),
        (3, "UPDATE t SET v = 'it''s;\\';'"),
    ]


def test_a_comment_that_the_server_executes_is_a_statement() -> None:
    assert cut("/*!50000 ALTER TABLE t ADD c INT */;") == [
        (1, "/*!50000 ALTER TABLE t ADD c INT */")
    ]


def test_another_delimiter_holds_a_body_together() -> None:
    body = "CREATE PROCEDURE p() BEGIN DROP TABLE a; END"
    text = f"DELIMITER //\n{body}//\nDELIMITER ;\nDROP TABLE b;"
    assert cut(text) == [
        (2, body),
        (4, "DROP TABLE b"),
    ]


def test_dollar_quotes_and_backslashes_are_those_of_postgresql() -> None:
    text = (
        "DO $x$ BEGIN; $$ END; $x$;\nSELECT 'a\\';\nSELECT E'a\\';b', \"c;\"\"d\", a$1;\nTRUNCATE t"
    )
    assert cut(text, is_postgres=True) == [
        (1, "DO $x$ BEGIN; $$ END; $x$"),
        (2, "SELECT 'a\\'"),
        (3, 'SELECT E\'a\\\';b\', "c;""d", a$1'),
        (4, "TRUNCATE t"),
    ]


@pytest.mark.parametrize("text", ["SELECT 1; DROP TABLE 'a; SELECT 2", "/* DROP TABLE a;"])
@pytest.mark.parametrize("is_postgres", [False, True])
def test_a_quote_without_an_end_is_a_problem_and_not_lost(text: str, is_postgres: bool) -> None:
    last = read_migration("m.sql", text, is_postgres=is_postgres)[-1]
    assert "has no end" in last.problem


def test_unquoted_names_of_postgresql_are_in_lower_case() -> None:
    assert [one.text for one in postgres_tokens('Alter "Big""One" /* x */ C1')] == [
        "alter",
        'Big"One',
        "c1",
    ]
    with pytest.raises(NotUnderstood, match="inside of a comment"):
        postgres_tokens("SELECT /* a /* b */ 1")
