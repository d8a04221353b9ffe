"""After the log has lost a range, only the rows that differ are repaired.

The way there is the whole one: MariaDB has purged a binlog that the relay had not read, the relay
stops by name, the operator does what docs/failover.md says, and the rest is automatic.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.shop import Shop
from tests.support.fixtures import FreshDatabase
from tests.support.own_servers import mariadb  # noqa: F401  fixtures
from tests.support.processes import Processes
from tests.support.system import System, server_shop, wait_for
from tests.support.tables import get
from tests.support.waiting import PATIENCE, eventually_sync

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


def database_of(system: System) -> dict[str, Any]:
    """The bootstrap's status of the shop, {} while it does not answer."""
    try:
        databases = get(f"{system.bootstrap_url}/v1/status")["databases"]
    except OSError:
        return {}
    return dict(databases[0]) if databases else {}


def is_seeded(system: System) -> bool:
    return database_of(system).get("state") == "seeded"


def relay_state(system: System) -> tuple[str, str]:
    """The state of the relay's database and the code of its problem."""
    try:
        (one,) = get(f"{system.relay_url}/v1/status")["databases"]
    except OSError:
        return "", ""
    return one["state"], (one.get("fetcher", {}).get("error") or {}).get("code", "")


def write_and_lose(shop: Shop, database: FreshDatabase) -> tuple[int, int]:
    """Few rows change, one goes, and no binlog has it any more; the order that went and one that
    changed."""
    connection = shop.connect()
    cursor = connection.cursor()
    first, *_, second = sorted(key[0] for key in shop.rows()[f"{database.name}.orders"])
    cursor.execute("BEGIN")
    cursor.execute(f"DELETE FROM order_lines WHERE order_id = {first}")
    cursor.execute(f"DELETE FROM orders WHERE id = {first}")
    cursor.execute(f"UPDATE orders SET state = 'lost and found' WHERE id = {second}")
    cursor.execute("COMMIT")
    cursor.close()
    connection.close()
    database.execute("FLUSH BINARY LOGS")
    newest = database.execute("SHOW MASTER STATUS")[0][0]

    def purged() -> bool:
        database.execute(f"PURGE BINARY LOGS TO '{newest}'")
        return len(database.execute("SHOW BINARY LOGS")) == 1

    eventually_sync(purged, 30, "no session reads the old binlog any more")
    return first, second


def test_after_a_purged_binlog_only_true_differences_are_emitted_deletions_included(
    mariadb_database: FreshDatabase, tmp_path: Path, processes: Processes
) -> None:
    shop, url = server_shop("mariadb", mariadb_database)
    system = System(tmp_path, shop, url, processes)
    relay = system.start_relay()
    bootstrap = system.start_bootstrap()
    with shop.session() as step:
        for _ in range(200):
            step()
    wait_for(lambda: is_seeded(system), "the copy is whole")
    consumer = system.start_consumer("follower")
    system.wait_until_equal("follower")
    consumer.kill9()
    bootstrap.stop()
    relay.stop()
    gone, changed = write_and_lose(shop, mariadb_database)

    relay.start()
    wait_for(
        lambda: relay_state(system) == ("failed", "source_position_lost"),
        "the relay reports that changes are missing",
    )
    relay.stop()
    (tmp_path / "relay" / "shop").rename(tmp_path / "before")
    relay.start()
    relay.wait_ready(f"{system.relay_url}/readyz")
    wait_for(lambda: "max" in get(f"{system.relay_url}/v1/shop/sources"), "the new ring has begun")
    before = get(f"{system.relay_url}/v1/shop/sources")["max"]
    bootstrap.start()
    wait_for(lambda: bool(database_of(system).get("gaps")), "the gap is recorded")
    wait_for(lambda: is_seeded(system), "the copy is repaired")
    wait_for(lambda: "repaired_us" in database_of(system)["gaps"][0], "the gap is closed")
    (gap,) = database_of(system)["gaps"]
    assert gap["bridged"]

    # What was emitted for the repair: the changed order, the deletions.
    orders = f"{mariadb_database.name}.orders"
    repair = changes(system, since=f"{before['scn']}:{before['seq']}")
    emitted = {(one["source"], one["op"], tuple(one["key"].values())) for one in repair}
    assert (orders, "d", (gone,)) in emitted
    assert (orders, "r", (changed,)) in emitted
    sources = {source.partition(".")[2] for source, _, _ in emitted}
    assert sources <= {"orders", "order_lines"}, emitted
    assert len([one for one in emitted if one[0] == orders]) == 2, emitted
    # Every change over the gap is refused; net changes over it and a fresh copy are right.
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{system.bootstrap_url}/v1/shop/changes?mode=all&since={gap['from']['scn']}")
    assert refused.value.code == 410
    assert json.loads(refused.value.read())["oldest"] == gap["to"]
    consumer.start()
    system.start_consumer("fresh")
    for name in ("follower", "fresh"):
        system.wait_until_equal(name)
        system.assert_faultless(name)


def changes(system: System, *, since: str) -> list[dict[str, Any]]:
    """The net changes after a position."""
    url = f"{system.bootstrap_url}/v1/shop/changes?format=ndjson&since={since}"
    with urllib.request.urlopen(url, timeout=30 * PATIENCE) as answer:
        lines = [json.loads(line) for line in answer.read().splitlines()]
    return [line for line in lines if "op" in line]
