"""What decides in a cluster, as a relay's membership sees it: who is there, and who leads.

``zookeeper_nodes`` and ``leased_nodes`` do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from databus.common.config import ClusterConfig
from databus.common.extras import imports_of_extra
from databus.relay.cluster.duties import Assignment, Duty


@dataclass(frozen=True, slots=True)
class Holder:
    """The relay that leads a database."""

    relay: str
    address: str
    epoch: int
    session: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster at one moment: the members' documents by name, the leaders by database."""

    members: Mapping[str, Mapping[str, Any]]
    holders: Mapping[str, Holder]
    assignment: Mapping[str, Duty]
    version: int


class ClusterNodes(Protocol):
    """One relay's session.

    Invariants:
        I1. ``beat`` returns only if the session that it names was renewed after the call began.  So
            this session, and each leadership taken in it, lasts for ``timeout_s`` from the
            beginning of the call on.
        I2. Each leader of a database has a larger epoch than every one before.

    Owner: the thread of the membership.
    Raises: ServerUnavailable whenever there is no answer.
    """

    @property
    def session(self) -> int:
        """The number of the session; 0 without one."""

    @property
    def timeout_s(self) -> float:
        """How long a session lasts without a beat; 0 before the first one."""

    def open(self) -> None:
        """Begin to connect."""

    def beat(self, document: Mapping[str, Any]) -> int:
        """Be there with this document; returns the session.

        Raises:
            ServerUnavailable: also if another process has the name of this relay.
        """

    def view(self) -> ClusterView:
        """The cluster now."""

    def assign(self, assignment: Assignment, version: int) -> bool:
        """Replace the assignment of that version; False if another relay was first."""

    def lead(self, database: str, address: str) -> Holder | None:
        """Become the leader, if there is none; None if another relay was first."""

    def release(self, database: str) -> None:
        """Lead no longer; the caller has seen that the fetcher has ended."""

    def close(self) -> None:
        """End the session: the other relays notice at once, or at their next look."""


def open_nodes(config: ClusterConfig, on_change: Callable[[], None]) -> ClusterNodes:
    """What decides in this cluster; ``on_change`` may be called when something changes.

    Raises:
        ConfigError: the store's URL or an option of it is wrong.
        MissingDependency: its library is not installed.
    """
    if config.zookeeper:
        with imports_of_extra("cluster", package="kazoo", needed_by="a [cluster] with ZooKeeper"):
            from databus.relay.cluster.zookeeper_nodes import ZooKeeperNodes
        return ZooKeeperNodes(config, on_change)
    from databus.relay.cluster.leased_nodes import LeasedNodes
    from databus.relay.cluster.shared_document import open_document

    return LeasedNodes(open_document(config), config.relay, config.lease)
