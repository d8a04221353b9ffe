"""A relay's session with a ZooKeeper that wants TLS and a user."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import ClusterConfig
from databus.common.errors import ConfigError, ServerUnavailable
from databus.relay.cluster.cluster_nodes import ClusterNodes, open_nodes
from tests.support.certificates import Authority
from tests.support.waiting import eventually_sync
from tests.support.zookeeper_server import ZooKeeperServer

USER = {"user": "databus", "password": "canary-of-zookeeper"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[ZooKeeperServer]:
    folder = tmp_path_factory.mktemp("zookeeper") / "server"
    with ZooKeeperServer(folder, authority=authority) as server:
        server.wait_until_serving()
        yield server


class Joining:
    """Opens relays' sessions with the server, and closes them at the end."""

    def __init__(self, server: ZooKeeperServer, authority: Authority) -> None:
        files = authority.issue("relay", is_client=True)
        self.files = {
            "ca": str(authority.ca), "certificate": str(files.certificate), "key": str(files.key),
        }  # fmt: skip
        self._hosts = server.hosts
        self._opened: list[ClusterNodes] = []

    def config(self, relay: str, **access: Any) -> ClusterConfig:
        """The configuration of a relay."""
        return ClusterConfig.model_validate(
            {
                "zookeeper": self._hosts, "relay": relay, "address": f"http://{relay}:1",
                "lease": 4, "zookeeper_access": {"tls": True, **access},
            }
        )  # fmt: skip

    def open(self, relay: str, **access: Any) -> ClusterNodes:
        """A session, once it is there."""
        connected = threading.Event()
        nodes = open_nodes(self.config(relay, **access), connected.set)
        nodes.open()
        self._opened.append(nodes)
        return nodes

    def close(self) -> None:
        """End all sessions."""
        for nodes in self._opened:
            nodes.close()


@pytest.fixture
def joining(server: ZooKeeperServer, authority: Authority) -> Iterator[Joining]:
    joining = Joining(server, authority)
    yield joining
    joining.close()


def has_joined(nodes: ClusterNodes) -> bool:
    try:
        return nodes.beat({"address": "a", "rings": {}}) != 0
    except ServerUnavailable as error:
        assert "no connection" in error.message, error
        return False


def test_only_the_user_of_the_relays_reads_and_changes_their_nodes(joining: Joining) -> None:
    from kazoo.client import KazooClient
    from kazoo.exceptions import NoAuthError

    nodes = joining.open("a", **joining.files, **USER)
    eventually_sync(lambda: has_joined(nodes), 30, "it is in the cluster")
    assert nodes.view().members.keys() == {"a"}
    holder = nodes.lead("shop", "http://a:1")
    assert holder is not None and holder.epoch == 1
    stranger = KazooClient(
        joining.config("s").zookeeper, use_ssl=True, ca=joining.files["ca"],
        certfile=joining.files["certificate"], keyfile=joining.files["key"],
    )  # fmt: skip
    stranger.start(30)
    try:
        for path in ("databases/shop/leader", "databases/shop", "members/a", "assignment"):
            with pytest.raises(NoAuthError):
                stranger.get(f"/databus/relays/{path}")
            with pytest.raises(NoAuthError):
                stranger.delete(f"/databus/relays/{path}")
    finally:
        stranger.stop()
        stranger.close()
    other = joining.open("b", **joining.files, user="other", password="x")

    def is_refused() -> str:
        try:
            other.beat({"address": "b", "rings": {}})
        except ServerUnavailable as error:
            return error.message if "connection" not in error.message else ""
        return ""

    message = eventually_sync(is_refused, 30, "it is refused")
    assert "belongs to another user" in message
    assert USER["password"] not in message


def test_a_relay_without_a_certificate_or_of_another_authority_does_not_connect(
    joining: Joining, tmp_path: Path
) -> None:
    unknown = joining.open("c", ca=joining.files["ca"])
    files = Authority(tmp_path).issue("relay", is_client=True)
    foreign = joining.open(
        "d", ca=joining.files["ca"], certificate=str(files.certificate), key=str(files.key)
    )
    known = joining.open("e", **joining.files, **USER)
    eventually_sync(lambda: has_joined(known), 30, "it is in the cluster")
    for nodes in (unknown, foreign):
        with pytest.raises(ServerUnavailable, match="no connection"):
            nodes.beat({"address": "c", "rings": {}})


@pytest.mark.parametrize(
    ("access", "problem"),
    [
        ({"tls": True, "certificate": "a.pem"}, "certificate and key belong together"),
        ({"tls": True, "user": "databus"}, "user and password belong together"),
        ({"ca": "ca.pem"}, "give tls = true"),
        ({"user": "databus", "password": "x"}, "would cross a network unencrypted"),
    ],
)
def test_an_access_that_is_not_whole_or_not_safe_is_refused(
    access: dict[str, Any], problem: str
) -> None:
    given = {
        "zookeeper": "zk.example:2181", "relay": "a", "address": "http://a:1",
        "zookeeper_access": access,
    }  # fmt: skip
    with pytest.raises(ValueError, match=problem):
        ClusterConfig.model_validate(given)


def test_a_file_that_cannot_be_used_is_an_error_at_once(joining: Joining) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        open_nodes(joining.config("f", ca="nothing.pem"), lambda: None)
