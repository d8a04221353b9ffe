"""MySQL's tagged GTIDs: their bytes as a server wrote them, damaged ones, and what may come so."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable

import pytest

from databus.common.errors import FormatError
from databus.common.frame.frame_format import iter_frames
from databus.relay.sources.mysql.binlog.mysql_decoder import MySqlDecoder
from databus.relay.sources.mysql.gtid.gtid_sets import parse_owned
from databus.relay.sources.mysql.gtid.out_of_order_gtids import read_number, read_tagged_gtid
from databus.relay.sources.mysql.gtid.promotion import Promotion
from tests.relay.sources.mysql.gtid.test_promotion import (
    NEW,
    OLD,
    XID,
    change,
    event,
    feed,
    insert,
    mysql_decoder,
    query,
    table_map,
    transaction,
)

TAGGED_GTID, MYSQL_GTID, XA_PREPARE = 42, 33, 38
STRANGER = str(uuid.UUID(int=9))

# Three bodies of a MySQL 9.7.4, without their checksums.
SHORT = bytes.fromhex(
    "02 72 00 00 02 02 fd03 fd03 fd03 fd03 02 0102 fe fe 0102 0502 02 04 06 08 0a f903 04 0c"
    "06 06 746167 08 08 0a 0c 0c 7f946c842cdd6006 10 9d03 12 83120b"
)
LONG = bytes.fromhex(
    "02 b0 00 00 02 02 fd03 fd03 fd03 fd03 02 0102 fe fe 0102 0502 02 04 06 08 0a f903 04 031711"
    "06 40 615f766572795f6c6f6e675f7461675f6f665f7468697274795f74776f5f6368"
    "08 08 0a 10 0c 7fc4d4842cdd6006 10 1904 12 83120b"
)
LAST = bytes.fromhex(
    "02 7a 00 00 02 02 3903 d2 3e 0d03 9903 ea 22 c503 e502 ac 04 f103 00 00 00 02 04"
    "fffcffffffffffffff 06 02 74 08 08 0a 14 0c 7fe779852cdd6006 10 ad03 12 83120b"
)


def number(value: int) -> bytes:
    """As the server writes it, for small ones: two bytes hold fourteen bits."""
    return bytes([value << 1]) if value < 128 else struct.pack("<H", value << 2 | 1)


def tagged(server: str, count: int, tag: str = "tag") -> memoryview:
    """The event that begins a group under a tag."""
    octets = b"".join(number(octet) for octet in uuid.UUID(server).bytes)
    fields = b"\0\0" + b"\2" + octets + b"\4" + number(count << 1)
    fields += b"\6" + number(len(tag)) + tag.encode() + b"\x08\x08"
    return event(TAGGED_GTID, b"\2" + number(len(fields) + 3) + b"\0" + fields)


def under_tag(server: str, count: int, *content: memoryview) -> list[memoryview]:
    return [tagged(server, count), query("BEGIN"), *content, event(XID, bytes(8))]


def reader_at(after_scn: int) -> MySqlDecoder:
    reader = mysql_decoder(after_scn, Promotion())
    reader.cursor.file = "binlog.000007"
    return reader


def ids(reader: MySqlDecoder) -> list[tuple[int, int]]:
    """The scn and the id of every row that was packed."""
    data, _ = reader.take()
    return [
        (view.scn, bytes(view.key)[0] >> 1) for view in iter_frames(data) if not view.is_control
    ]


# -- bytes


def test_what_a_server_wrote_is_read() -> None:
    server = "ffffffff-0180-7f7f-8081-0102030405fe"
    assert str(read_tagged_gtid(memoryview(SHORT))) == f"{server}:tag:3"
    long = f"{server}:a_very_long_tag_of_thirty_two_ch:70000"
    assert str(read_tagged_gtid(memoryview(LONG))) == long
    last = f"ce691fc3-e675-11f1-b956-02fc00000001:t:{2**63 - 2}"
    assert str(read_tagged_gtid(memoryview(LAST))) == last


@pytest.mark.parametrize(
    ("data", "value"),
    [("00", 0), ("fe", 127), ("0102", 128), ("fbff07", 65535), ("7f" + "ff" * 7, 2**56 - 1)],
)
def test_a_numbers_length_lies_in_its_trailing_ones(data: str, value: int) -> None:
    coded = bytes.fromhex(data)
    assert read_number(memoryview(coded + b"!"), 0) == (value, len(coded))
    with pytest.raises(IndexError):
        read_number(memoryview(coded[:-1]), 0)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "index out of bounds"),
        (b"\4" + SHORT[1:], "version 2 of its form, expected 1"),
        (SHORT[:-1], "56 bytes, expected 57"),
        (SHORT[:2] + b"\x1a" + SHORT[3:], "field 12 must be understood, 11 is the last known"),
        (SHORT[:3] + b"\x02" + SHORT[4:], "field 1, expected 0"),
        (SHORT.replace(b"\xfd\x03", b"\xfd\x07", 1), "bytes must be in range"),
        (SHORT.replace(b"\x04\x0c\x06", b"\x04\x0e\x06"), "a number that is not above 0"),
        (SHORT.replace(b"\x04\x0c\x06", b"\x04\x00\x06"), "a number that is not above 0"),
        (SHORT.replace(b"\x06tag", b"\x00tag"), "the tag '', of 0 bytes"),
        (SHORT.replace(b"\x06tag", b"\x06t\xe4g"), "can't decode byte 0xe4"),
        (SHORT.replace(b"\x06tag", b"\x06t-g"), "the tag 't-g'"),
        (SHORT.replace(b"\x06tag", b"\x0ctag"), "of 6 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_body_is_refused_with_its_position(body: bytes, named: str) -> None:
    with pytest.raises(FormatError, match=r"binlog.000007 at \d+: an event of type 42") as caught:
        reader_at(5).feed(event(TAGGED_GTID, body))
    assert named in caught.value.message


def test_any_part_of_a_body_is_a_gtid_or_a_format_error() -> None:
    read = 0
    for body in (SHORT, LONG, LAST):
        cut = [body[:size] for size in range(len(body))]
        short = [piece[:1] + number(len(piece)) + piece[2:] for piece in cut if len(piece) > 2]
        for damaged in (*cut, *short):
            try:
                assert reader_at(5).feed(event(TAGGED_GTID, damaged))
                read += 1
            except FormatError as error:
                assert "binlog.000007 at" in error.message
    assert read


def test_a_body_with_any_other_byte_is_read_or_refused() -> None:
    read = refused = 0
    for body in (SHORT, LONG, LAST):
        for at in range(len(body)):
            for value in range(256):
                damaged = body[:at] + bytes([value]) + body[at + 1 :]
                try:
                    assert read_tagged_gtid(memoryview(damaged)).number
                    read += 1
                except (IndexError, ValueError):  # to which the decoder adds a position
                    refused += 1
    assert read and refused


def test_a_gtid_without_a_tag_that_is_cut_off_is_a_format_error_too() -> None:
    with pytest.raises(FormatError, match="an event of type 33 is damaged"):
        reader_at(5).feed(event(MYSQL_GTID, bytes(20)))


def test_what_is_owned_under_a_tag_is_no_number_of_the_clock() -> None:
    # Of a MySQL 9.7.4, as it is there: nothing separates one set from the next.
    text = f"{OLD}:70#15:60#14{OLD}:other:9#17{OLD}:tag:51#16:50#13{NEW}:8#4"
    assert parse_owned(text) == {OLD: ((60, 60), (70, 70)), NEW: ((8, 8),)}
    assert parse_owned(f"{OLD}:tag:51#16") == {}
    assert parse_owned("") == {}


# -- groups


def elsewhere() -> memoryview:
    """The map of a table in a schema that is not captured."""
    mapped = table_map("t").tobytes().replace(b"\4shop", b"\4ship")
    return event(19, mapped[19:-4])


def test_one_of_a_server_that_is_not_configured_changes_nothing_where_nothing_is_captured() -> None:
    reader = reader_at(5)
    content = [elsewhere(), insert("t", 1)]
    feed(reader, transaction(STRANGER, 1, *content), under_tag(STRANGER, 1, *content))
    assert (reader.progress.foreign_groups, reader.group, reader.resolved) == (2, None, 5)
    feed(reader, [tagged(STRANGER, 2), query("DROP TABLE other.t")])
    feed(reader, transaction(OLD, 6, *change(3)))
    assert (reader.progress.foreign_groups, reader.resolved, ids(reader)) == (3, 6, [(6, 3)])
    assert suspensions(reader) == {}
    assert reader.resume_state().foreign == f"{STRANGER}:1-1,{STRANGER}:tag:1-2"


@pytest.mark.parametrize("server", [OLD, NEW])
def test_one_of_ours_that_changes_nothing_captured_is_passed_over(server: str) -> None:
    reader = reader_at(5)
    feed(reader, under_tag(server, 1), under_tag(server, 2, elsewhere(), insert("t", 1)))
    feed(reader, [tagged(server, 3), query("BEGIN"), query("SAVEPOINT a"), query("COMMIT")])
    for account in ("CREATE USER joe", "grant  select on shop.t to joe", "SET DEFAULT ROLE r"):
        feed(reader, [tagged(server, 4), query(account)])
    assert (reader.progress.other_groups, reader.progress.foreign_groups, reader.resolved) == (
        6,
        0,
        5,
    )
    # Nothing of them is left: a table id means what the next group maps it to.
    feed(reader, transaction(OLD, 6, *change(3)))
    assert (reader.resolved, ids(reader)) == (6, [(6, 3)])


def suspensions(reader: MySqlDecoder) -> dict[str, str]:
    return {source: stop.why for source, stop in reader.suspended.suspensions.items()}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (change(1), " changes rows of shop.t; "),
        ([query("ROLLBACK TO `a`"), *change(1)], " changes rows of shop.t; "),
        (
            [query("UPDATE t SET id = 1")],
            " changes it by 'UPDATE t SET id = 1': it is changed by a statement",
        ),
    ],
)
def test_one_of_ours_suspends_the_captured_table_that_it_changes(
    content: Iterable[memoryview], why: str
) -> None:
    reader = reader_at(5)
    feed(reader, transaction(OLD, 6, *change(7)), under_tag(OLD, 1, *content))
    assert suspensions(reader).keys() == {"shop.t"}
    assert suspensions(reader)["shop.t"].startswith(f"the tagged GTID {OLD}:tag:1{why}")
    # Its rows are passed over from there on, those of the others are not.
    feed(reader, transaction(OLD, 7, *change(8), table_map("u"), insert("u", 9)))
    assert (reader.resolved, ids(reader)) == (7, [(6, 7), (7, 9)])
    assert reader.resume_state().tagged == f"{OLD}:tag:1-1"


@pytest.mark.parametrize(
    ("statement", "suspended"),
    [
        ("TRUNCATE t", {"shop.t"}),
        ("DROP TABLE shop.u, t", {"shop.t", "shop.u"}),
        ("RENAME TABLE t TO other.t", {"shop.t"}),
        ("ALTER TABLE t ADD c INT DEFAULT 7", {"shop.t"}),
        ("FLY TO t", {"shop.t"}),
        ("FLY", {"shop.t", "shop.u"}),
        ("ALTER TABLE t ADD c INT", set()),  # The next rows show it.
        ("CREATE TABLE other.x (id INT)", set()),
        ("TRUNCATE other.t", set()),
    ],
)
def test_a_statement_suspends_what_it_may_change_and_no_other_table(
    statement: str, suspended: set[str]
) -> None:
    reader = reader_at(5)
    feed(reader, [tagged(OLD, 1), query(statement)], transaction(OLD, 6))
    assert suspensions(reader).keys() == suspended
    assert (reader.resolved, reader.resume_state().tagged) == (6, f"{OLD}:tag:1-1")


def prepare(gtid: memoryview, *content: memoryview) -> list[memoryview]:
    """A group that ends with XA PREPARE of the transaction 'a'."""
    prepared = event(XA_PREPARE, struct.pack("<BIII", 0, 1, 1, 0) + b"a")
    return [gtid, query("XA START X'61',X'',1"), *content, query("XA END X'61',X'',1"), prepared]


def plain(number: int) -> memoryview:
    return transaction(OLD, number)[0]


COMMIT, ROLLBACK = (query(f"XA {word} X'61',X'',1") for word in ("COMMIT", "ROLLBACK"))


def test_what_is_prepared_without_an_scn_suspends_its_tables_when_it_is_committed() -> None:
    reader = reader_at(5)
    feed(reader, prepare(tagged(OLD, 1), *change(1)), transaction(OLD, 6, *change(2)))
    assert (ids(reader), suspensions(reader), reader.resolved) == ([(6, 2)], {}, 6)
    # Until then it is read again after a restart: on MySQL by its GTID, on both by its location.
    assert (reader.resume_state().tagged, reader.resume_state().prepared) == ("", 5)
    feed(reader, [tagged(OLD, 2), COMMIT])
    assert suspensions(reader)["shop.t"].startswith(
        f"the tagged GTID {OLD}:tag:2 commits XA transaction"
    )
    assert (reader.resume_state().tagged, reader.resume_state().prepared) == (
        f"{OLD}:tag:1-2",
        None,
    )


def test_what_is_prepared_without_an_scn_and_rolled_back_suspends_nothing() -> None:
    reader = reader_at(5)
    feed(reader, prepare(tagged(OLD, 1), *change(1)), [tagged(OLD, 2), ROLLBACK])
    feed(reader, transaction(OLD, 6, *change(2)))
    assert (ids(reader), suspensions(reader)) == ([(6, 2)], {})
    assert reader.resume_state().tagged == f"{OLD}:tag:1-2"


def test_what_is_prepared_without_an_scn_and_committed_with_one_suspends_its_tables() -> None:
    reader = reader_at(5)
    feed(reader, prepare(tagged(STRANGER, 1), *change(1)), [plain(6), COMMIT])
    while reader.prepared.is_replayed:
        reader.replay()
    assert (reader.resolved, suspensions(reader).keys()) == (6, {"shop.t"})


def test_what_is_prepared_with_an_scn_and_committed_without_suspends_its_tables() -> None:
    reader = reader_at(5)
    content = [*change(1), table_map("u"), insert("u", 1)]
    feed(reader, prepare(plain(6), *content), [tagged(STRANGER, 1), COMMIT])
    assert (ids(reader), suspensions(reader).keys()) == ([], {"shop.t", "shop.u"})
    assert reader.resume_state().prepared is None


def test_a_commit_of_what_was_prepared_before_what_is_read_suspends_every_captured_table() -> None:
    reader = reader_at(5)
    feed(reader, [tagged(STRANGER, 1), ROLLBACK])
    assert suspensions(reader) == {}
    feed(reader, [tagged(STRANGER, 2), COMMIT])
    assert suspensions(reader).keys() == {"shop.t", "shop.u"}


def test_one_that_was_cut_off_is_forgotten_when_the_next_group_begins() -> None:
    reader = reader_at(5)
    feed(reader, [tagged(OLD, 1), query("BEGIN")], transaction(OLD, 6, *change(3)))
    assert (reader.resolved, ids(reader), suspensions(reader)) == (6, [(6, 3)], {})
    feed(reader, [tagged(OLD, 1), query("BEGIN"), elsewhere()], transaction(OLD, 7, *change(4)))
    assert (ids(reader), suspensions(reader), reader.resume_state().tagged) == ([(7, 4)], {}, "")
