"""Whose transactions move MySQL's clock, and tables that are suspended: on events made by hand."""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import replace

import pytest

from databus.common.errors import SourcePositionLost
from databus.common.frame.frame_format import iter_frames
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.binlog.mysql_decoder import MySqlDecoder
from databus.relay.sources.mysql.gtid.gtid_sets import scn_of, seen_at
from databus.relay.sources.mysql.gtid.mysql_lineage import (
    LineageMark,
    MySqlResumeState,
    RestoredState,
    decode_resume_state,
)
from databus.relay.sources.mysql.gtid.promotion import Promotion
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings
from databus.relay.sources.mysql.rows.charsets import Charset, Charsets
from databus.relay.sources.mysql.statements import Knowledge
from databus.relay.sources.mysql.tables.mysql_tables import MySqlTable, MySqlTableColumn
from databus.relay.sources.suspended_tables import SuspendedTables, TableSuspension
from tests.support.mariadb_stream import mariadb_config

OLD, NEW = (str(uuid.UUID(int=number)) for number in (1, 2))
CHARSETS = Charsets({45: Charset("utf8mb4", 4), 63: Charset("binary", 1)})
SETTINGS = read_settings(mariadb_config("mysql://u:p@h/shop", "shop.*"))
CATALOGUE = {
    f"shop.{name}": MySqlTable(
        "shop", name, "InnoDB", (MySqlTableColumn("id", "int", False, "", ""),), ("id",)
    )
    for name in ("t", "u")
}
MYSQL_GTID, MARIADB_GTID, XID, QUERY, HEARTBEAT, TABLE_MAP, WRITE_ROWS = 33, 162, 16, 2, 27, 19, 23


def event(kind: int, body: bytes) -> memoryview:
    length = 19 + len(body) + 4
    plain = struct.pack("<IBIIIH", 1_700_000_000, kind, 3, length, 1000, 0) + body
    return memoryview(plain + struct.pack("<I", zlib.crc32(plain)))


def query(statement: str) -> memoryview:
    return event(QUERY, struct.pack("<IIBHH", 1, 0, 4, 0, 0) + b"shop\0" + statement.encode())


def table_map(name: str, *, names: bytes = b"\4\3\2id", key: bytes = b"\x08\1\0") -> memoryview:
    body = struct.pack("<Q", ord(name))[:6] + b"\1\0" + b"\4shop\0" + b"\1" + name.encode() + b"\0"
    return event(TABLE_MAP, body + b"\1\3" + b"\0" + b"\0" + b"\1\1\0" + names + key)


def insert(name: str, *ids: int, present: bytes = b"\xff") -> memoryview:
    rows = b"".join(b"\0" + struct.pack("<i", one) for one in ids)
    return event(WRITE_ROWS, struct.pack("<Q", ord(name))[:6] + b"\1\0\1" + present + rows)


def transaction(server: str, number: int, *content: memoryview) -> list[memoryview]:
    gtid = b"\1" + uuid.UUID(server).bytes + struct.pack("<q", number)
    return [event(MYSQL_GTID, gtid), query("BEGIN"), *content, event(XID, bytes(8))]


def change(row: int) -> list[memoryview]:
    return [table_map("t"), insert("t", row)]


def mysql_decoder(
    after_scn: int, promotion: Promotion, *, seen_scn: int | None = None
) -> MySqlDecoder:
    made = MySqlDecoder(SETTINGS, CHARSETS, CATALOGUE, (OLD, NEW), after_scn, promotion)
    made.cursor.checksums = True
    made.progress.last_seq_no = after_scn if seen_scn is None else seen_scn
    made.progress.ends = (made.progress.last_seq_no,)
    return made


def feed(reader: BinlogDecoder, *groups: Iterable[memoryview]) -> None:
    for group in groups:
        for one in group:
            if not reader.feed(one):
                reader.known.lookahead = replace(reader.known.lookahead, knowledge=Knowledge())
                assert reader.feed(one, fresh=True)


# -- promotions


def test_what_a_replica_writes_for_itself_moves_nothing() -> None:
    reader = mysql_decoder(5, Promotion())
    feed(reader, transaction(NEW, 1), transaction(OLD, 6, *change(1)), transaction(NEW, 2))
    assert reader.resolved == 6
    feed(reader, transaction(OLD, 7))
    assert (reader.resolved, reader.progress.ends) == (7, (7, 2))


def test_its_first_captured_change_begins_its_generation_and_ends_the_one_before() -> None:
    reader = mysql_decoder(5, Promotion())
    feed(reader, transaction(NEW, 1), transaction(OLD, 6), transaction(NEW, 2, *change(1)))
    assert reader.resolved == scn_of(1, 2)
    assert reader.resume_state().ends == (6, 2)
    with pytest.raises(SourcePositionLost, match="order in which the servers have written"):
        feed(reader, transaction(OLD, 7))


