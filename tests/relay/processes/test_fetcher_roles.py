"""A fetcher's process in a cluster: it takes another role itself, or is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from databus.common.config import Config, parse
from databus.common.processes.own_clock import own_clock_s
from databus.relay.cluster.database_role import DatabaseRole
from databus.relay.cluster.lease_word import LeaseWord
from databus.relay.processes import supervised_child
from databus.relay.processes.fetcher_process import serve_roles
from databus.relay.processes.process_handover import Handover
from databus.relay.processes.supervised_child import Child
from databus.relay.processes.supervisor import Supervisor
from databus.relay.processes.wakeup import WakeupSender, make_wakeup
from databus.relay.processes.worker_channel import SupervisorChannel
from tests.support.waiting import eventually

CONFIG = """
[relay]
listen = "127.0.0.1:0"
data_dir = "data"

[[database]]
name = "one"
url = "generator://?events_per_second=500"
ring_bytes = "1MiB"
"""
FOLLOWER = DatabaseRole("follower", 3, "b", "http://127.0.0.1:8700")
OTHERS = DatabaseRole("follower", 4, "c", "http://127.0.0.1:8701")
LEADER = DatabaseRole("leader", 5, "a", "http://127.0.0.1:8702")


def configured(tmp_path: Path) -> Config:
    return parse(CONFIG.replace('"data"', f'"{tmp_path}"'))


class Recorded:
    """A fetcher that records what it was made with, and runs until it is stopped."""

    def __init__(self, handover: Handover, wakeup: WakeupSender, made: list[Recorded]) -> None:
        self.handover = handover
        self._wakeup = wakeup
        self._stopped = asyncio.Event()
        self.has_ended = False
        assert not made or made[-1].has_ended, "there are never two that write one ring"
        made.append(self)

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        await self._stopped.wait()
        self._wakeup.wake()
        self._wakeup.close()
        self.has_ended = True

    async def connected(self) -> object:
        return None


@pytest.fixture
def channels() -> Iterator[list[SupervisorChannel]]:
    made: list[SupervisorChannel] = []
    yield made
    for channel in made:
        channel.close()


def child(
    tmp_path: Path, channels: list[SupervisorChannel], role: DatabaseRole = FOLLOWER
) -> Child:
    channels.append(SupervisorChannel())
    handover = Handover(configured(tmp_path), database="one", role=role)
    made = Child("fetcher one", "module", lambda: handover, channel=channels[-1])
    made.role = role
    made.wanted.set()
    return made


async def test_a_follower_becomes_the_leader_in_the_same_process_with_the_lease(
    tmp_path: Path, channels: list[SupervisorChannel]
) -> None:
    made: list[Recorded] = []
    one, lease, wakeup = child(tmp_path, channels), LeaseWord.make(), make_wakeup()
    assert one.channel is not None
    handover = replace(
        one.handover(), channel_fd=os.dup(one.channel.worker_fd), wakeup_fds=(wakeup,)
    )
    serving = asyncio.create_task(serve_roles(handover, lambda h, w: Recorded(h, w, made)))
    await eventually(lambda: made)
    one.take_role(OTHERS, -1)
    await eventually(lambda: len(made) == 2)
    one.take_role(LEADER, os.dup(lease.fd))
    await eventually(lambda: len(made) == 3)
    await eventually(lambda: one.channel is not None and one.channel.taken() == 2)
    assert not one.again.is_set(), "no new process"
    assert [fetcher.handover.role for fetcher in made] == [FOLLOWER, OTHERS, LEADER]
    lease.extend(own_clock_s() + 600)
    assert LeaseWord(os.dup(made[-1].handover.lease_fd)).left_s > 500, "the supervisor's memory"
    assert os.eventfd_read(wakeup) == 2, "each has wake-ups of its own"
    one.take_role(None, -1)
    assert one.again.is_set() and not one.wanted.is_set(), "a leader's process ends"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 10)
    assert made[-1].has_ended


async def test_a_leader_and_a_process_that_does_not_take_its_role_are_replaced(
    tmp_path: Path, channels: list[SupervisorChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_child, "SWITCH_S", 0.01)
    leading = child(tmp_path, channels, LEADER)
    leading.take_role(OTHERS, -1)
    assert leading.again.is_set()
    hung = child(tmp_path, channels)
    hung.take_role(OTHERS, -1)
    assert not hung.again.is_set()
    await asyncio.wait_for(hung.again.wait(), 10)
    dead = child(tmp_path, channels)
    assert dead.channel is not None
    dead.channel.started()  # its end is closed: no process has it
    dead.take_role(OTHERS, -1)
    assert dead.again.is_set()


async def test_a_leader_without_its_lease_is_never_made(
    tmp_path: Path, channels: list[SupervisorChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recorded] = []
    one = child(tmp_path, channels)
    assert one.channel is not None
    monkeypatch.setattr(
        socket, "recv_fds", lambda sock, size, most: (sock.recv(size), [], socket.MSG_CTRUNC, None)
    )
    handover = replace(one.handover(), channel_fd=os.dup(one.channel.worker_fd))
    serving = asyncio.create_task(serve_roles(handover, lambda h, w: Recorded(h, w, made)))
    await eventually(lambda: made)
    one.take_role(LEADER, os.dup(LeaseWord.make().fd))
    await asyncio.wait_for(serving, 10)
    assert [fetcher.handover.role for fetcher in made] == [FOLLOWER]


class Member:
    """A membership that records whether the children run while it gives its leaderships away."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.ran: set[str] = set()
        self.is_closed = False

    def leave(self) -> None:
        self.ran = set(self._supervisor.pids)

    def close(self) -> None:
        self.is_closed = not self._supervisor.pids


@pytest.mark.slow
async def test_a_stopped_relay_leaves_the_cluster_before_its_processes_end(tmp_path: Path) -> None:
    supervisor = Supervisor(configured(tmp_path))
    member = Member(supervisor)
    running = asyncio.create_task(supervisor.run())
    supervisor._member = member
    await eventually(lambda: len(supervisor.pids) == 2, 60)
    supervisor.stop()
    await asyncio.wait_for(running, 60)
    assert member.ran == {"fetcher one", "worker 0"}
    assert member.is_closed
