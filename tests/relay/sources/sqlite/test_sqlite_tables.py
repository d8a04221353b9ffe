"""What the definitions of an SQLite file have done to its tables, apart from any relay."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.relay.sources.configured_keys import NO_KEYS
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite.sqlite_tables import UNWATCHED, CapturedTables

REBUILD = """
BEGIN;
CREATE TABLE u (id INTEGER PRIMARY KEY, c TEXT);
INSERT INTO u SELECT id, c FROM t WHERE id > 1;
DROP TABLE t;
ALTER TABLE u RENAME TO t;
COMMIT
"""


def test_rows_that_went_with_a_table_are_not_forgotten_for_a_doubt_about_its_values(
    tmp_path: Path,
) -> None:
    (tmp_path / "shop.db").touch()
    db = log.connect(str(tmp_path / "shop.db"))
    log.install(db)
    db.executescript("CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)")
    tables = CapturedTables(lambda _: True, NO_KEYS)
    tables.resumes = True
    while not tables.refresh(db, 0):
        pass
    db.executescript("INSERT INTO t VALUES (1, NULL), (2, NULL)")
    last = log.last_id(db)
    db.executescript(REBUILD)
    while not tables.refresh(db, last):
        pass
    assert tables.unseen(db)["main.t"].why == UNWATCHED

    db.executescript("CREATE TABLE other (id INT); DROP TABLE other;" * 2)
    while not tables.refresh(db, last):
        pass
    unseen = tables.unseen(db)["main.t"]
    assert not unseen.rows_remain
    assert unseen.why == UNWATCHED
    db.close()


@pytest.mark.parametrize(
    ("meanwhile", "why"),
    [
        ("CREATE TABLE a (id INT); CREATE VIEW b AS SELECT 1; CREATE INDEX i ON t (c)", None),
        ("ALTER TABLE t DROP c; ALTER TABLE t ADD c TEXT", "column c may have been dropped"),
    ],
)
def test_what_is_defined_while_no_relay_runs_puts_other_tables_in_no_doubt(
    tmp_path: Path, meanwhile: str, why: str | None
) -> None:
    path = tmp_path / "shop.db"
    path.touch()
    db = log.connect(str(path))
    log.install(db)
    db.executescript("CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)")
    db.executescript("INSERT INTO t VALUES (1, NULL)")
    before = CapturedTables(lambda _: True, NO_KEYS)
    while not before.refresh(db, 0):
        pass
    db.executescript(meanwhile)
    after = CapturedTables(lambda _: True, NO_KEYS)
    after.resumes = True
    while not after.refresh(db, log.last_id(db)):
        pass
    found = after.unseen(db).get("main.t")
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert found.why.startswith(why)
        assert found.rows_remain
    db.close()


def test_shadow_tables_of_a_virtual_table_are_no_tables_of_the_application(tmp_path: Path) -> None:
    (tmp_path / "shop.db").touch()
    db = log.connect(str(tmp_path / "shop.db"))
    db.executescript(
        """CREATE TABLE words_note (id INTEGER PRIMARY KEY);
        CREATE /* any */ VIRTUAL table words USING fts5(a);
        INSERT INTO words VALUES ('some words');
        CREATE VIRTUAL TABLE "a place" USING rtree(id, least, most);"""
    )
    assert list(log.user_tables(db)) == ["words_note"]
    assert log.virtual_tables(db) == ["a place", "words"]
    db.close()
