"""Each process is killed with -9 at random moments of a running workload, five times.

Whatever is killed, and in whatever order: at the end the consumer's tables are the source's, no row
has gone back in time, and no window was seen in part.  A failing seed is in the test's output.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from databus.bootstrap.merging import scratch_folders
from tests.support.processes import DatabusProcess, Processes
from tests.support.system import (
    System,
    Workload,
    children_named,
    server_shop,
    sqlite_shop,
    wait_for,
    wait_s,
)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(400),
]

KILLS = 5
"""Of each process."""
SEED = int(os.environ.get("DATABUS_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)

Killer = Callable[[System, dict[str, DatabusProcess]], None]


def kill_relay(system: System, running: dict[str, DatabusProcess]) -> None:
    running["relay"].kill9()
    running["relay"].start()


def kill_fetcher(system: System, running: dict[str, DatabusProcess]) -> None:
    fetchers = children_named(running["relay"], "databus.relay.processes.fetcher")
    for fetcher in fetchers:
        fetcher.kill()


def kill_worker(system: System, running: dict[str, DatabusProcess]) -> None:
    for worker in children_named(running["relay"], "databus.relay.http.relay_server"):
        worker.kill()


def kill_server(system: System, running: dict[str, DatabusProcess]) -> None:
    """One of two, alternately: its readers continue with the other one."""
    running["server"].kill9()
    running["server"].start()
    running["server"], running["other server"] = running["other server"], running["server"]


def kill_writer(system: System, running: dict[str, DatabusProcess]) -> None:
    running["writer"].kill9()
    running["writer"].start()


def kill_applier(system: System, running: dict[str, DatabusProcess]) -> None:
    running["applier"].kill9()
    running["applier"].start()


def kill_consumer(system: System, running: dict[str, DatabusProcess]) -> None:
    running["consumer"].kill9()
    running["consumer"].start()


KILLERS: dict[str, Killer] = {
    "relay": kill_relay,
    "fetcher": kill_fetcher,
    "worker": kill_worker,
    "server": kill_server,
    "writer": kill_writer,
    "applier": kill_applier,
    "consumer": kill_consumer,
}


def start_all(system: System, processes: Processes, *targets: str) -> dict[str, DatabusProcess]:
    running = {"relay": system.start_relay()}
    if "server" in targets:
        running["other server"] = system.start_another_server("other-server")
    running["writer"] = system.start_bootstrap("--role", "writer", name="writer")
    running["server"] = system.start_bootstrap("--role", "server", name="server")
    every = "1s" if "applier" in targets else "3s"  # A merge takes a processor for a second.
    running["applier"] = processes.start(
        "apply", "-c", system.config, "--every", every, name="applier"
    )
    running["consumer"] = system.start_consumer()
    return running


def kill_again_and_again(system: System, running: dict[str, DatabusProcess], *targets: str) -> None:
    """Each target is killed as often as the others, in any order."""
    print(f"DATABUS_KILL_SEED={SEED}")
    rng = random.Random(f"{targets}-{SEED}")
    victims = list(targets) * KILLS
    rng.shuffle(victims)
    print(*victims)
    with Workload(system.shop):
        wait_for(system.copy, "the consumer has begun", timeout_s=90)
        for victim in victims:
            wait_s(rng.uniform(0.1, 1.2))
            KILLERS[victim](system, running)
        # A consumer that was away for the whole time reads from the bootstrap.
        late = system.start_consumer("late")
        wait_s(1)
    system.wait_until_equal()
    system.assert_faultless()
    system.wait_until_equal("late")
    system.assert_faultless("late")
    assert late.running


def test_each_process_is_killed_five_times_and_nothing_is_lost(
    tmp_path: Path, processes: Processes
) -> None:
    shop, url = sqlite_shop(tmp_path / "shop.db")
    system = System(tmp_path, shop, url, processes, ring_bytes="8MiB")
    targets = sorted(KILLERS)
    running = start_all(system, processes, *targets)
    kill_again_and_again(system, running, *targets)
    running["applier"].kill9()
    done = processes.run("apply", "-c", system.config, "--once", timeout_s=120)
    assert done.returncode == 0, done.stderr
    left = (tmp_path / "bootstrap" / scratch_folders.FOLDER).iterdir()
    assert [path.name for path in left] == [scratch_folders.LOCK]


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        # The relay's own code is the same for all of them; each is killed again beside MariaDB
        # and PostgreSQL in integration/test_real_workloads.py.
        ("mariadb", "relay"),
        ("mysql", "fetcher"),
        ("postgres", "fetcher"),
    ],
)
def test_the_relay_and_its_fetcher_are_killed_on_the_real_servers(
    kind: str,
    target: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    processes: Processes,
) -> None:
    shop, url = server_shop(kind, request.getfixturevalue(f"{kind}_database"))
    system = System(tmp_path, shop, url, processes, ring_bytes="8MiB")
    kill_again_and_again(system, start_all(system, processes, target), target)
