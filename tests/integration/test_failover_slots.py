"""PostgreSQL 17 and later: a standby has a copy of the relay's slot, for after a failover."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import PostgresServer
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.postgres_standby import caught_up, insert, primary_and_standby, promote
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(240)]

COPYING = ("sync_replication_slots=on", "hot_standby_feedback=on")
SLOT = "SELECT failover, synced, NOT temporary FROM pg_replication_slots WHERE slot_name = %s"


@pytest.mark.postgres
async def test_after_a_promotion_the_stream_continues_from_the_copied_slot_without_a_gap(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    if int(postgres.version.split(".")[0]) < 17:
        pytest.skip(f"failover slots: since PostgreSQL 17, this is {postgres.version}")
    folder = tmp_path / "relay" / "shop"
    with primary_and_standby(tmp_path, *COPYING) as (primary, standby):
        primary.execute("CREATE TABLE orders (id INT PRIMARY KEY, v INT)", database="shop")
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = primary.url("shop").replace(f"127.0.0.1:{primary.port}", hosts)
        config = database_config("shop", url, "public.*")

        def count() -> int:
            return len(ring_state(folder).windows)

        def is_copied() -> bool:
            return standby.execute(SLOT, ["databus_shop"]) == [(True, True, True)]

        async with capturing(config, tmp_path / "relay") as fetcher:
            await streaming(fetcher)
            await asyncio.to_thread(insert, primary, 0, 10)
            await eventually(lambda: count() == 10, 90)
            await eventually(is_copied, 90, "the standby has a copy of the slot")
            await asyncio.to_thread(caught_up, primary, standby)
            primary.kill9()
            # The writers begin without waiting for the relay.
            await asyncio.to_thread(promote, standby)
            await asyncio.to_thread(insert, standby, 10, 10)
            await eventually(lambda: count() == 20, 90)
        rows = ring_state(folder).tables["public.orders"]
        assert sorted(key[0] for key in rows) == list(range(20))
