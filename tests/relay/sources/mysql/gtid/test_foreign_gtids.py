"""Groups of MariaDB's other domains: what was read of them, by the decoder and by the kernel."""

from __future__ import annotations

import struct

import pytest

from databus.common.errors import FormatError
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.binlog.fast_path import FastPath
from databus.relay.sources.mysql.gtid.foreign_gtids import ForeignGtids, read_gtid_list
from databus.relay.sources.mysql.protocol.packet_buffer import PacketBuffer, packets_of
from tests.relay.sources.mysql.gtid.test_promotion import (
    MARIADB_GTID,
    XID,
    change,
    event,
    insert,
    mariadb_decoder,
    mariadb_transaction,
    query,
    rows_in,
    table_map,
)

GTID_LIST = 163


def in_domain(domain: int, seq_no: int, *content: memoryview, flags: int = 0) -> list[memoryview]:
    gtid = event(MARIADB_GTID, struct.pack("<QIB6x", seq_no, domain, flags))
    return [gtid, *content, event(XID, bytes(8))]


def gtid_list(*gtids: tuple[int, int, int]) -> memoryview:
    return event(
        GTID_LIST,
        struct.pack("<I", len(gtids)) + b"".join(struct.pack("<IIQ", *gtid) for gtid in gtids),
    )


def private(number: int) -> list[memoryview]:
    """A change of a table that is not captured."""
    mapped = table_map("x").tobytes().replace(b"\4shop", b"\4ship")
    return [event(19, mapped[19:-4]), insert("x", number)]


def run(reader: BinlogDecoder, *groups: list[memoryview], with_kernel: bool) -> int:
    """Returns how many events were left to the decoder."""
    packets, count = PacketBuffer("here"), 0
    packets.hold(bytearray().join(packets_of(b"\0", one) for group in groups for one in group))
    fast = FastPath(reader) if with_kernel else None
    while True:
        if fast is not None and (need := fast.run(packets)):
            fast.make_room(need)
            continue
        one = packets.next_event()
        if one is None:
            return count
        assert reader.feed(one)
        packets.used()
        count += 1


@pytest.mark.parametrize("with_kernel", [True, False])
def test_a_captured_table_that_another_domain_changes_is_suspended(with_kernel: bool) -> None:
    reader = mariadb_decoder()
    groups = [
        mariadb_transaction(1, *change(1), table_map("u"), insert("u", 7)),
        in_domain(7, 1, *private(1)),
        in_domain(7, 2, *change(2)),
        mariadb_transaction(2, *change(3), table_map("u"), insert("u", 8)),
    ]
    run(reader, *groups, with_kernel=with_kernel)
    assert rows_in(reader) == [(1, 1), (1, 7), (2, 8)]
    suspensions = reader.suspended.suspensions
    assert (list(suspensions), suspensions["shop.t"].since_scn) == (["shop.t"], 1)
    assert suspensions["shop.t"].why.startswith(
        "GTID 7-3-2 changes rows of shop.t; the relay follows"
    )
    assert reader.resume_state().foreign == "7-3-2"
    # Read again behind them, they suspend nothing.
    again = mariadb_decoder()
    again.progress.foreign = ForeignGtids(reader.resume_state().foreign or "")
    run(again, *groups, with_kernel=with_kernel)
    assert (rows_in(again), dict(again.suspended.suspensions)) == (
        [(1, 1), (1, 7), (2, 3), (2, 8)],
        {},
    )


def test_the_kernel_takes_groups_of_another_domain_whose_tables_are_not_captured() -> None:
    reader = mariadb_decoder()
    groups = [in_domain(7, number, *private(number)) for number in range(1, 1001)]
    assert run(reader, *groups, with_kernel=True) == 2  # the first GTID and the first map
    assert (reader.progress.foreign_groups, reader.resume_state().foreign) == (1000, "7-3-1000")


def test_a_statement_of_another_domain_suspends_what_it_changes() -> None:
    reader = mariadb_decoder()
    alter = [event(MARIADB_GTID, struct.pack("<QIB6x", 1, 7, 1)), query("TRUNCATE u")]
    run(reader, alter, with_kernel=True)
    assert reader.suspended.suspensions.keys() == {"shop.u"}


def test_groups_that_lie_before_the_file_suspend_every_captured_table() -> None:
    reader = mariadb_decoder()
    reader.progress.foreign = ForeignGtids("7-3-5,8-1-2")
    run(reader, [gtid_list((0, 3, 9), (7, 3, 5), (9, 1, 4))], with_kernel=True)
    assert reader.suspended.suspensions == {}  # of domain 9 nothing has ever come
    run(reader, [gtid_list((7, 3, 6))], with_kernel=True)
    assert reader.suspended.suspensions.keys() == {"shop.t", "shop.u"}
    assert "groups 7-3-6 to 6 of another domain" in reader.suspended.suspensions["shop.t"].why


def test_a_domain_that_was_deleted_from_the_binlog_counts_from_one_again() -> None:
    reader = mariadb_decoder()
    run(reader, in_domain(7, 5, *private(1)), with_kernel=True)
    run(reader, [gtid_list((0, 3, 9))], in_domain(7, 1, *change(2)), with_kernel=True)
    assert reader.suspended.suspensions.keys() == {"shop.t"}


def test_a_list_of_gtids_is_read_or_refused() -> None:
    body = memoryview(bytes(gtid_list((7, 3, 5), (8, 1, 2)))[19:-4])
    assert read_gtid_list(body) == {(7, 3): 5, (8, 1): 2}
    for size in range(len(body)):
        with pytest.raises(FormatError, match="an event of type 163 is damaged"):
            mariadb_decoder().feed(event(GTID_LIST, bytes(body[:size])))


def test_a_row_of_a_table_that_could_not_be_seen_when_it_took_its_name_suspends_it() -> None:
    reader = mariadb_decoder()
    reader.known.invisible = {"shop.t"}
    groups = mariadb_transaction(1, *change(1), table_map("u"), insert("u", 7))
    run(reader, groups, mariadb_transaction(2, *change(2)), with_kernel=True)
    assert (rows_in(reader), list(reader.suspended.suspensions)) == ([(1, 7)], ["shop.t"])
