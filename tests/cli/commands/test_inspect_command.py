"""``databus inspect`` on real files, sound and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.manifest import Store
from databus.client import FileCheckpoints, OnlineCheckpoint, Position
from databus.common.frame.frame_format import Op
from tests.bootstrap.model import CLOCK, START, History
from tests.support.live_relay import ORDERS, LiveRelay, window


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """The folder of a closed ring with fifty windows."""
    live = LiveRelay(tmp_path)
    live.append(*[window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in range(1, 51)])
    live.close()
    return tmp_path / "shop"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The folder of a bootstrap database with one sealed segment and something in the log."""
    store = Store(tmp_path / "shop")
    store.create()
    history = History(3)
    log = HotLog(store.folder / "log")
    log.bind("shop", CLOCK, START)
    log.append(history.block(30), 1)
    segments.seal(log, store, 1)
    log.append(history.block(10), 1)
    log.close()
    return store.folder


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def test_a_sound_ring_is_shown_and_in_order(databus: Any, ring: Path) -> None:
    done = databus("inspect", "ring", ring, "--check")
    assert (done.code, done.err) == (0, "")
    assert "everything in order" in done.out
    document = json.loads(databus("inspect", "ring", ring, "--json").out)
    assert (document["min"]["scn"], document["max"]["scn"]) == (1, 50)
    assert document["windows"] == 50


def test_a_damaged_byte_in_a_ring_is_named_with_its_offset(databus: Any, ring: Path) -> None:
    document = json.loads(databus("inspect", "ring", ring, "--json").out)
    data = (ring / "ring").read_bytes()
    frame = window(25, [(Op.INSERT, ORDERS, 25)])
    offset = data.index(frame)
    flip(ring / "ring", offset + 74)
    done = databus("inspect", "ring", ring, "--check")
    assert done.code == 1
    assert f"offset {offset} of the file" in done.err
    assert "Traceback" not in done.err
    assert document["used_bytes"] > 0


def test_a_folder_without_a_ring_is_one_line(databus: Any, tmp_path: Path) -> None:
    done = databus("inspect", "ring", tmp_path)
    assert done.code == 1
    assert done.err.startswith("databus: store_error: ")
    assert str(tmp_path) in done.err


def test_a_log_is_shown_and_verified(databus: Any, store: Path) -> None:
    document = json.loads(databus("inspect", "log", store, "--json").out)
    assert document["database"] == "shop"
    assert document["clock"] == CLOCK
    assert document["frames"] > 0
    assert databus("inspect", "log", store).code == 0


def test_a_folder_without_a_log_is_one_line(databus: Any, tmp_path: Path) -> None:
    done = databus("inspect", "log", tmp_path)
    assert done.code == 1
    assert "holds no log" in done.err


def test_sound_runs_are_shown_and_in_order(databus: Any, store: Path) -> None:
    done = databus("inspect", "runs", store, "--check")
    assert (done.code, done.err) == (0, "")
    assert "everything in order" in done.out
    document = json.loads(databus("inspect", "runs", store, "--json").out)
    assert [run["kind"] for run in document["runs"]] == ["segment"]


def test_a_manifest_that_is_gone_is_named_by_the_log_that_needs_it(
    databus: Any, store: Path
) -> None:
    (store / "manifest.json").rename(store / "aside")
    for options in ((), ("--check",)):
        done = databus("inspect", "runs", store, *options)
        assert done.code == 1
        assert f"{store}/manifest.json is not there" in done.err
    (store / "aside").rename(store / "manifest.json")
    assert databus("inspect", "runs", store, "--check").code == 0


def test_a_damaged_byte_in_a_run_is_found(databus: Any, store: Path) -> None:
    (file,) = (store / "runs").rglob("*.parquet")
    flip(file, file.stat().st_size // 3)
    done = databus("inspect", "runs", store, "--check")
    assert done.code == 1
    assert "1 problems" in done.err
    assert file.name in done.err


def test_a_folder_without_runs_is_one_line(databus: Any, tmp_path: Path) -> None:
    done = databus("inspect", "runs", tmp_path)
    assert done.code == 1
    assert "holds no runs" in done.err


def test_checkpoints_are_shown_newest_first_and_damaged_lines_counted(
    databus: Any, tmp_path: Path
) -> None:
    path = tmp_path / "shop.checkpoint"
    checkpoints = FileCheckpoints(path)
    for scn in (7, 8):
        checkpoints.save(OnlineCheckpoint("shop", CLOCK, Position(scn, 2)))
    checkpoints.close()
    document = json.loads(databus("inspect", "checkpoint", path, "--json").out)
    assert [one["scn"] for one in document["checkpoints"]] == [8, 7]
    assert document["damaged"] == 0
    flip(path, 12)
    document = json.loads(databus("inspect", "checkpoint", path, "--json").out)
    assert (len(document["checkpoints"]), document["damaged"]) == (1, 1)


def test_a_file_without_a_checkpoint_is_one_line(databus: Any, tmp_path: Path) -> None:
    path = tmp_path / "shop.checkpoint"
    path.write_text("hello\n")
    done = databus("inspect", "checkpoint", path)
    assert done.code == 1
    assert "holds no checkpoint" in done.err
