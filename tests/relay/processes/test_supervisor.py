"""The supervisor's processes: started, restarted, ended, and never orphaned."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.config import parse
from databus.common.errors import ConfigError, ServerUnavailable, StoreBusy, StoreError
from databus.relay.local_relay import LocalRelay
from databus.relay.processes import supervisor as supervisor_module
from databus.relay.processes.process_handover import Handover, take_over
from databus.relay.processes.supervisor import HANDOVER_THREAD, Supervisor
from databus.relay.processes.wakeup import make_wakeup
from tests.support.processes import wait_process_gone
from tests.support.relay_process import RelayProcess
from tests.support.waiting import PATIENCE, eventually, eventually_sync

# Starting a relay costs some seconds of processor time, and many tests run beside.
pytestmark = pytest.mark.timeout(240)

CONFIG = """
[relay]
listen = "127.0.0.1:0"
data_dir = "data"
workers = 2

[[database]]
name = "one"
url = "generator://?events_per_second=500"
ring_bytes = "1MiB"

[[database]]
name = "two"
url = "generator://?events_per_second=500&seed=2"
ring_bytes = "1MiB"
"""

ONE = (
    CONFIG.partition("[[database]]")[0].replace("workers = 2", "workers = 1")
    + """
[[database]]
name = "one"
url = "URL"
ring_bytes = "1MiB"
"""
)

NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
NO_THREAD = RuntimeError("can't start new thread")


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "relay.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.slow
def test_a_killed_child_is_restarted_while_the_others_serve_all_databases(
    config_path: Path,
) -> None:
    with RelayProcess(config_path) as relay:
        relay.ready()
        assert len(relay.children("databus.relay.processes.fetcher")) == 2
        assert len(relay.children("databus.relay.http.relay_server")) == 2
        names = [database["name"] for database in relay.get("/v1/databases")["databases"]]
        assert names == ["one", "two"]
        before = {child.pid for child in relay.children("databus.relay.processes.fetcher")}
        workers = {child.pid for child in relay.children("databus.relay.http.relay_server")}
        victim = relay.fetcher()
        victim.kill()
        assert relay.get("/v1/databases")

        def replaced() -> bool:
            now = {child.pid for child in relay.children("databus.relay.processes.fetcher")}
            return len(now) == 2 and victim.pid not in now

        eventually_sync(replaced, 30)
        now = {child.pid for child in relay.children("databus.relay.processes.fetcher")}
        assert before - {victim.pid} <= now
        assert {child.pid for child in relay.children("databus.relay.http.relay_server")} == workers
        worker = relay.children("databus.relay.http.relay_server")[0]
        worker.kill()
        eventually_sync(
            lambda: (
                len(
                    {c.pid for c in relay.children("databus.relay.http.relay_server")}
                    - {worker.pid}
                )
                == 2
            )
        )
        for _ in range(20):
            assert relay.get("/v1/databases"), "the restarted worker's socket answers"
        assert relay.end() == 0


def test_the_children_die_with_a_supervisor_that_is_killed(config_path: Path) -> None:
    config_path.write_text(ONE.replace("URL", "generator://"))
    with RelayProcess(config_path) as relay:
        relay.ready()
        below = relay.children("databus.relay.processes.fetcher") + relay.children(
            "databus.relay.http.relay_server"
        )
        assert len(below) == 2
        relay.process.kill()
        for child in below:
            wait_process_gone(child.pid)


def test_no_secret_of_a_url_is_in_the_process_list(config_path: Path) -> None:
    config_path.write_text(ONE.replace("URL", "mariadb://u:hush@127.0.0.1:1/shop"))
    with RelayProcess(config_path) as relay:
        eventually_sync(lambda: relay.children("databus.relay.processes.fetcher"))
        for child in relay.children("databus.relay.processes.fetcher"):
            assert "hush" not in " ".join(child.cmdline())


@pytest.mark.slow
@pytest.mark.parametrize("error", [NO_PROCESS, NO_THREAD])
async def test_a_child_that_the_system_does_not_start_is_tried_again_and_the_others_run(
    error: Exception,
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = 0
    begin = asyncio.create_subprocess_exec

    async def sparing(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        nonlocal calls
        calls += 1
        if calls in (4, 5):
            raise error
        return await begin(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", sparing)
    supervisor = Supervisor(parse(CONFIG, folder=config_path.parent))
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: running.done() or len(supervisor.pids) == 4, 60)
    supervisor.stop()
    await running
    assert calls == 6
    messages = [one.getMessage() for one in caplog.records if "does not start" in one.getMessage()]
    assert len(messages) == 2
    assert all(f"{error}; restart in" in one for one in messages)


async def test_a_child_that_cannot_get_its_settings_is_ended_before_the_next_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, start = asyncio.create_subprocess_exec, threading.Thread.start
    begun: list[asyncio.subprocess.Process] = []
    running: list[int] = []
    refused: list[threading.Thread] = []

    async def noting(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        running.append(sum(one.returncode is None for one in begun))
        begun.append(await begin(*arguments, **options))
        return begun[-1]

    def sparing(thread: threading.Thread) -> None:
        if thread.name == HANDOVER_THREAD and not refused:
            refused.append(thread)
            raise NO_THREAD
        start(thread)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noting)
    monkeypatch.setattr(threading.Thread, "start", sparing)
    config = parse(ONE.replace("URL", "generator://"), folder=tmp_path)
    supervisor = Supervisor(config)
    supervising = asyncio.create_task(supervisor.run())
    await eventually(lambda: supervising.done() or len(supervisor.pids) == 2, 60)
    supervisor.stop()
    await supervising
    assert len(begun) == 3
    assert running[2] == 1, "of two that were begun one has ended"
    assert -signal.SIGKILL in [one.returncode for one in begun]
    assert f"does not start: {NO_THREAD}; restart in" in caplog.text


async def test_a_reload_for_which_there_are_no_descriptors_changes_nothing_and_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def last() -> int:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(make_wakeup())
        return made[0]

    old = parse(CONFIG, folder=tmp_path)
    new = parse(CONFIG.replace('"one"', '"three"'), folder=tmp_path)
    supervisor = Supervisor(old, read_again=lambda: new)
    supervising = asyncio.create_task(supervisor.run())
    await eventually(lambda: len(supervisor.pids) == 4, 60)
    with monkeypatch.context() as patch:
        patch.setattr(supervisor_module, "make_wakeup", last)
        with pytest.raises(ServerUnavailable, match="three: Too many open files; nothing is"):
            await supervisor.reload()
    assert supervisor.config == old
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])
    found = await supervisor.reload()
    assert ([one.name for one in found.added], found.removed) == (["three"], ("one",))
    await eventually(lambda: {"fetcher two", "fetcher three"} <= supervisor.pids.keys(), 60)
    assert len(supervisor.children) == 4
    supervisor.stop()
    await supervising


async def test_an_address_that_is_taken_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "TAKEN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = parse(CONFIG.replace(":0", f":{port}", 1), folder=tmp_path)
        with pytest.raises(ServerUnavailable, match=str(port)):
            Supervisor(config)


async def test_a_second_relay_in_the_same_folder_is_refused_before_it_touches_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "TAKEN_S", 0.1)
    found = parse(CONFIG, folder=tmp_path)
    busy = f"{tmp_path / 'data'} is open for writing in process {os.getpid()};"
    async with LocalRelay(found) as relay:
        await relay.ready()
        with pytest.raises(StoreBusy, match=busy):
            Supervisor(found)
        with pytest.raises(StoreBusy, match=busy):
            await LocalRelay(found).__aenter__()
        async with aiohttp.ClientSession(relay.url) as http, http.get("/v1/one/dumps") as answer:
            assert answer.status == 200
    async with LocalRelay(found) as relay:
        await relay.ready()


async def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(StoreError, match=r"data: File exists"):
        Supervisor(parse(CONFIG, folder=tmp_path))


async def test_a_configuration_without_a_database_is_refused() -> None:
    with pytest.raises(ConfigError, match="database"):
        Supervisor(parse("[relay]\n"))


def test_a_handover_comes_back_whole_with_the_password() -> None:
    config = parse(CONFIG.replace("generator://?events_per_second=500&seed=2", "mysql://a:b@c/d"))
    handover = Handover(config, "two", 3, 4, {"one": 5}, (6, 7))
    again = Handover.from_json(handover.to_json())
    assert again == handover
    assert again.config.database[1].url.reveal == "mysql://a:b@c/d"
    assert again.fds == (4, 5, 6, 7)


@pytest.mark.parametrize("arguments", [[], ["--handover-fd"], ["--handover-fd", "x"], ["-h"]])
def test_a_child_that_is_started_by_hand_prints_how_to_start_the_relay(
    arguments: list[str],
) -> None:
    with pytest.raises(ConfigError, match="databus relay -c FILE"):
        take_over(arguments)


def test_the_supervisor_starts_without_what_only_its_children_need() -> None:
    text = (
        "import sys, databus.relay.processes.supervisor\n"
        "assert not {'numba', 'numpy', 'aiohttp'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60 * PATIENCE)


def test_a_child_that_still_loads_dies_with_its_supervisor(tmp_path: Path) -> None:
    """Otherwise it holds the port of a relay that was killed while it started."""
    pid_file = tmp_path / "pid"
    (tmp_path / "loading.py").write_text(
        "import os, pathlib, signal, sys\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "path.with_suffix('.new').write_text(str(os.getpid()))\n"
        "path.with_suffix('.new').rename(path)\n"
        "signal.pause()\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        "child = [sys.executable, '-m', 'databus.relay.processes.child_process',"
        " str(os.getpid()), 'loading']\n"
        "subprocess.run([*child, sys.argv[1]])\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", parent, str(pid_file)], cwd=tmp_path)
    try:
        eventually_sync(pid_file.exists, 20.0)
    finally:
        supervisor.kill()
        supervisor.wait(20 * PATIENCE)
    wait_process_gone(int(pid_file.read_text()))


def test_a_child_loads_without_the_collector_and_runs_with_it(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(
        "import gc\n"
        "while_loading = gc.isenabled()\n"
        "def main(arguments):\n"
        "    assert arguments == ['one', 'two']\n"
        "    assert not while_loading and gc.isenabled() and gc.get_freeze_count() > 1000\n"
        "    return 7\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        "child = [sys.executable, '-m', 'databus.relay.processes.child_process',"
        " str(os.getpid()), 'loaded']\n"
        "sys.exit(subprocess.run([*child, 'one', 'two']).returncode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], cwd=tmp_path, check=False, timeout=20 * PATIENCE
    )
    assert done.returncode == 7
