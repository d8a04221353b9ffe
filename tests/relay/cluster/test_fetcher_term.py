"""A fetcher that leads: nothing after the lease, nothing acknowledged that only it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.processes.own_clock import own_clock_s
from databus.relay.capture.leader_term import SLOT_SEQS, LeaderTerm, newest_mark
from databus.relay.cluster.leadership import Leadership
from databus.relay.cluster.lease_word import LeaseWord
from databus.relay.ring.data_folder import DatabaseFolder, read_leader
from tests.support.scripted_fetcher import ask, ended, frames, opened, reached, running, status_in
from tests.support.scripted_source import ScriptedDatabase
from tests.support.waiting import eventually


@pytest.fixture
def database() -> ScriptedDatabase:
    return ScriptedDatabase()


def acked(database: ScriptedDatabase) -> int:
    return max(database.acks, default=0)


def lease(left_s: float = 600.0, followers: int = 0) -> LeaseWord:
    word = LeaseWord.make()
    word.extend(own_clock_s() + left_s)
    word.count(followers)
    return word


async def test_after_the_lease_nothing_is_appended_or_acknowledged(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    word = lease()
    database.commit((1, "a"))
    async with running(database, tmp_path, leadership=Leadership(7, "relay-a", word)) as fetcher:
        await eventually(reached(fetcher, 1))
        await eventually(lambda: acked(database) == 1)
        assert read_leader(DatabaseFolder(tmp_path / "shop")) == (7, "relay-a")
        word.end()
        before = opened(fetcher).ring.last
        database.commit((2, "b"))
        status = await status_in(tmp_path, "reconnecting")
        assert status["error"]["code"] == "leadership_lost"
        assert status["error"]["epoch"] == 7
        assert opened(fetcher).ring.last == before
        assert acked(database) == 1
        word.extend(own_clock_s() + 600)
        assert word.left_s < 0, "it stays ended"
    async with running(database, tmp_path, leadership=Leadership(9, "relay-a", lease())) as fetcher:
        await eventually(reached(fetcher, 2))
    terms = [newest_mark(frame_format.scan(data, verify=False), memoryview(data))
             for data in (bytes(view.bytes) for view in frames(tmp_path))]  # fmt: skip
    assert [term.epoch for term in terms if term is not None] == [7, 9]


async def test_the_source_is_acknowledged_up_to_what_a_follower_has_on_disk(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    word = lease(followers=1)
    async with running(database, tmp_path, leadership=Leadership(1, "relay-a", word)) as fetcher:
        for number in range(1, 6):
            database.commit((number, "a"))
        await eventually(reached(fetcher, 5))
        await fetcher.make_durable()
        assert acked(database) <= 0
        report = {"scn": 3, "seq": 0, "follower": "relay-b"}
        status, span = await ask(tmp_path, "POST", "/release", report)
        assert (status, span["prev"]["scn"], span["max"]["scn"]) == (200, 0, 5)
        await eventually(lambda: acked(database) == 2)
        complete = opened(fetcher).complete
        await ask(tmp_path, "POST", "/release", {**complete.to_json(), "follower": "relay-b"})
        await eventually(lambda: acked(database) == 5)
        database.commit((6, "a"))
        await eventually(reached(fetcher, 6))
        await fetcher.make_durable()
        assert acked(database) == 5
        word.count(0)
        await eventually(lambda: acked(database) == 6)


async def test_a_dump_comes_after_what_an_earlier_leader_can_have_shown(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    for number in range(1, 4):
        database.commit((number, "a"))
    term = Leadership(2, "relay-b", lease())
    async with running(database, tmp_path, leadership=term) as fetcher:
        await eventually(reached(fetcher, 3))
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["*"]})
        await ended(tmp_path, dump["id"], "completed")
    own = [view.position for view in frames(tmp_path) if view.op == Op.READ]
    assert {at.scn for at in own} == {3}
    assert own[0].seq >= 2 * SLOT_SEQS
    # The leader of another term does not continue what this one has begun.
    term = Leadership(3, "relay-b", lease())
    async with running(database, tmp_path, leadership=term) as fetcher:
        await eventually(reached(fetcher, 3))
        _, again = await ask(tmp_path, "GET", f"/dumps/{dump['id']}")
        assert again["state"] in ("completed", "cancelled")


def test_slots_of_terms_follow_each_other_and_end() -> None:
    complete = Position(9, 1)
    ends = [LeaderTerm(epoch, "a", 9).after(complete) for epoch in range(1, 16)]
    assert ends == sorted(set(ends))
    assert LeaderTerm(1, "a", 9).admits(complete)
    assert not LeaderTerm(1, "a", 10).admits(complete), "before what was shown"
    assert not LeaderTerm(16, "a", 9).admits(ends[-1]), "the slots begin again at another scn"
    assert LeaderTerm(16, "a", 9).admits(Position(10, 1))
    assert LeaderTerm().after(complete) == complete and LeaderTerm().admits(complete)
