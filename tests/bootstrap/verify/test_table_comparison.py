"""The comparison of a table with its copy, without servers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.bootstrap.verify.table_comparison import (
    KeyRange,
    ReturnedColumns,
    TableComparison,
    TableDigests,
    WantedFrames,
    compare_row,
    folded,
)
from databus.common.checkpoint import Position
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op, pack_bitmap, pack_frame
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.support.schemas import columns_of

ITEMS = SourceSchema(
    "shop.items",
    columns_of("id INT!, name STRING, price FLOAT"),
    ("id",),
)
WIDER = SourceSchema("shop.items", (*ITEMS.columns, Column("note", Kind.STRING)), ("id",))
SCHEMAS = SchemaSet((ITEMS, WIDER))

Rows = dict[int, tuple[str | None, float | None]]
ROWS = st.dictionaries(
    st.integers(0, 40),
    st.tuples(st.none() | st.sampled_from(["a", "b"]), st.none() | st.sampled_from([0.5, 1.5])),
    max_size=30,
)


def key(number: int) -> bytes:
    return ITEMS.encode_key([number])


def packed(number: int, row: tuple[str | None, float | None], scn: int = 1) -> bytes:
    after = ITEMS.encode_row([number, *row])
    return pack_frame(
        op=Op.READ, scn=scn, seq=number, source=ITEMS.source_id, schema_fp=ITEMS.fingerprint,
        key=key(number), after=after,
    )  # fmt: skip


def digests_of(rows: Rows, chunk_rows: int = 7) -> TableDigests:
    """The source's side, cut into chunks as a relay cuts it."""
    digests = TableDigests()
    numbers = sorted(rows)
    for at in range(0, len(numbers) or 1, chunk_rows):
        chunk = numbers[at : at + chunk_rows]
        views = [frame_format.read_frame(packed(number, rows[number])) for number in chunk]
        pairs = [(view.key_hash, frame_format.key_hash(bytes(view.after or b""))) for view in views]
        after = [numbers[at - 1]] if at else None
        digests.add(
            np.array(pairs, dtype=np.uint64).reshape(-1, 2),
            KeyRange(after, [chunk[-1]] if chunk else None),
            ITEMS,
        )
    digests.sort()
    return digests


