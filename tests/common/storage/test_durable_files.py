"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from databus.common.storage.durable_files import replace_file


def test_a_file_is_replaced_in_one_step_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for content in (b"one", b"two"):
        replace_file(path, content, durable=True)
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_file_that_is_replaced_durably_is_on_disk_before_its_name_and_its_name_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, beside = tmp_path / "window.json", tmp_path / "window.json.new"
    replace_file(path, b"one", durable=True)
    fsync, synced = os.fsync, []

    def recorded(fd: int) -> None:
        fsync(fd)
        is_there = beside.read_bytes() if beside.exists() else None
        synced.append((stat.S_ISDIR(os.fstat(fd).st_mode), path.read_bytes(), is_there))

    monkeypatch.setattr(os, "fsync", recorded)
    replace_file(path, b"two", durable=True)
    # Whenever the power goes, the name is that of the old content or of the whole new one.
    assert synced == [(False, b"one", b"two"), (True, b"two", None)]
