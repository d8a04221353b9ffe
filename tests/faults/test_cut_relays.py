"""Relays of a cluster, each in a network namespace, of which the leader is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_relay_cluster import CONNECTIONS, Commits, commits, marks
from tests.support.cluster_reader import StartClusterReader
from tests.support.cut_network import CutNetwork
from tests.support.fixtures import FreshDatabase
from tests.support.relay_cluster import RelayCluster
from tests.support.relay_process import ring_frames, ring_position
from tests.support.waiting import eventually_sync
from tests.support.zookeeper_server import ZooKeeperServer

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
@pytest.mark.parametrize("cut", ["everything", "zookeeper"])
def test_a_leader_that_is_cut_off_appends_nothing_that_the_next_one_does_not_have(
    kind: str,
    cut: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    start_reader: StartClusterReader,
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    port = database.url.rpartition("@")[2].partition("/")[0].rpartition(":")[2]
    table = Commits(database)
    with CutNetwork("ab") as network, ZooKeeperServer(tmp_path / "zookeeper") as zookeeper:
        zookeeper.wait_until_serving()
        hosts = network.forward(zookeeper.port)
        url = database.url.replace(f"127.0.0.1:{port}", network.forward(int(port)))
        keys = {"zookeeper": hosts}
        with RelayCluster(tmp_path, keys, {"shop": url}, network=network) as cluster:
            cluster.start("a", "b")
            first = cluster.leader("shop")
            second = "b" if first == "a" else "a"
            eventually_sync(lambda: cluster.follows(second, "shop"), 40, "it follows")
            table.start()
            reader = start_reader("shop", [cluster.url(name) for name in ("a", "b")])
            eventually_sync(lambda: len(reader.windows) > 20, 40, "the client reads")
            epoch = cluster.epoch(first, "shop")
            if cut == "everything":
                network.cut(first)
            else:
                network.cut_from(first, hosts)
            assert cluster.leader("shop", at=second) == second
            left = ring_position(tmp_path / first / "shop")
            eventually_sync(
                lambda: database.execute(CONNECTIONS[kind]) == [(1,)], 20, "one connection"
            )
            reader.reach(ring_position(tmp_path / second / "shop").scn + 1)
            if cut == "everything":
                assert ring_position(tmp_path / first / "shop") == left, "it has stopped"
                network.heal(first)
            else:
                network.heal_from(first, hosts)
            eventually_sync(lambda: cluster.follows(first, "shop"), 60, "it follows again")
            assert cluster.epoch(first, "shop") > epoch
            expected = table.stop()
            eventually_sync(lambda: reader.rows == expected, 40, "the copy equals the source")
            windows = reader.stop()
    scns = [scn for scn, _ in windows]
    assert scns == sorted(set(scns)), "each window once, in order"
    assert {count for _, count in windows} == {2}
    rings = {name: ring_frames(tmp_path / name / "shop") for name in (first, second)}
    for frames in rings.values():
        epochs = [found for found, _ in marks(frames)]
        assert epochs == sorted(epochs)
    one, other = commits(rings[first]), commits(rings[second])
    shared = one.keys() & other.keys()
    assert len(shared) > 20
    assert all(one[at] == other[at] for at in shared)
    begin, end = max(min(one), min(other)), min(max(one), max(other))
    assert {at for at in one if begin <= at <= end} == {at for at in other if begin <= at <= end}
