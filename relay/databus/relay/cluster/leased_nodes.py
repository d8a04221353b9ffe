"""A cluster's leases in one shared document: a row of a database, or an object on S3."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from databus.common.errors import DatabusError, ServerUnavailable
from databus.common.processes.own_clock import own_clock_s
from databus.relay.cluster.cluster_document import ClusterDocument, MemberEntry
from databus.relay.cluster.cluster_nodes import ClusterView, Holder
from databus.relay.cluster.duties import Assignment
from databus.relay.cluster.shared_document import SharedDocument

ATTEMPTS = 20
CONFLICT_S = 0.02

_log = logging.getLogger(__name__)

Change = Callable[[ClusterDocument], ClusterDocument | None]


class LeasedNodes:
    """One relay's session in a shared document.

    Each relay adds 1 to its ``beats``.  Another relay removes it if the number has not changed for
    the whole lease, by that relay's own clock since it first saw the number.  So no clocks are
    compared, and a relay is there for at least its lease after each beat that was stored.

    Invariants: those of ``ClusterNodes``, and
        I3. A session that was removed never comes back: the relay joins with another number.

    Owner: the thread of the membership.
    Raises: DatabusError whenever the store does not answer, or has something else.
    """

    def __init__(
        self,
        store: SharedDocument,
        relay: str,
        lease_s: float,
        *,
        now_s: Callable[[], float] = own_clock_s,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._relay = relay
        self._lease_s = lease_s
        self._now_s = now_s
        self._wait = wait
        self._session = 0
        self._document = ClusterDocument()
        self._seen: dict[str, tuple[int, int, float]] = {}

    @property
    def session(self) -> int:
        """See ``ClusterNodes``."""
        return self._session

    @property
    def timeout_s(self) -> float:
        """See ``ClusterNodes``."""
        return self._lease_s

    def open(self) -> None:
        """Nothing: each call connects if it must."""

    def beat(self, document: Mapping[str, Any]) -> int:
        """See ``ClusterNodes``."""
        self._change(lambda found: self._renewed(found, document))
        return self._session

    def _renewed(self, found: ClusterDocument, document: Mapping[str, Any]) -> ClusterDocument:
        for name in self._expired(found):
            _log.info("%s has not renewed its lease and is no longer in the cluster", name)
            found = found.without_member(name)
        own, beats = found.members.get(self._relay), 0
        if own is not None and own.session != self._session:
            raise ServerUnavailable(
                f"the relay {self._relay} is in the cluster already: an earlier process whose "
                "lease has not ended yet, or another relay of this name"
            )
        if own is None:
            self._session = secrets.randbits(62) + 1
        else:
            beats = own.beats + 1
        entry = MemberEntry(self._session, beats, self._lease_s, document)
        return found.with_member(self._relay, entry)

    def _expired(self, found: ClusterDocument) -> list[str]:
        """The members whose leases have ended by this relay's clock."""
        now_s, seen, expired = self._now_s(), {}, []
        for name, entry in found.members.items():
            if entry.session == self._session:
                continue
            session, beats, since_s = self._seen.get(name, (0, 0, now_s))
            if (session, beats) != (entry.session, entry.beats):
                since_s = now_s
            seen[name] = (entry.session, entry.beats, since_s)
            if now_s - since_s >= entry.lease_s:
                expired.append(name)
        self._seen = seen
        return expired

    def _change(self, change: Change) -> bool:
        """Apply a change to the document; whether there was one to apply."""
        for _ in range(ATTEMPTS):
            stored = self._store.read()
            found = ClusterDocument.from_bytes(stored.content) if stored else ClusterDocument()
            changed = change(found)
            if changed is None:
                self._document = found
                return False
            if self._store.replace(changed.to_bytes(), stored.tag if stored else None):
                self._document = changed
                return True
            self._wait(random.uniform(0, CONFLICT_S))
        raise ServerUnavailable(f"other relays change {self._store.name} all the time")

    def view(self) -> ClusterView:
        """The cluster as of the last call."""
        found = self._document
        members = {name: entry.document for name, entry in found.members.items()}
        return ClusterView(members, found.leaders, found.assignment, found.version)

    def assign(self, assignment: Assignment, version: int) -> bool:
        """See ``ClusterNodes``."""
        return self._change(
            lambda found: found.with_assignment(assignment) if found.version == version else None
        )

    def _is_there(self, found: ClusterDocument) -> bool:
        own = found.members.get(self._relay)
        return own is not None and own.session == self._session

    def lead(self, database: str, address: str) -> Holder | None:
        """See ``ClusterNodes``."""

        def led(found: ClusterDocument) -> ClusterDocument | None:
            if database in found.leaders or not self._is_there(found):
                return None
            return found.with_leader(database, self._relay, address)

        return self._document.leaders[database] if self._change(led) else None

    def release(self, database: str) -> None:
        """See ``ClusterNodes``."""

        def released(found: ClusterDocument) -> ClusterDocument | None:
            holder = found.leaders.get(database)
            is_own = holder is not None and holder.session == self._session
            return found.without_leader(database) if is_own else None

        self._change(released)

    def close(self) -> None:
        """See ``ClusterNodes``."""
        try:
            self._change(
                lambda found: found.without_member(self._relay) if self._is_there(found) else None
            )
        except DatabusError as error:
            _log.warning("the membership ends by itself: %s", error.message)
        self._store.close()
