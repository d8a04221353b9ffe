"""The machine of a bootstrap server is lost: ``databus restore`` continues from runs and relay."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.runs import failpoints
from databus.cli.demo.shop import Shop
from databus.common.config import S3Options
from tests.integration.test_gap_repair import database_of, is_seeded
from tests.support.processes import Processes
from tests.support.system import System, sqlite_shop, wait_for
from tests.support.tables import get
from tests.support.waiting import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]


def all_is_sealed(system: System) -> bool:
    """Whether the runs have everything that the log has had."""
    log = database_of(system).get("log", {})
    return bool(log) and log["frame_bytes"] == 0


def work(shop: Shop, steps: int) -> None:
    """Transactions of the shop."""
    with shop.session() as step:
        for _ in range(steps):
            step()


def overwrite(system: System, scn: int) -> None:
    """Write until the relay's ring begins after a position."""
    while int(get(f"{system.relay_url}/v1/shop/sources")["prev"]["scn"]) <= scn:
        work(system.shop, 200)


def s3_settings(options: S3Options, store: str) -> dict[str, Any]:
    """The configuration of a store on the test's server."""
    named = options.model_dump(include={"endpoint", "region", "access_key"})
    secret = {"secret_key": options.secret_key.get_secret_value(), "lease_ttl": "1s"}
    return {"store": store, "s3": {**named, **secret}}


@pytest.mark.parametrize(
    ("place", "relay_has_the_rest"), [("folder", True), ("s3", False), ("s3", True)]
)
def test_nothing_that_was_sealed_is_lost_and_old_checkpoints_stay_valid(
    tmp_path: Path,
    processes: Processes,
    request: pytest.FixtureRequest,
    place: str,
    relay_has_the_rest: bool,
) -> None:
    settings: dict[str, Any] = {"merge_with": "process"}
    if place == "s3":
        server = request.getfixturevalue("s3")
        settings |= s3_settings(server.options(), server.empty_prefix())
    shop, url = sqlite_shop(tmp_path / "shop.db")
    ring_bytes = "8MiB" if relay_has_the_rest else "256KiB"
    system = System(tmp_path, shop, url, processes, ring_bytes=ring_bytes, **settings)
    system.start_relay()
    bootstrap = system.start_bootstrap()
    work(shop, 200)
    wait_for(lambda: is_seeded(system), "the copy is whole")
    consumer = system.start_consumer("follower")
    system.wait_until_equal("follower")
    consumer.kill9()
    wait_for(lambda: all_is_sealed(system), "everything is sealed")
    before = database_of(system)
    if relay_has_the_rest:
        work(shop, 50)  # Some of it is sealed, some is not.
    bootstrap.kill9()
    copied = []
    if place == "folder":
        shutil.copytree(tmp_path / "bootstrap", tmp_path / "copy")
        shutil.rmtree(tmp_path / "copy" / "shop" / "log")
        copied = ["--from", tmp_path / "copy"]
    shutil.rmtree(tmp_path / "bootstrap")
    if relay_has_the_rest:
        work(shop, 100)
    else:
        overwrite(system, before["max"]["scn"])

    command = ("restore", "-c", system.config, *copied)
    dying = {failpoints.VARIABLE: "restore.manifest_switched"}

    def is_killed() -> bool:
        """The lease of the lost machine ends first."""
        return processes.run(*command, environment=dying).returncode == -signal.SIGKILL

    eventually_sync(is_killed, 30, "a restore is killed")
    restored = processes.run(*command)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.startswith("shop: restored up to "), restored.stdout
    bootstrap.start()
    if not relay_has_the_rest:
        wait_for(lambda: bool(database_of(system).get("gaps")), "the gap is recorded")
        (gap,) = database_of(system)["gaps"]
        assert gap["bridged"] and gap["from"]["scn"] >= before["max"]["scn"]
        wait_for(lambda: "repaired_us" in database_of(system)["gaps"][0], "the gap is closed")
    wait_for(lambda: is_seeded(system), "the copy is whole")
    work(shop, 20)
    consumer.start()
    system.start_consumer("fresh")
    for name in ("follower", "fresh"):
        system.wait_until_equal(name)
        system.assert_faultless(name)
    assert bool(database_of(system)["gaps"]) != relay_has_the_rest
    bootstrap.stop()
    refused = processes.run("restore", "-c", system.config)
    assert refused.returncode == 1, "a log with content is never overwritten"
    assert "has content: shop up to" in refused.stderr
