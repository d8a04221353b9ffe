"""The membership of a relay: to whom it leaves its leaderships."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from databus.common.config import ClusterConfig
from databus.relay.cluster import cluster_member
from databus.relay.cluster.cluster_document import ClusterDocument
from databus.relay.cluster.cluster_member import ClusterMember
from databus.relay.cluster.database_role import DatabaseRole
from databus.relay.cluster.leased_nodes import LeasedNodes
from tests.support.memory_document import MemoryDocument
from tests.support.waiting import eventually_sync

LEASE_S = 2.0


class Host:
    """A supervisor whose fetchers start and end at once."""

    def __init__(self, scn: int, lag_us: int) -> None:
        self.lag_us = lag_us
        self._scn = scn
        self.roles: Mapping[str, DatabaseRole | None] = {}

    def rings(self) -> Mapping[str, dict[str, Any]]:
        ring = {"scn": self._scn, "seq": 0, "state": "streaming", "error": None, "epoch": 0}
        return {"shop": {**ring, "lag_us": self.lag_us}}

    def follow_roles(
        self, roles: Mapping[str, DatabaseRole | None], leases: Mapping[str, int]
    ) -> None:
        self.roles = dict(roles)

    def is_idle(self, database: str) -> bool:
        return self.roles.get(database) is None

    def publish(self, table: dict[str, Any]) -> None:
        """No test reads it."""

    @property
    def role(self) -> str:
        role = self.roles.get("shop")
        return role.kind if role is not None else ""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryDocument:
    made = MemoryDocument()
    monkeypatch.setattr(
        cluster_member,
        "open_nodes",
        lambda config, on_change: LeasedNodes(made, config.relay, config.lease),
    )
    return made


@pytest.fixture
def members() -> Iterator[list[ClusterMember]]:
    started: list[ClusterMember] = []
    yield started
    for member in started:
        member.close()


def joined(members: list[ClusterMember], name: str, host: Host) -> ClusterMember:
    config = ClusterConfig(store="s3://b/c", relay=name, address=f"http://{name}:1", lease=LEASE_S)
    member = ClusterMember(config, host)
    members.append(member)
    member.start()
    return member


def beats(store: MemoryDocument, name: str) -> int:
    return ClusterDocument.from_bytes(store.content or b"").members[name].beats


def test_a_relay_leaves_its_leadership_to_a_follower_that_is_current(
    store: MemoryDocument, members: list[ClusterMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_member, "LEAVE_S", 1000.0)
    first, second = Host(scn=9, lag_us=0), Host(scn=5, lag_us=60_000_000)
    member = joined(members, "a", first)
    eventually_sync(lambda: first.role == "leader", 20, "a leads")
    joined(members, "b", second)
    eventually_sync(lambda: second.role == "follower", 20, "b follows")
    leaving = threading.Thread(target=member.leave)
    leaving.start()
    before = beats(store, "a")
    eventually_sync(lambda: beats(store, "a") > before + 2, 20, "it is still there")
    assert (first.role, second.role) == ("leader", "follower"), "b would lack what a has"
    second.lag_us = 0
    eventually_sync(lambda: second.role == "leader", 20, "b leads")
    leaving.join(20)
    assert not leaving.is_alive()
    assert first.role == ""


@pytest.mark.parametrize(
    ("its_scn", "leave_s"),
    [(9, 1000.0), (5, 0.1)],
    ids=["that has what it had", "that is the only one, at last"],
)
def test_a_relay_leaves_to_a_follower(
    its_scn: int,
    leave_s: float,
    store: MemoryDocument,
    members: list[ClusterMember],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_member, "LEAVE_S", leave_s)
    first, second = Host(scn=9, lag_us=0), Host(scn=its_scn, lag_us=60_000_000)
    member = joined(members, "a", first)
    eventually_sync(lambda: first.role == "leader", 20, "a leads")
    joined(members, "b", second)
    eventually_sync(lambda: second.role == "follower", 20, "b follows")
    member.leave()
    eventually_sync(lambda: second.role == "leader", 20, "b leads")


def test_a_relay_that_is_alone_leaves_at_once(
    store: MemoryDocument, members: list[ClusterMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_member, "LEAVE_S", 1000.0)
    first = Host(scn=9, lag_us=0)
    member = joined(members, "a", first)
    eventually_sync(lambda: first.role == "leader", 20, "a leads")
    member.leave()
    assert first.role == ""
    assert not ClusterDocument.from_bytes(store.content or b"").leaders
