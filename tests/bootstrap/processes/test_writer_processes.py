"""Several log writers: each has databases of its own, and one that is killed returns alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.processes.writer_processes import WRITER_CHILD
from databus.bootstrap.runs.manifest import Store
from databus.cli.demo.private_servers import free_port
from databus.common.config import parse
from databus.relay.local_relay import LocalRelay
from tests.support.config_text import bootstrap_text, relay_text, section
from tests.support.processes import DatabusProcess, Processes, wait_process_gone
from tests.support.system import children_named
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(180)]

NAMES = ("a", "b", "c")
URL = "generator://?events_per_second=300&payload_bytes=100&keys=200&events_per_window=5"


def get(url: str) -> bytes:
    """The body of an answer."""
    with urllib.request.urlopen(url, timeout=10 * PATIENCE) as answer:
        return bytes(answer.read())


class Server:
    """A bootstrap server with two writers, as an operator starts it."""

    def __init__(self, folder: Path, processes: Processes, relay_url: str, *role: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.data_dir = folder / "bootstrap"
        config = folder / "bootstrap.toml"
        settings = {"writers": 2, "segment_every": "300ms", "merge_with": "process"}
        config.write_text(bootstrap_text(relay_url, port, **settings))
        self.process: DatabusProcess = processes.start(
            "bootstrap", "-c", config, "--no-apply", *role, name="bootstrap"
        )

    async def writers(self) -> dict[str, dict[str, Any]]:
        """By database, what its writer reports; those that run."""
        try:
            databases = json.loads(await asyncio.to_thread(get, f"{self.url}/v1/status"))
        except OSError:
            return {}
        found = {one["name"]: one["writer"] for one in databases["databases"]}
        return {name: one for name, one in found.items() if one.get("state") == "running"}

    def pids(self) -> set[int]:
        """The writer processes that there are."""
        return {one.pid for one in children_named(self.process, WRITER_CHILD)}

    async def ends(self) -> dict[str, int]:
        """By database, the scn up to which its log has whole windows."""
        databases = json.loads(await asyncio.to_thread(get, f"{self.url}/v1/databases"))
        return {one["name"]: one["max"]["scn"] for one in databases["databases"]}


async def test_each_writer_has_databases_of_its_own_and_one_that_is_killed_returns_alone(
    tmp_path: Path, processes: Processes
) -> None:
    text = relay_text(URL, name="a", data_dir=tmp_path / "relay", relay={"workers": 1})
    text += "".join(section("[[database]]", {"name": name, "url": URL}) for name in NAMES[1:])
    async with LocalRelay(parse(text)) as relay:
        server = Server(tmp_path, processes, relay.url)

        async def all_run() -> bool:
            return set(await server.writers()) == set(NAMES)

        await eventually(all_run, 60, "every database has a writer", poll_s=0.1)
        writers = await server.writers()
        assert {one["number"] for one in writers.values()} == {1, 2}
        assert {one["pid"] for one in writers.values()} == server.pids()
        by_number = {one["number"]: one["pid"] for one in writers.values()}
        assert len(by_number) == 2, "a process has one number"
        metrics = (await asyncio.to_thread(get, f"{server.url}/metrics")).decode()
        for name, one in writers.items():
            assert f'databus_bootstrap_writer{{database="{name}"}} {one["number"]}.0' in metrics
            assert f'databus_bootstrap_writer_failed{{database="{name}"}} 0.0' in metrics

        killed = writers["a"]
        hit = {name for name, one in writers.items() if one["pid"] == killed["pid"]}
        others = set(NAMES) - hit
        before = await server.ends()
        os.kill(killed["pid"], signal.SIGKILL)

        async def has_returned() -> bool:
            found = await server.writers()
            return all(found.get(n, killed)["pid"] != killed["pid"] for n in hit)

        async def writes_on() -> bool:
            ends = await server.ends()
            return all(ends[name] > before[name] + 100 for name in NAMES)

        await eventually(has_returned, 60, "the writer is restarted", poll_s=0.1)
        await eventually(writes_on, 60, "all logs grow", poll_s=0.1)
        found = await server.writers()
        for name in NAMES:
            assert found[name]["number"] == writers[name]["number"], "a database stays where it is"
        for name in others:
            assert found[name]["pid"] == writers[name]["pid"], "the other one noticed nothing"
        assert f"log writer {killed['number']} ended with -9" in server.process.log

        pids = server.pids()
        assert server.process.kill9_alone() == -signal.SIGKILL
        for pid in pids:
            wait_process_gone(pid, 20)
        for name in NAMES:
            log = HotLog(server.data_dir / name / "log")
            log.check()
            assert log.note("gaps") is None
            log.close()
            assert Store(server.data_dir / name).check() == []


async def test_writers_alone_end_in_order_and_leave_their_logs_to_the_next(
    tmp_path: Path, processes: Processes
) -> None:
    text = relay_text(URL, name="a", data_dir=tmp_path / "relay", relay={"workers": 1})
    text += section("[[database]]", {"name": "b", "url": URL})
    async with LocalRelay(parse(text)) as relay:
        server = Server(tmp_path, processes, relay.url, "--role", "writer")
        logs = [server.data_dir / name / "log" / "data.mdb" for name in ("a", "b")]
        await eventually(lambda: all(map(Path.exists, logs)), 60, "both write")
        pids = server.pids()
        assert len(pids) == 2
        assert await asyncio.to_thread(server.process.stop) == 0
        for pid in pids:
            wait_process_gone(pid, 20)
        assert "Traceback" not in server.process.log
        for log in logs:
            HotLog(log.parent).close()