@given(source=ROWS, copy=ROWS)
def test_candidates_and_left_over_rows_are_exactly_what_differs(source: Rows, copy: Rows) -> None:
    digests = digests_of(source)
    data = b"".join(packed(number, row) for number, row in copy.items())
    digests.observe(frame_format.scan(data), memoryview(data), SCHEMAS)
    assert digests.candidates == {
        key(number) for number, row in copy.items() if source.get(number) != row
    }
    missing = {number for number in source if number not in copy}
    assert {number for number in source if digests.is_left_over(key(number))} == missing
    chunks = {sorted(source).index(number) // 7 for number in missing}
    assert digests.left_over() == sorted(chunks)


def test_keys_that_share_a_hash_are_always_looked_at_again() -> None:
    digests = TableDigests()
    one = frame_format.read_frame(packed(1, ("a", None)))
    pairs = [(one.key_hash, frame_format.key_hash(bytes(one.after or b""))), (one.key_hash, 7)]
    digests.add(np.array(pairs, dtype=np.uint64), KeyRange(None, None), ITEMS)
    digests.sort()
    data = packed(1, ("a", None))
    digests.observe(frame_format.scan(data), memoryview(data), SCHEMAS)
    assert digests.candidates == {key(1)}


@pytest.mark.parametrize(
    ("written_with", "is_alike"),
    [
        (Column("name", Kind.STRING, type_name="varchar(20)"), True),
        (Column("label", Kind.STRING), False),
        (Column("name", Kind.JSON), False),
    ],
    ids=["as it is", "before it was renamed", "before it was converted"],
)
def test_equal_bytes_of_other_columns_are_no_equal_row(
    written_with: Column, is_alike: bool
) -> None:
    old = SourceSchema("shop.items", (ITEMS.columns[0], written_with, ITEMS.columns[2]), ("id",))
    data = pack_frame(
        op=Op.READ, scn=1, seq=0, source=old.source_id, schema_fp=old.fingerprint,
        key=key(1), after=old.encode_row([1, "a", 0.5]),
    )  # fmt: skip
    digests = digests_of({1: ("a", 0.5)})
    digests.observe(frame_format.scan(data), memoryview(data), SchemaSet((old, ITEMS)))
    assert digests.candidates == (set() if is_alike else {key(1)})
    unknown = digests_of({1: ("a", 0.5)})
    unknown.observe(frame_format.scan(data), memoryview(data), SchemaSet())
    assert unknown.candidates == {key(1)}


def test_rows_under_a_key_of_another_form_are_noticed() -> None:
    columns = (ITEMS.columns[0], Column("name", Kind.STRING, nullable=False), ITEMS.columns[2])
    wide = SourceSchema("shop.items", columns, ("id", "name"))
    digests = digests_of({1: ("a", 0.5)})
    data = packed(1, ("a", 0.5))
    digests.observe(frame_format.scan(data), memoryview(data), SCHEMAS)
    assert not digests.has_other_keys
    data = pack_frame(
        op=Op.READ, scn=1, seq=0, source=wide.source_id, schema_fp=wide.fingerprint,
        key=wide.encode_key([1, "a"]), after=wide.encode_row([1, "a", 0.5]),
    )  # fmt: skip
    digests.observe(frame_format.scan(data), memoryview(data), SchemaSet((wide, ITEMS)))
    assert digests.has_other_keys
    without_rows = digests_of({1: ("a", 0.5)})
    without_rows.compare_key(WIDER)
    assert not without_rows.has_other_keys
    without_rows.compare_key(wide)
    assert without_rows.has_other_keys


def test_a_patch_makes_its_key_a_candidate_and_is_folded_into_the_row() -> None:
    whole = packed(1, ("a", 0.5))
    patch = pack_frame(
        op=Op.UPDATE, scn=2, seq=0, source=ITEMS.source_id, schema_fp=ITEMS.fingerprint,
        key=key(1), after=ITEMS.encode_row([1, None, 1.5]), absent=pack_bitmap([1], 3),
    )  # fmt: skip
    digests = digests_of({1: ("a", 1.5)})
    digests.observe(frame_format.scan(whole + patch), memoryview(whole + patch), SCHEMAS)
    assert digests.candidates == {key(1)}
    wanted = WantedFrames([key(1), key(3)])
    wanted.observe(whole + packed(2, ("b", 1.0)))
    wanted.observe(patch)
    assert wanted.found.keys() == {key(1)}
    views = wanted.found[key(1)]
    assert folded(views, SCHEMAS, ITEMS) == {"id": 1, "name": "a", "price": 1.5}
    truth = ITEMS.encode_row([1, "a", 1.5])
    assert compare_row(truth, views, SCHEMAS, ITEMS) == (TableComparison.EQUAL, [])


def test_each_outcome_has_its_case_and_names_the_columns() -> None:
    views = list(frame_format.iter_frames(packed(1, ("a", float("nan")))))
    equal = ITEMS.encode_row([1, "a", float("nan")])
    other = ITEMS.encode_row([1, "b", float("nan")])
    assert compare_row(equal, views, SCHEMAS, ITEMS) == (TableComparison.EQUAL, [])
    assert compare_row(other, views, SCHEMAS, ITEMS) == (TableComparison.CHANGED, ["name"])
    assert compare_row(other, [], SCHEMAS, ITEMS) == (TableComparison.MISSING, [])
    assert compare_row(None, views, SCHEMAS, ITEMS) == (TableComparison.EXTRA, [])
    assert compare_row(None, [], SCHEMAS, ITEMS) == (TableComparison.EQUAL, [])


def test_a_row_of_an_older_schema_equals_the_same_row_with_a_null_in_the_new_column() -> None:
    views = list(frame_format.iter_frames(packed(1, ("a", 0.5))))
    same = WIDER.encode_row([1, "a", 0.5, None])
    filled = WIDER.encode_row([1, "a", 0.5, "by default"])
    assert compare_row(same, views, SCHEMAS, WIDER) == (TableComparison.EQUAL, [])
    assert compare_row(filled, views, SCHEMAS, WIDER) == (TableComparison.CHANGED, ["note"])


def test_a_row_that_is_equal_differs_if_a_reader_may_lack_its_returned_columns() -> None:
    """Unless the column is null, or the row was written again since."""
    rows: Rows = {1: ("a", 0.5), 2: (None, 0.5), 3: ("a", 0.5)}
    digests = digests_of(rows)
    digests.returned = ReturnedColumns(("name",), Position(4, 9))
    copy = packed(1, rows[1]) + packed(2, rows[2]) + packed(3, rows[3], scn=5)
    digests.observe(frame_format.scan(copy), memoryview(copy), SCHEMAS)
    assert digests.candidates == {key(1)}
    results = {}
    for view in frame_format.iter_frames(copy):
        content = bytes(view.after or b"")
        results[bytes(view.key)] = compare_row(content, [view], SCHEMAS, ITEMS, digests.returned)
    assert results == {
        key(1): (TableComparison.CHANGED, ["name"]),
        key(2): (TableComparison.EQUAL, []),
        key(3): (TableComparison.EQUAL, []),
    }
