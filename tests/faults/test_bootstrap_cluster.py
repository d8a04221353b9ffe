"""Bootstrap servers of a cluster: the one that writes the log is killed, and another takes over."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.bootstrap_cluster import BootstrapCluster
from tests.support.processes import Processes
from tests.support.s3_server import S3Server
from tests.support.system import System, Workload, sqlite_shop, wait_for, wait_s

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

KILLS = 4


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_the_writer_is_killed_again_and_again_and_each_reader_has_the_source(
    kind: str, tmp_path: Path, processes: Processes, s3: S3Server
) -> None:
    shop, url = sqlite_shop(tmp_path / "shop.db")
    system = System(tmp_path, shop, url, processes, ring_bytes="1MiB")
    system.start_relay()
    cluster = BootstrapCluster(
        tmp_path, processes, [system.relay_url], "abc", s3 if kind == "s3" else None
    )
    system.bootstrap_urls = list(cluster.urls.values())
    readers = ["early"]
    writers = []
    with Workload(shop):
        cluster.start("a", "b", "c")
        cluster.wait_ready("a", "b", "c")
        system.start_consumer("early")
        wait_for(lambda: bool(system.copy("early")), "the consumer has begun")
        for number in range(KILLS):
            writer = cluster.writer()
            readers.append(f"late-{number}")
            system.start_consumer(readers[-1])
            wait_s(0.5)
            cluster.kill(writer)
            writers.append(cluster.writer(but=writer))
            cluster.start(writer)
        cluster.wait_ready("a", "b", "c")
        wait_s(2)
    for name in readers:
        system.wait_until_equal(name)
        system.assert_faultless(name)
    assert len(writers) == KILLS
    for name, process in cluster.servers.items():
        assert process.running, name
        assert cluster.document(name)["gaps"] == [], "nothing was lost meanwhile"
    assert cluster.store().check() == []


def test_a_writer_that_was_paused_for_longer_than_its_lease_writes_nothing_more(
    tmp_path: Path, processes: Processes, s3: S3Server
) -> None:
    shop, url = sqlite_shop(tmp_path / "shop.db")
    system = System(tmp_path, shop, url, processes)
    system.start_relay()
    cluster = BootstrapCluster(tmp_path, processes, [system.relay_url], "ab", s3)
    system.bootstrap_urls = list(cluster.urls.values())
    with Workload(shop):
        cluster.start("a", "b")
        cluster.wait_ready("a", "b")
        for _ in range(2):
            paused = cluster.writer()
            below = [psutil.Process(cluster.servers[paused].pid)]
            below += cluster.servers[paused].descendants()
            for process in below:
                process.suspend()
            other = cluster.writer(but=paused)
            cluster.wait_sealed()
            for process in below:
                process.resume()
            cluster.wait_state(paused, "standby")
            assert cluster.state(other) == "running"
    for name, first in (("one", "a"), ("two", "b")):
        system.bootstrap_urls = [cluster.urls[first]]
        system.start_consumer(name)
        system.wait_until_equal(name)
        system.assert_faultless(name)
    assert cluster.store().check() == []
