"""A disk that fills up under the log writer: it stops, reports it, and resumes when there is room.

``tmpfs`` is a real file system of a few megabytes, mounted in a namespace of the child's own;
where that is not permitted the test is left out.  ``limit`` makes the same code of the kernel
refuse to extend files (RLIMIT_FSIZE), which needs no permission.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.manifest import Store
from databus.common.checkpoint import decode_position
from databus.common.config import parse
from tests.support.generator_log import relay_of
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

DISK_BYTES = 6 << 20
BALLAST_BYTES = 4 << 20
LIMIT_BYTES = 1200 << 10
RUN = """
import logging, sys
from databus.bootstrap import run_bootstrap
from databus.common.config import Config
logging.basicConfig(level=logging.WARNING)
run_bootstrap(Config.model_validate_json(sys.argv[1]), apply=False)
"""


def may_mount(folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return False


def get(url: str) -> Any:
    """A JSON document; an empty one while no server answers."""
    try:
        with urllib.request.urlopen(url, timeout=10 * PATIENCE) as answer:
            return json.load(answer)
    except OSError:
        return {}


async def status_of(port: int) -> dict[str, Any]:
    """What the server reports of its only database."""
    document = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/v1/status")
    databases = document.get("databases")
    return databases[0] if databases else {}


def start(command: list[str], output: Path, *, limited: bool) -> subprocess.Popen[bytes]:
    """The child; ``limited`` may not make a file larger than LIMIT_BYTES."""
    with output.open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            preexec_fn=_limit if limited else None,
        )


@pytest.mark.parametrize("kind", ["tmpfs", "limit"])
async def test_a_full_disk_stops_the_writer_and_room_lets_it_continue(
    tmp_path: Path, free_port: Callable[[], int], kind: str
) -> None:
    disk = tmp_path / "disk"
    if kind == "tmpfs" and not may_mount(disk):
        pytest.skip("mounting a tmpfs in a namespace of one's own is not permitted here")
    disk.mkdir(exist_ok=True)
    port = free_port()
    config = parse(
        f'''
        [bootstrap]
        listen = "127.0.0.1:{port}"
        data_dir = "{disk}/data"
        relays = ["http://127.0.0.1:1"]
        segment_every = "1h"
        '''
    )
    assert config.bootstrap is not None
    async with relay_of(tmp_path, 12_000) as relay:
        section = config.bootstrap.model_copy(update={"relays": (relay.url,)})
        document = config.model_copy(update={"bootstrap": section}).model_dump_json()
        run = [sys.executable, "-c", RUN, document]
        if kind == "tmpfs":
            script = (
                f'mount -t tmpfs -o size={DISK_BYTES} none "{disk}" && '
                f'head -c {BALLAST_BYTES} /dev/zero >"{disk}/ballast" && exec "$@"'
            )
            run = ["unshare", "-Urm", "sh", "-ec", script, "sh", *run]
        child = start(run, tmp_path / "bootstrap.log", limited=kind == "limit")
        try:
            inside = Path(f"/proc/{child.pid}/root{disk}")
            await _fills_up(child, port, inside)
            if kind == "tmpfs":
                (inside / "ballast").unlink()
            else:
                resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

            async def is_whole() -> bool:
                found = await status_of(port)
                assert child.poll() is None
                running = found.get("writer", {}).get("state") == "running"
                if not running or found.get("state") != "seeded":
                    return False
                # The seeding dump may come before or behind what was the stream's end.
                return decode_position(found["max"]) >= decode_position(end)

            end = (await asyncio.to_thread(get, f"{relay.url}/v1/gen/sources"))["max"]
            await eventually(is_whole, 120.0, "the log has everything", poll_s=0.1)
            log = HotLog(inside / "data" / "gen" / "log", read_only=True)
            assert log.check() >= 12_000
            log.close()
            assert Store(inside / "data" / "gen").check() == []
        finally:
            child.send_signal(signal.SIGTERM)
            await asyncio.to_thread(_ended, child)
        assert child.returncode == 0


def _ended(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(60 * PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(10 * PATIENCE)


def _limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))


async def _fills_up(child: subprocess.Popen[bytes], port: int, inside: Path) -> None:
    """The writer reports that the disk is full, what it has is whole, and the server answers."""

    async def is_full() -> bool:
        found = await status_of(port)
        assert child.poll() is None, "a full disk ends no process"
        error = found.get("writer", {}).get("error", "")
        return "this step stored nothing" in error and "bytes are free" in error

    await eventually(is_full, 120.0, "the writer reports that the disk is full", poll_s=0.1)
    assert await asyncio.to_thread(get, f"http://127.0.0.1:{port}/healthz") == {"status": "ok"}
    log = HotLog(inside / "data" / "gen" / "log", read_only=True)
    assert log.check() < 12_000, "whole steps; the first one may have been too large"
    log.close()
