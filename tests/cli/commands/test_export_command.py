"""Exports of a real database to Parquet, Delta and Iceberg, read back by their own readers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import pandas as pd
import pytest
from typer.testing import CliRunner

from databus.cli.main import cli
from databus.common.checkpoint import decode_position
from databus.common.errors import BadRequest
from tests.support.exports import EXPORT, FORMATS, assert_equal, export, exported
from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes
from tests.support.system import System, server_shop
from tests.support.tables import name_of, settled, source_rows, sqlite_system, started, write
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system over an SQLite file for all tests of this file."""
    with sqlite_system(tmp_path_factory.mktemp("export")) as found:
        yield found


def target(system: System) -> str:
    """Up to where the bootstrap server has the stream, as SCN:SEQ."""
    with urllib.request.urlopen(
        f"{system.bootstrap_url}/v1/shop/targetSCN", timeout=20 * PATIENCE
    ) as answer:
        return str(decode_position(json.load(answer)))


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_is_the_source_and_the_next_one_writes_what_changed(
    system: System, tmp_path: Path, form: str
) -> None:
    write(system, 30)
    since = target(system)
    assert export(system, form, tmp_path) == ["whole"] * 4
    assert_equal(system, form, tmp_path)
    assert export(system, form, tmp_path) == ["nothing"] * 4
    write(system, 40)
    kinds = export(system, form, tmp_path)
    assert set(kinds) == {"changes"}
    assert_equal(system, form, tmp_path)
    assert export(system, form, tmp_path, "--since", since) == ["changes"] * 4, "once more"
    assert_equal(system, form, tmp_path)
    write(system, 5)
    for wrong, words in ((target(system), "use --since auto"), ("yesterday", "nor a time")):
        with pytest.raises(BadRequest, match=words):
            export(system, form, tmp_path, "--since", wrong)
    assert export(system, form, tmp_path, "--since", "0") == ["whole"] * 4
    assert_equal(system, form, tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_a_column_that_is_added_appears(system: System, tmp_path: Path, form: str) -> None:
    column = f"of_{form}"
    write(system, 10)
    export(system, form, tmp_path)
    with closing(system.shop.connect()) as connection:
        connection.execute(f"ALTER TABLE stock ADD COLUMN {column} BIGINT")
        connection.execute(f"UPDATE stock SET {column} = 7 WHERE sku = 'SKU-001'")
    settled(system)
    assert export(system, form, tmp_path, "--source", "*.stock") == ["changes"]
    found = exported(system, form, tmp_path, "stock")
    assert found == source_rows(system, "stock")
    assert found[("SKU-001",)][column] == 7


def test_a_table_that_returns_to_an_earlier_shape_is_exported_in_it(
    tmp_path_factory: pytest.TempPathFactory, postgres_database: FreshDatabase
) -> None:
    folder = tmp_path_factory.mktemp("returning")
    processes = Processes(folder)
    shop, url = server_shop("postgres", postgres_database)
    try:
        system = started(folder, processes, shop, url)
        for statement in (
            "ALTER TABLE stock ADD COLUMN c BIGINT",
            "UPDATE stock SET c = 7 WHERE sku = 'SKU-001'",
            "ALTER TABLE stock DROP COLUMN c",
            "UPDATE stock SET on_hand = 3 WHERE sku = 'SKU-002'",
        ):
            postgres_database.execute(statement)
        settled(system)
        assert export(system, "parquet", folder / "to", "--source", "*.stock") == ["whole"]
        found = exported(system, "parquet", folder / "to", "stock")
        assert found == source_rows(system, "stock")
        assert all("c" not in row for row in found.values())
    finally:
        processes.end_all()


def test_plain_readers_need_nothing_of_ours(system: System, tmp_path: Path) -> None:
    write(system, 10)
    export(system, "parquet", tmp_path)
    folder = tmp_path / "shop" / name_of(system, "orders") / "current"
    expected = source_rows(system, "orders")
    found = duckdb.sql(f"SELECT id, state FROM '{folder}/*.parquet'").fetchall()
    assert dict(found) == {key: row["state"] for (key,), row in expected.items()}
    frame = pd.read_parquet(folder)
    assert set(frame["id"]) == {key for (key,) in expected}


def test_files_that_no_change_touches_stay_where_they_are(system: System, tmp_path: Path) -> None:
    write(system, 10)
    export(system, "parquet", tmp_path)
    with closing(system.shop.connect()) as connection:
        connection.execute("INSERT INTO stock (sku, on_hand) VALUES ('NEW', 1)")
    settled(system)
    folder = tmp_path / "shop" / name_of(system, "stock") / "current"
    before = {path.stat().st_ino for path in folder.glob("*.parquet")}
    export(system, "parquet", tmp_path)
    after = {path.stat().st_ino for path in folder.glob("*.parquet")}
    assert before < after and len(after) == len(before) + 1
    with closing(system.shop.connect()) as connection:
        connection.execute("DELETE FROM stock WHERE sku = 'NEW'")
    settled(system)


KILLED = """
import os, signal, sys
from pathlib import Path
from databus.cli.commands import export_command
from databus.client.exports import delta_table as delta, iceberg_table, parquet_table

def die(step):
    os.kill(os.getpid(), signal.SIGKILL)

for cls in (delta.DeltaLakeTable, iceberg_table.IcebergTable, parquet_table.ParquetTable):
    def init(self, *args, _old=cls.__init__, **kwargs):
        _old(self, *args, **kwargs)
        self._reached = die
    cls.__init__ = init
"""


@pytest.mark.faults
@pytest.mark.parametrize("form", FORMATS)
def test_an_export_that_is_killed_leaves_the_old_state_and_is_made_up_for(
    system: System, tmp_path: Path, form: str
) -> None:
    def killed() -> None:
        command = [sys.executable, "-c", KILLED + EXPORT, str(system.config), form, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, timeout=60 * PATIENCE, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    write(system, 10)
    killed()
    assert export(system, form, tmp_path, "--source", "*.orders") == ["whole"]
    before = exported(system, form, tmp_path, "orders")
    write(system, 20)
    killed()
    assert exported(system, form, tmp_path, "orders") == before
    assert export(system, form, tmp_path, "--source", "*.orders") == ["changes"]
    assert exported(system, form, tmp_path, "orders") == source_rows(system, "orders")


def test_a_server_that_is_not_there_and_a_format_that_is_none(tmp_path: Path) -> None:
    config = tmp_path / "databus.toml"
    config.write_text('[bootstrap]\nlisten = "127.0.0.1:9"\ndata_dir = "b"\nrelays = []\n')
    for more in (["--format", "csv"], ["--since", "yesterday"], []):
        done = CliRunner().invoke(cli, ["export", "-c", str(config), *more])
        assert done.exit_code != 0
        assert done.exception is not None
