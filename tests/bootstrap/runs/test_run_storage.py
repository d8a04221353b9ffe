"""A store in a folder: what is settled has been synced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from databus.bootstrap.runs.run_storage import MANY_FILES, LocalFiles
from databus.common.errors import StoreError


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are synced, in order; one with ``bad`` in its name fails."""
    paths: list[str] = []

    def fsync(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if "bad" in path:
            raise OSError(errno.EIO, "the disk refuses")
        paths.append(path)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def made(folder: Path, count: int, *others: str) -> list[str]:
    folder.mkdir(parents=True)
    names = [*(f"part-{number}" for number in range(count)), *others]
    for name in names:
        (folder / name).write_bytes(b"x")
    return names


@pytest.mark.parametrize("count", [1, MANY_FILES - 1, MANY_FILES, 10 * MANY_FILES])
def test_each_file_is_synced_once_and_the_folders_after_them(
    tmp_path: Path, synced: list[str], count: int
) -> None:
    folder = tmp_path / "runs" / "c-1"
    names = made(folder, count)
    LocalFiles(folder).settle(names)
    assert sorted(synced[:-2]) == sorted(str(folder / name) for name in names)
    assert synced[-2:] == [str(folder), str(folder.parent)]


@pytest.mark.parametrize("count", [1, 10 * MANY_FILES])
def test_a_file_that_cannot_be_synced_is_an_error_and_no_folder_is_synced(
    tmp_path: Path, synced: list[str], count: int
) -> None:
    folder = tmp_path / "runs" / "c-1"
    names = made(folder, count, "bad")
    with pytest.raises(StoreError, match="the disk refuses"):
        LocalFiles(folder).settle(names)
    assert str(folder) not in synced
