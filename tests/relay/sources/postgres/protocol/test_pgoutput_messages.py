"""pgoutput's messages: read as written, and any other bytes are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.errors import FormatError
from databus.relay.sources.postgres.protocol import pgoutput_messages
from databus.relay.sources.postgres.protocol.pgoutput_messages import UNCHANGED
from tests.relay.sources.postgres import packed_messages as made

READERS: dict[bytes, Callable[[bytes], Any]] = {
    b"B": pgoutput_messages.read_begin,
    b"C": pgoutput_messages.read_commit,
    b"R": pgoutput_messages.read_relation,
    b"I": pgoutput_messages.read_insert,
    b"U": pgoutput_messages.read_update,
    b"D": pgoutput_messages.read_delete,
    b"T": pgoutput_messages.read_truncate,
}
EXAMPLES = [
    made.begin(1 << 40, xid=2**32 - 1),
    made.commit(64),
    made.relation(5, "shop.Örders", [("id", 20, -1, True), ("a b", 1700, 786438, False)], "i"),
    made.insert(5, [b"1", None, b""]),
    made.update(5, [b"1", UNCHANGED], [b"0", b"x"], "O"),
    made.update(5, [b"1", None]),
    made.delete(5, [b"1", None]),
    made.truncate(5, 6),
]


def test_each_message_is_read_as_it_was_written() -> None:
    assert pgoutput_messages.read_begin(EXAMPLES[0][1:]) == pgoutput_messages.Begin(
        1 << 40, pgoutput_messages.POSTGRES_EPOCH_US + 5, 2**32 - 1
    )
    assert pgoutput_messages.read_commit(EXAMPLES[1][1:]).end_lsn == 112
    relation = pgoutput_messages.read_relation(EXAMPLES[2][1:])
    assert (relation.oid, relation.source, relation.identity) == (5, "shop.Örders", "i")
    assert relation.columns[1] == pgoutput_messages.RelationColumn("a b", 1700, 786438, False)
    assert pgoutput_messages.read_insert(EXAMPLES[3][1:]).new == (b"1", None, b"")
    assert pgoutput_messages.read_update(EXAMPLES[4][1:]) == pgoutput_messages.Change(
        5, "O", (b"0", b"x"), (b"1", UNCHANGED)
    )
    assert pgoutput_messages.read_delete(EXAMPLES[6][1:]) == pgoutput_messages.Change(
        5, "K", (b"1", None)
    )
    assert pgoutput_messages.read_truncate(EXAMPLES[7][1:]).oids == (5, 6)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: chr(message[0]))
def test_a_message_cut_anywhere_is_refused(message: bytes) -> None:
    read = READERS[message[:1]]
    for stop in range(1, len(message)):
        with pytest.raises(FormatError):
            read(message[1:stop])


@pytest.mark.parametrize(
    "message", [m for m in EXAMPLES if m[:1] != b"R"], ids=lambda message: chr(message[0])
)
def test_a_message_with_a_byte_too_many_is_refused(message: bytes) -> None:
    with pytest.raises(FormatError):
        READERS[message[:1]](message[1:] + b"\0")


@given(st.sampled_from(sorted(READERS)), st.binary(max_size=60))
def test_any_bytes_give_a_message_or_a_format_error(kind: bytes, body: bytes) -> None:
    try:
        READERS[kind](body)
    except FormatError as error:
        assert error.message
