"""A relay as a member of its cluster: the thread that renews the leases and follows the roles.

It asks ZooKeeper or the store, computes the assignment as all others do, and tells the supervisor
which role this relay has for each database.  The supervisor starts and ends the fetchers.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from databus.common.checkpoint import Position
from databus.common.config import ClusterConfig
from databus.common.errors import DatabusError
from databus.common.processes.own_clock import own_clock_s
from databus.relay.cluster.cluster_nodes import ClusterView, Holder, open_nodes
from databus.relay.cluster.database_role import DatabaseRole
from databus.relay.cluster.duties import Duty, RelayThere, RingCopy, assign
from databus.relay.cluster.lease_word import LeaseWord

OWN_SHARE = 0.5
"""The part of the session's time-out after which a leader stops by its own clock.  A server of an
ensemble reports to the others that it has heard of a session once in a tick, and the shortest
time-out is two ticks."""
LEAVE_S = 5.0
"""The time for which a relay that is stopped waits until its leaderships have moved."""
BEATS = 8
"""Beats in a session's time-out."""
LONGEST_BEAT_S = 1.0

_log = logging.getLogger(__name__)


class ClusterHost(Protocol):
    """The supervisor, as the thread of the membership sees it; all calls are from that thread."""

    def rings(self) -> Mapping[str, dict[str, Any]]:
        """For each configured database: ``scn``, ``seq``, ``state``, ``error``, ``lag_us`` and
        ``epoch``."""

    def follow_roles(
        self, roles: Mapping[str, DatabaseRole | None], leases: Mapping[str, int]
    ) -> None:
        """Do this for each database; ``leases`` are the descriptors of those that are led."""

    def is_idle(self, database: str) -> bool:
        """Whether no fetcher of the database runs, and none is about to."""

    def publish(self, table: dict[str, Any]) -> None:
        """This is the routing table now."""


@dataclass(slots=True)
class _Led:
    """A database that this relay leads."""

    holder: Holder
    lease: LeaseWord
    is_leaving: bool = False


