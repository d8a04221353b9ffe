"""kill -9 of a sink, and lost connections of its target: the target stays equal to the source."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from databus.client.sinks.sink_kinds import sink_of
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.sinks.mirror_houses import MirrorHouse
from tests.client.sinks.sink_runs import Watched, sink_config
from tests.client.sinks.test_every_sink import expected_changes, read_files
from tests.client.sinks.test_sql_targets import house, recorded_scn, tables_of
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, warm_process

KILLS = {"sqlite": 10, "postgres": 10}
SESSIONS = {"mariadb": 10}
FEW = 3
FILE_KILLS = 10
"""For the other kinds: each kill costs a second or two."""
EVERY = 20
__all__ = ["house"]


@pytest.fixture
async def forked() -> AsyncIterator[WarmProcess]:
    async with warm_process("tests.client.sinks.forked_sinks") as process:
        yield process


def scn_or_0(house: MirrorHouse) -> int:
    if "databus_checkpoints" not in house.tables:
        return 0
    rows = house.ask("SELECT checkpoint FROM databus_checkpoints")
    return recorded_scn(house) if rows and rows[0][0] else 0


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.processes
async def test_kill_9_anywhere_leaves_the_target_equal_to_the_source(
    scripted: StartServer, forked: WarmProcess, house: MirrorHouse
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    kills = KILLS.get(house.kind, FEW)
    made, _ = workload(seed, EVERY * (kills + 1))
    server = await scripted()
    config = {
        "name": "copy", "database": "shop", "relays": [server.url], "start": "oldest",
        "sql": {"url": house.url}, "commit_every": 0, "batch_rows": choice.choice([10, 1000]),
    }  # fmt: skip
    kill_count = 0
    for number in range(kills):
        server.append(*made[number * EVERY : (number + 1) * EVERY])
        begun = scn_or_0(house)
        pid = await forked.start(config)
        if number % 2 and house.kind != "duckdb":
            await eventually(lambda begun=begun: _is_after(house, begun), 30, "it has committed")
        await asyncio.sleep(choice.uniform(0, 0.2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        kill_count += await forked.exit_code() == -signal.SIGKILL
        scn, found = await _at_one_scn(house)
        assert scn >= begun
        assert found == workload(seed, scn)[1], f"after kill {number}"
    assert kill_count == kills
    server.append(*made[kills * EVERY :])
    await Watched(sink_config(server.url), house.mirror()).until_scn(len(made))
    assert tables_of(house) == workload(seed, len(made))[1]


async def _at_one_scn(house: MirrorHouse) -> tuple[int, dict[str, dict[Any, Any]]]:
    """The tables and their SCN; a commit that was sent before the kill may still be made."""
    while True:
        scn, found = scn_or_0(house), tables_of(house)
        if scn_or_0(house) == scn:
            return scn, found


async def _is_after(house: MirrorHouse, scn: int) -> bool:
    return scn_or_0(house) > scn


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.processes
async def test_kill_9_leaves_no_early_mark_and_no_change_twice_in_files(
    scripted: StartServer, forked: WarmProcess, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    made, _ = workload(seed, EVERY * (FILE_KILLS + 1))
    expected = expected_changes(seed, len(made))
    server = await scripted()
    files = {"url": str(tmp_path / "lake"), "format": "ndjson"}
    config = {
        "name": "copy", "database": "shop", "relays": [server.url], "start": "oldest",
        "files": files, "commit_every": 0, "batch_rows": 10,
    }  # fmt: skip
    for number in range(FILE_KILLS):
        server.append(*made[number * EVERY : (number + 1) * EVERY])
        pid = await forked.start(config)
        await eventually((tmp_path / "lake").exists, 30, "it has begun")
        await asyncio.sleep(choice.uniform(0, 0.2))
        os.kill(pid, signal.SIGKILL)
        assert await forked.exit_code() == -signal.SIGKILL
        read_files(tmp_path / "lake", expected)
    server.append(*made[FILE_KILLS * EVERY :])
    last = sink_config(server.url, sql=None, files=files)
    await Watched(last, sink_of(last)).until_scn(len(made))
    found, marks = read_files(tmp_path / "lake", expected)
    assert not list(tmp_path.glob("lake/*/.*.ndjson.new")), "what was not finished is gone"
    assert sorted(found) == sorted(expected)
    assert marks


END_SESSIONS = {
    "postgres": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name = 'databus sink' AND datname = current_database()",
    "mysql": "SELECT id FROM information_schema.processlist "
    "WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}


@pytest.mark.faults
@pytest.mark.processes
@pytest.mark.slow
async def test_a_target_that_ends_its_sessions_loses_nothing(
    scripted: StartServer, house: MirrorHouse
) -> None:
    if house.kind in ("sqlite", "duckdb"):
        pytest.skip("a file has no sessions")
    seed = 5
    kills = SESSIONS.get(house.kind, FEW)
    made, _ = workload(seed, EVERY * kills)
    server = await scripted()
    process = Watched(sink_config(server.url, batch_rows=20), house.mirror())
    task = asyncio.create_task(process.until_scn(len(made)))
    rng = random.Random(seed)
    for number in range(kills):
        server.append(*made[number * EVERY : (number + 1) * EVERY])
        await asyncio.sleep(rng.uniform(0, 0.05))
        await asyncio.to_thread(_end_sessions, house)
        if number % 3 == 0:
            await eventually(
                lambda number=number: _is_after(house, number * EVERY), 30, "it continues"
            )
    await task
    assert process.consumer.counts.rollbacks
    assert tables_of(house) == workload(seed, len(made))[1]


def _end_sessions(house: MirrorHouse) -> None:
    if house.kind == "postgres":
        house.ask(END_SESSIONS["postgres"])
        return
    for (number,) in house.ask(END_SESSIONS["mysql"]):
        with contextlib.suppress(Exception):  # it has ended by itself
            house.ask(f"KILL {number}")
