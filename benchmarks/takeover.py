"""How long a database has no leader: kills and orderly leaves of the relay that leads it.

Two relays of one cluster over a real ZooKeeper, the generator as the source.  The time is from the
signal to the leader until the ring of the other relay has the first commit that it read itself.
Beside it is the time until the new leader begins its term.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Report, Run, Sample, start
from databus.relay.ring.data_folder import DatabaseFolder, read_leader
from tests.support.relay_cluster import LEASE_S, RelayCluster
from tests.support.relay_process import ring_position
from tests.support.waiting import eventually_sync
from tests.support.zookeeper_server import ZooKeeperServer

DATABASE = "gen"
SOURCE = "generator://?events_per_second=1000&events_per_window=5&clock=real"
POLL_S = 0.002
WAIT_S = 60.0
FLOORS_S = {"kill -9": 5.0, "SIGTERM": 1.0}


class Takeover(NamedTuple):
    """Seconds from the signal."""

    term_s: float
    commit_s: float


def take_over(cluster: RelayCluster, number: signal.Signals) -> Takeover:
    """Send the signal to the leader, and wait for the other relay's first commit; both are there
    afterwards."""
    first = cluster.leader(DATABASE)
    second = "b" if first == "a" else "a"
    eventually_sync(lambda: _is_steady(cluster, first), WAIT_S, f"{second} follows")
    folder = DatabaseFolder.of(cluster.folder / second, DATABASE)
    epoch = read_leader(folder)[0]
    relay = cluster.relays.pop(first)
    below = cluster.processes(relay)
    began_s = time.monotonic()
    os.kill(relay.process.pid, number)
    term_s = _wait(lambda: read_leader(folder) > (epoch, "") and read_leader(folder)[1] == second)
    at = ring_position(folder.path).scn
    commit_s = _wait(lambda: ring_position(folder.path).scn > at)
    for process in below:
        process.wait(WAIT_S)
    relay.end()
    cluster.start(first)
    return Takeover(term_s - began_s, commit_s - began_s)


def _is_steady(cluster: RelayCluster, leader: str) -> bool:
    """Whether both relays stream, as the leader sees it."""
    relays = cluster.table(leader)["databases"][0]["relays"]
    return [relay.get("state") for relay in relays] == ["streaming", "streaming"]


def _wait(is_there: Callable[[], bool]) -> float:
    """When it was there."""
    until_s = time.monotonic() + WAIT_S
    while not is_there():
        if time.monotonic() >= until_s:
            raise TimeoutError(f"no takeover within {WAIT_S} s")
        time.sleep(POLL_S)
    return time.monotonic()


def percentile(values: list[float], share: float) -> float:
    """Of the sorted values, the one that this share does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main(run: Run) -> None:
    """Measure and report."""
    kills = run.options.kills or (1 if run.smoke else 5)
    settings = {"kills": kills, "lease_s": LEASE_S, "source": SOURCE}
    report = Report(run, "Takeover of a database", "ms", settings)
    report.output_hash = hashlib.sha256(SOURCE.encode()).hexdigest()[:16]
    with (
        tempfile.TemporaryDirectory(prefix="databus-bench-") as name,
        ZooKeeperServer(Path(name) / "zookeeper") as zookeeper,
    ):
        zookeeper.wait_until_serving()
        folder = Path(name) / "bench"
        folder.mkdir()
        with RelayCluster(folder, zookeeper.coordination, {DATABASE: SOURCE}) as cluster:
            cluster.start("a", "b")
            for what, number in (("kill -9", signal.SIGKILL), ("SIGTERM", signal.SIGTERM)):
                found = [take_over(cluster, number) for _ in range(kills)]
                _report(report, what, found)
    report.write()


def _report(report: Report, what: str, found: list[Takeover]) -> None:
    commits = [one.commit_s for one in found]
    for series, values in (
        ("to the new term", [one.term_s for one in found]),
        ("to the first commit", commits),
    ):
        report.add(Sample(tuple(value * 1000 for value in values)), series=series, by=what)
    report.note(
        f"{what}: p50 {statistics.median(commits):.2f} s, p99 {percentile(commits, 0.99):.2f} s "
        f"of {len(commits)}; the floor is {FLOORS_S[what]:.0f} s"
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, help="and as many orderly leaves (50 for p99)")


if __name__ == "__main__":
    main(start("takeover", __doc__.partition("\n")[0], _options))