class ClusterMember:
    """The membership of this relay.

    Invariants:
        I1. A lease ends by this machine's clock before another relay can end the session that it
            was taken in: it is measured from before the last beat that was answered.
        I2. A lease that has ended never holds again: the relay leads again with another epoch.
        I3. A leader gives its node up only when its fetcher has ended.

    Owner: its own thread; ``start``, ``wake`` and ``close`` in any.
    """

    def __init__(self, config: ClusterConfig, host: ClusterHost) -> None:
        self._config = config
        self._host = host
        self._woken = threading.Event()
        self._is_closing = False
        self._is_leaving = False
        self._wait_until_s = 0.0
        self._has_left = threading.Event()
        self._nodes = open_nodes(config, self.wake)
        self._led: dict[str, _Led] = {}
        self._roles: dict[str, DatabaseRole | None] = {}
        self._vacant: set[str] = set()
        self._others: list[RelayThere] | None = None
        self._left_at: dict[str, Position] = {}
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="databus-cluster", daemon=True)

    def start(self) -> None:
        """Join the cluster."""
        self._thread.start()

    def wake(self) -> None:
        """Something has changed: do not wait for the next beat."""
        self._woken.set()

    def leave(self) -> None:
        """Give the leaderships away; returns when this relay leads nothing, or after ``LEAVE_S``.

        It stays a member without rings, so that the others assign it nothing.  For half of that
        time it waits for a follower that is current: another might have less than the source has.
        """
        self._wait_until_s = own_clock_s() + LEAVE_S / 2
        self._others = None  # Who is there now, not at the last beat.
        self._is_leaving = True
        self.wake()
        self._has_left.wait(LEAVE_S)

    def close(self) -> None:
        """End the membership, once all fetchers have ended."""
        self._is_closing = True
        self.wake()
        self._thread.join(self._config.lease + 10)

    # -- the thread --

    def _run(self) -> None:
        self._nodes.open()
        try:
            while not self._is_closing:
                self._woken.clear()
                try:
                    self._beat()
                    self._last_error = ""
                    if self._is_leaving and not self._led:
                        self._has_left.set()
                except DatabusError as error:
                    self._note(error)
                    if self._is_leaving:
                        self._has_left.set()  # No other relay can be notified.
                except Exception:
                    _log.exception("the membership in the cluster %s", self._config.name)
                self._lose_ended()
                self._woken.wait(self._pause_s)
        finally:
            for database, led in list(self._led.items()):
                self._lose(database, led)
            self._nodes.close()

    def _note(self, error: DatabusError) -> None:
        if str(error) != self._last_error:
            _log.warning("cluster %s: %s", self._config.name, error)
        self._last_error = str(error)

    @property
    def _pause_s(self) -> float:
        timeout_s = self._nodes.timeout_s or self._config.lease
        return min(LONGEST_BEAT_S, timeout_s / BEATS) * random.uniform(0.8, 1.0)

    def _beat(self) -> None:
        began_s = own_clock_s()
        rings = self._offered()
        session = self._nodes.beat(self._document(rings))
        until_s = began_s + self._nodes.timeout_s * OWN_SHARE
        self._extend(session, until_s)
        view = self._nodes.view()
        self._lose_taken(session, view)
        members = _members(view)
        if self._is_leaving and self._others is None:
            self.wake()
        self._others = [one for one in members if one.name != self._config.relay]
        wanted = assign(view.assignment, members, self._config.followers)
        if wanted != dict(view.assignment) and not self._nodes.assign(wanted, view.version):
            self.wake()
            return
        for database in self._led.keys() - rings.keys():
            duty = wanted.get(database, Duty())
            self._roles[database] = self._leading(database, self._led[database], duty, view)
        for database in rings:
            self._roles[database] = self._role(
                database, wanted.get(database, Duty()), view, until_s
            )
        self._apply()
        self._host.publish(self._table(view, wanted))

    def _offered(self) -> Mapping[str, dict[str, Any]]:
        """The rings of this relay that may be assigned to it."""
        rings = self._host.rings()
        if not self._is_leaving:
            return rings
        is_late = own_clock_s() >= self._wait_until_s
        for database, ring in rings.items():
            self._left_at.setdefault(database, Position(ring["scn"], ring["seq"]))
        return {
            database: ring
            for database, ring in rings.items()
            if database in self._led and not (is_late or self._has_heir(database))
        }

    def _has_heir(self, database: str) -> bool:
        """Whether a follower is current, or has what this relay had when it was stopped; or none
        is there."""
        if self._others is None:
            return False
        copies = [one.copies[database] for one in self._others if database in one.copies]
        left_at = self._left_at[database]
        return not copies or any(copy.is_current or copy.position >= left_at for copy in copies)

    def _document(self, rings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        return {
            "address": self._config.address,
            "zone": self._config.zone,
            "at_us": time.time_ns() // 1000,
            "rings": rings,
        }

    def _extend(self, session: int, until_s: float) -> None:
        for led in self._led.values():
            if led.holder.session == session:
                led.lease.extend(until_s)

    def _lose_ended(self) -> None:
        """Give up what this relay leads no longer by its own clock."""
        for database, led in list(self._led.items()):
            if led.lease.left_s <= 0 and not led.is_leaving:
                _log.warning("%s: the lease of epoch %d has ended", database, led.holder.epoch)
                self._lose(database, led)
        self._apply()

    def _lose_taken(self, session: int, view: ClusterView) -> None:
        for database, led in list(self._led.items()):
            if led.holder.session != session or view.holders.get(database) != led.holder:
                self._lose(database, led)

    def _lose(self, database: str, led: _Led) -> None:
        led.lease.end()
        led.lease.close()
        self._roles[database] = None
        del self._led[database]

    def _apply(self) -> None:
        leases = {database: led.lease.fd for database, led in self._led.items()}
        self._host.follow_roles(dict(self._roles), leases)

    # -- one database --

    def _role(
        self, database: str, duty: Duty, view: ClusterView, until_s: float
    ) -> DatabaseRole | None:
        led, holder = self._led.get(database), view.holders.get(database)
        if led is not None:
            return self._leading(database, led, duty, view)
        name = self._config.relay
        if holder is not None:
            self._vacant.discard(database)
            if holder.relay == name:
                self._give_back(database, holder)
            if name not in duty.relays or holder.relay == name:
                return None
            return DatabaseRole("follower", holder.epoch, holder.relay, holder.address)
        if duty.leader != name:
            return self._roles.get(database)
        if database not in self._vacant:
            # The next beat knows where the rings of all others end, now that no leader is there.
            self._vacant.add(database)
            self.wake()
            return self._roles.get(database)
        return self._lead(database, until_s)

    def _give_back(self, database: str, holder: Holder) -> None:
        """This relay has the node, and leads no longer: its lease has ended by its own clock, or
        the node is of an earlier session, which ends by itself."""
        if holder.session == self._nodes.session and self._host.is_idle(database):
            self._nodes.release(database)

    def _lead(self, database: str, until_s: float) -> DatabaseRole | None:
        self._vacant.discard(database)
        holder = self._nodes.lead(database, self._config.address)
        if holder is None:
            return None
        lease = LeaseWord.make()
        lease.extend(until_s)
        self._led[database] = _Led(holder, lease)
        _log.info("%s: this relay leads with the epoch %d", database, holder.epoch)
        return DatabaseRole("leader", holder.epoch, holder.relay, holder.address)

    def _wake_soon(self) -> None:
        """Beat again after a moment: a process is about to end."""
        timer = threading.Timer(0.05, self.wake)
        timer.daemon = True
        timer.start()

    def _leading(
        self, database: str, led: _Led, duty: Duty, view: ClusterView
    ) -> DatabaseRole | None:
        followers = [name for name in duty.followers if name in view.members]
        led.lease.count(len(followers))
        is_leaving = duty.leader != self._config.relay and (
            duty.leader in view.members or not duty.relays
        )
        if not (is_leaving or led.is_leaving):
            return DatabaseRole("leader", led.holder.epoch, led.holder.relay, led.holder.address)
        led.is_leaving = True
        if self._host.is_idle(database):
            self._nodes.release(database)
            self._lose(database, led)
            heir = duty.leader or "no relay"
            _log.info("%s: %s takes over from epoch %d", database, heir, led.holder.epoch)
        else:
            self._wake_soon()
        return None

    # -- the routing table --

    def _table(self, view: ClusterView, wanted: Mapping[str, Duty]) -> dict[str, Any]:
        relays = [
            {"name": name, **{key: document[key] for key in ("address", "zone", "at_us")}}
            for name, document in sorted(view.members.items())
        ]
        databases = []
        for database, duty in sorted(wanted.items()):
            holder = view.holders.get(database)
            serving = [name for name in duty.relays if name in view.members]
            if holder is not None and holder.relay in view.members:
                serving = list(dict.fromkeys([holder.relay, *serving]))
            databases.append(
                {
                    "name": database,
                    "epoch": holder.epoch if holder is not None else None,
                    "leader": holder.relay if holder is not None else None,
                    "relays": [
                        {
                            "relay": name,
                            "role": "leader" if holder and holder.relay == name else "follower",
                            **view.members[name]["rings"].get(database, {}),
                        }
                        for name in serving
                    ],
                }
            )
        return {"cluster": self._config.name, "relays": relays, "databases": databases}


def _members(view: ClusterView) -> list[RelayThere]:
    return [
        RelayThere(name, {database: _copy(ring) for database, ring in document["rings"].items()})
        for name, document in sorted(view.members.items())
    ]


def _copy(ring: Mapping[str, Any]) -> RingCopy:
    lag_us = ring["lag_us"]
    return RingCopy(
        Position(ring["scn"], ring["seq"]),
        is_current=ring["state"] == "streaming" and lag_us is not None and lag_us < 2_000_000,
        is_refused=ring["error"] == "source_position_lost",
    )
