"""Events without an end position: MariaDB writes them between a transaction's first and last one
since 11.4 (MDEV-31273).  `make matrix` runs the real server; these run without one."""

from __future__ import annotations

import socket
import struct
import zlib
from typing import cast

import pytest

from databus.relay.sources.mysql.binlog import ddl_lookahead as scout_module
from databus.relay.sources.mysql.binlog.ddl_lookahead import DdlLookahead
from databus.relay.sources.mysql.binlog.fast_path import FastPath
from databus.relay.sources.mysql.binlog.lookahead_request import LookaheadRequest
from databus.relay.sources.mysql.protocol.mysql_connection import BinlogRequest, MySqlConnection
from databus.relay.sources.mysql.protocol.packet_buffer import PacketBuffer, packets_of
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue
from tests.relay.sources.mysql.binlog.test_binlog_decoder import (
    CATALOGUE,
    XID,
    decoder,
    event,
    gtid,
    insert,
    query,
    settings,
    table_map,
)

BEGIN = 1000


def at(end_offset: int, one: memoryview) -> memoryview:
    """The event with this end position."""
    plain = bytearray(one[:-4])
    struct.pack_into("<I", plain, 13, end_offset)
    return memoryview(bytes(plain) + struct.pack("<I", zlib.crc32(plain)))


def packet(one: memoryview) -> bytearray:
    return packets_of(b"\0", bytes(one))


def transaction() -> tuple[list[memoryview], int]:
    """Events as MariaDB 11.4 writes them, and where the last one ends.

    The file has an ANNOTATE_ROWS event of 50 bytes as well, which the server does not send.
    """
    first, *rest = gtid(5), table_map(), insert(1), query("ALTER TABLE t ADD c INT")
    last = event(XID, bytes(8))
    end = BEGIN + 50 + sum(map(len, rest)) + len(last)
    return [at(BEGIN, first), *(at(0, one) for one in rest), at(end, last)], end


def test_offsets_within_a_transaction_are_counted_from_its_beginning() -> None:
    events, end = transaction()
    reader = decoder()
    offsets = []
    for one in events:
        # The ALTER TABLE needs the catalogue; nothing here needs its answer.
        if reader.feed(one):
            offsets.append((reader.cursor.offset, reader.cursor.server_offset))
        else:
            offsets.append((reader.lookahead_request.offset, reader.cursor.server_offset))
            reader.cursor.offset = reader.lookahead_request.offset
    counted = [BEGIN]
    for one in events[1:-1]:
        counted.append(counted[-1] + len(one))
    assert offsets == [*((offset, BEGIN) for offset in counted), (end, end)]


def test_the_kernel_counts_offsets_as_the_decoder_does() -> None:
    rows = [table_map(), insert(1), table_map(), insert(2, 3)]
    last = event(XID, bytes(8))
    end = BEGIN + sum(map(len, rows)) + len(last)
    whole = [at(BEGIN, gtid(5)), *(at(0, one) for one in rows), at(end, last)]
    for count in range(3, len(whole) + 1):
        slow, quick = decoder(), decoder()
        fast = FastPath(quick)
        for one in whole[:3]:
            slow.feed(one)
            quick.feed(one)
        for one in whole[3:count]:
            slow.feed(one)
        packets = PacketBuffer("here")
        packets.hold(bytearray(b"".join(map(packet, whole[3:count]))))
        while need_bytes := fast.run(packets):
            fast.make_room(need_bytes)
        assert packets.next_event() is None, "the kernel has taken them all"
        assert (quick.cursor.offset, quick.cursor.server_offset) == (
            slow.cursor.offset,
            slow.cursor.server_offset,
        )
    assert (slow.cursor.offset, slow.cursor.server_offset) == (end, end)


def test_a_look_ahead_sees_statements_without_an_end_position_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, end = transaction()
    offsets: list[int] = []

    class Server:
        """A connection to a server whose binlog is ``events``."""

        is_mysql = False

        def __init__(self, *_: object) -> None:
            self._ours, self._theirs = socket.socketpair()

        def row(self, question: str) -> tuple[str, int]:
            return ("CRC32", 0) if "checksum" in question else ("binlog.000007", end)

        def start_binlog(self, request: BinlogRequest, *_: object) -> socket.socket:
            offsets.append(request.offset)
            assert request.offset == BEGIN, "the server has no such offset"
            for one in events[1:]:
                self._theirs.sendall(packet(one))
            return self._ours

        def close(self) -> None:
            self._ours.close()
            self._theirs.close()

    def catalogue(*_: object) -> Catalogue:
        return CATALOGUE

    monkeypatch.setattr(scout_module, "MySqlConnection", Server)
    monkeypatch.setattr(scout_module, "load_catalogue", catalogue)
    ahead = DdlLookahead()
    connection = cast(MySqlConnection, Server())
    counted = BEGIN
    for one in events[:-1]:
        counted += 0 if one is events[0] else len(one)
        found = ahead.look(
            connection, settings(), LookaheadRequest("binlog.000007", counted, BEGIN)
        )
        is_before = one is not events[-2]
        assert [statement.text for statement in found.ahead] == (
            ["ALTER TABLE t ADD c INT"] if is_before else []
        )
    connection.close()
    assert offsets == [BEGIN], "what was read is cached"
