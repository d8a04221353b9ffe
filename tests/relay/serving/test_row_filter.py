"""``where`` at work: which image is decided, what is remembered, and the stream over HTTP."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from databus.common.checkpoint import Position
from databus.common.errors import BadFilter
from databus.common.filters.predicate import parse_where
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame.frame_format import FrameSplitter, Op, iter_frames, pack_bitmap
from databus.common.frame.window_builder import WindowBuilder
from databus.common.http.stream_formats import FRAMES_TYPE, NDJSON_TYPE, SSE_TYPE
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from databus.relay.serving import row_filter
from databus.relay.serving.row_filter import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_ROW_FILTERS,
    RowFilter,
    RowFilters,
)
from databus.relay.serving.stream_cursor import StreamCursor
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window

PEOPLE = SourceSchema(
    "shop.people",
    (Column("id", Kind.INT, nullable=False), Column("age", Kind.INT), Column("bio", Kind.STRING)),
    ("id",),
)
WIDER = SourceSchema("shop.people", (*PEOPLE.columns, Column("note", Kind.STRING)), ("id",))
RETYPED = SourceSchema(
    "shop.people", (PEOPLE.columns[0], Column("age", Kind.STRING), PEOPLE.columns[2]), ("id",)
)

Row = tuple[Any, ...]


def change(
    op: Op, before: Row | None, after: Row | None, *, absent: Sequence[int] = (), number: int = 1
) -> bytes:
    """A window with one change of PEOPLE, without its end."""
    builder = WindowBuilder(1, 1)
    builder.event(
        op,
        PEOPLE.source_id,
        PEOPLE.fingerprint,
        PEOPLE.encode_key((number,)),
        before=None if before is None else PEOPLE.encode_row(before),
        after=None if after is None else PEOPLE.encode_row(after),
        absent=pack_bitmap(list(absent), len(PEOPLE.columns)) if absent else b"",
    )
    return builder.end()


def row_filter_of(where: str, *schemas: SourceSchema) -> RowFilter:
    return RowFilter(parse_where(where), SchemaSet(schemas or (PEOPLE,)))


def cursor_of(matcher: RowFilter) -> StreamCursor:
    return StreamCursor(Position(0, 0), StreamFilter(), row_filter=matcher)


def is_taken(where: str, block: bytes) -> bool:
    return len(cursor_of(row_filter_of(where)).take(block).data) > 0


OLD, YOUNG = (1, 70, "x"), (1, 7, "x")


@pytest.mark.parametrize(
    ("block", "taken"),
    [
        (change(Op.INSERT, None, OLD), True),
        (change(Op.INSERT, None, YOUNG), False),
        (change(Op.INSERT, None, (1, None, "x")), False),
        (change(Op.READ, None, OLD), True),
        (change(Op.READ, None, YOUNG), False),
        (change(Op.UPDATE, OLD, OLD), True),
        (change(Op.UPDATE, YOUNG, OLD), True),
        (change(Op.UPDATE, OLD, YOUNG), True),
        (change(Op.UPDATE, YOUNG, YOUNG), False),
        (change(Op.UPDATE, None, YOUNG), True),
        (change(Op.DELETE, OLD, None), True),
        (change(Op.DELETE, YOUNG, None), False),
        (change(Op.DELETE, None, None), True),
        (change(Op.UPDATE, YOUNG, (1, None, "y"), absent=[1]), False),
        (change(Op.UPDATE, OLD, (1, None, "y"), absent=[1]), True),
        (change(Op.UPDATE, None, (1, None, "y"), absent=[1]), True),
        (change(Op.TRUNCATE, None, None), True),
    ],
)
def test_a_change_is_taken_if_the_row_was_in_or_is_in_or_is_unknown(
    block: bytes, taken: bool
) -> None:
    assert is_taken("age > 60", block) is taken


@pytest.mark.parametrize(
    ("block", "taken"),
    [
        (change(Op.DELETE, None, None, number=1), True),
        (change(Op.DELETE, None, None, number=2), False),
        (change(Op.UPDATE, None, (2, 70, "x"), number=2), False),
    ],
)
def test_a_predicate_over_the_key_needs_no_image_before(block: bytes, taken: bool) -> None:
    assert is_taken("id = 1", block) is taken


def test_the_key_alone_decides_where_the_rest_cannot_change_it() -> None:
    assert not is_taken("id = 1 AND age > 60", change(Op.DELETE, None, None, number=2))
    assert is_taken("id = 1 AND age > 60", change(Op.DELETE, None, None, number=1))


# ---- schemas ----


def test_sources_without_the_column_are_left_out_truncates_and_all() -> None:
    matcher = row_filter_of("age > 1", PEOPLE, ORDERS)
    matcher.check(["shop.people", "shop.orders"])
    builder = WindowBuilder(1, 1)
    for schema in (ORDERS, PEOPLE):
        builder.event(Op.TRUNCATE, schema.source_id, schema.fingerprint, b"")
    retained = [
        f.source_id for f in iter_frames(bytes(cursor_of(matcher).take(builder.end()).data))
    ]
    assert retained == [PEOPLE.source_id, 0]


def test_a_column_of_a_newer_version_is_null_in_the_older_ones() -> None:
    block = change(Op.INSERT, None, OLD)
    for where, taken in (("note IS NULL", True), ("note = 'x'", False)):
        matcher = row_filter_of(where, PEOPLE, WIDER)
        matcher.check(["shop.people"])
        assert (len(cursor_of(matcher).take(block).data) > 0) is taken


def test_a_version_whose_types_do_not_compare_is_passed_through() -> None:
    matcher = row_filter_of("age = 'old'", PEOPLE, RETYPED)
    matcher.check(["shop.people"])
    assert len(cursor_of(matcher).take(change(Op.INSERT, None, YOUNG)).data)


def test_a_new_version_is_reckoned_with_as_soon_as_it_is_known() -> None:
    schemas = SchemaSet([PEOPLE])
    matcher = RowFilter(parse_where("note IS NULL"), schemas)
    block = change(Op.INSERT, None, OLD)
    assert not len(cursor_of(matcher).take(block, 0).data)
    schemas.add(WIDER)
    assert len(cursor_of(matcher).take(block, 0).data)


@pytest.mark.parametrize(
    ("where", "sources", "message"),
    [
        ("salary > 1", ["shop.people", "shop.orders"], r"'salary'.*known are: age, bio, id, item"),
        ("age > 1", ["shop.orders"], r"unknown column 'age'.*known are: id, item"),
        ("age > 1 AND item = 'x'", ["shop.people", "shop.orders"], "has all of age, item"),
        ("age LIKE 'x'", ["shop.people"], "needs text, not int"),
    ],
)
def test_a_predicate_that_no_selected_source_can_answer_is_refused(
    where: str, sources: list[str], message: str
) -> None:
    with pytest.raises(BadFilter, match=message):
        row_filter_of(where, PEOPLE, ORDERS).check(sources)


def test_while_no_source_is_known_every_column_may_still_come() -> None:
    row_filter_of("age > 1").check([])


# ---- what is remembered ----


def blocks_of(count: int) -> bytes:
    return b"".join(
        window(scn, [(Op.INSERT, ORDERS, scn + n) for n in range(5)]) for scn in range(1, count)
    )


def test_readers_with_other_cuts_share_the_matches_of_the_ring() -> None:
    block = blocks_of(300)
    edges = [*[frame.offset for frame in iter_frames(block)][::37], len(block)]
    matcher = row_filter_of("id % 3 = 0", ORDERS)
    base = 5 * CHUNK_BYTES - 4096
    whole = bytes(cursor_of(matcher).take(block, base).data)
    decided = matcher.decided_count
    assert decided == 299 * 5
    cursor, parts = cursor_of(matcher), b""
    for start, stop in itertools.pairwise(edges):
        parts += bytes(cursor.take(block[start:stop], base + start).data)
    assert parts == whole
    assert matcher.decided_count == decided
    retained = [f for f in iter_frames(whole) if f.op == Op.INSERT]
    assert [ORDERS.decode_key(f.key)["id"] % 3 for f in retained] == [0] * len(retained)
    assert len(retained) == sum((scn + n) % 3 == 0 for scn in range(1, 300) for n in range(5))


def test_a_match_is_only_computed_for_what_the_other_filters_take() -> None:
    matcher = row_filter_of("id > 0", ORDERS, ITEMS)
    wanted = StreamFilter(sources=("shop.items",))
    cursor = StreamCursor(Position(0, 0), wanted, row_filter=matcher)
    cursor.set_sources(np.array([ITEMS.source_id], dtype=np.uint32))
    cursor.take(window(1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ITEMS, 2)]), 0)
    assert matcher.decided_count == 1


def test_memory_is_bounded_however_far_a_reader_goes() -> None:
    matcher = row_filter_of("id = 1", ORDERS)
    cursor, block = cursor_of(matcher), window(1, [(Op.INSERT, ORDERS, 1)])
    for number in range(MAX_CHUNKS + 10):
        cursor.take(block, number * CHUNK_BYTES)
    assert len(matcher._chunks) == MAX_CHUNKS


def test_equal_predicates_share_a_filter_and_the_oldest_are_dropped() -> None:
    row_filters = RowFilters(SchemaSet([ORDERS]))
    first = row_filters.of(parse_where("id=1"))
    assert row_filters.of(parse_where("id  =  1")) is first
    for number in range(MAX_ROW_FILTERS):
        row_filters.of(parse_where(f"id = {number + 5}"))
    assert len(row_filters) == MAX_ROW_FILTERS
    assert row_filters.of(parse_where("id = 1")) is not first


# ---- over HTTP ----


async def test_every_format_serves_the_rows_that_match_and_moves_over_the_rest(
    tmp_path: Path,
) -> None:
    live = LiveRelay(tmp_path)
    live.append(
        window(1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ORDERS, 2), (Op.INSERT, ITEMS, 3)]),
        window(2, [(Op.INSERT, ORDERS, 3)]),
    )
    query = {"where": "item IN ('x1', 'x9')"}
    async with live.served(), aiohttp.ClientSession() as http:
        url = f"{live.url}/v1/shop/stream"
        async with http.get(url, params=query, headers={"Accept": FRAMES_TYPE}) as answer:
            found = [(f.op, f.scn, f.seq) for f in iter_frames(await answer.read())]
        assert found == [(Op.INSERT, 1, 0), (Op.END_OF_WINDOW, 1, 3), (Op.HEARTBEAT, 2, 1)]
        async with http.get(url, params=query, headers={"Accept": NDJSON_TYPE}) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
        assert [line.get("key") or line["control"] for line in lines] == [
            {"id": 1},
            "end_of_window",
            "heartbeat",
        ]
        query["follow"] = "false"
        async with http.get(url, params=query, headers={"Accept": SSE_TYPE}) as answer:
            assert (await answer.text()).count("event: change") == 1
    live.close()


async def test_a_follower_gets_the_matching_rows_as_they_come(tmp_path: Path) -> None:
    live = LiveRelay(tmp_path, heartbeat="10s")
    query = {"where": "id >= 10", "follow": "true", "sources": "shop.orders"}
    splitter, keys = FrameSplitter(), []
    async with live.served(), aiohttp.ClientSession(headers={"Accept": FRAMES_TYPE}) as http:
        async with http.get(f"{live.url}/v1/shop/stream", params=query) as answer:
            live.append(*(window(n, [(Op.INSERT, ORDERS, n)]) for n in range(8, 13)))
            async for piece in answer.content.iter_any():
                block = splitter.feed(piece)
                keys += [
                    ORDERS.decode_key(f.key)["id"]
                    for f in iter_frames(bytes(block))
                    if f.op == Op.INSERT
                ]
                if len(keys) == 3:
                    break
    assert keys == [10, 11, 12]
    live.close()


@pytest.mark.parametrize("most_by_hand", [2000, 10])
@pytest.mark.parametrize("where", ["id % 7 = 3", "id / 7 = 30 OR id % 7 = 3"])
async def test_a_reader_that_is_behind_gets_the_matching_rows_of_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, most_by_hand: int
) -> None:
    monkeypatch.setattr(row_filter, "MAX_BY_HAND", most_by_hand)
    row_filters: set[RowFilter] = set()
    match_cached = RowFilter.refine_cached

    def noting(matcher: RowFilter, *arguments: Any) -> Any:
        row_filters.add(matcher)
        return match_cached(matcher, *arguments)

    monkeypatch.setattr(RowFilter, "refine_cached", noting)
    live = LiveRelay(tmp_path)
    live.append(
        *(window(n, [(Op.INSERT, ORDERS, n), (Op.INSERT, ITEMS, n)]) for n in range(1, 899))
    )
    query = {"where": where, "sources": "shop.orders"}
    headers = {"Accept": FRAMES_TYPE, "Accept-Encoding": "identity"}
    async with live.served(), aiohttp.ClientSession() as http:
        url = f"{live.url}/v1/shop/stream"
        async with http.get(url, params=query, headers=headers) as answer:
            found = [(f.op, f.scn) for f in iter_frames(await answer.read())]
    (matcher,) = row_filters
    assert matcher.uses_cached_headers == (most_by_hand > 898 or "/" not in where)
    assert matcher.decided_count == 898
    rows = [n for n in range(1, 899) if n % 7 == 3 or ("/" in where and n == 210)]
    wanted = [(op, n) for n in rows for op in (Op.INSERT, Op.END_OF_WINDOW)]
    assert found == [*wanted, (Op.HEARTBEAT, 898)]
    live.close()


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("colour = 'red'", "item, name"),
        ("sleep(9) = 1", "length, lower, upper"),
        ("id =", "no SQL"),
    ],
)
async def test_a_predicate_that_cannot_be_served_is_answered_with_400(
    tmp_path: Path, where: str, named: str
) -> None:
    live = LiveRelay(tmp_path)
    async with live.served(), aiohttp.ClientSession() as http:
        async with http.get(f"{live.url}/v1/shop/stream", params={"where": where}) as answer:
            document = await answer.json(content_type=None)
    assert (answer.status, document["code"]) == (400, "bad_filter")
    assert named in document["detail"]
    live.close()
