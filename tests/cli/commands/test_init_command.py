"""``databus init``: a file that works, and the statements that the database still lacks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from databus.common import config as configuration
from tests.support.fixtures import FreshDatabase


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_file_of_a_ready_database_is_whole_and_private(databus: Any, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "my shop.db", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    done = databus("init", f"sqlite:///{tmp_path}/my shop.db")
    assert done.code == 0, done.err
    loaded = configuration.load("databus.toml")
    (database,) = loaded.database
    assert (database.name, database.sources) == ("my_shop", ("main.*",))
    assert loaded.bootstrap is not None
    assert Path("databus.toml").stat().st_mode & 0o777 == 0o600
    assert "my_shop: ready" in done.out
    assert "databus relay -c databus.toml" in done.out
    assert databus("check", "databus.toml").code == 0
    with closing(sqlite3.connect(tmp_path / "my shop.db")) as db:
        assert [name for (name,) in db.execute("SELECT name FROM sqlite_master")] == ["t"]


def test_a_file_that_exists_is_left_as_it_is(databus: Any, tmp_path: Path) -> None:
    Path("mine.toml").write_text("# mine")
    done = databus("init", f"sqlite:///{tmp_path}/shop.db", "-o", "mine.toml")
    assert done.code == 2
    assert "mine.toml exists" in done.err
    assert Path("mine.toml").read_text() == "# mine"


@pytest.mark.parametrize("url", ["oracle://x/y", "shop.db", "mariadb://u:p#q@h/s"])
def test_a_url_that_nothing_serves_writes_no_file(databus: Any, url: str) -> None:
    done = databus("init", url)
    assert done.code == 2, done.err
    assert not list(Path.cwd().iterdir())
    assert "p#q" not in done.err


def test_what_a_database_lacks_is_printed_as_statements(
    databus: Any, postgres_database: FreshDatabase
) -> None:
    db = postgres_database
    db.execute("CREATE TABLE keyless (v int)")
    db.execute("CREATE TABLE good (id int PRIMARY KEY)")
    done = databus("init", db.url, "--name", "crm")
    assert done.code == 3, done.err
    assert 'ALTER TABLE "public"."keyless" ADD PRIMARY KEY' in done.out
    assert configuration.load("databus.toml").database[0].name == "crm"
    db.execute("ALTER TABLE keyless ADD PRIMARY KEY (v)")
    assert databus("check", "databus.toml").code == 0


def test_the_tables_of_the_schema_in_the_url_are_captured(
    databus: Any, mariadb_database: FreshDatabase
) -> None:
    db = mariadb_database
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    done = databus("init", db.url)
    assert done.code == 0, done.err
    (database,) = configuration.load("databus.toml").database
    assert database.sources == (f"{db.name}.*",)
    assert db.url not in done.out
    assert "databus:***@" in done.out
