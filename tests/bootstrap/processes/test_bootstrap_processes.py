"""The processes as an operator runs them: all three together, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.processes import bootstrap_processes
from databus.bootstrap.processes.bootstrap_processes import (
    APPLIER_CHILD,
    bootstrap_config,
    run_applier,
    run_bootstrap,
)
from databus.bootstrap.runs.manifest import Store
from databus.common.config import BootstrapConfig, Config, parse
from databus.common.errors import BucketError, ConfigError, ServerUnavailable
from tests.bootstrap.processes.test_log_writer import relay_of
from tests.support.processes import wait_process_gone
from tests.support.waiting import PATIENCE, eventually, eventually_sync

pytestmark = pytest.mark.timeout(180)

Start = Callable[[str, Config], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a function of the room in a process of its own."""
    children: list[subprocess.Popen[bytes]] = []

    def begin(function: str, config: Config) -> subprocess.Popen[bytes]:
        code = (
            "import sys, logging; logging.basicConfig(level=logging.INFO)\n"
            f"from databus.bootstrap import {function}\n"
            "from databus.common.config import Config\n"
            f"{function}(Config.model_validate_json(sys.argv[1]))"
        )
        with (tmp_path / f"{function}.log").open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-c", code, config.model_dump_json()],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        children.append(child)
        return child

    yield begin
    for log in sorted(tmp_path.glob("*.log")):
        print(f"{log.name}:\n{log.read_text()}")  # shown if the test failed
    for child in children:
        for below in psutil.Process(child.pid).children(recursive=True) if _runs(child) else ():
            below.kill()
        child.kill()
        child.wait(10 * PATIENCE)


@pytest.fixture
def port(free_port: Callable[[], int]) -> int:
    """The port of the bootstrap server."""
    return free_port()


def _runs(child: subprocess.Popen[bytes]) -> bool:
    return child.poll() is None


