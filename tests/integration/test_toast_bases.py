"""Large values that PostgreSQL does not log again, in a base that real applies have made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run
from databus.client import DatabusClient
from databus.client.testing import Mirror
from databus.common.frame.frame_format import Flag
from tests.bootstrap.model import frames_of
from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes
from tests.support.system import relay_and_bootstrap
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 4
BODY_BYTES = 20_000


@pytest.mark.parametrize("merge_with", [pytest.param("spark", marks=pytest.mark.spark), "process"])
async def test_a_base_grows_with_the_rows_and_not_with_updates_that_leave_large_values_alone(
    merge_with: str, postgres_database: FreshDatabase, processes: Processes, tmp_path: Path
) -> None:
    database = postgres_database
    database.execute("CREATE TABLE pages (id int PRIMARY KEY, body text, n int)")
    database.execute("ALTER TABLE pages ALTER body SET STORAGE EXTERNAL")
    bodies = {number: str(number) * BODY_BYTES for number in range(ROWS)}
    for number, body in bodies.items():
        database.execute(f"INSERT INTO pages VALUES ({number}, '{body}', 0)")
    relay_url, url = relay_and_bootstrap(
        tmp_path, processes, database.url, "public.*",
        segment_every="1s", apply_every="1s", run_grace="0s",
        merge_with=merge_with, spark_master="local[1]",
    )  # fmt: skip
    store = Store(tmp_path / "bootstrap" / "shop")

    async def base_after(*statements: str) -> Run:
        """The base that has these statements."""
        for statement in statements:
            database.execute(statement)
        (row,) = database.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        database.execute("UPDATE pages SET n = n")
        await eventually(
            lambda: store.exists() and store.read().snapshot.scn >= int(str(row[0])),
            150,
            "a base",
            poll_s=0.2,
        )
        found = store.read().base
        assert found is not None
        return found

    first = await base_after()
    update = "UPDATE pages SET n = n + 1"
    second = await base_after(*[update] * 50)
    third = await base_after(
        "ALTER TABLE pages ADD title text",
        *[f"{update}, title = 'title {number}'" for number in range(50)],
    )
    for base in (first, second, third):
        assert base.rows == ROWS
        assert base.frame_bytes < ROWS * (BODY_BYTES + 1000)
    frames = frames_of(store, third)
    assert not any(one.flags & Flag.PARTIAL for one in frames)
    assert any(run.partial_rows for run in store.read().chain), "updates did lack the value"

    expected = {
        (number,): {"id": number, "body": body, "n": 100, "title": "title 49"}
        for number, body in bodies.items()
    }
    mirror = Mirror()
    client = DatabusClient(
        database="shop",
        relays=[relay_url],
        bootstraps=[url],
        consumer=mirror,
        start="bootstrap",
    )
    running = asyncio.create_task(client.serve())
    try:
        await eventually(lambda: not mirror.differences({"public.pages": expected}), 90)
        assert mirror.stale == []
    finally:
        client.stop()
        await running
