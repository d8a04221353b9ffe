"""What MySQL packs differently: differences of JSON values, and compressed transactions."""

from __future__ import annotations

import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from databus.common.errors import FormatError
from databus.relay.sources.mysql.protocol.transaction_payload import BLOCK_BYTES, Payload
from databus.relay.sources.mysql.rows.json_diffs import applied

REPLACE, INSERT, REMOVE = 0, 1, 2


def diff(operation: int, path: str, text: str | None = None) -> bytes:
    """One difference; ``text`` is a string value."""
    packed = bytes([operation, len(path.encode())]) + path.encode()
    if text is None:
        return packed
    value = bytes([12, len(text.encode())]) + text.encode()
    return packed + bytes([len(value)]) + value


def test_differences_are_applied_in_order_and_numbers_keep_their_digits() -> None:
    before = '{"a": 1.50, "b": [1e100, {"ż": null}], "long": true}'
    diffs = (
        diff(REPLACE, "$.a", "x")
        + diff(INSERT, "$.b[1]", "in between")
        + diff(REMOVE, "$.b[2].ż")
        + diff(INSERT, '$."q\\"."', "y")
    )
    after = '{"a": "x", "b": [1e100, "in between", {}], "q\\".": "y", "long": true}'
    assert applied(before, memoryview(diffs)) == after
    assert applied(before, memoryview(b"")) == before


@pytest.mark.parametrize(
    "diffs",
    [
        diff(REPLACE, "$.none", "x"),
        diff(INSERT, "$.a", "there already"),
        diff(REMOVE, "$"),
        diff(7, "$.a", "x"),
        diff(REPLACE, "$.a.b", "no object"),
        diff(REPLACE, "a", "no path"),
        diff(REPLACE, "$.a", "cut off")[:-3],
    ],
)
def test_differences_that_do_not_fit_are_refused(diffs: bytes) -> None:
    with pytest.raises(FormatError):
        applied('{"a": 1}', memoryview(diffs))


def event(kind: int, body: bytes) -> bytes:
    return struct.pack("<IBIIIH", 1, kind, 1, 19 + len(body), 0, 0) + body


def payload(events: bytes, *, zstd: bool = True) -> bytes:
    """The body of a TRANSACTION_PAYLOAD_EVENT."""
    data = zstandard.compress(events) if zstd else events
    fields = b"\2\1\0" if zstd else b"\2\3\xfc\xff\0"
    size = b"\xfe" + len(data).to_bytes(8, "little")
    return b"\1\x09" + size + fields + b"\3\1\1" + b"\0" + data


@given(sizes=st.lists(st.integers(0, 400_000), max_size=6), zstd=st.booleans())
def test_a_payloads_events_come_out_whole_and_in_order(sizes: list[int], zstd: bool) -> None:
    events = [event(30, bytes([number]) * size) for number, size in enumerate(sizes)]
    opened = Payload(memoryview(payload(b"".join(events), zstd=zstd)), "here")
    found = []
    while opened.refill():
        assert opened.packets.stop < BLOCK_BYTES + 400_100
        while (one := opened.packets.next_event()) is not None:
            found.append(bytes(one))
            opened.packets.used()
    assert found == events
    assert not opened.refill()


def test_an_event_longer_than_a_packet_is_put_together_again() -> None:
    long = event(30, b"x" * (0xFFFFFF * 2 - 20))
    opened = Payload(memoryview(payload(long)), "here")
    assert opened.refill()
    found = opened.packets.next_event()
    assert found is not None
    assert bytes(found) == long


def test_a_payload_that_is_damaged_is_refused() -> None:
    whole = payload(event(30, b"row" * 50))
    for body in (b"", whole[:5], b"\2\1\7\0", whole[:-20], payload(event(30, b"row")[:-1])):
        with pytest.raises(FormatError):
            Payload(memoryview(body), "here").refill()
