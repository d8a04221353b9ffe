"""kill -9 all over a chain of relays, at random moments of a running stream."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from databus.common.checkpoint import Position
from tests.support.chain import parent_url, relay_text
from tests.support.processes import wait_process_gone
from tests.support.relay_process import RelayProcess, ring_frames
from tests.support.waiting import eventually_sync

URL = "generator://?events_per_second=12000&events_per_window=40&payload_bytes=60&events=240000"
LAST_SCN = 6000
KILLS = 10


def start(folder: Path, name: str, url: str, port: int) -> RelayProcess:
    path = folder / f"{name}.toml"
    listen = f"127.0.0.1:{port}"
    path.write_text(relay_text(folder / name, {"shop": url}, listen=listen, ring_bytes=128 << 20))
    return RelayProcess(path)


def kill_all(relay: RelayProcess) -> None:
    """SIGKILL to the supervisor and everything below it, at once."""
    pids = [relay.process.pid]
    pids += [child.pid for child in psutil.Process(relay.process.pid).children(recursive=True)]
    os.killpg(relay.process.pid, signal.SIGKILL)
    relay.process.wait(10)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_process_gone(pid)


def newest_scn(relay: RelayProcess) -> int:
    try:
        return int(relay.state("shop").get("max", {}).get("scn", 0))
    except OSError:
        return 0


def frames_of(folder: Path) -> dict[Position, bytes]:
    views = ring_frames(folder)
    found = {view.position: bytes(view.bytes) for view in views}
    assert len(found) == len(views), "each position once"
    assert [view.position for view in views] == sorted(found)
    return found


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_of_parents_and_children_leave_the_same_bytes_at_every_level(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    ports = {name: free_port() for name in "abcd"}
    address = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    # a and b read the same database; c follows one of them, d follows c.
    urls = {
        "a": URL,
        "b": URL,
        "c": parent_url(address["a"], address["b"]),
        "d": parent_url(address["c"]),
    }
    with contextlib.ExitStack() as stack:
        relays: dict[str, RelayProcess] = {}

        def begin(name: str) -> None:
            relays[name] = start(tmp_path, name, urls[name], ports[name])
            stack.callback(relays[name].end)

        for name in "abcd":
            begin(name)
        eventually_sync(lambda: newest_scn(relays["d"]) > 0, 90)
        for number in range(KILLS):
            name = moments.choice("aabccd")
            kind = moments.choice(["fetcher", "worker", "all"])
            time.sleep(moments.uniform(0.0, 0.6))
            print(f"kill {number}: {name} {kind}")
            if kind == "all":
                kill_all(relays[name])
                begin(name)
                continue
            module = "databus.relay.fetcher" if kind == "fetcher" else "databus.relay.server"
            for child in relays[name].children(module):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        for name in "abcd":
            eventually_sync(
                lambda name=name: newest_scn(relays[name]) == LAST_SCN,  # type: ignore[misc]
                120,
                f"{name} has everything (seed {seed}): {relays[name].log.read_text()[-1500:]}",
            )
    stored = {name: frames_of(tmp_path / name / "shop") for name in "abcd"}
    assert len(stored["a"]) == 240_000 + LAST_SCN
    for name in "bcd":
        assert stored[name] == stored["a"], f"{name} differs (seed {seed})"
