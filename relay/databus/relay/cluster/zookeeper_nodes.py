"""The cluster's nodes in ZooKeeper: who is there, who leads, what is assigned.

| node below /databus/NAME | what |
|---|---|
| members/RELAY | ephemeral: address, zone and rings of a relay that is there |
| databases/DB | its version is the epoch: the number of leaders that the database has had |
| databases/DB/leader | ephemeral: the relay that leads; made together with the next epoch |
| assignment | who is to lead and to follow; replaced only on top of the version that was read |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.loggingsupport import BLATHER
from kazoo.security import make_digest_acl

from databus.common.access.credentials import Credentials
from databus.common.config import ClusterConfig, ZooKeeperAccess
from databus.common.errors import ServerUnavailable
from databus.relay.cluster.cluster_nodes import ClusterView, Holder
from databus.relay.cluster.duties import Assignment, decode, encode

ANSWER_S = 10.0

_log = logging.getLogger(__name__)


class _SessionLog(logging.Logger):
    """kazoo's logger, which is the only place where it gives the session's agreed time-out."""

    def __init__(self) -> None:
        super().__init__("databus.relay.kazoo", BLATHER)
        self.timeout_s = 0.0

    def handle(self, record: logging.LogRecord) -> None:
        if record.levelno == BLATHER:
            if str(record.msg).startswith("Session created") and isinstance(record.args, tuple):
                self.timeout_s = float(str(record.args[2])) / 1000
        elif record.levelno >= logging.WARNING:
            _log.log(record.levelno, "ZooKeeper: %s", record.getMessage())


class ZooKeeperNodes:
    """One relay's session with ZooKeeper.

    Invariants: those of ``ClusterNodes``.

    Owner: the thread of the membership.
    Raises: ServerUnavailable whenever ZooKeeper does not answer.
    """

    def __init__(self, config: ClusterConfig, on_change: Callable[[], None]) -> None:
        self._root = f"/databus/{config.name}"
        self._relay = config.relay
        self._answer_s = min(ANSWER_S, config.lease)
        self._on_change = on_change
        self._session_log = _SessionLog()
        self._client = KazooClient(
            hosts=config.zookeeper,
            timeout=config.lease,
            logger=self._session_log,
            **_access(config.zookeeper_access),
        )
        self._client.add_listener(self._changed)
        self._joined_in = 0

    def _changed(self, *_: object) -> None:
        self._on_change()

    @property
    def session(self) -> int:
        """The number of the session; 0 without one."""
        identity = self._client.client_id
        return int(identity[0]) if identity is not None else 0

    @property
    def timeout_s(self) -> float:
        """The session's time-out as agreed with the server; 0 before the first session."""
        return self._session_log.timeout_s

    def open(self) -> None:
        """Begin to connect, and to connect again for ever."""
        self._client.start_async()

    def beat(self, document: Mapping[str, Any]) -> int:
        """Be there with this document; returns the session.

        Raises:
            ServerUnavailable: also if the session has changed during the call, or another process
                has the name of this relay.
        """
        if not self._client.connected:
            raise ServerUnavailable("there is no connection to ZooKeeper")
        session, path = self.session, f"{self._root}/members/{self._relay}"
        content = json.dumps(document).encode()
        if self._joined_in == session:
            try:
                self._wait(self._client.set_async(path, content))
            except NoNodeError:
                self._joined_in = 0
        if self._joined_in != session:
            self._join(path, content)
        if not session or session != self.session:
            raise ServerUnavailable("the session with ZooKeeper has changed")
        self._joined_in = session
        return session

    def _join(self, path: str, content: bytes) -> None:
        for folder in ("members", "databases", "assignment"):
            self._wait(self._client.ensure_path_async(f"{self._root}/{folder}"))
        try:
            self._wait(self._client.create_async(path, content, ephemeral=True))
        except NodeExistsError:
            raise ServerUnavailable(
                f"the relay {self._relay} is in the cluster already: an earlier process whose "
                "session has not ended yet, or another relay of this name"
            ) from None

    def view(self) -> ClusterView:
        """The cluster now; ``on_change`` is called when it changes."""
        client, watch, root = self._client, self._changed_node, self._root
        names = self._wait(client.get_children_async(f"{root}/members", watch=watch))
        databases = self._wait(client.get_children_async(f"{root}/databases"))
        content, stat = self._wait(client.get_async(f"{root}/assignment", watch=watch))
        members = self._each(client.get_async, names, lambda name: f"{root}/members/{name}")
        nodes = [f"{root}/databases/{name}/leader" for name in databases]
        present = [client.exists_async(node, watch=watch) for node in nodes]
        there = [name for name, one in zip(databases, present, strict=True) if self._wait(one)]
        leaders = self._each(
            client.get_async, there, lambda name: f"{root}/databases/{name}/leader"
        )
        return ClusterView(
            {name: json.loads(found[0]) for name, found in members.items()},
            {name: _holder(*found) for name, found in leaders.items()},
            decode(content),
            int(stat.version),
        )

    def _each(
        self, ask: Callable[[str], Any], names: Iterable[str], path: Callable[[str], str]
    ) -> dict[str, tuple[bytes, Any]]:
        """The nodes that are still there."""
        asked = {name: ask(path(name)) for name in names}
        found = {}
        for name, answer in asked.items():
            try:
                found[name] = self._wait(answer)
            except NoNodeError:
                continue
        return found

    def _changed_node(self, event: object) -> None:
        self._on_change()

    def assign(self, assignment: Assignment, version: int) -> bool:
        """Replace the assignment of that version; False if another relay was first."""
        try:
            self._wait(
                self._client.set_async(f"{self._root}/assignment", encode(assignment), version)
            )
        except BadVersionError:
            return False
        return True

    def lead(self, database: str, address: str) -> Holder | None:
        """Become the leader, if there is none; None if another relay was first."""
        path, session = f"{self._root}/databases/{database}", self.session
        self._wait(self._client.ensure_path_async(path))
        _, stat = self._wait(self._client.get_async(path))
        epoch = int(stat.version) + 1
        document = {"relay": self._relay, "address": address, "epoch": epoch}
        transaction = self._client.transaction()
        transaction.create(f"{path}/leader", json.dumps(document).encode(), ephemeral=True)
        transaction.set_data(path, b"", version=epoch - 1)
        results = self._wait(transaction.commit_async())
        if any(isinstance(result, Exception) for result in results) or session != self.session:
            return None
        return Holder(self._relay, address, epoch, session)

    def release(self, database: str) -> None:
        """Lead no longer; the caller has seen that the fetcher has ended."""
        try:
            self._wait(self._client.delete_async(f"{self._root}/databases/{database}/leader"))
        except NoNodeError:
            return

    def close(self) -> None:
        """End the session: the other relays notice at once."""
        try:
            self._client.stop()
            self._client.close()
        except (KazooException, KazooTimeoutError) as error:
            _log.warning("the session with ZooKeeper ends by itself: %r", error)

    def _wait(self, answer: Any) -> Any:
        try:
            return answer.get(timeout=self._answer_s)
        except (NoNodeError, NodeExistsError, BadVersionError):
            raise
        except (NoAuthError, AuthFailedError) as error:
            raise ServerUnavailable(
                f"ZooKeeper refuses this relay ({error!r}): {self._root} belongs to another user; "
                "give the user and the password of [cluster.zookeeper_access] that made it"
            ) from error
        except (KazooException, KazooTimeoutError) as error:
            raise ServerUnavailable(f"ZooKeeper does not answer: {error!r}") from error


def _access(access: ZooKeeperAccess) -> dict[str, Any]:
    """What kazoo gets for TLS and the user.

    Raises:
        ConfigError: a file cannot be used; kazoo would try for ever.
    """
    found: dict[str, Any] = {}
    if access.tls:
        files = {"ca": access.ca, "certificate": access.certificate, "key": access.key}
        Credentials(**files).context("https://zookeeper")
        found = {
            "use_ssl": True,
            "check_hostname": True,
            "ca": access.ca or None,
            "certfile": access.certificate or None,
            "keyfile": access.key or None,
        }
    if access.user:
        password = access.password.reveal
        found["auth_data"] = [("digest", f"{access.user}:{password}")]
        found["default_acl"] = [make_digest_acl(access.user, password, all=True)]
    return found


def _holder(content: bytes, stat: Any) -> Holder:
    document = json.loads(content)
    return Holder(
        str(document["relay"]),
        str(document["address"]),
        int(document["epoch"]),
        int(stat.ephemeralOwner),
    )
