"""The configuration of a relay that is a member of a cluster."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator, Field

from databus.common.access_config import CredentialsConfig
from databus.common.config_values import HiddenText, Seconds, Section, require_plain_authority
from databus.common.loopback import is_loopback
from databus.common.private import HiddenUrl
from databus.common.s3_config import S3Options

STORE_SCHEMES = ("postgresql", "postgres", "mariadb", "mysql", "s3")


def _hosts(value: Any) -> str:
    if value == "":
        return ""
    hosts = [host.strip() for host in str(value).split(",")]
    for host in hosts:
        name, colon, port = host.rpartition(":")
        if not (name and colon and port.isdigit()) or "/" in host:
            raise ValueError(f"{value!r} is not HOST:PORT[,HOST:PORT...]")
    return ",".join(hosts)


def _store(value: Any) -> HiddenUrl:
    url = HiddenUrl(value)
    if not url.reveal:
        return url
    scheme = url.reveal.partition("://")[0]
    if scheme not in STORE_SCHEMES or "://" not in url.reveal:
        raise ValueError(f"the store's scheme is {scheme!r}; it is {', '.join(STORE_SCHEMES)}")
    if scheme != "s3":
        require_plain_authority(url.reveal)
    return url


def _address(value: Any) -> str:
    url = str(value).rstrip("/")
    if not re.fullmatch(r"https?://[^/?#@]+", url):
        raise ValueError(f"{value!r} is not http://HOST:PORT or https://HOST:PORT")
    return url


_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


class ZooKeeperAccess(Section):
    """``[cluster.zookeeper_access]``: TLS to ZooKeeper, and who the relays are there."""

    tls: bool = False
    """Whether the connections are encrypted: `zookeeper` names the servers' secure ports.
    Example: tls = true """

    ca: str = ""
    """PEM file of the authorities that sign the servers' certificates, beside those of the system.
    A relative path, here and below, starts at the configuration file.
    Example: ca = "/etc/databus/ca.pem" """

    certificate: str = ""
    """PEM file of the certificate that a relay presents.
    Example: certificate = "/etc/databus/relay.pem" """

    key: str = ""
    """PEM file of its private key, without a password.
    Example: key = "/etc/databus/relay.key" """

    user: str = Field(default="", pattern=r"^[^:\s]*$")
    """User of the scheme `digest`. No other user may read or change the nodes that the relays make.
    Example: user = "databus" """

    password: HiddenText = Field(default="", validate_default=True)
    """Password of this user. `env:NAME` reads it from an environment variable. It is sent to
    servers of other machines only with TLS.
    Example: password = "env:ZOOKEEPER_PASSWORD" """

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> ZooKeeperAccess:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key belong together; give both or none")
        if bool(self.user) != bool(self.password):
            raise ValueError("user and password belong together; give both or none")
        if (self.ca or self.certificate) and not self.tls:
            raise ValueError("ca and certificate are for TLS; give tls = true")
        return self


class ClusterConfig(Section):
    """``[cluster]``: several relays that read each database once.

    One relay, the leader of a database, reads it; others follow the leader. ZooKeeper, a table or
    an object on S3 decides which: `zookeeper` or `store`.
    """

    zookeeper: Annotated[str, BeforeValidator(_hosts)] = ""
    """Servers of ZooKeeper.
    Example: zookeeper = "zk-a:2181,zk-b:2181,zk-c:2181" """

    store: Annotated[HiddenUrl, BeforeValidator(_store)] = HiddenUrl("")
    """Instead of ZooKeeper: a database with the table `databus_cluster` (PostgreSQL, MariaDB or
    MySQL), or a prefix on S3. The relay makes the table if it is not there.
    Example: store = "postgresql://databus:secret@db-a:5432/shop" """

    s3: S3Options = S3Options()
    """How a `store` on S3 is reached: see `[cluster.s3]`.
    Example: s3 = { region = "eu-central-1" } """

    zookeeper_access: ZooKeeperAccess = ZooKeeperAccess()
    """TLS to ZooKeeper, and a user there: see `[cluster.zookeeper_access]`.
    Example: zookeeper_access = { tls = true, ca = "ca.pem" } """

    name: str = Field(default="relays", pattern=_NAME)
    """Name of the cluster: relays of one name share the databases. Its nodes in ZooKeeper are below
    `/databus/NAME`.
    Example: name = "orders" """

    relay: str = Field(pattern=_NAME)
    """Name of this relay in the cluster. A relay has the same name after a restart.
    Example: relay = "relay-a" """

    address: Annotated[str, BeforeValidator(_address)]
    """URL at which the other relays and the clients reach this relay.
    Example: address = "http://relay-a.internal:8700" """

    zone: str = Field(default="", max_length=63)
    """Zone of this relay. Clients prefer a relay of their own zone.
    Example: zone = "eu-central-1a" """

    followers: int = Field(default=1, ge=0, le=15)
    """Number of relays that follow the leader of each database. There are fewer where the cluster
    has fewer relays.
    Example: followers = 2 """

    lease: Seconds = Field(default=6.0, ge=0.5, le=60)
    """Time without contact to ZooKeeper, or to the store, after which another relay takes over.
    ZooKeeper's `minSessionTimeout` and `maxSessionTimeout` bound it.
    Example: lease = "10s" """

    credentials: CredentialsConfig = CredentialsConfig()
    """What a follower presents to the leader. It needs the grants `read` and `replicate`.
    Example: credentials = { token_file = "follower.token", ca = "ca.pem" } """

    @pydantic.model_validator(mode="after")
    def _is_reachable(self) -> ClusterConfig:
        if "://0.0.0.0" in self.address or "://[::]" in self.address:
            raise ValueError(f"address {self.address} is no address that another machine reaches")
        if bool(self.zookeeper) == bool(self.store):
            raise ValueError("[cluster] needs zookeeper or store, and not both")
        hosts = [host.rpartition(":")[0].strip("[]") for host in self.zookeeper.split(",")]
        access = self.zookeeper_access
        if access.user and not access.tls and not all(map(is_loopback, hosts)):
            raise ValueError(
                "the password for ZooKeeper would cross a network unencrypted; give tls = true in "
                "[cluster.zookeeper_access]"
            )
        return self
