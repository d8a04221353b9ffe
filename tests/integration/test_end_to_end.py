"""The main job on real databases: what an application ends with is what the source holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.shop import Shop
from tests.support.fixtures import FreshDatabase
from tests.support.mirror_process import stored_facts
from tests.support.processes import Processes
from tests.support.system import (
    System,
    Workload,
    server_shop,
    sqlite_shop,
    wait_for,
)
from tests.support.tables import get

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]

MakeSystem = Callable[..., System]


@pytest.fixture(params=["sqlite", "mariadb", "postgres", "mysql"])
def make_system(request: pytest.FixtureRequest, tmp_path: Path, processes: Processes) -> MakeSystem:
    """Makes the system over a shop in a database of the parameter's kind."""

    def make(**options: Any) -> System:
        shop: Shop
        if request.param == "sqlite":
            shop, url = sqlite_shop(tmp_path / "shop.db")
        else:
            database: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
            shop, url = server_shop(request.param, database)
        return System(tmp_path, shop, url, processes, **options)

    return make


def oldest_scn(system: System) -> int:
    return int(get(f"{system.relay_url}/v1/shop/sources")["prev"]["scn"])


def test_a_consumer_follows_sleeps_past_the_ring_and_comes_back_equal(
    make_system: MakeSystem,
) -> None:
    system = make_system(ring_bytes="1MiB")
    system.start_relay()
    system.start_bootstrap()
    consumer = system.start_consumer()
    with Workload(system.shop, per_s=300):
        wait_for(
            lambda: stored_facts(system.mirror())[0].get("windows_online", 0) > 20,
            "the consumer follows the relay",
        )
        consumer.kill9()
        checkpoint = json.loads(stored_facts(system.mirror())[0]["checkpoint"])
        before = stored_facts(system.mirror())[0]["windows_bootstrap"]
        wait_for(
            lambda: oldest_scn(system) > checkpoint["scn"], "the ring has evicted its position"
        )
        consumer.start()
        wait_for(
            lambda: stored_facts(system.mirror())[0]["windows_bootstrap"] > before,
            "the consumer reads from the bootstrap",
        )
    system.wait_until_equal()
    facts = system.assert_faultless()
    assert facts["windows_bootstrap"] > before
    assert json.loads(facts["checkpoint"])["mode"] == "online"


def test_a_late_consumer_gets_everything_from_the_bootstrap_while_writes_continue(
    make_system: MakeSystem,
) -> None:
    system = make_system()
    system.start_relay()
    first_scn = oldest_scn(system)
    system.start_bootstrap()
    with Workload(system.shop, per_s=300):
        wait_for(lambda: oldest_scn(system) > first_scn, "the ring has evicted its first windows")
        system.start_consumer("late")
        wait_for(
            lambda: stored_facts(system.mirror("late"))[0].get("windows_online", 0) > 20,
            "the late consumer has reached the relay",
        )
    system.wait_until_equal("late")
    system.assert_faultless("late")


def test_tail_prints_every_change_as_documented_json(
    make_system: MakeSystem, processes: Processes
) -> None:
    system = make_system()
    system.start_relay()
    with system.shop.session() as step:
        for _ in range(60):
            step()
    done = processes.run(
        "tail", f"{system.relay_url}/shop", "--from", "oldest", "--until-idle", "2s"
    )
    assert done.returncode == 0, done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    events = [item for item in objects if "op" in item]
    names = ["database", "source", "op", "scn", "seq", "ts_us", "txid", "key", "before", "after"]
    assert all(list(event) == names for event in events)
    assert {event["op"] for event in events} >= {"c", "u", "d"}
    positions = [(event["scn"], event["seq"]) for event in events]
    assert positions == sorted(set(positions))
    ends = [item for item in objects if item.get("control") == "end_of_window"]
    assert sum(end["events"] for end in ends) == len(events)
