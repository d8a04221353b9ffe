"""A first start: the relay streams before its kernels are compiled, then starts again with them."""

from __future__ import annotations

import json
import sqlite3
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_text import relay_text
from tests.support.processes import Processes
from tests.support.waiting import PATIENCE, eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(400)]


def rows(url: str) -> list[Any]:
    """The rows that the stream has given so far."""
    stream = f"{url}/v1/shop/stream?start=oldest&wait_ms=1000"
    with urllib.request.urlopen(stream, timeout=30 * PATIENCE) as answer:
        lines = [json.loads(line) for line in answer]
    return [line["after"] for line in lines if "op" in line]


def test_the_stream_is_there_before_the_kernels_are_compiled_and_after(
    processes: Processes, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    path, port = tmp_path / "shop.db", free_port()
    config = tmp_path / "databus.toml"
    config.write_text(relay_text(f"sqlite:///{path}", "main.*", port=port, ring_bytes="1MiB"))
    url = f"http://127.0.0.1:{port}"
    # No note that this installation has compiled its kernels: they are compiled once more.
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "DATABUS_COMPILE_FIRST": ""}
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
        relay = processes.start("relay", "-c", config, environment=environment)
        relay.wait_ready(f"{url}/readyz", 60)
        db.execute("INSERT INTO t VALUES (1, 'interpreted')")
        eventually_sync(lambda: rows(url) == [{"id": 1, "v": "interpreted"}], 60, "it streams")
        assert "the loops are compiled" not in relay.log, "this was before"
        eventually_sync(lambda: "the loops are compiled; restarting" in relay.log, 240)
        pid = relay.pid
        relay.wait_ready(f"{url}/readyz", 60)
        db.execute("INSERT INTO t VALUES (2, 'compiled')")
        eventually_sync(lambda: len(rows(url)) == 2, 60, "it streams again")
    assert relay.pid == pid, "a supervisor sees the same process"
    assert "Traceback" not in relay.log
    assert list((tmp_path / "cache" / "databus").glob("kernels-*"))
    assert relay.stop() == 0, relay.log
