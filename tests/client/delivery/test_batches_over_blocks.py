"""Batches of windows that lie in several blocks, against the events of the same frames."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.client import Event, Position, Result
from databus.client.application.events import Decoding, Window
from databus.client.application.frame_blocks import Block
from databus.client.application.options import Options
from databus.client.delivery.dispatcher import Call, Dispatcher
from databus.client.pulling.replay_buffer import ReplayBuffer
from databus.client.tables.data_batch import BatchDecoding, DataBatch
from databus.common.frame.frame_format import scan
from databus.common.frame.window_builder import heartbeat
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.client.shop import ITEMS, ORDERS, window

OLD_ITEMS = SourceSchema(
    "shop.items",
    (Column("name", Kind.STRING, nullable=True), Column("id", Kind.INT, nullable=False)),
    ("id",),
)
change = st.tuples(
    st.sampled_from("ccuudt"),
    st.sampled_from([ORDERS, ITEMS]),
    st.integers(1, 9),
    st.none() | st.text(max_size=3),
)
rows_of_window = st.lists(change, min_size=1, max_size=9)


def decoding() -> Decoding:
    return Decoding("shop", SchemaSet([ORDERS, OLD_ITEMS, ITEMS]), {})


def dispatcher_of(frames: list[bytes], cuts: list[int]) -> tuple[Dispatcher, ReplayBuffer]:
    """A dispatcher of these frames, in blocks that end before the frames ``cuts``."""
    buffer = ReplayBuffer(1 << 20)
    bounds = sorted({0, *(cut for cut in cuts if cut < len(frames)), len(frames)})
    for start, stop in itertools.pairwise(bounds):
        block = Block(b"".join(frames[start:stop]), first=start, bootstrap=False)
        asyncio.run(buffer.put(block))
    options = Options(checkpoint_every_windows=10**6)
    return Dispatcher(
        buffer=buffer, decoding=decoding(), options=options, clock_of=lambda: "c"
    ), buffer


def split(data: bytes) -> list[bytes]:
    columns = scan(data)
    bounds = [*columns.offset.tolist(), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(bounds)]


def as_row(event: Event) -> tuple[Any, ...]:
    """What a batch has of an event."""
    values = event.value or event.key
    return event.op, event.position, {name: value for name, value in values.items() if value}


@settings(max_examples=60)
@given(
    windows=st.lists(rows_of_window | st.none(), min_size=1, max_size=9),
    cuts=st.lists(st.integers(1, 60), max_size=8),
    most_rows=st.integers(1, 20),
)
def test_batches_over_blocks_have_the_rows_of_the_events_in_whole_windows(
    windows: list[Any], cuts: list[int], most_rows: int
) -> None:
    """A window that is None is a heartbeat."""
    frames: list[bytes] = []
    for scn, changes in enumerate(windows, start=1):
        if changes is None:
            frames.append(heartbeat(Position(scn), 0))
        else:
            old = [c if c[1] is ORDERS or scn % 3 else (c[0], OLD_ITEMS, *c[2:]) for c in changes]
            frames += split(window(scn, *old))
    wanted: dict[str, list[Any]] = {}
    whole = Block(b"".join(frames), bootstrap=False)
    for index in range(whole.count):
        if whole.ops[index] < 64:
            event = Event(whole, index, Window(decoding(), "online", whole, index))
            wanted.setdefault(event.source, []).append(as_row(event))
    sizes = {scn: len(one) for scn, one in enumerate(windows, 1) if one}
    dispatcher, buffer = dispatcher_of(frames, cuts)
    batching = BatchDecoding(decoding())
    found: dict[str, list[Any]] = {}

    def note(batch: DataBatch) -> list[int]:
        table = batch.arrow.to_pylist()
        assert len(table) == len(batch)
        for one in table:
            position = Position(one["_scn"], one["_seq"])
            values = {k: v for k, v in one.items() if v and not k.startswith("_")}
            found.setdefault(batch.source, []).append((one["_op"], position, values))
        return [one["_scn"] for one in table]

    while True:
        batches = dispatcher.open_batch(0.0, most_rows)
        if batches:
            scns: list[int] = []
            for source, parts in batches:
                batch = DataBatch(batching, source, "online", parts)
                table = batch.arrow.to_pylist()
                assert len(table) == len(batch)
                for one in table:
                    position = Position(one["_scn"], one["_seq"])
                    values = {k: v for k, v in one.items() if v and not k.startswith("_")}
                    found.setdefault(source, []).append((one["_op"], position, values))
                    scns.append(position.scn)
            assert len(scns) == sum(sizes[scn] for scn in set(scns)), "windows are whole"
            assert len(scns) <= most_rows or len(set(scns)) == 1
            due = dispatcher.close_batch(0.0, Result.SUCCESS)
            assert due is None or due.mark is not None
            assert dispatcher.position is not None
            assert dispatcher.position.scn == max(scns)
            if due is not None:
                dispatcher.done(due, 0.0)
            continue
        due = dispatcher.next(0.0)
        if due is None:
            break
        if due.call is Call.EVENTS:  # a window just after a heartbeat
            assert due.block is not None
            rows = np.arange(due.start, due.stop)
            note(DataBatch(batching, due.source, "online", [(due.block, rows)]))
        dispatcher.done(due, 0.0)
    assert found == wanted
    assert buffer.cursor == len(frames)


def test_only_the_rows_of_one_window_without_its_end_await_the_rest() -> None:
    frames = split(window(1, *[("c", ORDERS, key, "x") for key in range(5)]))
    for count, awaits in ((1, True), (5, True), (6, False)):
        dispatcher, _ = dispatcher_of(frames[:count], [2, 4])
        assert dispatcher.awaits_rest() is awaits
    beat = heartbeat(Position(2), 0)
    dispatcher, _ = dispatcher_of([*frames[:3], beat], [2])
    assert dispatcher.awaits_rest() is False


def test_rows_of_a_window_without_its_end_come_together_over_blocks() -> None:
    changes = [("c", ORDERS, key, "x") for key in range(6)]
    frames = split(window(1, *changes, ("c", ITEMS, 1, "y"), ("c", ITEMS, 2, "y")))[:-1]
    dispatcher, buffer = dispatcher_of(frames, [2, 4, 7])
    found = []
    while (due := dispatcher.next(0.0)) is not None:
        if due.call is Call.EVENTS:
            dispatcher.extend(due, 5)
            found.append((due.source, due.row_count))
            assert buffer.given == buffer.cursor + due.row_count
        dispatcher.done(due, 0.0)
    assert found == [("shop.orders", 4), ("shop.orders", 2), ("shop.items", 2)]


def test_the_events_of_a_batch_have_their_windows_over_blocks() -> None:
    data = window(1, ("c", ORDERS, 1, "a")) + window(
        2, ("c", ORDERS, 2, "b"), ("c", ORDERS, 3, "c"), ("c", ORDERS, 4, "d")
    )
    dispatcher, _ = dispatcher_of(split(data), [3, 4])
    batches = dispatcher.open_batch(0.0, 100)
    events = [
        event
        for source, parts in batches
        for event in DataBatch(BatchDecoding(decoding()), source, "online", parts).events()
    ]
    assert [event.position for event in events] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert [event.txid for event in events] == ["tx1", "tx2", "tx2", "tx2"]
