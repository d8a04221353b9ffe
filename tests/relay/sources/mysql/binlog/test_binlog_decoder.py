"""The MariaDB decoder and its packets, on events made by hand: what no healthy server sends."""

from __future__ import annotations

import dataclasses
import ipaddress
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.errors import (
    ConfigError,
    FormatError,
    SourcePositionLost,
    SourceUnavailable,
    UnsupportedChange,
)
from databus.common.frame.frame_format import Op, iter_frames
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.kernels.mysql_value_kernels import put_inet4, put_inet6
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings, read_settings
from databus.relay.sources.mysql.protocol.packet_buffer import SLACK_BYTES, PacketBuffer
from databus.relay.sources.mysql.rows.charsets import Charset, Charsets
from databus.relay.sources.mysql.rows.column_readers import catalogue_type, column_of, inet6_text
from databus.relay.sources.mysql.statements import Statement
from databus.relay.sources.mysql.tables.inferred_columns import LookaheadResult
from databus.relay.sources.mysql.tables.mysql_tables import MySqlTable, MySqlTableColumn
from tests.support.mariadb_stream import mariadb_config

GTID, XID, QUERY, ROTATE, TABLE_MAP, WRITE_ROWS = 162, 16, 2, 4, 19, 23
CHARSETS = Charsets({45: Charset("utf8mb4", 4), 63: Charset("binary", 1)})
CATALOGUE = {
    "shop.t": MySqlTable(
        "shop", "t", "InnoDB", (MySqlTableColumn("id", "int", False, "", ""),), ("id",)
    )
}


def settings(**options: str | int | float | bool) -> MySqlSettings:
    return read_settings(mariadb_config("mariadb://u:p@h/shop", "shop.*", options=options))


def decoder(after_scn: int = 0) -> BinlogDecoder:
    made = BinlogDecoder(settings(), CHARSETS, CATALOGUE, 1, after_scn)
    made.cursor.checksums = True
    made.cursor.file = "binlog.000007"
    return made


def event(kind: int, body: bytes, end_offset: int = 1000) -> memoryview:
    length = 19 + len(body) + 4
    plain = struct.pack("<IBIIIH", 1_700_000_000, kind, 3, length, end_offset, 0) + body
    return memoryview(plain + struct.pack("<I", zlib.crc32(plain)))


def gtid(seq_no: int, domain: int = 1, flags: int = 0) -> memoryview:
    return event(GTID, struct.pack("<QIB6x", seq_no, domain, flags))


def table_map() -> memoryview:
    names = b"\4\3\2id"
    key = b"\x08\1\0"
    body = struct.pack("<Q", 5)[:6] + b"\1\0" + b"\4shop\0" + b"\1t\0" + b"\1\3" + b"\0" + b"\0"
    return event(TABLE_MAP, body + b"\1\1\0" + names + key)


def insert(*ids: int) -> memoryview:
    rows = b"".join(b"\0" + struct.pack("<i", one) for one in ids)
    return event(WRITE_ROWS, struct.pack("<Q", 5)[:6] + b"\1\0\1\xff" + rows)


def query(statement: str) -> memoryview:
    return event(QUERY, struct.pack("<IIBHH", 1, 0, 4, 0, 0) + b"shop\0" + statement.encode())


def test_a_group_makes_one_window_and_moves_resolved_at_its_end() -> None:
    reader = decoder()
    for one in (gtid(5), table_map(), insert(1, 2)):
        assert reader.feed(one)
    assert (reader.resolved, reader.pending_bytes) == (0, 0)
    reader.feed(event(XID, bytes(8)))
    data, schemas = reader.take()
    assert reader.resolved == 5
    assert data
    assert [schema.source for schema in schemas] == ["shop.t"]


def test_a_group_that_a_crash_cut_off_is_forgotten_and_its_number_used_again() -> None:
    reader = decoder()
    for one in (gtid(5), table_map(), insert(1)):
        reader.feed(one)
    reader.feed(event(ROTATE, struct.pack("<Q", 4) + b"binlog.000008"))
    assert reader.pending_bytes == 0
    for one in (gtid(5), table_map(), insert(9), event(XID, bytes(8))):
        reader.feed(one)
    assert reader.resolved == 5
    whole = decoder()
    for one in (gtid(5), table_map(), insert(9), event(XID, bytes(8))):
        whole.feed(one)
    assert reader.take()[0] == whole.take()[0]


