"""Raw windows: every byte once, in whole windows, over broken connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from databus.client import DatabusClient, RawWindows
from databus.common.checkpoint import OnlineCheckpoint, Position
from databus.common.errors import ClockMismatch, ScnTooOld, UnknownSource
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.frame.window_builder import heartbeat
from tests.client.conftest import StartServer
from tests.client.scripted_server import Fault
from tests.client.shop import ORDERS, orders
from tests.support.waiting import PATIENCE


def client(*urls: str, **options: Any) -> DatabusClient:
    return DatabusClient(
        database="shop", relays=list(urls), **{"reconnect_s": 0.001, "seed": 1} | options
    )


async def read(
    source: DatabusClient, windows: int, start: Any = "oldest", **settings: Any
) -> list[RawWindows]:
    parts: list[RawWindows] = []
    stream = source.raw_windows(start, **settings)
    async with asyncio.timeout(10 * PATIENCE):
        async for part in stream:
            parts.append(part)
            if sum(one.window_count for one in parts) >= windows:
                break
    await stream.aclose()
    return parts


async def test_all_windows_come_out_byte_for_byte(scripted: StartServer) -> None:
    made = [orders(scn, scn, scn + 1) for scn in range(1, 20)]
    server = await scripted(*made)
    parts = await read(client(server.url), 19)
    assert b"".join(part.data for part in parts) == b"".join(made)
    assert parts[-1].position == parts[-1].window_end == Position(19, 2)


async def test_schemas_of_all_rows_are_known_when_they_are_handed_out(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1))
    source = client(server.url)
    await read(source, 1)
    assert source.schemas.by_fingerprint(ORDERS.fingerprint) == ORDERS


async def test_a_cut_anywhere_loses_and_doubles_no_byte(scripted: StartServer) -> None:
    made = [orders(scn, 1, 2, 3) for scn in range(1, 6)]
    whole = b"".join(made)
    server = await scripted(*made)
    server.faults = [Fault(cut_after_bytes=count) for count in range(1, len(whole), 97)]
    parts = await read(client(server.url), 5)
    assert b"".join(part.data for part in parts) == whole
    assert len(server.streams()) > 1


async def test_a_large_window_comes_in_parts_and_only_the_last_is_complete(
    scripted: StartServer,
) -> None:
    made = orders(1, *range(2000))
    server = await scripted(made)
    server.faults = [Fault(end_after_bytes=count) for count in (20_000, 40_000, 40_000)]
    parts = await read(client(server.url), 1, part_bytes=10_000)
    assert b"".join(part.data for part in parts) == made
    assert [part.complete for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    for part in parts:
        assert list(iter_frames(part.data))[-1].position == part.position


async def test_heartbeats_move_the_position_and_carry_no_data(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1), heartbeat_s=0.01)
    stream = client(server.url).raw_windows("latest")
    server_moved = Position(7, 0)

    async def first_with_progress() -> RawWindows:
        async for part in stream:
            return part
        raise AssertionError("the stream ended")

    async with asyncio.timeout(10 * PATIENCE):
        task = asyncio.create_task(first_with_progress())
        while not server.streams():
            await asyncio.sleep(0)
        server.append(heartbeat(server_moved, 0))
        part = await task
    await stream.aclose()
    assert (part.data, part.position, part.complete) == (b"", server_moved, True)


async def test_a_position_that_is_gone_raises_scn_too_old(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1), orders(2, 2), orders(3, 3))
    server.evict_to(2)
    with pytest.raises(ScnTooOld):
        await read(client(server.url), 1, start=1)


async def test_windows_before_an_error_are_handed_out_before_it_is_raised(
    scripted: StartServer,
) -> None:
    server = await scripted(orders(1, 1), holds_open=False)
    server.faults = [Fault(), Fault(error=UnknownSource("no table shop.nothing"))]
    seen = []

    async def read_all() -> None:
        async for part in client(server.url).raw_windows("oldest"):
            seen.extend(frame.op for frame in iter_frames(part.data))

    with pytest.raises(UnknownSource, match=r"shop\.nothing"):
        await read_all()
    assert seen == [Op.INSERT, Op.END_OF_WINDOW]


async def test_a_checkpoint_of_another_clock_is_refused(scripted: StartServer) -> None:
    server = await scripted(orders(1, 1))
    with pytest.raises(ClockMismatch, match="another-clock"):
        await read(
            client(server.url), 1, start=OnlineCheckpoint("shop", "another-clock", Position(0))
        )


async def test_reading_continues_at_the_next_relay_in_the_middle_of_a_window(
    scripted: StartServer,
) -> None:
    made = [orders(1, 1, 2, 3), orders(2, 4, 5, 6)]
    first, second = await scripted(*made), await scripted(*made)
    first.faults = second.faults = [Fault(cut_after_bytes=len(made[0]) + 200)]
    parts = await read(client(first.url, second.url), 2)
    assert b"".join(part.data for part in parts) == b"".join(made)
    assert first.streams()
    assert second.streams()
