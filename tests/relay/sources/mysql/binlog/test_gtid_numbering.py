"""What is requested of a server after a position, by what it reports of its GTIDs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from databus.common.errors import SourcePositionLost
from databus.relay.sources.mysql.binlog import gtid_numbering
from databus.relay.sources.mysql.binlog.gtid_numbering import UuidNumbering
from databus.relay.sources.mysql.gtid.gtid_sets import (
    GtidSet,
    Intervals,
    as_text,
    common,
    encode_gtid_set,
    parse_gtid_set,
    union,
    without,
)
from databus.relay.sources.mysql.gtid.mysql_lineage import MySqlResumeState, decode_resume_state
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings

SERVER = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
SETTINGS = cast(MySqlSettings, SimpleNamespace(name="shop", host="db", port=3306))


def server_with(executed: str, owned: str) -> MySqlConnection:
    """A connection to a server that reports this of its GTIDs."""
    said = {"gtid_executed": f"{SERVER}:{executed}", "gtid_owned": owned, "gtid_purged": ""}

    def row(sql: str) -> tuple[Any, ...]:
        return (said[sql.removeprefix("SELECT @@global.")],)

    return cast(MySqlConnection, SimpleNamespace(row=row))


@pytest.mark.parametrize(
    ("executed", "owned", "missed", "at", "seen"),
    [
        ("1-5", "", "", 5, ((1, 5),)),
        ("1-5", "7#31:6#30", "", 7, ((1, 7),)),
        ("1-5", "7#31:6#30", "", 6, ((1, 6),)),
        ("1-5", "6#30:5#29", "", 6, ((1, 6),)),  # 5 was executed between the two questions
        ("1-3:5", "4#28", "", 5, ((1, 5),)),  # without binlog_order_commits
        ("1-3:5", "4#28", "4", 5, ((1, 3), (5, 5))),  # a session holds 4 for later
    ],
)
def test_what_is_being_committed_has_come(
    executed: str, owned: str, missed: str, at: int, seen: Intervals
) -> None:
    server = server_with(executed, f"{SERVER}:{owned}" if owned else "")
    resume_state = MySqlResumeState(at, missed=f"{SERVER}:{missed}" if missed else "")
    start = UuidNumbering((SERVER,)).dump_after(server, SETTINGS, resume_state)
    assert start.request.seen == encode_gtid_set({SERVER: seen})


def test_a_number_that_no_session_commits_has_not() -> None:
    with pytest.raises(SourcePositionLost, match="has only reached 7"):
        UuidNumbering((SERVER,)).dump_after(
            server_with("1-5", f"{SERVER}:7#31:6#30"), SETTINGS, MySqlResumeState(8)
        )


@pytest.mark.parametrize(
    ("executed", "before", "seen"),
    [
        ("1-5:tag:1-9", "", {SERVER: ((1, 5),)}),
        ("1-5:tag:1-9", ":tag:1-4", {SERVER: ((1, 5),), f"{SERVER}:tag": ((1, 4),)}),
        ("1-5:tag:3-9", ":tag:1-4:8-12", {SERVER: ((1, 5),), f"{SERVER}:tag": ((3, 4), (8, 9))}),
        ("1-5:other:1", ":tag:1-4", {SERVER: ((1, 5),)}),  # no server may be sent more than it has
    ],
)
def test_what_came_under_a_tag_before_the_first_start_is_not_sent(
    executed: str, before: str, seen: GtidSet
) -> None:
    resume_state = MySqlResumeState(5, tagged=f"{SERVER}{before}" if before else "")
    start = UuidNumbering((SERVER,)).dump_after(server_with(executed, ""), SETTINGS, resume_state)
    assert start.request.seen == encode_gtid_set(seen)


def test_a_beginning_has_only_the_tagged_gtids_of_the_followed_servers() -> None:
    other = "4e11fa47-71ca-11e1-9e33-c80aa9429562"
    server = server_with(f"1-5:a:1:b:2-3:5,{other}:1:a:7", "")
    resume_state = UuidNumbering((SERVER,)).beginning(server)
    assert (resume_state.scn, resume_state.missed) == (5, "")
    retained = {f"{SERVER}:a": ((1, 1),), f"{SERVER}:b": ((2, 3), (5, 5))}
    assert parse_gtid_set(resume_state.tagged) == retained
    assert parse_gtid_set(as_text(retained)) == retained
    assert decode_resume_state(resume_state.encode()) == resume_state


def test_a_beginning_has_the_unused_numbers() -> None:
    resume_state = UuidNumbering((SERVER,)).beginning(server_with("3-5:9:12-20", ""))
    assert (resume_state.scn, resume_state.missed) == (20, f"{SERVER}:1-2:6-8:10-11")


def test_a_beginning_waits_for_the_commits_that_are_under_way() -> None:
    """As with binlog_order_commits = OFF: 4 and 7 are in their commits, 9 is free."""
    gtids = [("1-3:5-6:8:10", "4#1:7#2:11#3"), ("1-6:8:10", "7#2"), ("1-8:10-12", "13#1")]
    answers = [*gtids[:1], *gtids]

    def row(sql: str) -> tuple[Any, ...]:
        if sql.endswith("gtid_owned"):
            return (f"{SERVER}:{answers[0][1]}",)
        return (f"{SERVER}:{answers.pop(0)[0]}",)

    resume_state = UuidNumbering((SERVER,)).beginning(
        cast(MySqlConnection, SimpleNamespace(row=row))
    )
    assert (resume_state.scn, resume_state.missed) == (10, f"{SERVER}:9-9")
    assert not answers


def test_a_beginning_does_not_wait_for_a_session_that_has_reserved_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gtid_numbering, "_COMMITTED_WITHIN_S", 0.02)
    resume_state = UuidNumbering((SERVER,)).beginning(server_with("1-3:5", f"{SERVER}:4#28"))
    assert (resume_state.scn, resume_state.missed) == (5, f"{SERVER}:4-4")


def test_out_of_order_numbers_are_requested_until_they_are_read() -> None:
    by_uuid = UuidNumbering((SERVER,))
    resume_state = MySqlResumeState(20, missed=f"{SERVER}:6-8:10-11")
    for executed, seen in (("1-5:9:12-20", "1-5:9:12-20"), ("1-7:9-25", "1-5:9:12-20")):
        start = by_uuid.dump_after(server_with(executed, ""), SETTINGS, resume_state)
        assert start.request.seen == encode_gtid_set(parse_gtid_set(f"{SERVER}:{seen}"))


@pytest.mark.parametrize(
    ("intervals", "others", "left"),
    [
        ("1-9", "3-4", "1-2:5-9"),
        ("1-9", "1-4", "5-9"),
        ("1-9", "9-20", "1-8"),
        ("1-9:12-20", "5-15:18", "1-4:16-17:19-20"),
        ("1-9", "1-9", ""),
        ("1-9", "", "1-9"),
    ],
)
def test_numbers_without_others(intervals: str, others: str, left: str) -> None:
    def read(text: str) -> Intervals:
        return parse_gtid_set(f"s:{text}").get("s", ()) if text else ()

    assert without(read(intervals), read(others)) == read(left)
    both = common(read(intervals), read(others))
    assert union(read(left), both) == read(intervals)
