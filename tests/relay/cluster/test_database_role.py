"""The configuration of a fetcher in its role, and what a cluster refuses."""

from __future__ import annotations

import pytest

from databus.common.config import Config, parse
from databus.common.errors import ConfigError
from databus.relay.cluster.database_role import DatabaseRole, as_configured
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.reload import changes
from databus.relay.sources.chained.chained_source import read_settings

LEADER = DatabaseRole("leader", 4, "relay-a", "http://a:8700")
FOLLOWER = DatabaseRole("follower", 4, "relay-a", "http://a:8700")


def config(url: str, *, relay: str = "relay-b", cluster: str = "orders") -> Config:
    return parse(
        f"""
[relay]
[cluster]
zookeeper = "zk:2181"
name = "{cluster}"
relay = "{relay}"
address = "http://b:8700/"
credentials = {{ token_file = "follower.token" }}
[[database]]
name = "shop"
url = "{url}"
exclude_columns = ["shop.orders.note"]
"""
    )


def options(role: DatabaseRole, one: Config) -> dict[str, object]:
    assert one.cluster is not None
    return dict(as_configured(role, one.database[0], one.cluster).options)


def test_a_follower_reads_the_leader_without_the_rules_that_the_leader_has_applied() -> None:
    one = config("mariadb://u:p@db/shop")
    assert one.cluster is not None
    database = as_configured(FOLLOWER, one.database[0], one.cluster)
    settings = read_settings(database)
    assert (settings.urls, settings.database, settings.sources) == (("http://a:8700",), "shop", ())
    assert (settings.follower, settings.least_epoch, settings.release) == ("relay-b", 4, True)
    assert settings.credentials.token_file == "follower.token"
    assert database.ring_bytes == one.database[0].ring_bytes


def test_all_leaders_of_a_database_are_one_reader_for_the_server() -> None:
    url = "mariadb://u:p@db/shop"
    ids = [options(LEADER, config(url, relay=name))["server_id"] for name in ("a", "b")]
    assert ids[0] == ids[1] != options(LEADER, config(url, cluster="other"))["server_id"]
    assert "server_id" not in options(LEADER, config(f"{url}?server_id=7"))
    assert options(LEADER, config("postgresql://u:p@db/shop")) == {"take_over": True}
    assert options(LEADER, config("generator://")) == {}


def test_a_cluster_needs_processes_and_databases_and_does_not_change_while_it_runs() -> None:
    one = config("generator://")
    with pytest.raises(ConfigError, match="databus relay"):
        LocalRelay(one)
    with pytest.raises(ConfigError, match="restart"):
        changes(one, config("generator://", relay="other"))
    with pytest.raises(ConfigError, match="the cluster decides"):
        config("relay+http://a:8700/shop")
    with pytest.raises(ConfigError, match="another machine"):
        parse('[relay]\n[cluster]\nzookeeper = "a:1"\nrelay = "a"\naddress = "http://0.0.0.0:1"')
