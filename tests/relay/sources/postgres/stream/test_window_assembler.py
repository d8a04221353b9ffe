"""Windows from pgoutput: the compiled kernel and the reference path write the same bytes."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.common.compiled import kernels as common_kernels
from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame.frame_format import Op, iter_frames, scan
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.postgres.protocol.pgoutput_messages import UNCHANGED, Value
from databus.relay.sources.postgres.stream import window_assembler
from databus.relay.sources.postgres.stream.window_assembler import WindowAssembler
from databus.relay.sources.postgres.tables.table_definitions import DefinitionGap
from databus.relay.sources.suspended_tables import SuspendedTables, TableSuspension
from tests.relay.sources.postgres import packed_messages as made

OID, OTHER, IGNORED = 70001, 70002, 70003
PRICE = 1700
COLUMNS: list[made.Column] = [
    ("id", 20, -1, True),
    ("flag", 16, -1, False),
    ("ratio", 701, -1, False),
    ("price", 1700, ((12 << 16) | 2) + 4, False),
    ("any", 1700, -1, False),
    ("name", 1043, 68, False),
    ("raw", 17, -1, False),
    ("day", 1082, -1, False),
    ("clock", 1083, -1, False),
    ("at", 1114, -1, False),
    ("zoned", 1184, -1, False),
    ("uid", 2950, -1, False),
    ("doc", 3802, -1, False),
    ("part", 23, -1, False),
]
DESCRIBED = [
    made.relation(OID, "public.t", COLUMNS),
    made.relation(OTHER, "public.other", [("b", 25, -1, True), ("a", 23, -1, True)]),
    made.relation(IGNORED, "private.t", [("id", 23, -1, True)]),
]


def assemble(
    messages: Sequence[bytes],
    *,
    compiled: bool,
    special_values: str = "error",
    keys: ConfiguredKeys = NO_KEYS,
) -> tuple[bytes, list[SourceSchema], WindowAssembler, int]:
    """The frames of these messages, their schemas, and how many were fed by hand."""
    assembler = WindowAssembler(("public.*",), special_values, 0, keys=keys, compiled=compiled)
    block = bytearray(made.copy_data(*messages))  # writable, as received blocks are
    array, at, by_hand = np.frombuffer(block, dtype=np.uint8), 0, 0
    out, schemas = b"", list[SourceSchema]()
    while at < len(block):
        at = assembler.run(array, at)
        if at < len(block) and assembler.pending_bytes < window_assembler.PART_BYTES:
            end = at + 1 + int.from_bytes(block[at + 1 : at + 5], "big")
            relation = assembler.feed(block[at + 30], bytes(block[at + 31 : end]))
            if relation is not None:
                assembler.learn(relation, None)
            at, by_hand = end, by_hand + 1
        if assembler.pending_bytes >= window_assembler.PART_BYTES:
            data, more = assembler.take()
            out, schemas = out + data, [*schemas, *more]
    data, more = assembler.take()
    return out + data, [*schemas, *more], assembler, by_hand


def both(messages: Sequence[bytes], special_values: str = "error") -> bytes:
    """The frames, after the two paths were compared."""
    reference = assemble(messages, compiled=False, special_values=special_values)
    if common_kernels.COMPILED:
        compiled = assemble(messages, compiled=True, special_values=special_values)
        assert compiled[0] == reference[0]
        assert compiled[1] == reference[1]
        assert compiled[2].resolved == reference[2].resolved
    return reference[0]


def typical(number: int) -> list[Value]:
    """A row such as applications write."""
    return [
        str(number).encode(), b"t", b"0.25", b"-12.50", b"1.500", "näme".encode(), b"\\x00ff",
        b"2024-02-29", b"23:59:59.5", b"2024-02-29 01:02:03.000004", b"1969-12-31 23:59:59+00",
        b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", b'{"a": 1}', None,
    ]  # fmt: skip


def key_only(number: int) -> list[Value]:
    return [str(number).encode(), *[None] * 13]


def test_a_transaction_becomes_a_window_of_its_captured_events() -> None:
    frames = list(
        iter_frames(
            both(
                [
                    made.begin(800, xid=4294967295),
                    *DESCRIBED,
                    made.insert(OID, typical(1)),
                    made.insert(IGNORED, [b"1"]),
                    made.update(OID, typical(1)),
                    made.update(OID, typical(1), typical(1)),
                    made.update(OID, typical(2), key_only(1), "K"),
                    made.delete(OID, key_only(2)),
                    made.delete(OID, typical(2), "O"),
                    made.insert(OTHER, [b"k", b"5"]),
                    made.truncate(OTHER, IGNORED),
                    made.commit(800),
                    made.begin(880),
                    made.insert(IGNORED, [b"2"]),
                    made.commit(880),
                ]
            )
        )
    )
    ops = [Op(frame.op) for frame in frames]
    assert ops == [
        Op.INSERT, Op.UPDATE, Op.UPDATE, Op.DELETE, Op.INSERT, Op.DELETE, Op.DELETE, Op.INSERT,
        Op.TRUNCATE, Op.END_OF_WINDOW,
    ]  # fmt: skip
    assert [frame.seq for frame in frames] == list(range(10))
    assert {frame.scn for frame in frames} == {800}
    assert bytes(frames[-1].key) == b"4294967295"
    assert frames[-1].event_count == 9


def test_typical_rows_never_leave_the_kernel() -> None:
    rows = [made.insert(OID, typical(number)) for number in range(500)]
    more = [made.update(OID, typical(3)), made.delete(OID, key_only(3))]
    messages = [made.begin(80), *DESCRIBED, *rows, *more, made.commit(80)]
    *_, by_hand = assemble(messages, compiled=True)
    assert by_hand == len(DESCRIBED)


EDGES: list[tuple[int, bytes]] = [
    (0, b"-9223372036854775808"),
    (0, b"9223372036854775807"),
    (1, b"f"),
    *[(2, text) for text in (b"NaN", b"-Infinity", b"-0", b"1e-07", b"1.7976931348623157e+308")],
    *[(2, text) for text in (b"5e-324", b"123456789012345", b"1234567890123456", b"1e+22")],
    *[(2, text) for text in (b"0.1", b"9.999999999999999e+22", b"1e+23", b"0.000123456789012345")],
    *[(3, text) for text in (b"0.00", b"-0.01", b"1.27", b"1.28", b"-1.28", b"-1.29", b"327.67")],
    *[(3, text) for text in (b"9999999999.99", b"-9999999999.99", b"83886.08", b"-83886.08")],
    *[(4, text) for text in (b"0.0000001", b"-0.0000001", b"0.000001", b"NaN", b"1" + b"0" * 60)],
    *[(4, text) for text in (b"0.0000000", b"0.00000", b"100", b"-Infinity", b"0.00000012")],
    (5, b""),
    (5, b"x" * 300),
    (6, b"\\x"),
    *[(7, text) for text in (b"0001-01-01", b"9999-12-31", b"1970-01-01", b"1900-03-01")],
    *[(8, text) for text in (b"00:00:00", b"23:59:59.999999", b"00:00:00.1")],
    *[(9, text) for text in (b"0001-01-01 00:00:00", b"9999-12-31 23:59:59.999999")],
    (10, b"2000-01-01 00:00:00.12+00"),
]


@pytest.mark.parametrize(("index", "text"), EDGES)
def test_edges_of_every_kind_are_equal_on_both_paths(index: int, text: bytes) -> None:
    values = typical(1)
    values[index] = text
    messages = [made.begin(80), *DESCRIBED, made.insert(OID, values), made.commit(80)]
    assert len(list(iter_frames(both(messages)))) == 2


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.floats(),
            st.decimals(-9999999999, 9999999999, places=2),
            st.decimals(allow_nan=True, allow_infinity=True),
            st.text(max_size=200),
            st.binary(max_size=40),
            st.dates(),
            st.times(),
            st.datetimes(),
        ),
        max_size=8,
    )
)
def test_random_rows_are_equal_on_both_paths(rows: list[tuple[Any, ...]]) -> None:
    messages = [made.begin(80), *DESCRIBED]
    for number, ratio, price, any_number, name, raw, day, clock, at in rows:
        values = typical(0)
        values[0] = str(number).encode()
        values[2] = repr(ratio).replace("inf", "Infinity").replace("nan", "NaN").encode()
        values[3] = format(price, ".2f").encode()
        values[4] = format(any_number, "f").replace("sNaN", "NaN").replace("-NaN", "NaN").encode()
        values[5] = str(name).encode()
        values[6] = b"\\x" + bytes(raw).hex().encode()
        values[7], values[8] = str(day).encode(), str(clock).encode()
        values[9] = str(at).encode()
        values[10] = str(at).encode() + b"+00"
        messages += [made.insert(OID, values), made.insert(OTHER, [str(name).encode(), b"1"])]
    both([*messages, made.commit(80)])


@pytest.mark.parametrize(
    "values",
    [
        [*typical(1)[:5], UNCHANGED, *typical(1)[6:]],
        [*typical(1)[:3], *[UNCHANGED] * 11],
    ],
)
def test_unchanged_values_are_marked_absent(values: list[Value]) -> None:
    messages = [made.begin(80), *DESCRIBED, made.update(OID, values), made.commit(80)]
    frame = next(iter_frames(both(messages)))
    expected = [index for index, value in enumerate(values) if value is UNCHANGED]
    marked = [i for i in range(14) if frame.absent[i >> 3] >> (i & 7) & 1]
    assert marked == expected


def test_a_whole_old_row_fills_what_is_unchanged() -> None:
    values: list[Value] = [*typical(1)[:5], UNCHANGED, *typical(1)[6:]]
    messages = [made.begin(80), *DESCRIBED, made.update(OID, values, typical(1)), made.commit(80)]
    frame = next(iter_frames(both(messages)))
    assert len(frame.absent) == 0
    assert frame.before is not None
    assert frame.after is not None
    assert bytes(frame.before) == bytes(frame.after)


def test_a_window_larger_than_a_part_comes_out_in_parts() -> None:
    rows = [made.insert(OTHER, [b"k%d" % n, b"1"]) for n in range(30_000)]
    data = both([made.begin(80), *DESCRIBED, *rows, made.commit(80)])
    columns = scan(data)
    assert columns.seq.tolist() == list(range(30_001))


def test_a_row_larger_than_the_output_buffer_passes() -> None:
    big = b"x" * (5 << 20)
    messages = [made.begin(80), *DESCRIBED, made.insert(OTHER, [b"k", b"1"])]
    messages += [made.insert(OTHER, [big, b"1"]), made.commit(80)]
    assert len(list(iter_frames(both(messages)))) == 3


def test_a_schema_change_is_announced_before_the_window_or_after_a_part_of_it() -> None:
    wider = made.relation(OTHER, "public.other", [("b", 25, -1, True), ("a", 25, -1, True)])
    row = made.insert(OTHER, [b"k", b"1"])
    data = both(
        [
            made.begin(80), *DESCRIBED, row, made.commit(80),
            made.begin(160), wider, row, made.commit(160),
            made.begin(240), row, DESCRIBED[1], row, made.commit(240),
        ]
    )  # fmt: skip
    frames = [(frame.scn, frame.seq, Op(frame.op).name) for frame in iter_frames(data)]
    assert frames == [
        (80, 0, "INSERT"), (80, 1, "END_OF_WINDOW"),
        (159, 0, "SCHEMA_CHANGE"), (159, 1, "END_OF_WINDOW"),
        (160, 0, "INSERT"), (160, 1, "END_OF_WINDOW"),
        (240, 0, "INSERT"), (240, 1, "INSERT"), (240, 2, "END_OF_WINDOW"),
        (241, 0, "SCHEMA_CHANGE"), (241, 1, "END_OF_WINDOW"),
    ]  # fmt: skip


def test_resolved_stays_below_a_window_that_has_not_ended() -> None:
    messages = [made.begin(80), *DESCRIBED, made.insert(OID, typical(1)), made.commit(80)]
    for compiled in {False, common_kernels.COMPILED}:
        *_, assembler, _ = assemble(messages[:-1], compiled=compiled)
        assembler.keepalive(4000)
        assert assembler.resolved == 0
        *_, assembler, _ = assemble(messages, compiled=compiled)
        assert assembler.resolved == 80
        assembler.keepalive(4000)
        assert assembler.resolved == 3998


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([made.begin(80), made.begin(88)], "inside another"),
        ([made.insert(OID, typical(1))], "undescribed"),
        ([made.begin(80), made.commit(88)], "ends a transaction of"),
        ([made.begin(80), made.commit(80), made.begin(72)], "was resolved"),
        ([b"?"], "unknown type"),
    ],
)
def test_a_stream_out_of_order_is_refused(messages: list[bytes], complaint: str) -> None:
    for compiled in {False, common_kernels.COMPILED}:
        with pytest.raises(FormatError, match=complaint):
            assemble(messages, compiled=compiled)


@pytest.mark.parametrize(
    ("index", "text"),
    [(7, b"infinity"), (7, b"0044-03-15 BC"), (8, b"24:00:00"), (9, b"-infinity"), (3, b"NaN")],
)
def test_a_value_beyond_its_kind_suspends_its_table_or_is_null_or_text(
    index: int, text: bytes
) -> None:
    values = typical(1)
    values[index] = text
    fine, other = made.insert(OID, typical(2)), made.insert(OTHER, [b"k", b"1"])
    messages = [made.begin(80), *DESCRIBED, fine, made.insert(OID, values), fine, other]
    messages += [made.commit(80), made.begin(160), DESCRIBED[0], fine, other, made.commit(160)]
    name = COLUMNS[index][0]
    for compiled in {False, common_kernels.COMPILED}:
        data, _, assembler, _ = assemble(messages, compiled=compiled)
        frames = [(f.scn, f.seq, f.source_id, Op(f.op).name) for f in iter_frames(data)]
        t, o = frames[0][2], frames[1][2]
        assert t != o
        assert frames == [
            (80, 0, t, "INSERT"), (80, 1, o, "INSERT"), (80, 2, 0, "END_OF_WINDOW"),
            (160, 0, o, "INSERT"), (160, 1, 0, "END_OF_WINDOW"),
        ]  # fmt: skip
        stop = assembler.suspended.suspensions["public.t"]
        assert stop.since_scn == 80
        assert re.search(rf"public\.t\.{name}.*special_values", stop.why)
    messages = [made.begin(80), *DESCRIBED, made.insert(OID, values), made.commit(80)]
    data = both(messages, "null")
    schema = assemble(messages, compiled=False, special_values="null")[1][0]
    after = next(iter_frames(data)).after
    assert after is not None
    assert schema.decode_row(after)[name] is None
    data = both(messages, "text")
    for compiled in {False, common_kernels.COMPILED}:
        _, (schema, *_), _, by_hand = assemble(messages, compiled=compiled, special_values="text")
        assert by_hand == len(DESCRIBED) if compiled else by_hand > len(DESCRIBED)
    after = next(iter_frames(data)).after
    assert after is not None
    assert schema.decode_row(after)[name] == text.decode()


def test_a_table_without_a_key_is_left_out_and_named() -> None:
    keyless = made.relation(OID, "public.t", [("id", 20, -1, False)])
    messages = [made.begin(80), keyless, made.insert(OID, [b"1"]), made.commit(80)]
    data, schemas, assembler, _ = assemble(messages, compiled=common_kernels.COMPILED)
    assert (data, schemas) == (b"", [])
    assert "no primary key" in assembler.suspended.suspensions["public.t"].why


def test_a_table_that_is_never_fit_does_not_prevent_others_from_being_resumed() -> None:
    suspensions = {
        name: TableSuspension(70, "it joined") for name in ("public.unfit", "public.other")
    }
    suspended = SuspendedTables(suspensions)
    assembler = WindowAssembler(("public.*",), "error", 80, suspended=suspended)
    suspended.request_resume("public.other")
    suspended.request_resume("public.unfit")
    assembler.suspend_again("public.unfit", DefinitionGap("it is unlogged", rows_remain=False))
    assert assembler.apply_suspensions()
    assert suspended.left_out == {"public.unfit"}
    assert not suspended.has_requests, "a request for the unfit one has to be repeated"


def test_cut_and_damaged_messages_never_pass_the_kernel_unseen() -> None:
    chance = random.Random(20)
    good = made.insert(OID, typical(1))
    for _ in range(400):
        damaged = bytearray(good)
        index = chance.randrange(5, len(good))
        damaged[index] = chance.randrange(256)
        messages = [made.begin(80), *DESCRIBED, bytes(damaged)[: chance.randrange(6, len(good))]]
        with pytest.raises((FormatError, UnsupportedChange)):
            assemble([*messages, made.commit(80)], compiled=True)


def test_rows_keyed_as_configured_come_from_both_paths_with_equal_bytes() -> None:
    columns: list[made.Column] = [("a", 23, -1, True), ("b", 25, -1, True), ("c", 17, -1, True)]
    rows: list[list[Value]] = [
        [b"1", b"x", b"\\x00"], [None, None, None], [b"-7", b"", b"\\x"], [b"2", None, None],
    ]  # fmt: skip
    messages = [made.begin(800), made.relation(OID, "public.t", columns, "f")]
    messages += [made.insert(OID, row) for row in rows]
    messages += [made.update(OID, row, row, "O") for row in rows]
    messages += [made.update(OID, rows[0], rows[1], "O")]
    messages += [made.delete(OID, row, "O") for row in rows]
    messages += [made.commit(800)]
    keys = ConfiguredKeys({"public.t": ("*",)})
    reference = assemble(messages, compiled=False, keys=keys)
    compiled = assemble(messages, compiled=True, keys=keys)
    assert compiled[:2] == reference[:2]
    assert compiled[3] == 2, "the relation and the update of a key, and no more, by hand"
    (schema,) = compiled[1]
    frames = list(iter_frames(compiled[0]))
    assert [frame.op for frame in frames[8:10]] == [Op.DELETE, Op.INSERT]
    assert schema.decode_key(frames[1].key) == {"a": None, "b": None, "c": None}
    assert schema.decode_key(frames[2].key) == schema.decode_row(frames[2].after or b"")
