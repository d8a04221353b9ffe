"""The main job on real databases: what an application ends with is what the source holds."""

from __future__ import annotations

import json
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


@pytest.fixture(params=["sqlite", "mariadb", "postgres", "mysql"])
def system(request: pytest.FixtureRequest, tmp_path: Path, processes: Processes) -> System:
    """The system over a shop in a database of the parameter's kind; nothing is started."""
    shop: Shop
    if request.param == "sqlite":
        shop, url = sqlite_shop(tmp_path / "shop.db")
    else:
        database: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
        shop, url = server_shop(request.param, database)
    return System(tmp_path, shop, url, processes)


def oldest_scn(system: System) -> int:
    return int(get(f"{system.relay_url}/v1/shop/sources")["prev"]["scn"])


def facts_of(system: System, name: str = "mirror") -> dict[str, Any]:
    """The counters of a consumer that runs."""
    return stored_facts(system.mirror(name))[0]


def test_consumers_that_slept_past_the_ring_or_come_late_end_with_what_the_source_holds(
    system: System, processes: Processes
) -> None:
    system.start_relay()
    first_scn = oldest_scn(system)
    with system.shop.session() as step:
        for _ in range(60):
            step()
    check_tail(system, processes)
    system.start_bootstrap()
    consumer = system.start_consumer()
    with Workload(system.shop, per_s=300):
        wait_for(
            lambda: facts_of(system).get("windows_online", 0) > 20,
            "the consumer follows the relay",
        )
        consumer.kill9()
        checkpoint = json.loads(facts_of(system)["checkpoint"])
        before = facts_of(system)["windows_bootstrap"]
        wait_for(
            lambda: oldest_scn(system) > max(checkpoint["scn"], first_scn),
            "the ring has evicted its position",
        )
        consumer.start()
        system.start_consumer("late")
        wait_for(
            lambda: facts_of(system)["windows_bootstrap"] > before,
            "the consumer reads from the bootstrap",
        )
        wait_for(
            lambda: facts_of(system, "late").get("windows_online", 0) > 20,
            "the late consumer has reached the relay",
        )
    system.wait_until_equal()
    facts = system.assert_faultless()
    assert facts["windows_bootstrap"] > before
    assert json.loads(facts["checkpoint"])["mode"] == "online"
    system.wait_until_equal("late")
    system.assert_faultless("late")


def check_tail(system: System, processes: Processes) -> None:
    """``databus tail`` prints every change as the JSON that the manual describes."""
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
