"""The merge of one bucket against the plain model's compaction."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.bootstrap.merging.spark_tasks import Changes, Task
from databus.client.splits.bucket_merge import bucket_range, merged, within
from databus.client.splits.frame_tables import SCHEMA, as_table
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView, Op
from tests.bootstrap.model import clustered, compact

SOURCE = 7
HASHES = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)
"""Few hashes: several keys have the same one, and their order is unsigned."""


@dataclass(frozen=True)
class Change:
    """A row of a history; its position is its index."""

    op: Op
    key: bytes
    hash: int
    is_partial: bool


def changes() -> st.SearchStrategy[list[Change]]:
    """Histories of one source."""
    row = st.builds(
        Change,
        op=st.sampled_from([Op.INSERT, Op.UPDATE, Op.UPDATE, Op.DELETE, Op.READ]),
        key=st.sampled_from([b"a", b"ab", b"b"]),
        hash=st.just(0),
        is_partial=st.just(False),
    )
    partial = st.builds(
        Change,
        op=st.just(Op.UPDATE),
        key=st.sampled_from([b"a", b"ab", b"b"]),
        hash=st.just(0),
        is_partial=st.just(True),
    )
    truncate = st.just(Change(Op.TRUNCATE, b"", 2**40, is_partial=False))
    return st.lists(st.one_of(row, row, partial, truncate), max_size=40)


def frame_of(change: Change, number: int, hashes: dict[bytes, int]) -> FrameView:
    packed = bytearray(
        frame_format.pack_frame(
            op=change.op,
            scn=10 + number // 3,
            seq=number,
            source=SOURCE,
            key=change.key,
            after=None if change.op in (Op.DELETE, Op.TRUNCATE) else b"%d" % number,
            absent=b"\x01" if change.is_partial else b"",
        )
    )
    wanted = change.hash if change.op == Op.TRUNCATE else hashes[change.key]
    packed[32:40] = wanted.to_bytes(8, "little")
    return frame_format.trusted_frame(memoryview(bytes(packed)), 0)


def table_of(frames: Sequence[FrameView]) -> Any:
    data = b"".join(bytes(one.bytes) for one in frames)
    return as_table(data, frame_format.scan(data, verify=False))


def in_pieces(table: Any, rng: random.Random) -> list[Any]:
    pieces = []
    at = 0
    while at < table.num_rows:
        count = rng.choice((1, 1, 2, 3, 100))
        pieces.append(table.slice(at, count))
        at += count
    return pieces


def frames_in(tables: Sequence[Any]) -> list[bytes]:
    return [value for table in tables for value in table.column("frame").to_pylist()]


@settings(max_examples=150, deadline=None)
@given(changes(), st.integers(0, 2**32), st.booleans())
def test_a_merge_of_adjacent_runs_is_the_compaction_of_all_their_changes(
    history: list[Change], seed: int, base: bool
) -> None:
    rng = random.Random(seed)
    hashes = {key: rng.choice(HASHES) for key in (b"a", b"ab", b"b")}
    frames = [frame_of(change, number, hashes) for number, change in enumerate(history)]
    edges = sorted(rng.choices(range(len(frames) + 1), k=2))
    runs = [frames[: edges[0]], frames[edges[0] : edges[1]], frames[edges[1] :]]
    inputs = [in_pieces(table_of(clustered(compact(run, base=False))), rng) for run in runs]
    rng.shuffle(inputs)
    cuts = [one.position for one in frames if one.op == Op.TRUNCATE]
    cut = max(cuts) if cuts else None
    found = list(merged(inputs, base=base, cut=cut))
    expected = clustered(compact(frames, base=base))
    assert frames_in(found) == [bytes(one.bytes) for one in expected]
    for bits in (1, 2):
        halves = [f"{number:0{bits}b}" for number in range(2**bits)]
        parts = [
            frames_in(
                list(merged([[within(t, half) for t in one] for one in inputs], base=base, cut=cut))
            )
            for half in halves
        ]
        joined = [frame for part in parts for frame in part]
        assert joined == frames_in(found), "two halves of a bucket are two buckets"


def test_rows_after_a_position_alone_are_taken() -> None:
    hashes = {b"a": 1, b"b": 2}
    rows = [Change(Op.INSERT, key, 0, is_partial=False) for key in (b"b", b"a", b"b", b"a")]
    frames = [frame_of(change, number, hashes) for number, change in enumerate(rows)]
    table = table_of(clustered(frames))
    for number, one in enumerate(frames):
        found = within(table, "", tuple(one.position))
        assert set(frames_in([found])) == {bytes(f.bytes) for f in frames[number + 1 :]}
    assert within(table, "1").num_rows == 0


def test_inputs_differ_in_which_columns_have_no_nulls() -> None:
    """Spark's do: a filter on a column makes it so."""
    hashes = {b"a": 1, b"b": 2}
    rows = [Change(Op.INSERT, key, 0, is_partial=False) for key in (b"a", b"b")]
    first, second = (table_of([frame_of(row, at, hashes)]) for at, row in enumerate(rows))
    op = first.schema.get_field_index("op")
    strict = first.schema.set(op, first.schema.field(op).with_nullable(False))
    found = list(merged([[first.cast(strict)], [second]], base=True))
    assert len(frames_in(found)) == 2
    assert all(table.schema == second.schema for table in found)


