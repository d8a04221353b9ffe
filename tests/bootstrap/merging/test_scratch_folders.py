"""Scratch folders: those of ended processes are removed, those of running ones stay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from databus.bootstrap.log.configured_stores import Stores, database_folders
from databus.bootstrap.merging.scratch_folders import FOLDER, LOCK, scratch_folder, sweep
from databus.common.config import BootstrapConfig
from databus.common.errors import ConfigError, StoreError
from tests.support.waiting import PATIENCE

HOLDER = """
import pathlib, sys
from databus.bootstrap.merging.scratch_folders import scratch_folder
with scratch_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "blockmgr").mkdir()
    (folder / "blockmgr" / "shuffled").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a scratch folder, which ends when its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def names(data_dir: Path) -> set[str]:
    return {path.name for path in (data_dir / FOLDER).iterdir()}


def test_a_folder_is_its_owners_alone_and_goes_with_the_block(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        assert folder.parent == tmp_path / FOLDER
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "spark-1" / "userFiles").mkdir(parents=True)
    assert names(tmp_path) == {LOCK}


def test_it_goes_with_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="merging failed"), scratch_folder(tmp_path):
        raise StoreError("merging failed")
    assert names(tmp_path) == {LOCK}


def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path: Path) -> None:
    with another(tmp_path) as (process, left):
        process.kill()
        process.wait(10 * PATIENCE)
        assert (left / "blockmgr" / "shuffled").exists()
        with scratch_folder(tmp_path) as folder:
            assert names(tmp_path) == {LOCK, folder.name}
    assert names(tmp_path) == {LOCK}


def test_what_a_living_process_has_is_left_to_it(tmp_path: Path) -> None:
    with another(tmp_path) as (process, held):
        with scratch_folder(tmp_path) as folder:
            assert names(tmp_path) == {LOCK, folder.name, held.name}
        sweep(tmp_path)
        assert (held / "blockmgr" / "shuffled").exists()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10 * PATIENCE) == 0
    assert names(tmp_path) == {LOCK}


def test_a_folder_without_a_lock_has_no_owner(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "applier-1" / "spark-2").mkdir(parents=True)
    sweep(tmp_path)
    assert names(tmp_path) == {LOCK}


def test_no_process_loses_a_folder_to_others_that_come_and_go(tmp_path: Path) -> None:
    def come_and_go(_: int) -> bool:
        with scratch_folder(tmp_path) as folder:
            sweep(tmp_path)
            return (folder / LOCK).exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(come_and_go, range(100)))
    assert names(tmp_path) == {LOCK}


def test_sweeping_where_nothing_is_makes_nothing(tmp_path: Path) -> None:
    sweep(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_data_dir_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StoreError, match="no scratch folder for Spark"):
        with scratch_folder(tmp_path / "data"):
            pass


def test_it_is_no_database_and_no_database_is_called_so(tmp_path: Path) -> None:
    with scratch_folder(tmp_path):
        assert database_folders(tmp_path) == {}
    with pytest.raises(ConfigError, match="cannot be the name of a database"):
        Stores(BootstrapConfig(data_dir=tmp_path)).store(FOLDER)
