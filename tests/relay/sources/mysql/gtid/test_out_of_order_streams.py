"""GTIDs of MySQL that come behind larger ones: on events made by hand."""

from __future__ import annotations

import re

import pytest

from databus.relay.sources.mysql.binlog.mysql_decoder import MySqlDecoder
from databus.relay.sources.mysql.gtid.mysql_lineage import decode_resume_state
from databus.relay.sources.mysql.gtid.promotion import Promotion
from tests.relay.sources.mysql.gtid.test_promotion import (
    OLD,
    change,
    feed,
    mysql_decoder,
    query,
    rows_in,
    transaction,
)

LATE = rf"GTID {OLD}:7[ ,].*it comes after larger numbers.*replica_preserve_commit_order = ON"


def reader_at(after_scn: int) -> MySqlDecoder:
    reader = mysql_decoder(after_scn, Promotion())
    reader.progress.ends = (after_scn,)
    return reader


def test_an_out_of_order_number_without_captured_changes_is_passed_over() -> None:
    reader = reader_at(5)
    feed(reader, transaction(OLD, 6, *change(1)), transaction(OLD, 9, *change(2)))
    assert reader.resume_state().missed == f"{OLD}:7-8"
    feed(reader, transaction(OLD, 7, query("SAVEPOINT one")), transaction(OLD, 10))
    assert rows_in(reader) == [(6, 1), (9, 2)]
    assert (reader.resolved, reader.resume_state().missed) == (10, f"{OLD}:8-8")
    feed(reader, transaction(OLD, 8))
    assert reader.resume_state().missed == ""


@pytest.mark.parametrize(
    "content", [change(3), [query("ALTER TABLE t ADD COLUMN v INT NOT NULL DEFAULT 3")]]
)
def test_an_out_of_order_number_suspends_the_captured_table_that_it_changes(
    content: list[memoryview],
) -> None:
    reader = reader_at(5)
    feed(reader, transaction(OLD, 6), transaction(OLD, 9, *change(2)))
    before = reader.resume_state()
    assert before.missed == f"{OLD}:7-8"
    for again in (reader, reader_at(9)):  # Killed before the resume state was stored: once more.
        again.continue_from(decode_resume_state(before.encode()))
        feed(again, transaction(OLD, 7, *content), transaction(OLD, 10, *change(4)))
        assert again.suspended.suspensions.keys() == {"shop.t"}
        stop = again.suspended.suspensions["shop.t"]
        assert stop.since_scn == 9 and re.match(LATE, stop.why)
        assert again.resume_state().missed == f"{OLD}:8-8"
    assert rows_in(reader) == [(9, 2)]


def test_numbers_missed_after_the_resume_state_are_noted_when_they_are_read_again() -> None:
    # Killed after the ring's sync at 9, and before that of the resume state, which is of 5.
    reader = reader_at(9)
    reader.progress.last_seq_no = 5
    feed(reader, transaction(OLD, 6, *change(1)), transaction(OLD, 9, *change(2)))
    feed(reader, transaction(OLD, 10, *change(3)))
    assert rows_in(reader) == [(10, 3)]
    assert reader.resume_state().missed == f"{OLD}:7-8"


def test_numbers_that_are_left_free_before_the_first_of_all_may_come_out_of_order_too() -> None:
    reader = reader_at(0)
    feed(reader, transaction(OLD, 3, *change(1)))
    assert reader.resume_state().missed == f"{OLD}:1-2"
