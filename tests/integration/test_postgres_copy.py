"""Many rows of PostgreSQL at one LSN: COPY writes a page of them with one record.

An LSN would name none of these rows: each has an scn, which is its commit's, and a seq of its own,
and both are the same when the transaction is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op
from databus.relay.ring.schema_registry import RegistryReader
from tests.support.config_text import relay_text
from tests.support.fixtures import FreshDatabase
from tests.support.metered_proxy import MeteredProxy
from tests.support.processes import wait_process_gone
from tests.support.relay_process import RelayProcess, ring_frames, ring_position
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(120)]

ROWS = 20_000
NOTE = "n" * 100
SELECTED = f"""
SELECT 1000000 + n, '{NOTE}' FROM generate_series(1, {ROWS}) n ORDER BY md5(n::text)
"""

Write = Callable[[FreshDatabase], list[int]]


def copied(database: FreshDatabase) -> list[int]:
    """COPY of rows, in an order that is not that of their key; their ids."""
    ids = random.Random(1).sample(range(ROWS * 10), ROWS)
    with contextlib.closing(database.server.connect(database.name)) as connection:
        with connection.cursor().copy("COPY many FROM STDIN") as copy:
            for number in ids:
                copy.write_row((number, NOTE))
    return ids


def selected(database: FreshDatabase) -> list[int]:
    """The same with INSERT ... SELECT."""
    database.execute(f"INSERT INTO many {SELECTED}")
    return [int(str(number)) for number, _ in database.execute(SELECTED)]


def written(database: FreshDatabase, write: Write) -> tuple[list[int], int, int]:
    """The ids that ``write`` wrote, at how many LSNs, and how much of it the server sends."""
    with contextlib.closing(database.server.connect(database.name)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT pg_create_logical_replication_slot('probe', 'pgoutput', true)")
        ids = write(database)
        cursor.execute(
            "SELECT count(DISTINCT lsn) FILTER (WHERE get_byte(data, 0) = ascii('I')), "
            "sum(length(data)) FROM pg_logical_slot_peek_binary_changes("
            "'probe', NULL, NULL, 'proto_version', '1', 'publication_names', 'probe')"
        )
        lsn_count, sent_bytes = cursor.fetchone()
        cursor.execute("SELECT pg_drop_replication_slot('probe')")
    return ids, int(lsn_count), int(sent_bytes)


async def kill_among(relay: RelayProcess, proxy: MeteredProxy, folder: Path, some: int) -> None:
    """Let ``some`` bytes through, and kill the fetcher once readers see a part of the window."""
    before = ring_position(folder)
    proxy.grant(some)

    def part() -> Position | None:
        seen = ring_position(folder)  # An idle window has one frame.
        return seen if seen.scn > before.scn and seen.seq else None

    inside = await eventually(part, 60, "a part can be seen")
    assert inside is not None and inside.seq < ROWS - 1
    fetcher = await asyncio.to_thread(relay.fetcher)
    fetcher.kill()
    await asyncio.to_thread(wait_process_gone, fetcher.pid)
    proxy.grant(1 << 40)
    end = Position(inside.scn, ROWS)
    await eventually(lambda: ring_position(folder) >= end, 60, "the window has ended")


def windows_in(folder: Path) -> list[list[int]]:
    """The ids of each window in order; each of its frames has the next seq."""
    registry = RegistryReader(folder / "schemas.jsonl")
    registry.refresh()
    found: list[list[int]] = []
    ids: list[int] = []
    scn = -1
    for view in ring_frames(folder):
        assert view.scn == scn if ids else view.scn > scn
        assert view.seq == len(ids)
        scn = view.scn
        if view.op == Op.END_OF_WINDOW:
            assert view.event_count == len(ids)
            found, ids = [*found, ids], []
        else:
            assert view.op == Op.INSERT
            ids.append(registry.schemas.by_fingerprint(view.schema_fp).decode_key(view.key)["id"])
    assert not ids
    return found


async def test_many_rows_at_one_lsn_have_each_its_position_and_a_kill_among_them_changes_none(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    database = postgres_database
    database.execute("CREATE TABLE many (id bigint PRIMARY KEY, note text)")
    database.execute("CREATE PUBLICATION probe FOR TABLE many")
    folder = tmp_path / "data" / "shop"
    async with MeteredProxy("127.0.0.1", database.server.port) as proxy:
        config = tmp_path / "relay.toml"
        url = database.url.replace(f":{database.server.port}/", f":{proxy.port}/")
        config.write_text(relay_text(url, "public.many", data_dir="data", ring_bytes="8MiB"))
        relay = await asyncio.to_thread(RelayProcess, config)
        try:
            await asyncio.to_thread(relay.ready)
            expected = []
            for write, most_lsns in ((copied, ROWS // 20), (selected, ROWS)):
                proxy.close_off()
                ids, lsn_count, sent_bytes = await asyncio.to_thread(written, database, write)
                assert lsn_count <= most_lsns
                expected.append(ids)
                await kill_among(relay, proxy, folder, 2 * sent_bytes // 3)
        finally:
            proxy.grant(1 << 40)
            await asyncio.to_thread(relay.end)
    windows = [ids for ids in windows_in(folder) if ids]
    assert windows == expected