def test_a_row_that_belongs_to_no_task_ends_the_merge() -> None:
    hashes = {b"a": 1, b"b": 2**63}
    rows = [Change(Op.INSERT, key, 0, is_partial=False) for key in (b"a", b"b")]
    table = table_of([frame_of(change, number, hashes) for number, change in enumerate(rows)])

    def changes_of(*tasks: tuple[int, str]) -> list[int]:
        changes = Changes(iter(table.to_batches()))
        found = [
            sum(part.num_rows for part in changes.of(Task(0, source, bucket, (), None, 0)))
            for source, bucket in tasks
        ]
        changes.require_end()
        return found

    assert changes_of((SOURCE, "0"), (SOURCE, "1"), (SOURCE + 1, "")) == [1, 1, 0]
    for tasks in (((SOURCE, "1"),), ((SOURCE, "0"),), ((SOURCE + 1, ""),), ((SOURCE - 1, ""),)):
        with pytest.raises(ValueError, match="no bucket"):
            changes_of(*tasks)


def test_a_bucket_is_named_by_leading_bits() -> None:
    assert bucket_range("") == (0, 2**64 - 1)
    assert bucket_range("10") == (2**63, 2**63 + 2**62 - 1)


def test_memory_is_that_of_the_tables_at_hand() -> None:
    """An input is read no further than the merge has come."""
    read = {"old": 0, "new": 0}
    peak = 0

    def tables(name: str, first_scn: int) -> Any:
        for number in range(200):
            read[name] += 1
            nonlocal peak
            peak = max(peak, sum(read.values()) - 2 * done)
            hashes = np.arange(number * 100, number * 100 + 100, dtype=np.uint64)
            columns = {name: np.zeros(100, dtype=np.int64) for name in SCHEMA.names[:7]}
            columns |= {"scn": columns["scn"] + first_scn, "op": columns["op"] + int(Op.UPDATE)}
            keys = [b"%d" % one for one in hashes.tolist()]
            columns |= {"key_hash": hashes.view(np.int64), "key": keys, "frame": keys}
            yield pa.table(columns).cast(SCHEMA)

    done = rows = 0
    for table in merged([tables("old", 5), tables("new", 6)], base=True):
        rows += table.num_rows
        done = rows // 100
        assert set(table.column("scn").to_pylist()) == {6}
    assert rows == 200 * 100
    assert peak <= 6


@pytest.mark.parametrize("count", [1, 2])
def test_tables_without_rows_are_passed_over(count: int) -> None:
    empty = table_of([])
    one = table_of([frame_of(Change(Op.INSERT, b"a", 0, is_partial=False), 1, {b"a": 9})])
    assert frames_in(list(merged([[empty, one, empty]] * 1 + [[empty]] * count, base=True))) == (
        one.column("frame").to_pylist()
    )
    assert list(merged([], base=False)) == []