def test_once_nothing_of_the_server_before_can_follow_every_transaction_counts() -> None:
    promotion = Promotion(ended_scn=6)
    # The last one that is known is read again, behind what its successor has written for itself.
    reader = mysql_decoder(6, promotion, seen_scn=5)
    reader.progress.expected = LineageMark(6, 3, 1_700_000_000_000_000)
    feed(reader, transaction(NEW, 1), transaction(OLD, 6))
    assert reader.resolved == 6
    feed(reader, transaction(NEW, 2))
    assert reader.resolved == scn_of(1, 2)
    assert reader.resume_state().ends == (6, 2)


def test_a_promotion_that_is_learned_of_later_counts_from_the_next_heartbeat_on() -> None:
    promotion = Promotion()
    reader = mysql_decoder(5, promotion)
    feed(reader, transaction(NEW, 1), transaction(OLD, 6))
    heartbeat = [event(HEARTBEAT, b"binlog.000001")]
    feed(reader, heartbeat)
    assert reader.resolved == 6
    promotion.ended_scn = 6
    feed(reader, heartbeat)
    assert reader.resolved == scn_of(1, 1)


def test_a_server_that_wrote_again_is_sent_and_not_taken_for_known() -> None:
    executed = {OLD: ((1, 9),), NEW: ((1, 4),)}
    here = scn_of(1, 4)
    assert seen_at(executed, {}, (OLD, NEW), here)[OLD] == ((1, 9),)
    assert seen_at(executed, {}, (OLD, NEW), here, (6, 4))[OLD] == ((1, 6),)


# -- tables that stop


def mariadb_transaction(seq_no: int, *content: memoryview) -> list[memoryview]:
    gtid = event(MARIADB_GTID, struct.pack("<QIB6x", seq_no, 0, 0))
    return [gtid, *content, event(XID, bytes(8))]


def mariadb_decoder(after_scn: int = 0) -> BinlogDecoder:
    made = BinlogDecoder(SETTINGS, CHARSETS, CATALOGUE, 0, after_scn)
    made.cursor.checksums = True
    return made


def rows_in(reader: BinlogDecoder) -> list[tuple[int, int]]:
    """The scn and the id of every row that was packed."""
    data, _ = reader.take()
    return [
        (view.scn, bytes(view.key)[0] >> 1) for view in iter_frames(data) if not view.is_control
    ]


@pytest.mark.parametrize(
    ("hidden", "why"),
    [
        ([table_map("t"), insert("t", 2, present=b"\xfe")], "binlog_row_image other than FULL"),
        ([query("UPDATE t SET id = 2")], "by a statement instead of rows"),
    ],
)
def test_a_table_is_suspended_at_an_uncertain_change_and_the_others_continue(
    hidden: list[memoryview], why: str
) -> None:
    reader = mariadb_decoder()
    other = [table_map("u"), insert("u", 7)]
    feed(reader, mariadb_transaction(1, *change(1)), mariadb_transaction(2, *hidden, *other))
    feed(reader, mariadb_transaction(3, *change(3), *other))
    assert rows_in(reader) == [(1, 1), (2, 7), (3, 7)]
    suspensions = reader.suspended.suspensions
    assert (list(suspensions), suspensions["shop.t"].since_scn) == (["shop.t"], 2)
    assert why in suspensions["shop.t"].why
    # Restarted inside of it: up to the suspension the rows are the same.
    again = mariadb_decoder()
    again.suspended = SuspendedTables(reader.resume_state().suspended)
    feed(again, mariadb_transaction(1, *change(1)), mariadb_transaction(2, *hidden, *other))
    feed(again, mariadb_transaction(3, *change(3)))
    assert rows_in(again) == [(1, 1), (2, 7)]
    again.suspended.request_resume("shop.t")
    again.resume_requested()
    feed(again, mariadb_transaction(4, *change(4)))
    assert (rows_in(again), again.suspended.warnings()) == ([(4, 4)], [])


def test_suspensions_are_stored_in_the_resume_state_and_restored_at_any_position() -> None:
    suspended = {"shop.t": TableSuspension(7, "no key")}
    text = MySqlResumeState(9, None, None, (1, 2), suspended).encode()
    assert decode_resume_state(text).suspended == suspended
    assert (
        RestoredState(12, None, decode_resume_state(text)).resume_state(12).suspended == suspended
    )
    assert RestoredState(8, None, decode_resume_state(text)).resume_state(8).suspended == suspended
    assert decode_resume_state('{"scn": 1, "mark": null, "prepared": null}').suspended == {}
