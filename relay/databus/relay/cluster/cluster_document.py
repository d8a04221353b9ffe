"""The state of a cluster without ZooKeeper, as one small document.  Pure.

It is replaced as a whole, only on top of the version that was read.  So every change sees all
changes before it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from databus.common.errors import FormatError
from databus.relay.cluster.cluster_nodes import Holder
from databus.relay.cluster.duties import Assignment, Duty, decode, encode


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """A relay that is there: ``beats`` grows with each renewal of its session."""

    session: int
    beats: int
    lease_s: float
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterDocument:
    """Members, leaders, the last epoch of each database, and the assignment with its version.

    Invariants:
        I1. A leader is a member, with the same session.
        I2. The epoch of a database never falls.
    """

    members: Mapping[str, MemberEntry] = field(default_factory=dict)
    leaders: Mapping[str, Holder] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    assignment: Assignment = field(default_factory=dict)
    version: int = 0

    def check(self) -> None:
        """Assert I1."""
        for holder in self.leaders.values():
            assert self.members[holder.relay].session == holder.session

    def with_member(self, name: str, entry: MemberEntry) -> ClusterDocument:
        """A member that is there, or still there."""
        return replace(self, members={**self.members, name: entry})

    def without_member(self, name: str) -> ClusterDocument:
        """A member and its leaderships have ended."""
        members = {one: entry for one, entry in self.members.items() if one != name}
        leaders = {one: holder for one, holder in self.leaders.items() if holder.relay != name}
        return replace(self, members=members, leaders=leaders)

    def with_leader(self, database: str, relay: str, address: str) -> ClusterDocument:
        """A member leads a database, with the next epoch.

        A document that was lost is made again without epochs; the rings of the members have them.
        """
        rings = (
            entry.document.get("rings", {}).get(database, {}) for entry in self.members.values()
        )
        known = [self.epochs.get(database, 0), *(int(ring.get("epoch", 0)) for ring in rings)]
        epoch = max(known) + 1
        holder = Holder(relay, address, epoch, self.members[relay].session)
        return replace(
            self,
            leaders={**self.leaders, database: holder},
            epochs={**self.epochs, database: epoch},
        )

    def without_leader(self, database: str) -> ClusterDocument:
        """A database has no leader."""
        leaders = {one: holder for one, holder in self.leaders.items() if one != database}
        return replace(self, leaders=leaders)

    def with_assignment(self, assignment: Assignment) -> ClusterDocument:
        """The next version of the assignment."""
        return replace(self, assignment=assignment, version=self.version + 1)

    def to_bytes(self) -> bytes:
        """As it is stored; no two texts are equal, so that a writer finds its own again."""
        return json.dumps(
            {
                "v": 1,
                "members": {name: asdict(entry) for name, entry in self.members.items()},
                "leaders": {name: asdict(holder) for name, holder in self.leaders.items()},
                "epochs": dict(self.epochs),
                "assignment": json.loads(encode(self.assignment)),
                "version": self.version,
                "written": secrets.token_hex(8),
            }
        ).encode()

    @staticmethod
    def from_bytes(content: bytes) -> ClusterDocument:
        """What ``to_bytes`` gave.

        Raises:
            FormatError: it is something else.
        """
        try:
            document = json.loads(content)
            if document["v"] != 1:
                raise ValueError(f"version {document['v']}")
            assignment: dict[str, Duty] = decode(json.dumps(document["assignment"]).encode())
            return ClusterDocument(
                {name: MemberEntry(**entry) for name, entry in document["members"].items()},
                {name: Holder(**holder) for name, holder in document["leaders"].items()},
                {name: int(epoch) for name, epoch in document["epochs"].items()},
                assignment,
                int(document["version"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"the document of the cluster is damaged: {error!r}") from error