async def ends_well(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM ends the process without an error."""
    child.send_signal(signal.SIGTERM)
    await eventually(lambda: not _runs(child), 20.0)
    assert child.returncode == 0


def config_of(folder: Path, relay: str, port: int) -> Config:
    return parse(
        f'''
        [bootstrap]
        listen = "127.0.0.1:{port}"
        data_dir = "{folder / "bootstrap"}"
        relays = ["{relay}"]
        segment_every = "200ms"
        apply_every = "500ms"
        spark_master = "local[1]"
        '''
    )


def status_of(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/v1/status", timeout=5 * PATIENCE
        ) as answer:
            databases = json.load(answer)["databases"]
    except OSError:
        return {}
    return databases[0] if databases else {}


@pytest.mark.spark
@pytest.mark.slow
async def test_writer_server_and_applier_run_together_and_end_together(
    tmp_path: Path, start: Start, port: int
) -> None:
    async with relay_of(tmp_path, 2000) as relay:
        config = config_of(tmp_path, relay.url, port)
        child = start("run_bootstrap", config)

        async def has_snapshot() -> bool:
            found = await asyncio.to_thread(status_of, port)
            is_whole = found.get("state") == "seeded"
            return is_whole and (found.get("snapshot") or {}).get("scn") == found["max"]["scn"]

        await eventually(has_snapshot, 150.0, "a snapshot that is up to date", poll_s=0.2)
        below = psutil.Process(child.pid).children(recursive=True)
        assert any("java" in one.name() for one in below)
        await ends_well(child)
        for one in below:
            wait_process_gone(one.pid)


START_SPARK = """
import sys, tempfile
from pathlib import Path
from databus.bootstrap.merging.spark_merges import start_spark
start_spark("local[1]", "512m", scratch=Path(sys.argv[1]))
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.faults
def test_java_ends_with_an_applier_that_is_killed_while_java_starts(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", START_SPARK, tmp_path], stdin=subprocess.DEVNULL
    )
    try:
        below = eventually_sync(lambda: psutil.Process(child.pid).children(), 60.0)
        java = below[0]
        # So the kill falls into the start of Java however fast it is, and the folder in which it
        # would leave its port is gone before it gets there.
        java.suspend()
    finally:
        child.kill()
        child.wait()
    shutil.rmtree(tmp_path)
    with contextlib.suppress(psutil.NoSuchProcess):
        java.resume()
    wait_process_gone(java.pid, 20.0)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.faults
async def test_the_applier_ends_when_its_parent_is_killed_and_returns_when_it_is_killed(
    tmp_path: Path, start: Start, port: int
) -> None:
    async with relay_of(tmp_path, 100) as relay:
        child = start("run_bootstrap", config_of(tmp_path, relay.url, port))

        def appliers() -> list[psutil.Process]:
            found = []
            for one in psutil.Process(child.pid).children():
                # It may be gone, or not yet reaped, by the time it is looked at.
                with contextlib.suppress(psutil.NoSuchProcess):
                    if APPLIER_CHILD in one.cmdline():
                        found.append(one)
            return found

        first = (await eventually(appliers, 20.0))[0]
        first.kill()
        await eventually(lambda: [one for one in appliers() if one.pid != first.pid], 20.0)
        below = psutil.Process(child.pid).children(recursive=True)
        os.kill(child.pid, signal.SIGKILL)
        for one in below:
            wait_process_gone(one.pid, 20.0)


KILLED_AT_ONCE = "killed before it reads its settings"
NOT_STARTED = "not started at all"
NO_THREAD = "started, but there is no thread to follow it"


@pytest.mark.parametrize("fate", [KILLED_AT_ONCE, NOT_STARTED, NO_THREAD])
def test_an_applier_that_does_not_come_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    # A child that stores what it was sent and runs until its stdin ends.
    received = tmp_path / "received"
    code = f"import sys; open({str(received)!r}, 'wb').write(sys.stdin.buffer.readline())"
    monkeypatch.setattr(bootstrap_processes, "APPLIER_CHILD", f"{code}; sys.stdin.buffer.read()")
    monkeypatch.setattr(bootstrap_processes, "APPLIER_RESTART_S", 0.01)
    begin = asyncio.create_subprocess_exec
    started: list[asyncio.subprocess.Process] = []

    async def failing_twice(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await begin(*arguments, **options))
        if len(started) < 3:
            started[-1].kill()
            await started[-1].wait()
            await asyncio.sleep(0)  # in which the loop notices that there is no reader
            if fate is NOT_STARTED:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if fate is NO_THREAD:
                refuse()
        return started[-1]

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", failing_twice)

    async def body(stop: asyncio.Event) -> None:
        config = BootstrapConfig(data_dir=tmp_path / "bootstrap")
        keeping = asyncio.create_task(bootstrap_processes._keep_applier(config, stop))
        with monkeypatch.context() as patch:
            if fate is NO_THREAD:
                patch.setattr(asyncio, "to_thread", refuse)
            await eventually(
                lambda: keeping.done() or (received.exists() and received.read_bytes()), 20.0
            )
        stop.set()
        await asyncio.wait_for(keeping, 10 * PATIENCE)

    bootstrap_processes._run(body)  # with the event loop that the real process has
    assert json.loads(received.read_bytes()) == {"secret_key": "", "session_token": ""}
    assert len(started) == 3
    assert started[-1].returncode == -signal.SIGTERM


REFUSED_APPLIER = """
import sys
from databus.bootstrap.processes import bootstrap_processes as process
from databus.common.errors import MissingDependency

def run_applier(*_, **__):
    raise MissingDependency("there is no Java")

process.run_applier = run_applier
process.applier_child(sys.argv[1])
"""


def test_an_applier_that_cannot_begin_prints_why_and_nothing_else() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", REFUSED_APPLIER, BootstrapConfig().model_dump_json()],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stderr is not None
    with child, child.stdin:
        child.stdin.write(b'{"secret_key": "", "session_token": ""}\n')
        child.stdin.flush()
        said = child.stderr.read().decode()
    assert "missing_dependency: there is no Java" in said
    assert "Fatal Python error" not in said
    assert child.returncode == 1


@pytest.mark.slow
async def test_writer_and_server_run_apart_and_each_alone_may_be_killed(
    tmp_path: Path, start: Start, port: int
) -> None:
    async with relay_of(tmp_path, 500) as relay:
        config = config_of(tmp_path, relay.url, port)
        server = start("run_server", config)

        async def is_seeded() -> bool:
            found = await asyncio.to_thread(status_of, port)
            return found.get("state") == "seeded"

        for _ in range(2):
            writer = start("run_writer", config)
            await eventually(is_seeded, 30.0)
            writer.kill()
            writer.wait(10 * PATIENCE)
        assert _runs(server)
        await ends_well(server)


def test_a_configuration_without_the_section_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no \[bootstrap\] section"):
        bootstrap_config(Config())
    with pytest.raises(ConfigError):
        run_bootstrap(Config())
    with pytest.raises(ConfigError):
        run_applier(Config())


def test_the_applier_retains_what_the_configuration_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from databus.bootstrap.merging import applier, spark_merges

    (tmp_path / "shop" / "log").mkdir(parents=True)
    (tmp_path / "shop" / "log" / "data.mdb").touch()
    seen: list[tuple[int | None, ...]] = []

    class Noting(applier.Applier):
        def apply(self, *, full: bool = False) -> list[Mapping[str, Any]]:
            retained = self.retention_bytes, self.retention_us, self.retention_scns
            seen.append((*retained, self.grace_us))
            return []

    monkeypatch.setattr(applier, "Applier", Noting)
    session = SimpleNamespace(stop=lambda: None)
    monkeypatch.setattr(spark_merges, "start_spark", lambda *_, scratch: session)
    run_applier(BootstrapConfig(data_dir=tmp_path, retention_bytes=1 << 30, run_grace=2.0))
    bounds = {"retention_time": 60.0, "retention_scns": 7}
    run_applier(BootstrapConfig.model_validate({"data_dir": tmp_path, **bounds}))
    assert seen == [
        (1 << 30, None, None, 2_000_000),
        (64 << 30, 60_000_000, 7, 600_000_000),
    ]


def test_an_applier_of_many_rounds_outlives_a_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from databus.bootstrap.merging import spark_merges

    away = BucketError("s3://lake: SlowDown")
    answers: list[Exception] = [away, OSError(errno.EMFILE, "Too many open files")]

    class NextRound(Exception):
        """Ends an applier that otherwise runs for ever."""

    def begun(stores: Stores) -> dict[str, Store]:
        raise answers.pop(0) if answers else NextRound

    session = SimpleNamespace(stop=lambda: None)
    monkeypatch.setattr(spark_merges, "start_spark", lambda *_, scratch: session)
    monkeypatch.setattr(Stores, "begun", begun)
    config = BootstrapConfig(data_dir=tmp_path)
    with pytest.raises(NextRound):
        run_applier(config, every_s=0.0)
    assert "apply: s3://lake: SlowDown" in caplog.text
    assert "Too many open files" in caplog.text
    answers.append(away)
    with pytest.raises(BucketError, match="SlowDown"):
        run_applier(config)


def test_an_address_that_is_taken_is_one_clear_error(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    from databus.common.http.listening_socket import listening_socket

    port = free_port()
    taken = listening_socket(f"127.0.0.1:{port}")
    with pytest.raises(ServerUnavailable, match=f"cannot listen at 127.0.0.1:{port}"):
        run_bootstrap(config_of(tmp_path, "http://127.0.0.1:9", port), apply=False)
    taken.close()
