"""Wake-ups by eventfd, and the short name of a deep socket."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from databus.common.errors import StoreError
from databus.relay.processes.wakeup import WakeupReceiver, WakeupSender, make_wakeup
from databus.relay.ring.data_folder import DatabaseFolder, SocketName
from tests.support.waiting import PATIENCE


async def test_every_task_that_waits_is_woken_by_one_commit() -> None:
    fd = make_wakeup()
    receiver, sender = WakeupReceiver(fd), WakeupSender((os.dup(fd),))
    waits = [asyncio.create_task(receiver.wait(5 * PATIENCE)) for _ in range(3)]
    await asyncio.sleep(0)
    sender.wake()
    assert await asyncio.gather(*waits) == [True, True, True]
    receiver.close()
    sender.close()


async def test_a_wait_without_a_commit_ends_on_time_and_reports_it() -> None:
    receiver = WakeupReceiver(make_wakeup())
    assert await receiver.wait(0.01) is False
    receiver.close()


async def test_a_commit_between_the_look_and_the_wait_is_not_missed() -> None:
    fd = make_wakeup()
    receiver, sender = WakeupReceiver(fd), WakeupSender((os.dup(fd),))
    sender.wake()
    assert await receiver.wait(5 * PATIENCE) is True
    receiver.close()
    sender.close()


async def test_closing_wakes_every_waiter() -> None:
    receiver = WakeupReceiver(make_wakeup())
    wait = asyncio.create_task(receiver.wait())
    await asyncio.sleep(0)
    receiver.close()
    assert await wait is True


async def test_a_receiver_that_is_restarted_for_long_does_not_block_the_sender() -> None:
    fd = make_wakeup()
    os.eventfd_write(fd, 2**64 - 2)
    sender = WakeupSender((fd,))
    sender.wake()
    sender.close()


async def test_a_socket_in_a_deep_folder_is_reached_by_a_short_name(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    socket = DatabaseFolder.of(deep.parent, deep.name).socket
    with SocketName(socket) as name:
        assert len(name.path) < 100
        served = asyncio.Event()

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.set()
            writer.close()

        server = await asyncio.start_unix_server(serve, name.path)
        with SocketName(socket) as other:
            _, writer = await asyncio.open_unix_connection(other.path)
            await asyncio.wait_for(served.wait(), 5 * PATIENCE)
            writer.close()
            await writer.wait_closed()
        server.close()
        await server.wait_closed()


def test_a_socket_in_a_folder_that_is_missing_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has the fetcher run"):
        SocketName(tmp_path / "missing" / "fetcher.sock")
