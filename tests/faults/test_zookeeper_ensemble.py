"""A cluster of relays over three servers of ZooKeeper, of which one is lost, and then two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster_reader import StartClusterReader
from tests.support.relay_cluster import RelayCluster
from tests.support.relay_process import ring_position
from tests.support.waiting import eventually_sync
from tests.support.zookeeper_server import ZooKeeperEnsemble

GENERATOR = "generator://?events_per_second=1000&events_per_window=10"

pytestmark = pytest.mark.slow


def test_relays_continue_without_one_server_and_stop_without_two_until_one_is_back(
    tmp_path: Path, start_reader: StartClusterReader
) -> None:
    with (
        ZooKeeperEnsemble(tmp_path / "zookeeper") as ensemble,
        RelayCluster(
            tmp_path, ensemble.coordination, {"gen": GENERATOR}, ring_bytes="64MiB"
        ) as cluster,
    ):
        ensemble.by_mode()
        cluster.start("a", "b")
        urls = [cluster.url(name) for name in ("a", "b")]

        def leads(name: str) -> bool:
            return cluster.state(name, "gen").get("role") == name

        def is_whole() -> bool:
            roles = {name: cluster.state(name, "gen").get("role") for name in ("a", "b")}
            leaders = [name for name, role in roles.items() if role == name]
            return len(leaders) == 1 and "follower" in roles.values()

        eventually_sync(is_whole, 60, "one leads and one follows")
        reader = start_reader("gen", urls)
        reader.reach(50)

        leader, *others = ensemble.by_mode()
        leader.kill()
        ensemble.by_mode()
        eventually_sync(is_whole, 60, "one leads and one follows, over two servers")
        reader.reach(reader.windows[-1][0] + 100)

        others[0].kill()
        eventually_sync(lambda: not (leads("a") or leads("b")), 60, "no relay leads")
        stopped = {name: ring_position(tmp_path / name / "gen") for name in ("a", "b")}
        epochs = {name: cluster.epoch(name, "gen") for name in ("a", "b")}

        leader.start()
        ensemble.by_mode()
        first = cluster.leader("gen")
        eventually_sync(is_whole, 60, "one leads and one follows, over two other servers")
        assert cluster.epoch(first, "gen") > max(epochs.values())
        reader.reach(max(one.scn for one in stopped.values()) + 200)
        windows = reader.stop()
    scns = [scn for scn, _ in windows]
    assert scns == list(range(1, scns[-1] + 1)), "each window once, in order"
    assert {count for _, count in windows} == {10}
