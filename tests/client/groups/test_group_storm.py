"""Members of a group as processes, killed and stopped beyond their leases, under writers."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from databus.client import DatabaseLeases
from databus.common.errors import UsageError
from databus.common.frame.frame_format import Op
from tests.client.checkpoints.conftest import Application
from tests.client.groups.conftest import database_of
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[3]
PARTITIONS, KEYS, LEASE_S = 6, 40, 3.0
_DELIVERED = (
    "number BIGINT NOT NULL, fence BIGINT NOT NULL, scn BIGINT NOT NULL, seq BIGINT NOT NULL, "
    "id BIGINT NOT NULL, process BIGINT NOT NULL"
)
_COUNTER = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgres": "BIGSERIAL PRIMARY KEY",
    "mariadb": "BIGINT AUTO_INCREMENT PRIMARY KEY",
}


class Members:
    """The processes of a group."""

    def __init__(self, application: Application, relay: LiveRelay, *, puts: bool) -> None:
        self._settings = {
            "driver": application.driver,
            "url": application.url,
            "relay": relay.url,
            "partitions": PARTITIONS,
            "lease_s": LEASE_S,
            "puts": puts,
        }
        self.running: list[asyncio.subprocess.Process] = []
        self._count = 0

    async def start(self) -> None:
        self._count += 1
        settings = json.dumps(self._settings | {"process": self._count})
        arguments = (sys.executable, "-m", "tests.support.group_process", settings)
        self.running.append(await asyncio.create_subprocess_exec(*arguments, cwd=ROOT))

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        process.kill()
        await process.wait()
        self.running.remove(process)

    async def __aenter__(self) -> Members:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.running:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def stop_in_order(self) -> list[int | None]:
        for process in self.running:
            process.terminate()
        return [await process.wait() for process in self.running]


class Writer:
    """Writes windows of few keys, and knows what it has written."""

    def __init__(self, relay: LiveRelay, choice: random.Random) -> None:
        self._relay, self._choice = relay, choice
        self.expected: list[tuple[int, int, int]] = []
        """Of each event: scn, seq, id."""

    def write(self) -> None:
        scn = self.expected[-1][0] + 1 if self.expected else 1
        ids = [self._choice.randrange(KEYS) for _ in range(self._choice.randrange(1, 4))]
        self._relay.append(window(scn, [(Op.UPDATE, ORDERS, number) for number in ids]))
        self.expected += [(scn, seq, number) for seq, number in enumerate(ids)]

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        async def forever() -> None:
            while True:
                self.write()
                await asyncio.sleep(0.02)

        task = asyncio.create_task(forever())
        try:
            yield
        finally:
            task.cancel()


def partition_of(number: int) -> int:
    return xxhash.xxh3_64_intdigest(ORDERS.encode_key((number,))) % PARTITIONS


def delivered(application: Application) -> list[tuple[Any, ...]]:
    return application.execute(
        "SELECT number, fence, scn, seq, id, process FROM delivered ORDER BY counter"
    )


def missing(application: Application, writer: Writer) -> set[tuple[int, int, int]]:
    return set(writer.expected) - {row[2:5] for row in delivered(application)}


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("driver", "puts"),
    [("sqlite", True), ("postgres", True), ("postgres", False), ("mariadb", True)],
)
async def test_nothing_is_lost_and_nothing_of_an_owner_before_comes_after_the_next_ones(
    driver: str, puts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    application = database_of(driver, tmp_path, request)
    application.execute(f"CREATE TABLE delivered (counter {_COUNTER[driver]}, {_DELIVERED})")
    application.execute(
        "CREATE TABLE fences (number BIGINT PRIMARY KEY, fence BIGINT NOT NULL, "
        "writes BIGINT NOT NULL)"
    )
    for number in range(PARTITIONS):
        application.execute(f"INSERT INTO fences VALUES ({number}, 0, 0)")
    leases = DatabaseLeases(application.connect)
    leases.create_tables()
    relay = LiveRelay(tmp_path / "relay", ring_bytes=8 << 20)
    writer = Writer(relay, choice)
    async with relay.served(), Members(application, relay, puts=puts) as members:
        for _ in range(3):
            await members.start()
        async with writer.writing():
            await eventually(lambda: len(delivered(application)) > 20)
            for number in range(6):
                process = choice.choice(members.running)
                if number % 2:
                    await members.kill(process)
                    await members.start()
                else:
                    process.send_signal(signal.SIGSTOP)
                    until_s = time.monotonic() + 1.3 * LEASE_S
                    await eventually(lambda until_s=until_s: time.monotonic() > until_s)
                    process.send_signal(signal.SIGCONT)
                await asyncio.sleep(choice.uniform(0, 0.05))
        # Seldom: the relay and its readers wait meanwhile.
        await eventually(lambda: len(missing(application, writer)) == 0, 60, "all came", poll_s=0.3)
        await eventually(lambda: len(leases.state("storm").incarnations) == 3)
        assert await members.stop_in_order() == [0] * 3
    check(delivered(application), writer.expected, puts=puts)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.processes
async def test_partitions_move_within_the_lease_of_a_kill_and_two_seconds_of_a_leave(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    application = database_of("postgres", tmp_path, request)
    application.execute(f"CREATE TABLE delivered (counter {_COUNTER['postgres']}, {_DELIVERED})")
    leases = DatabaseLeases(application.connect)
    leases.create_tables()

    def members_that_own() -> int:
        try:
            state = leases.state("storm")
        except UsageError:  # no member has joined
            return 0
        owners = {one.incarnation for one in state.owners}
        return len(owners) if owners <= set(state.incarnations.values()) else 0

    relay = LiveRelay(tmp_path / "relay")
    async with relay.served(), Members(application, relay, puts=True) as members:
        for _ in range(3):
            await members.start()
        await eventually(lambda: members_that_own() == 3, 20)
        await members.kill(members.running[0])
        await eventually(lambda: members_that_own() == 2, LEASE_S, "within the lease of a kill")
        members.running[0].terminate()
        assert await members.running.pop(0).wait() == 0
        await eventually(lambda: members_that_own() == 1, 2.0, "two seconds after a leave")
        assert await members.stop_in_order() == [0]


def check(rows: list[tuple[Any, ...]], expected: list[tuple[int, int, int]], *, puts: bool) -> None:
    """What holds for ``delivered`` in the order of its writes."""
    counts = Counter((scn, seq, number) for _, _, scn, seq, number, _ in rows)
    assert counts.keys() == set(expected), "events are lost"
    if puts:
        assert set(counts.values()) == {1}, "events took effect twice"
    fences: dict[int, int] = defaultdict(int)
    newest: dict[tuple[int, int], tuple[int, int]] = {}
    owners: dict[tuple[int, int], int] = {}
    for partition, fence, scn, seq, number, process in rows:
        assert partition == partition_of(number)
        assert fence >= fences[partition], "an owner before wrote after the next one"
        fences[partition] = fence
        assert owners.setdefault((partition, fence), process) == process
        assert newest.get((partition, fence), (0, 0)) < (scn, seq), "an older state after a newer"
        newest[partition, fence] = scn, seq
    assert sum(fences.values()) > PARTITIONS, "no partition has moved"
