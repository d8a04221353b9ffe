"""What the definitions of an SQLite file have done to its tables, apart from any relay."""

from __future__ import annotations

from pathlib import Path

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
    tables = CapturedTables(str(tmp_path / "shop.db"), lambda _: True, NO_KEYS)
    tables.goes_on = True
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
    assert not unseen.keeps_rows
    assert unseen.why == UNWATCHED
    db.close()
