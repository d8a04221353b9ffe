"""The leader of a cluster of relays is killed while a bootstrap server is seeded from its dump."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import free_port
from tests.support.config_text import section
from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes
from tests.support.relay_cluster import RelayCluster
from tests.support.waiting import PATIENCE, eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ROWS = 150_000


def _get(url: str, accept: str = "application/json") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60 * PATIENCE) as answer:
        return str(answer.read().decode())


def test_seeding_continues_after_the_rows_that_the_log_has(
    tmp_path: Path, processes: Processes, postgres_database: FreshDatabase
) -> None:
    database = postgres_database
    database.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
    database.execute(
        f"INSERT INTO items SELECT n, repeat('x', 100) FROM generate_series(1, {ROWS}) n"
    )
    url = f"http://127.0.0.1:{(port := free_port())}"
    with RelayCluster(
        tmp_path,
        {"store": database.url},
        {"shop": database.url},
        ring_bytes="64MiB",
        sources=["public.items"],
    ) as cluster:
        cluster.start("a", "b")
        first = cluster.leader("shop")
        second = "b" if first == "a" else "a"
        eventually_sync(lambda: cluster.follows(second, "shop"), 40, "it follows")
        config = tmp_path / "bootstrap.toml"
        settings = {
            "listen": f"127.0.0.1:{port}",
            "data_dir": "bootstrap",
            "relays": [cluster.url(first), cluster.url(second)],
            "merge_with": "process",
        }
        config.write_text(section("[bootstrap]", settings))
        processes.start("bootstrap", "-c", config, name="bootstrap")

        def items() -> dict[str, Any]:
            with contextlib.suppress(OSError):
                for one in json.loads(_get(f"{url}/v1/shop/sources"))["sources"]:
                    if one["name"] == "public.items":
                        return dict(one)
            return {}

        leader = cluster.relays[first]
        path = "/v1/shop/dumps"
        begun = eventually_sync(lambda: leader.get(path)["dumps"], 60, "a dump", poll_s=0.02)
        pace = {"chunk_rows": 500, "delay_ms": 200}
        leader.send("PATCH", f"{path}/{begun[0]['id']}", pace)
        had = eventually_sync(lambda: items().get("had"), 60, "a part is in the log", poll_s=0.05)
        assert items()["state"] == "dumping"
        cluster.kill(first)
        assert cluster.leader("shop", but=first) == second
        eventually_sync(lambda: items().get("state") == "seeded", 120, "it is whole")
        dumps = json.loads(_get(f"{cluster.url(second)}/v1/shop/dumps"))["dumps"]
        rows = _get(f"{url}/v1/shop/snapshot?sources=public.items", "application/x-ndjson")
    (dump,) = [one for one in dumps if one["state"] == "completed"]
    assert dump["after"]["public.items"] >= had[0]
    assert 0 < dump["rows"] < ROWS
    keys = [one["key"]["id"] for one in map(json.loads, rows.splitlines()) if "key" in one]
    assert sorted(keys) == list(range(1, ROWS + 1))
