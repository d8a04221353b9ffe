"""``databus checkpoint`` on each kind of store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from databus.client import (
    BootstrapCheckpoint,
    Checkpoint,
    DatabaseCheckpoints,
    FileCheckpoints,
    LmdbCheckpoints,
    OnlineCheckpoint,
    Position,
    encode_checkpoint,
)
from databus.common.errors import CheckpointMoved
from databus.common.frame.frame_format import Op
from tests.support.database_connection import connect
from tests.support.live_relay import CLOCK, ORDERS, LiveRelay, window

SERVERS = [pytest.param(one, marks=getattr(pytest.mark, one)) for one in ("postgres", "mariadb")]


def at(scn: int) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", CLOCK, Position(scn, 1))


def file_with(path: Path, checkpoint: Checkpoint) -> Path:
    with contextlib.closing(FileCheckpoints(path)) as store:
        store.save(checkpoint)
    return path


def in_file(path: Path) -> Checkpoint | None:
    with contextlib.closing(FileCheckpoints(path)) as store:
        return store.load()


def test_the_checkpoint_of_a_file_is_shown_set_and_rewound(databus: Any, tmp_path: Path) -> None:
    path = file_with(tmp_path / "cp", at(812))
    shown = databus("checkpoint", "show", path)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.strip() == encode_checkpoint(at(812))
    done = databus("checkpoint", "rewind", path, "--to", "800")
    assert (done.code, done.err) == (0, "")
    assert in_file(path) == OnlineCheckpoint("shop", CLOCK, Position(800))
    assert databus("checkpoint", "rewind", path, "--to", "799:3").code == 0
    assert in_file(path) == OnlineCheckpoint("shop", CLOCK, Position(799, 3))
    done = databus("checkpoint", "set", path, encode_checkpoint(at(900)))
    assert (done.code, in_file(path)) == (0, at(900))
    assert encode_checkpoint(at(900)) in done.out


def test_a_consumer_within_a_bootstrap_is_rewound_to_the_stream(
    databus: Any, tmp_path: Path
) -> None:
    within = BootstrapCheckpoint("shop", CLOCK, Position(5), Position(9), "run", 7, Position(5))
    path = file_with(tmp_path / "cp", within)
    assert databus("checkpoint", "rewind", path, "--to", "4").code == 0
    assert in_file(path) == OnlineCheckpoint("shop", CLOCK, Position(4))


def test_nothing_is_changed_where_something_is_wrong(databus: Any, tmp_path: Path) -> None:
    path = file_with(tmp_path / "cp", at(812))
    later = databus("checkpoint", "rewind", path, "--to", "813")
    assert later.code == 2
    assert "would lose what lies between" in later.err
    assert databus("checkpoint", "rewind", path, "--to", "yesterday").code == 2
    timed = databus("checkpoint", "rewind", path, "--to", "2026-03-01")
    assert timed.code == 2
    assert "--relay URL" in timed.err
    assert databus("checkpoint", "set", path, "{}").code == 2
    named = databus("checkpoint", "set", path, encode_checkpoint(at(1)), "--consumer", "x")
    assert named.code == 2
    assert "leave --consumer out" in named.err
    assert in_file(path) == at(812)
    missing = databus("checkpoint", "show", tmp_path / "none")
    assert missing.code == 1
    assert "there is no file of checkpoints" in missing.err
    assert not (tmp_path / "none").exists()
    unknown = databus("checkpoint", "show", "redis://user:word@host/0")
    assert unknown.code == 2
    assert "word" not in unknown.err


def test_a_file_that_a_client_uses_is_left_alone(databus: Any, tmp_path: Path) -> None:
    path = file_with(tmp_path / "cp", at(812))
    with contextlib.closing(FileCheckpoints(path)) as client:
        client.load()
        assert databus("checkpoint", "show", path).code == 0
        refused = databus("checkpoint", "rewind", path, "--to", "800")
    assert refused.code == 1
    assert "store_busy" in refused.err
    assert in_file(path) == at(812)


def test_consumers_of_lmdb_are_shown_and_rewound_by_name(databus: Any, tmp_path: Path) -> None:
    for name, scn in (("one", 5), ("other", 7)):
        with contextlib.closing(LmdbCheckpoints(tmp_path, name)) as store:
            store.save(at(scn))
    shown = databus("checkpoint", "show", tmp_path, "--json")
    documents = [json.loads(line) for line in shown.out.splitlines()]
    assert [(one["consumer"], one["checkpoint"]["scn"]) for one in documents] == [
        ("one", 5),
        ("other", 7),
    ]
    unnamed = databus("checkpoint", "rewind", tmp_path, "--to", "6")
    assert unnamed.code == 2
    assert databus("checkpoint", "rewind", tmp_path, "--to", "6", "--consumer", "other").code == 0
    with contextlib.closing(LmdbCheckpoints(tmp_path, "other")) as store:
        assert store.load() == OnlineCheckpoint("shop", CLOCK, Position(6))
    with contextlib.closing(LmdbCheckpoints(tmp_path, "one")) as store:
        assert store.load() == at(5)


@pytest.mark.parametrize("product", [*SERVERS, "mysql", "sqlite"])
def test_a_consumer_in_a_database_is_rewound_and_its_client_is_stopped(
    databus: Any, tmp_path: Path, product: str, request: pytest.FixtureRequest
) -> None:
    if product == "sqlite":
        url = f"sqlite:///{tmp_path / 'application.db'}"
        sqlite3.connect(tmp_path / "application.db").close()
    else:
        url = request.getfixturevalue(f"{product}_database").url
    store = DatabaseCheckpoints("search", lambda: connect(url), table="positions")
    store.create_table()
    store.load()
    store.save(at(5))
    names = ("--consumer", "search", "--table", "positions")
    shown = json.loads(databus("checkpoint", "show", url, *names, "--json").out)
    assert shown["checkpoint"] == json.loads(encode_checkpoint(at(5)))
    assert shown["owner"] and shown["updated"]
    done = databus("checkpoint", "rewind", url, "--to", "3", *names)
    assert (done.code, done.err) == (0, "")
    with pytest.raises(CheckpointMoved, match="set by an operator"):
        store.save(at(6))
    assert store.load() == OnlineCheckpoint("shop", CLOCK, Position(3))
    absent = databus("checkpoint", "show", url, "--consumer", "none", "--table", "positions")
    assert absent.code == 2


async def test_a_time_is_found_by_a_relay(tmp_path: Path) -> None:
    """The window with this scn was committed in the second of that number."""
    live = LiveRelay(tmp_path / "relay")
    live.append(*[window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in range(1, 9)])
    path = file_with(tmp_path / "cp", at(8))
    async with live.served():

        async def rewound(to: str) -> tuple[int | None, str]:
            process = await asyncio.create_subprocess_exec(
                Path(sys.executable).with_name("databus"),
                *("checkpoint", "rewind", path, "--to", to, "--relay", live.url),
                stderr=asyncio.subprocess.PIPE,
            )
            _, error = await process.communicate()
            return process.returncode, error.decode()

        assert await rewound("1970-01-01T00:00:05") == (0, "")
        assert in_file(path) == at(4), "the window of second 5 comes next"
        file_with(path, OnlineCheckpoint("shop", "another", Position(8)))
        code, error = await rewound("1970-01-01T00:00:05")
        assert code == 1
        assert "clock_mismatch" in error
    live.close()
