"""MariaDB's compressed events, made by hand: whole, torn, damaged, and absurd."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.errors import FormatError
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.compressed_events import (
    LONGEST_BYTES,
    PlainRows,
    plain_query,
)
from tests.relay.sources.mysql.binlog.test_binlog_decoder import (
    QUERY,
    WRITE_ROWS,
    XID,
    decoder,
    event,
    gtid,
    insert,
    query,
    table_map,
)

QUERY_COMPRESSED, WRITE_COMPRESSED, UPDATE_COMPRESSED, WRITE_COMPRESSED_V2 = 165, 166, 167, 169
UPDATE_ROWS, WRITE_ROWS_V2 = 24, 30


def packed(plain: bytes, *, width: int = 3, size: int | None = None) -> bytes:
    """What a compressed event has for ``plain``; ``size`` is given as its own."""
    said = len(plain) if size is None else size
    return bytes([0x80 | width]) + said.to_bytes(width, "big") + zlib.compress(plain)


def header(kind: int) -> binlog_events.Header:
    return binlog_events.Header(1_700_000_000, kind, 3, 99, 1000, 0)


def rows_head(columns: int, *, bitmaps: int = 1, extra: bytes = b"") -> bytes:
    count = bytes([columns]) if columns < 251 else b"\xfc" + struct.pack("<H", columns)
    return (
        bytes([5, 0, 0, 0, 0, 0, 1, 0]) + extra + count + b"\xff" * ((columns + 7) // 8 * bitmaps)
    )


def compressed(one: memoryview, head_bytes: int) -> memoryview:
    """An event of ``event`` with what follows on its body's first bytes compressed."""
    body = bytes(one)[19:-4]
    kind = {QUERY: QUERY_COMPRESSED, WRITE_ROWS: WRITE_COMPRESSED}[one[4]]
    return event(kind, body[:head_bytes] + packed(body[head_bytes:]))


def feed(reader: BinlogDecoder, *stream: memoryview) -> None:
    """As the source does it."""
    for one in stream:
        assert reader.feed(one)
        while reader.cursor.payload is not None:
            inner = reader.cursor.payload.packets.next_event()
            if inner is None:
                assert not reader.cursor.payload.refill()
                reader.cursor.payload = None
            else:
                assert reader.feed(inner)
                reader.cursor.payload.packets.used()


def only_event(opened: PlainRows) -> tuple[binlog_events.Header, bytes]:
    one = opened.packets.next_event()
    assert one is not None
    found = binlog_events.read_header(one), bytes(one[19:])
    assert found[0].length == len(one)
    opened.packets.used()
    assert opened.packets.next_event() is None
    assert not opened.refill()
    return found


@pytest.mark.parametrize(
    ("kind", "plain_kind", "head"),
    [
        (WRITE_COMPRESSED, WRITE_ROWS, rows_head(3)),
        (WRITE_COMPRESSED, WRITE_ROWS, rows_head(300)),
        (UPDATE_COMPRESSED, UPDATE_ROWS, rows_head(9, bitmaps=2)),
        (WRITE_COMPRESSED_V2, WRITE_ROWS_V2, rows_head(3, extra=b"\5\0abc")),
    ],
)
@given(rows=st.binary(min_size=1), width=st.integers(2, 4))
def test_rows_come_out_as_they_would_have_been_written(
    kind: int, plain_kind: int, head: bytes, rows: bytes, width: int
) -> None:
    body = head + packed(rows, width=width)
    opened, found = only_event(PlainRows(header(kind), memoryview(body), "here"))
    assert (opened.type, found) == (plain_kind, head + rows)
    assert (opened.timestamp_s, opened.server_id) == (1_700_000_000, 3)


def test_rows_longer_than_a_packet_are_put_together_again() -> None:
    rows = bytes(0xFFFFFF * 2)
    body = memoryview(rows_head(1) + packed(rows, width=4))
    assert only_event(PlainRows(header(WRITE_COMPRESSED), body, "here"))[1] == rows_head(1) + rows


def test_a_compressed_group_gives_the_bytes_of_a_plain_one() -> None:
    plain, small = decoder(), decoder()
    ids = range(1000)
    statement = query("SAVEPOINT `a long enough name of one`")
    end = event(XID, bytes(8), end_offset=1500)
    feed(plain, gtid(5), statement, table_map(), insert(*ids), end)
    packed_statement = compressed(statement, 13 + 4 + 1)
    packed_rows = compressed(insert(*ids), 10)
    assert len(packed_rows) < len(insert(*ids)) / 2
    feed(small, gtid(5), packed_statement, table_map(), packed_rows, end)
    assert plain.take() == small.take()
    assert (small.cursor.offset, small.cursor.checksums) == (1500, True)


