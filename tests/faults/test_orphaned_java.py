"""Kill -9 of the applier, then of the bootstrap server, while Java starts: nothing of
theirs runs on."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from databus.bootstrap.processes.bootstrap_processes import APPLIER_CHILD
from databus.common.config import Config
from tests.bootstrap.processes.test_bootstrap_processes import config_of
from tests.support.generator_log import relay_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

RUN = """
import sys
from databus.bootstrap import run_bootstrap
from databus.common.config import Config
run_bootstrap(Config.model_validate_json(sys.argv[1]))
"""
MARK = "DATABUS_TEST_ORPHANS"
STAGES = {
    "the applier begins": APPLIER_CHILD,
    "Spark's script runs": "bin/spark-class",
    "Java's options are made": "org.apache.spark.launcher.Main",
    "Java starts": "org.apache.spark.deploy.SparkSubmit",
}


def commands(processes: list[psutil.Process]) -> dict[int, str]:
    """The command lines of those that still run, by process id."""
    found = {}
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found[one.pid] = " ".join(one.cmdline())
    return found


def marked(mark: str) -> list[psutil.Process]:
    """All processes that have inherited the mark, whatever their parent is by now."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{one.pid}/environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in environ:
                found.append(one)
    return found


def started(config: Config, mark: str, log_path: Path) -> subprocess.Popen[bytes]:
    """A bootstrap server whose descendants all inherit the mark."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, config.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {MARK: mark},
        )


@pytest.mark.parametrize("stage", STAGES)
async def test_nothing_outlives_the_applier_or_the_server_that_is_killed_when(
    tmp_path: Path, free_port: Callable[[], int], stage: str
) -> None:
    mark = secrets.token_hex(8)
    async with relay_of(tmp_path, 500) as relay:
        config = config_of(tmp_path, relay.url, free_port())
        server = started(config, mark, tmp_path / "bootstrap.log")
        known: set[int] = set()

        def below() -> dict[int, str]:
            with contextlib.suppress(psutil.NoSuchProcess):
                return commands(psutil.Process(server.pid).children(recursive=True))
            return {}

        def at_stage() -> bool:
            return any(STAGES[stage] in line for pid, line in below().items() if pid not in known)

        def orphans() -> dict[int, str]:
            here = commands(marked(mark))
            return {pid: line for pid, line in here.items() if pid not in {server.pid, *below()}}

        try:
            await eventually(at_stage, 90.0, stage, poll_s=0.02)
            known |= below().keys()
            (applier,) = (pid for pid, line in below().items() if APPLIER_CHILD in line)
            os.kill(applier, 9)
            await eventually(lambda: not orphans(), 30.0, "nothing of the applier runs", poll_s=0.2)
            await eventually(at_stage, 90.0, f"{stage}, once more", poll_s=0.02)
            server.kill()
            server.wait()
            await eventually(lambda: not orphans(), 30.0, "nothing runs", poll_s=0.2)
        finally:
            server.kill()
            server.wait()
            for one in marked(mark):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