def test_after_the_end_of_a_file_the_position_is_the_start_of_the_next() -> None:
    reader = decoder()
    reader.feed(gtid(5))
    assert (reader.cursor.file, reader.cursor.offset) == ("binlog.000007", 1000)
    reader.feed(event(ROTATE, struct.pack("<Q", 4) + b"binlog.000008", end_offset=1040))
    assert (reader.cursor.file, reader.cursor.offset) == ("binlog.000008", 4)


def test_a_number_that_goes_back_is_refused() -> None:
    reader = decoder()
    reader.feed(gtid(5))
    reader.feed(event(XID, bytes(8)))
    with pytest.raises(SourcePositionLost, match=r"GTID 4 of domain 1 comes after 5"):
        reader.feed(gtid(4))


def test_an_event_whose_length_or_checksum_is_wrong_is_refused_with_its_position() -> None:
    good = bytes(gtid(5))
    flipped = good[:20] + bytes([good[20] ^ 1]) + good[21:]
    with pytest.raises(FormatError, match=r"binlog binlog.000007 at 958: the checksum"):
        decoder().feed(memoryview(flipped))
    with pytest.raises(FormatError, match=r"has length 42"):
        decoder().feed(memoryview(good + b"\0"))


@pytest.mark.parametrize(
    ("engine", "ahead", "statement", "rows", "suspended"),
    [
        ("InnoDB", "", "ROLLBACK", 0, False),
        ("MyISAM", "", "ROLLBACK", 2, False),
        ("MyISAM", "ALTER TABLE t ENGINE = MyISAM", "ROLLBACK", 0, True),
        ("MyISAM", "", "ROLLBACK TO `s`", 2, False),
        ("InnoDB", "", "ROLLBACK TO `s`", 1, False),
        ("InnoDB", "", "ROLLBACK TO `other`", 2, True),
    ],
)
def test_rows_before_a_rollback_stay_as_in_the_tables_engine_or_the_table_is_suspended(
    engine: str, ahead: str, statement: str, rows: int, suspended: bool
) -> None:
    reader = decoder()
    table = dataclasses.replace(CATALOGUE["shop.t"], engine=engine)
    for one in (gtid(5), table_map(), insert(1), query("SAVEPOINT `s`"), insert(2)):
        assert reader.feed(one)
    assert not reader.feed(query(statement)), "it asks for the engines, and what changes them"
    assert reader.lookahead_request.is_for_statement
    statements = (Statement("shop", ahead),) if ahead else ()
    reader.known.lookahead = LookaheadResult({"shop.t": table}, statements)
    assert reader.feed(query(statement), fresh=True)
    if statement != "ROLLBACK":
        reader.feed(event(XID, bytes(8)))
    views = list(iter_frames(reader.take()[0]))
    assert [view.seq for view in views] == list(range(len(views)))
    assert [view.op for view in views].count(Op.INSERT) == rows
    assert not rows or (views[-1].op, views[-1].event_count) == (Op.END_OF_WINDOW, rows)
    assert (list(reader.suspended.suspensions), reader.resolved) == (
        ["shop.t"] if suspended else [],
        5,
    )


def test_a_cut_row_image_and_an_unknown_event_are_refused() -> None:
    reader = decoder()
    reader.feed(gtid(5))
    reader.feed(table_map())
    cut = event(WRITE_ROWS, struct.pack("<Q", 5)[:6] + b"\1\0\1\xff" + b"\0\1\2")
    with pytest.raises(FormatError, match=r"shop\.t: rows end at byte"):
        reader.feed(cut)
    with pytest.raises(UnsupportedChange, match="an event of type 20"):
        decoder().feed(event(20, bytes(20)))


