"""kill -9 all over a chain of relays, at random moments of a running stream."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from databus.common.checkpoint import Position
from tests.support.chain import databases_text, parent_url
from tests.support.processes import wait_process_gone
from tests.support.relay_process import RelayProcess, ring_frames
from tests.support.waiting import PATIENCE, eventually_sync

URL = "generator://?events_per_second=3000&events_per_window=40&payload_bytes=60&events=40000"
LAST_SCN = 1000
KILLS = 10


def start(folder: Path, name: str, url: str, port: int) -> RelayProcess:
    path = folder / f"{name}.toml"
    listen = f"127.0.0.1:{port}"
    path.write_text(
        databases_text(folder / name, {"shop": url}, listen=listen, ring_bytes=128 << 20)
    )
    return RelayProcess(path)


def kill_all(relay: RelayProcess) -> None:
    """SIGKILL to the supervisor and everything below it, at once."""
    pids = [relay.process.pid]
    pids += [child.pid for child in psutil.Process(relay.process.pid).children(recursive=True)]
    os.killpg(relay.process.pid, signal.SIGKILL)
    relay.process.wait(10 * PATIENCE)
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


class SqliteWriter:
    """Commits to a SQLite file in a thread of its own, until the test ends it.

    Owner: one test.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
            connection.commit()

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as connection:
            number = 0
            while not self._stop.wait(0.002):
                for _ in range(1 + number % 5):
                    number += 1
                    row = (number % 700, f"name {number}")
                    connection.execute("INSERT OR REPLACE INTO items VALUES (?, ?)", row)
                connection.commit()

    def halt(self) -> None:
        """End the thread, if it was started."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> int:
        """End the thread; the scn of the last change."""
        self.halt()
        with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as connection:
            found = connection.execute("SELECT max(id) FROM databus_log").fetchone()
            return int(found[0] or 0)


class Chain:
    """Four relays by name, on addresses that stay theirs over every death.

    Owner: one test; ``end`` leaves no process behind.
    """

    def __init__(self, folder: Path, ports: dict[str, int], parents: dict[str, str]) -> None:
        """``parents`` has a database's URL, or the names of the relays that are read."""
        self.folder = folder
        self.ports = ports
        self.urls = {
            name: url if ":" in url else parent_url(*(self.address(one) for one in url))
            for name, url in parents.items()
        }
        self.relays: dict[str, RelayProcess] = {}

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def begin(self, name: str) -> None:
        self.relays[name] = start(self.folder, name, self.urls[name], self.ports[name])

    def kill(self, name: str, kind: str) -> None:
        """SIGKILL to the fetcher, to a worker, or to everything, which is started again."""
        if kind == "all":
            kill_all(self.relays[name])
            self.relays[name].end()
            self.begin(name)
            return
        for child in self.relays[name].children(f"databus.relay.{kind}"):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def wait(self, name: str, scn: int, seed: int) -> None:
        relay = self.relays[name]
        eventually_sync(
            lambda: newest_scn(relay) >= scn,
            120,
            f"{name} has everything (seed {seed}): {relay.log.read_text()[-1500:]}",
        )

    def end(self) -> None:
        for relay in self.relays.values():
            relay.end()


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("head", ["generator", "sqlite"])
def test_kills_of_parents_and_children_leave_the_same_bytes_at_every_level(
    tmp_path: Path, free_port: Callable[[], int], head: str
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    writer = SqliteWriter(tmp_path / "shop.db")
    # Two relays may read one generator, but only one a SQLite file: its polls make the windows.
    urls = {"generator": (URL, URL), "sqlite": (writer.url, "a")}[head]
    parents = {"a": urls[0], "b": urls[1], "c": "ab", "d": "c"}
    chain = Chain(tmp_path, {name: free_port() for name in parents}, parents)
    with contextlib.ExitStack() as stack:
        stack.callback(chain.end)
        stack.callback(writer.halt)
        for name in parents:
            chain.begin(name)
        if head == "sqlite":
            chain.relays["a"].ready()
            writer.start()
        chain.wait("d", 1, seed)
        for number in range(KILLS):
            name = moments.choice("aabccd")
            kind = moments.choice(["fetcher", "server", "all"])
            time.sleep(moments.uniform(0.0, 0.6))
            print(f"kill {number}: {name} {kind}")
            chain.kill(name, kind)
        last_scn = LAST_SCN if head == "generator" else writer.stop()
        for name in parents:
            chain.wait(name, last_scn, seed)
    stored = {name: frames_of(tmp_path / name / "shop") for name in parents}
    if head == "generator":
        assert len(stored["a"]) == 40 * LAST_SCN + LAST_SCN
    assert max(stored["a"]).scn >= last_scn > 100
    for name in "bcd":
        differing = set(stored[name].items()) ^ set(stored["a"].items())
        assert all(position.scn > last_scn for position, _ in differing), f"{name}, seed {seed}"