def test_what_is_not_wanted_is_not_unpacked() -> None:
    ours, foreign = decoder(), decoder()
    rows = compressed(insert(1, 2, 3), 10)
    for one in (gtid(5, domain=2), table_map(), rows):
        assert foreign.feed(one)
    assert foreign.cursor.payload is None
    assert foreign.suspended.suspensions.keys() == {"shop.t"}  # whatever its rows are
    feed(ours, gtid(5), table_map())
    ours.known.pass_over("shop.t")
    ours.feed(rows)
    assert ours.cursor.payload is None


# -- torn, damaged, absurd

STATEMENT = b"ALTER TABLE t ADD COLUMN c INT, ADD COLUMN d INT, ADD COLUMN e INT"
QUERY_HEAD = struct.pack("<IIBHH", 1, 0, 4, 0, 3) + b"var" + b"shop\0"
ROWS = b"".join(b"\0" + struct.pack("<i", one) for one in range(20))


def opened(kind: int, body: bytes) -> bytes:
    """The plain body of what a compressed event held."""
    if kind == QUERY_COMPRESSED:
        return bytes(plain_query(memoryview(body), "here"))
    return only_event(PlainRows(header(kind), memoryview(body), "here"))[1]


@pytest.mark.parametrize(
    ("kind", "head", "plain"),
    [
        (QUERY_COMPRESSED, QUERY_HEAD, STATEMENT),
        (WRITE_COMPRESSED, rows_head(1), ROWS),
        (UPDATE_COMPRESSED, rows_head(260, bitmaps=2), ROWS),
        (WRITE_COMPRESSED_V2, rows_head(1, extra=b"\2\0"), ROWS),
    ],
)
def test_any_torn_or_flipped_event_is_refused_or_means_the_same(
    kind: int, head: bytes, plain: bytes
) -> None:
    whole = head + packed(plain)
    assert opened(kind, whole) == head + plain
    for length in range(len(whole)):
        with pytest.raises(FormatError, match=r"^here: "):
            opened(kind, whole[:length])
    with pytest.raises(FormatError, match=r"^here: "):
        opened(kind, whole + b"\0")
    for bit in range(8 * len(head), 8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        try:
            found = opened(kind, bytes(damaged))
        except FormatError as error:
            assert error.message.startswith("here: ")
        else:  # One of the bits between the end of the blocks and their sum means nothing.
            assert found == head + plain


def test_a_length_that_cannot_be_is_refused_before_there_is_room_for_it() -> None:
    noise = random.Random(1).randbytes(2 << 20)
    for raw, size, why in (
        (b"short", 0xFFFFFFFF, "cannot be 4294967295 uncompressed"),
        (noise, LONGEST_BYTES + 1, "cannot be"),
        (b"", 0, "cannot be 0 uncompressed"),
        (bytes(32 << 20), 100, "are not 100 uncompressed"),
    ):
        body = memoryview(rows_head(1) + packed(raw, width=4, size=size))
        tracemalloc.start()
        try:
            with pytest.raises(FormatError, match=f"here: .*{why}"):
                PlainRows(header(WRITE_COMPRESSED), body, "here")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_an_unknown_way_of_compressing_is_refused() -> None:
    for first in (0x03, 0x93, 0xF3, 0x8B, 0x80, 0x85):
        body = rows_head(1) + bytes([first]) + packed(ROWS)[1:]
        with pytest.raises(FormatError, match=f"here: {first:#04x} does not begin"):
            opened(WRITE_COMPRESSED, body)


def test_a_damaged_event_is_reported_with_its_position_and_gives_no_row() -> None:
    reader = decoder()
    feed(reader, gtid(5), table_map())
    good = rows_head(1) + packed(ROWS)
    bad = event(WRITE_COMPRESSED, good[:-6] + b"\0\0" + good[-4:], end_offset=2000)
    with pytest.raises(FormatError, match=rf"binlog binlog.000007 at {2000 - len(bad)}: a compr"):
        reader.feed(bad)
    assert reader.out.open_bytes == 0
    assert reader.cursor.payload is None


def test_rows_with_damaged_content_are_reported_with_their_position() -> None:
    reader = decoder()
    feed(reader, gtid(5))
    orphan = event(WRITE_COMPRESSED, rows_head(1) + packed(ROWS), end_offset=2000)
    with pytest.raises(FormatError, match=rf"binlog binlog.000007 at {2000 - len(orphan)}: rows"):
        feed(reader, orphan)
