"""Filters: vectorised selection equals the definition, one frame at a time."""

from __future__ import annotations

import fnmatch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.errors import BadFilter
from databus.common.filters import stream_filter as filters
from databus.common.filters.stream_filter import (
    HashPartition,
    ModPartition,
    RangePartition,
    StreamFilter,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema

SOURCES = ["shop.orders", "shop.users", "audit.log"]
SCHEMA = SourceSchema("any.table", (Column("id", Kind.INT, nullable=False),), ("id",))

events = st.lists(
    st.tuples(
        st.sampled_from(SOURCES),
        st.sampled_from([Op.INSERT, Op.UPDATE, Op.DELETE, Op.READ]),
        st.integers(-(2**63), 2**63 - 1),
    ),
    max_size=30,
)
partitions = st.one_of(
    st.none(),
    st.builds(ModPartition, st.just(4), st.frozensets(st.integers(0, 3), min_size=1)),
    st.builds(HashPartition, st.just(3), st.frozensets(st.integers(0, 2), min_size=1)),
    st.builds(RangePartition, st.integers(1, 1000), st.integers(-3, 0), st.integers(0, 3)),
)
stream_filters = st.builds(
    StreamFilter,
    sources=st.sampled_from([(), ("shop.*",), ("*",), ("audit.log", "shop.users"), ("none",)]),
    ops=st.sampled_from([frozenset(), frozenset({Op.INSERT}), frozenset({Op.DELETE, Op.READ})]),
    partition=partitions,
)


def takes(stream_filter: StreamFilter, source: str, op: Op, key: int) -> bool:
    partition = stream_filter.partition
    if stream_filter.ops and op not in stream_filter.ops:
        return False
    if stream_filter.sources and not any(
        fnmatch.fnmatchcase(source, glob) for glob in stream_filter.sources
    ):
        return False
    if isinstance(partition, ModPartition):
        bucket = frame_format.key_hash(SCHEMA.encode_key((key,))) % partition.count
        return bucket in partition.buckets
    if isinstance(partition, HashPartition):
        key_hash = frame_format.key_hash(SCHEMA.encode_key((key,)))
        return (key_hash >> 32) * partition.count >> 32 in partition.buckets
    if isinstance(partition, RangePartition):
        return partition.first <= key // partition.size <= partition.last
    return True


@given(events, stream_filters)
def test_the_mask_takes_what_the_definition_takes(
    rows: list[tuple[str, Op, int]], stream_filter: StreamFilter
) -> None:
    window = WindowBuilder(1, 0)
    for source, op, key in rows:
        window.event(op, frame_format.source_id(source), 9, SCHEMA.encode_key((key,)), after=b"x")
    block = np.frombuffer(window.end(), dtype=np.uint8)
    ids = filters.matching_ids(SOURCES, stream_filter)
    mask = stream_filter.mask(frame_format.scan(block), block, ids)
    assert mask.tolist() == [*(takes(stream_filter, *row) for row in rows), False]


@given(events, st.sampled_from(["mod", "hash"]))
def test_the_partitions_are_disjoint_and_together_everything(
    rows: list[tuple[str, Op, int]], kind: str
) -> None:
    window = WindowBuilder(1, 0)
    for source, op, key in rows:
        window.event(op, frame_format.source_id(source), 9, SCHEMA.encode_key((key,)))
    block = np.frombuffer(window.end(), dtype=np.uint8)
    columns = frame_format.scan(block)
    taken = [
        StreamFilter(partition=filters.parse_partition(f"{kind}:3:{bucket}")).mask(
            columns, block, np.array([], dtype=np.uint32)
        )
        for bucket in range(3)
    ]
    assert np.sum(taken, axis=0).tolist() == [*(1 for _ in rows), 0]


def test_partitions_are_written_as_documented() -> None:
    assert filters.parse_partition("mod:16:3,7") == ModPartition(16, frozenset({3, 7}))
    assert filters.parse_partition("mod:16:0-2,9") == ModPartition(16, frozenset({0, 1, 2, 9}))
    most = filters.parse_partition("mod:999999999:999934463-999999998")
    assert isinstance(most, ModPartition)
    assert len(most.buckets) == filters.MAX_BUCKETS
    assert filters.parse_partition("hash:16:0-2,9") == HashPartition(16, frozenset({0, 1, 2, 9}))
    assert filters.parse_partition("range:10000:0-3") == RangePartition(10000, 0, 3)
    assert filters.parse_partition("range:10:-5--2") == RangePartition(10, -5, -2)
    assert filters.parse_partition("range:10:4") == RangePartition(10, 4, 4)


@pytest.mark.parametrize(
    "text",
    ["", "mod", "mod:0:0", "mod:4:4", "mod:4:", "mod:4:a", "mod:4:3-1", "range:0:1-2",
     "range:5:3-1", "range:5", "bits:4:1", "hash:4:4",
     "hash:0:0", "mod:4:1;drop", "mod:4:-1", "mod:4:1-2-3",
     "mod:4:" + "9" * 5000, "mod:999999999:0-65536", "mod:9:" + "0-8," * 8000 + "1"],
)  # fmt: skip
def test_a_partition_of_another_form_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(BadFilter, match="partition"):
        filters.parse_partition(text)


def test_ops_and_sources_of_another_form_are_refused() -> None:
    assert filters.parse_ops("c, d") == {Op.INSERT, Op.DELETE}
    assert filters.parse_sources(" shop.* ,x.y") == ("shop.*", "x.y")
    for text in ("", "x", "c,z"):
        with pytest.raises(BadFilter, match="ops"):
            filters.parse_ops(text)
    with pytest.raises(BadFilter, match="names no source"):
        filters.parse_sources(" , ")