def test_packets_come_out_whole_however_the_bytes_arrive() -> None:
    events = [b"x" * size for size in (1, 70, 3000, 5)]
    wire = b"".join(
        struct.pack("<I", len(one) + 1)[:3] + bytes([i]) + b"\0" + one
        for i, one in enumerate(events)
    )
    for step in (1, 7, 64, 5000):
        packets = PacketBuffer("h", room_bytes=128 + SLACK_BYTES)
        found = []
        for at in range(0, len(wire), step):
            piece = wire[at : at + step]
            while piece:
                room = packets.room()
                count = min(len(room), len(piece))
                room[:count] = piece[:count]
                packets.received(count)
                piece = piece[count:]
                while (one := packets.next_event()) is not None:
                    found.append(bytes(one))
                    del one
                    packets.used()
        assert found == events


@pytest.mark.parametrize(
    ("payload", "raised", "match"),
    [
        (b"\xff\xd4\x04#HY000purged", SourcePositionLost, "error 1236: purged"),
        (b"\xff\x1d\x04#HY000bye", SourceUnavailable, "error 1053: bye"),
        (b"\xfe\0\0\0\0", SourceUnavailable, "ended the stream"),
        (b"\x07what", FormatError, "status 0x07"),
    ],
)
def test_what_the_server_answers_instead_of_events_is_named(
    payload: bytes, raised: type[Exception], match: str
) -> None:
    packets = PacketBuffer("h")
    wire = struct.pack("<I", len(payload)) + payload
    packets.room()[: len(wire)] = wire
    packets.received(len(wire))
    with pytest.raises(raised, match=match):
        packets.next_event()


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("int(10) unsigned zerofill", "int unsigned"),
        ("decimal(12,2) unsigned", "decimal(12,2) unsigned"),
        ("float(7,3)", "float"),
        ("year(4)", "year"),
        ("enum('A','b c')", "enum('A','b c')"),
        ("datetime(6)", "datetime(6)"),
        ("multipolygon", "geometry"),
        ("bit(3)", "bit(3)"),
    ],
)
def test_the_catalogues_types_have_one_canonical_name(written: str, canonical: str) -> None:
    assert catalogue_type(written) == canonical
    assert column_of("c", canonical, True, "error").type_name == canonical


def test_an_unknown_type_is_refused_by_column_and_name() -> None:
    with pytest.raises(UnsupportedChange, match=r"column v has the type vector\(3\)"):
        column_of("v", "vector(3)", True, "error")


def test_inet6_text_is_mariadbs() -> None:
    assert inet6_text(bytes(15) + b"\1") == "::1"
    assert inet6_text(bytes(10) + b"\xff\xff\xc0\0\2\x80") == "::ffff:192.0.2.128"


@given(
    st.one_of(
        st.binary(min_size=16, max_size=16),
        st.lists(
            st.sampled_from([b"\0\0", b"\0\0", b"\xff\xff", b"\0\1", b"\1\0", b"\x20\x01"]),
            min_size=8,
            max_size=8,
        ).map(b"".join),
        st.binary(max_size=4).map(lambda last: bytes(12) + last.rjust(4, b"\0")),
        st.binary(max_size=4).map(lambda last: bytes(10) + b"\xff\xff" + last.rjust(4, b"\0")),
    ),
    st.booleans(),
)
def test_the_kernel_writes_addresses_as_the_decoder_does(raw: bytes, is_short: bool) -> None:
    stored = raw.rstrip(b"\0") if is_short else raw
    buf, out = np.frombuffer(stored + b"\xaa", dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    stop = put_inet6(out, 0, buf, 0, len(stored))
    assert bytes(out[:stop]).decode() == inet6_text(raw)
    stop = put_inet4(out, 0, buf, 0, min(len(stored), 4))
    assert bytes(out[:stop]).decode() == str(ipaddress.IPv4Address(raw[:4]))


def test_options_are_checked() -> None:
    assert settings(domain_id=7, server_id=9).domain_id == 7
    for options, named in (
        ({"domian_id": 1}, "domian_id"),
        ({"server_id": -1}, "server_id"),
        ({"zero_dates": "guess"}, "zero_dates"),
    ):
        with pytest.raises(ConfigError, match=named):
            settings(**options)
    assert "secret" not in repr(
        read_settings(mariadb_config("mariadb://u:secret@h:1/shop", "shop.*"))
    )
