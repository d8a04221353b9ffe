"""A range that the log has lost is mended by what really differs, and by nothing more."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Processes
from tests.support.system import System, sqlite_shop, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def database_of(system: System) -> dict[str, Any]:
    """The bootstrap's status of the shop, {} while it does not answer."""
    try:
        databases = get(f"{system.bootstrap_url}/v1/status")["databases"]
    except OSError:
        return {}
    return dict(databases[0]) if databases else {}


def is_seeded(system: System) -> bool:
    return database_of(system).get("state") == "seeded"


def test_after_a_gap_only_true_differences_are_emitted_deletions_included(
    tmp_path: Path, processes: Processes
) -> None:
    shop, url = sqlite_shop(tmp_path / "shop.db")
    system = System(tmp_path, shop, url, processes, ring_bytes="256KiB")
    system.start_relay()
    bootstrap = system.start_bootstrap()
    with shop.session() as step:
        for _ in range(200):
            step()
    wait_for(lambda: is_seeded(system), "the copy is whole")
    consumer = system.start_consumer("follower")
    system.wait_until_equal("follower")
    consumer.kill9()
    bootstrap.stop()

    # Few rows change, one goes; then so much is written to another row that the ring forgets it.
    connection = shop.connect()
    cursor = connection.cursor()
    orders = sorted(key[0] for key in shop.rows()["main.orders"])
    gone, changed = orders[0], orders[1]
    customer = min(key[0] for key in shop.rows()["main.customers"])
    cursor.execute(f"DELETE FROM order_lines WHERE order_id = {gone}")
    cursor.execute(f"DELETE FROM orders WHERE id = {gone}")
    cursor.execute(f"UPDATE orders SET state = 'lost and found' WHERE id = {changed}")
    connection.commit()
    last = database_scn(system)
    while get(f"{system.relay_url}/v1/shop/sources")["prev"]["scn"] <= last + 1:
        for number in range(200):
            note = f"{number} " * 40
            cursor.execute(f"UPDATE customers SET note = '{note}' WHERE id = {customer}")
            connection.commit()
    cursor.close()
    connection.close()

    before = get(f"{system.relay_url}/v1/shop/sources")["max"]
    bootstrap.start()
    wait_for(lambda: bool(database_of(system).get("gaps")), "the gap is recorded")
    wait_for(lambda: is_seeded(system), "the copy is repaired")
    wait_for(lambda: "repaired_us" in database_of(system)["gaps"][0], "the gap is closed")
    (gap,) = database_of(system)["gaps"]
    assert gap["bridged"]

    # What was emitted for the repair: the changed order, the deletions, the customer perhaps.
    repair = changes(system, since=f"{before['scn']}:{before['seq']}")
    emitted = {(one["source"], one["op"], tuple(one["key"].values())) for one in repair}
    assert ("main.orders", "d", (gone,)) in emitted
    assert ("main.orders", "r", (changed,)) in emitted
    assert len(emitted) < 12, emitted
    # Every change over the gap is refused; net changes over it and a fresh copy are right.
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{system.bootstrap_url}/v1/shop/changes?mode=all&since={gap['from']['scn']}")
    assert refused.value.code == 410
    assert json.loads(refused.value.read())["oldest"] == gap["to"]
    consumer.start()
    system.wait_until_equal("follower")
    system.start_consumer("fresh")
    system.wait_until_equal("fresh")
    for name in ("follower", "fresh"):
        system.assert_faultless(name)


def database_scn(system: System) -> int:
    return int(get(f"{system.relay_url}/v1/shop/sources")["max"]["scn"])


def changes(system: System, *, since: str) -> list[dict[str, Any]]:
    """The net changes after a position."""
    url = f"{system.bootstrap_url}/v1/shop/changes?format=ndjson&since={since}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = [json.loads(line) for line in answer.read().splitlines()]
    return [line for line in lines if "op" in line]
