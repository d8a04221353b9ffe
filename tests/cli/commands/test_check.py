"""``databus check`` on real files: what it finds, and that it changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from databus.common.table_state import CaptureState
from databus.relay.dumps.table_records import TableBook, TableRecord
from databus.relay.ring.data_folder import DatabaseFolder

CONFIG = """
[relay]
data_dir = "relay"

[[database]]
name = "shop"
url = "sqlite:///{path}"
sources = ["{sources}"]
"""


def shop(folder: Path, *statements: str, sources: str = "main.*") -> tuple[Path, Path]:
    """A SQLite database made by ``statements``, and a configuration that captures it."""
    path = folder / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    config = folder / "databus.toml"
    config.write_text(CONFIG.format(path=path, sources=sources))
    return path, config


def tables(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall()


def test_a_table_without_a_key_is_found_with_exit_code_3(databus: Any, tmp_path: Path) -> None:
    path, config = shop(
        tmp_path, "CREATE TABLE good (id INTEGER PRIMARY KEY)", "CREATE TABLE keyless (name TEXT)"
    )
    before = tables(path)
    done = databus("check", config)
    assert done.code == 3
    assert "keyless" in done.out
    assert done.err.splitlines()[0].startswith("databus: preflight_failed: ")
    assert "shop" in done.err
    assert tables(path) == before
    assert not (tmp_path / "relay").exists()


def test_a_table_that_is_not_captured_needs_no_key(databus: Any, tmp_path: Path) -> None:
    _, config = shop(
        tmp_path,
        "CREATE TABLE good (id INTEGER PRIMARY KEY)",
        "CREATE TABLE keyless (name TEXT)",
        sources="main.good",
    )
    assert databus("check", config).code == 0


def test_a_good_database_is_ready_with_exit_code_0(databus: Any, tmp_path: Path) -> None:
    path, config = shop(
        tmp_path, "PRAGMA journal_mode = WAL", "CREATE TABLE good (id INTEGER PRIMARY KEY)"
    )
    before = tables(path)
    done = databus("check", config)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"shop: ready (sqlite:///{path})\n"
    assert tables(path) == before


def test_a_finding_that_forbids_nothing_is_shown_with_its_fix(databus: Any, tmp_path: Path) -> None:
    _, config = shop(tmp_path, "CREATE TABLE good (id INTEGER PRIMARY KEY)")
    done = databus("check", config)
    assert done.code == 0
    assert "To fix it: PRAGMA journal_mode = WAL" in done.out
    assert "shop: ready" in done.out


def test_a_missing_file_is_an_error_and_is_not_created(databus: Any, tmp_path: Path) -> None:
    path, config = shop(tmp_path)
    path.unlink()
    done = databus("check", config)
    assert done.code in (1, 3)
    assert "Traceback" not in done.err
    assert str(path) in done.out + done.err
    assert not path.exists()


def test_a_file_without_databases_is_reported_as_good(databus: Any, tmp_path: Path) -> None:
    config = tmp_path / "databus.toml"
    config.write_text("[bootstrap]\n")
    done = databus("check", config)
    assert done.code == 0
    assert "no [[database]] to examine" in done.out


def test_the_columns_that_are_left_and_patterns_that_name_none_are_shown(
    databus: Any, tmp_path: Path
) -> None:
    _, config = shop(tmp_path, "CREATE TABLE people (id INTEGER PRIMARY KEY, ssn TEXT, name TEXT)")
    rules = 'exclude_columns = ["*.ssn", "*.snn"]\ntruncate_columns = { "main.people.name" = 3 }\n'
    config.write_text(config.read_text() + rules)
    done = databus("check", config)
    assert done.code == 0
    assert "main.people: id, ssn (excluded), name (first 3 characters)" in done.out
    assert "'*.snn' matches no column" in done.out


def test_the_tables_that_the_relay_does_not_follow_are_named(databus: Any, tmp_path: Path) -> None:
    _, config = shop(tmp_path, "CREATE TABLE good (id INTEGER PRIMARY KEY)")
    folder = DatabaseFolder.of(tmp_path / "relay", "shop")
    folder.path.mkdir(parents=True)
    book = TableBook(folder.tables)
    book.add(TableRecord("main.bad", CaptureState.SUSPENDED, 7, "it was [rebuilt]"))
    book.add(TableRecord("main.good", CaptureState.FOLLOWED, 5, "", published="resynchronising"))
    book.write(book.content())
    done = databus("check", config)
    assert done.code == 0
    assert done.out.splitlines()[1:] == [
        "shop: main.bad is suspended since scn 7: it was [rebuilt]",
        "shop: main.bad: The table is resynchronised automatically.",
        f"shop: ready (sqlite:///{tmp_path}/shop.db)",
    ]
    folder.tables.write_text("{")
    done = databus("check", config)
    assert done.code != 0
    assert str(folder.tables) in done.err
