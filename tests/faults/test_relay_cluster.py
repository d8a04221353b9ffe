"""A cluster of relays over ZooKeeper, a table or S3: leaders killed, paused and stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.frame.frame_format import FrameView, Op, scan
from databus.relay.capture.leader_term import newest_mark
from tests.support.cluster_reader import StartClusterReader
from tests.support.fixtures import FreshDatabase
from tests.support.relay_cluster import RelayCluster
from tests.support.relay_process import ring_frames, ring_position
from tests.support.s3_server import S3Server
from tests.support.waiting import eventually_sync
from tests.support.zookeeper_server import ZooKeeperServer

GENERATOR = "generator://?events_per_second=2000&events_per_window=10"


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper") / "server") as server:
        server.wait_until_serving()
        yield server


def coordination(kind: str, request: pytest.FixtureRequest) -> dict[str, object]:
    """The keys of ``[cluster]`` for a coordination of this kind."""
    if kind == "zookeeper":
        return dict(request.getfixturevalue("zookeeper").coordination)
    if kind == "s3":
        server: S3Server = request.getfixturevalue("s3")
        options = server.options()
        keys = ("endpoint", "region", "access_key")
        secret = {"secret_key": options.secret_key.get_secret_value()}
        given = {key: getattr(options, key) for key in keys} | secret
        return {"store": server.empty_prefix(), "s3": given}
    database: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    return {"store": database.url}


def marks(frames: list[FrameView]) -> list[tuple[int, str]]:
    """The terms whose marks are among some frames, in order."""
    found = []
    for view in frames:
        data = bytes(view.bytes)
        mark = newest_mark(scan(data, verify=False), memoryview(data))
        if mark is not None:
            found.append((mark.epoch, mark.relay))
    return found


def commits(frames: list[FrameView]) -> dict[Position, bytes]:
    """The rows of the source's own windows."""
    return {
        view.position: bytes(view.key) + bytes(view.after or b"")
        for view in frames
        if view.op < Op.END_OF_WINDOW
    }


@pytest.mark.parametrize("decided_by", ["zookeeper", "s3"])
def test_a_paused_leader_appends_nothing_more_and_each_window_comes_once(
    decided_by: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    start_reader: StartClusterReader,
) -> None:
    keys = coordination(decided_by, request)
    with RelayCluster(tmp_path, keys, {"gen": GENERATOR}, ring_bytes="64MiB") as cluster:
        cluster.start("a", "b")
        first = cluster.leader("gen")
        second = "b" if first == "a" else "a"
        eventually_sync(lambda: cluster.follows(second, "gen"), 40, "it follows")
        reader = start_reader("gen", [cluster.url(name) for name in ("a", "b")])
        reader.reach(50)
        epoch = cluster.epoch(first, "gen")
        paused = cluster.pause(first)
        at = ring_position(tmp_path / first / "gen")
        assert cluster.leader("gen", at=second) == second
        reader.reach(at.scn + 100)
        for process in paused:
            process.resume()
        eventually_sync(lambda: cluster.follows(first, "gen"), 40, "it follows")
        assert cluster.epoch(first, "gen") > epoch
        reader.reach(at.scn + 200)
        roles = {
            one["relay"]: one["role"] for one in cluster.table(first)["databases"][0]["relays"]
        }
        assert roles == {first: "follower", second: "leader"}
        windows = reader.stop()
    scns = [scn for scn, _ in windows]
    assert scns == list(range(1, scns[-1] + 1))
    assert {count for _, count in windows} == {10}
    rings = {name: ring_frames(tmp_path / name / "gen") for name in (first, second)}
    for frames in rings.values():
        epochs = [epoch for epoch, _ in marks(frames)]
        assert epochs == sorted(epochs)
    assert marks(rings[second])[-1][1] == second
    one, other = commits(rings[first]), commits(rings[second])
    shared = one.keys() & other.keys()
    assert len(shared) > 1000
    assert all(one[at] == other[at] for at in shared)


class Commits:
    """Transactions of two rows on a table, one after the other, in a thread of its own.

    Owner: one test; ``stop`` raises what it met.
    """

    def __init__(self, database: FreshDatabase) -> None:
        self._database = database
        self._stop = threading.Event()
        database.execute("CREATE TABLE items (id int PRIMARY KEY, v int)")
        self._thread = threading.Thread(target=self._write, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _write(self) -> None:
        number = 0
        while not self._stop.wait(0.005):
            number += 1
            self._database.transaction(
                f"INSERT INTO items VALUES ({number}, 0)",
                f"UPDATE items SET v = v + 1 WHERE id = {(number + 1) // 2}",
            )

    def stop(self) -> dict[int, int]:
        """The table."""
        self._stop.set()
        self._thread.join(60)
        return {int(key): int(v) for key, v in self._database.execute("SELECT id, v FROM items")}


CONNECTIONS = {
    "postgres": "SELECT count(*) FROM pg_stat_replication",
    "mariadb": "SELECT count(*) FROM information_schema.processlist "
    "WHERE command LIKE 'Binlog Dump%'",
}


@pytest.mark.parametrize(
    ("kind", "decided_by"),
    [
        pytest.param("mariadb", "zookeeper", marks=pytest.mark.slow),
        ("postgres", "zookeeper"),
        ("postgres", "postgres"),
        pytest.param("mariadb", "mariadb", marks=pytest.mark.slow),
        pytest.param("mariadb", "s3", marks=pytest.mark.slow),
    ],
)
def test_a_copy_equals_the_source_after_a_kill_a_pause_and_an_orderly_leave(
    kind: str,
    decided_by: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    start_reader: StartClusterReader,
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{kind}_database")
    commits = Commits(database)
    with RelayCluster(
        tmp_path, coordination(decided_by, request), {"shop": database.url}
    ) as cluster:
        cluster.start("a", "b")
        first = cluster.leader("shop")
        second = "b" if first == "a" else "a"
        eventually_sync(lambda: cluster.follows(second, "shop"), 40, "it follows")
        commits.start()
        reader = start_reader("shop", [cluster.url(name) for name in ("a", "b")])
        eventually_sync(lambda: len(reader.windows) > 20, 40, "the client reads")
        cluster.kill(first)
        assert cluster.leader("shop", but=first) == second
        cluster.start(first)
        eventually_sync(lambda: cluster.follows(first, "shop"), 40, "it follows")
        paused = cluster.pause(second)
        assert cluster.leader("shop", at=first) == first
        # The server may take a moment to end the paused one's.
        eventually_sync(lambda: database.execute(CONNECTIONS[kind]) == [(1,)], 10, "one connection")
        for process in paused:
            process.resume()
        eventually_sync(lambda: cluster.follows(second, "shop"), 40, "it follows again")
        follower = cluster.relays[second].fetcher().pid
        assert cluster.relays.pop(first).end() == 0
        assert cluster.leader("shop", at=second) == second
        assert cluster.relays[second].fetcher().pid == follower, "it takes over without a new start"
        expected = commits.stop()
        eventually_sync(lambda: reader.rows == expected, 40, "the copy equals the source")
        windows = reader.stop()
        if decided_by == kind:
            sources = [
                one["name"] for one in cluster.relays[second].get("/v1/shop/sources")["sources"]
            ]
            names = {name.rpartition(".")[2] for name in sources}
            # Other tests' databases may be on the server.
            assert "items" in names
            assert "databus_cluster" not in names, "the table of the leases is not captured"
    scns = [scn for scn, _ in windows]
    assert scns == sorted(set(scns)), "each window once, in order"
    assert {count for _, count in windows} == {2}
