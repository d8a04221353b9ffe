"""The foreign keys with actions behind a statement."""

from __future__ import annotations

import pytest

from databus.relay.sources.mysql.statements import Statement, StatementDialect
from databus.relay.sources.mysql.tables.cascades import Cascades, ForeignKey, decode_cascades
from databus.relay.sources.mysql.tables.passed_keys import passed_by

PARENT, CHILD = ("shop", "p"), ("shop", "c")
KEY = ForeignKey("k", PARENT, CHILD, ("id",), "SET NULL", "CASCADE")
NAMELESS = ForeignKey("", PARENT, CHILD, ("id",), "SET NULL", "CASCADE")


def after(*statements: str, before: tuple[ForeignKey, ...] = (KEY,)) -> set[ForeignKey]:
    cascades = Cascades(before)
    for text in statements:
        cascades = passed_by(cascades, Statement("shop", text), StatementDialect())
    return set(cascades.keys)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "CREATE TABLE c (id INT PRIMARY KEY, p INT, FOREIGN KEY (p) REFERENCES `p` (`id`) "
            "ON DELETE SET NULL ON UPDATE CASCADE, KEY (p)) ENGINE=InnoDB",
            NAMELESS,
        ),
        (
            "ALTER TABLE c ADD x INT, ADD CONSTRAINT k FOREIGN KEY f (p) REFERENCES shop.p (id) "
            "MATCH FULL ON UPDATE CASCADE ON DELETE SET NULL, ADD KEY (x)",
            KEY,
        ),
        (
            "/*!50000 CREATE TABLE IF NOT EXISTS c (p INT REFERENCES p (id) ON DELETE SET NULL "
            "ON UPDATE CASCADE) */",
            NAMELESS,
        ),
        (
            "CREATE TABLE other.c (p INT, CONSTRAINT FOREIGN KEY (p) REFERENCES p (id) "
            "ON DELETE CASCADE ON UPDATE NO ACTION)",
            ForeignKey("", ("other", "p"), ("other", "c"), ("id",), "CASCADE", "RESTRICT"),
        ),
    ],
)
def test_a_statement_that_defines_a_key_gives_it(statement: str, expected: ForeignKey) -> None:
    assert after(statement, before=()) == {expected}


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE c (p INT, FOREIGN KEY (p) REFERENCES p (id) ON DELETE RESTRICT)",
        "CREATE TEMPORARY TABLE c (p INT REFERENCES p (id) ON DELETE CASCADE)",
        "CREATE TABLE c (id INT COMMENT 'REFERENCES p (id) ON DELETE CASCADE')",
        "DROP TABLE p, other",
        "DROP VIEW v",
    ],
)
def test_a_statement_without_an_action_gives_none(statement: str) -> None:
    assert after(statement, before=()) == set()


def test_keys_follow_the_names_of_their_tables() -> None:
    renamed = "RENAME TABLE p TO away.old, x TO p"
    assert {key.parent for key in after(renamed)} == {PARENT, ("away", "old")}
    assert {key.child for key in after("ALTER TABLE c RENAME TO away.d")} == {("away", "d")}
    both = after("RENAME TABLE c TO d", "ALTER TABLE p RENAME q")
    assert {(key.parent[1], key.child[1]) for key in both} == {("p", "d"), ("q", "d")}


def test_keys_end_with_their_child_or_by_their_name() -> None:
    both = (KEY, NAMELESS)
    assert after("DROP TABLE IF EXISTS c", before=both) == set()
    assert after("CREATE OR REPLACE TABLE c (id INT PRIMARY KEY)", before=both) == set()
    assert after("ALTER TABLE c DROP FOREIGN KEY IF EXISTS K", before=both) == set()
    assert after("ALTER TABLE c DROP CONSTRAINT k, ADD x INT", before=both) == set()
    assert after("ALTER TABLE c DROP CONSTRAINT other", before=both) == set(both)
    assert after("DROP TABLE p", "TRUNCATE TABLE c", "DELETE FROM c", before=both) == set(both)


def test_keys_are_stored_and_read_again() -> None:
    for keys in ((), (KEY, NAMELESS)):
        assert decode_cascades(Cascades(keys).encode()).keys == set(keys)
