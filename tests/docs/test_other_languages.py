"""The Node.js and Go clients of the manual, against a live relay and a live bootstrap server."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import DatabusProcess, Processes
from tests.support.snippets import ROOT
from tests.support.system import relay_and_bootstrap
from tests.support.waiting import PATIENCE, eventually_sync

NODE = ROOT / "examples" / "nodejs" / "client.mjs"
GO = ROOT / "examples" / "go" / "client.go"


def test_the_node_client_is_as_short_as_the_manual_states() -> None:
    lines = NODE.read_text().splitlines()
    assert 50 < len(lines) < 66


@pytest.fixture(params=["node", "go"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """What starts a client; its arguments follow."""
    program = shutil.which(request.param)
    if program is None:
        pytest.skip(f"there is no {request.param} on this machine")
    if request.param == "node":
        return [program, str(NODE)]
    binary = tmp_path / "client"
    subprocess.run([program, "build", "-o", binary, GO], check=True, timeout=100 * PATIENCE)
    return [str(binary)]


def write(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, timeout=30)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def rows_of(database: Path) -> dict[str, dict[str, object]]:
    """The table as the client stores it."""
    connection = sqlite3.connect(database)
    found = connection.execute("SELECT id, item FROM orders").fetchall()
    connection.close()
    return {f'{{"id":{number}}}': {"id": number, "item": item} for number, item in found}


@pytest.mark.slow
def test_a_client_in_another_language_sleeps_past_the_ring_and_equals_the_source(
    processes: Processes, tmp_path: Path, command: list[str]
) -> None:
    database, copy = tmp_path / "shop.db", tmp_path / "copy.json"
    write(
        database,
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)",
        "INSERT INTO orders VALUES (1, 'kettle'), (2, 'chair')",
    )
    relay, bootstrap = relay_and_bootstrap(
        tmp_path, processes, f"sqlite:///{database}", "main.*",
        ring_bytes="64KiB", arguments=("--no-apply",),
    )  # fmt: skip
    processes.started[-1].wait_ready(f"{bootstrap}/readyz", 60)

    client = DatabusProcess(
        [relay, bootstrap, "shop", copy], tmp_path / "client.log", command=command
    )

    def equals_the_source() -> bool:
        found = json.loads(copy.read_text()) if copy.exists() else {}
        tables = found.get("tables", {}).get("main.orders", {})
        assert found.get("checkpoint", {}).get("mode") == "online", client.log
        assert tables == rows_of(database), client.log
        return True

    client.start()
    try:
        eventually_sync(equals_the_source, 60, "the client has the table", poll_s=0.05)
        write(database, "UPDATE orders SET item = 'throne' WHERE id = 2")
        eventually_sync(equals_the_source, 30, "the client follows", poll_s=0.05)
        client.kill9()
        # More than the ring holds, in many transactions: its position is gone.
        for start in range(100, 1600, 500):
            rows = ", ".join(f"({n}, 'bolt {n}')" for n in range(start, start + 500))
            write(database, f"INSERT INTO orders VALUES {rows}", "DELETE FROM orders WHERE id = 1")
        client.start()
        eventually_sync(equals_the_source, 60, "the client has caught up", poll_s=0.05)
        assert "scn_too_old" in client.log
        write(database, "DELETE FROM orders WHERE id > 1500")
        eventually_sync(equals_the_source, 30, "the client follows again", poll_s=0.05)
    finally:
        client.kill9()
