"""Chunk dumps spliced into the stream, against a plain model of a database.

The model commits transactions, shows each to snapshots only some time after it can be
streamed (as PostgreSQL may), streams them in commit order, and reads several chunks at a time
in between, at any interleaving that hypothesis finds; with and without watermark rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.dumps.chunk_window import ChunkWindow, ReadAgain, Ready, Waiting
from databus.relay.dumps.watermark_writes import WatermarkWrite, WatermarkWrites
from databus.relay.sources.contract import Chunk
from databus.relay.sources.row_buffers import Row, Rows

KEYS = 6
CHUNK_KEYS = 2
MOST_IN_FLIGHT = 3
SCHEMA = SourceSchema("t.t", (Column("id", Kind.INT, False), Column("v", Kind.INT)), ("id",))


def key_bytes(key: int) -> bytes:
    return SCHEMA.encode_key((key,))


@dataclass
class Transaction:
    scn: int
    writes: dict[int, bool]  # key -> does the row exist afterwards
    token: str = ""
    visible: bool = False


@dataclass(frozen=True)
class ModelSnapshot:
    visible: frozenset[int]
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        return int(txid) in self.visible


@dataclass
class Consumer:
    """Applies what it gets; stores for each key the scn of its state and whether it exists."""

    rows: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def apply(self, key: int, scn: int, exists: bool) -> None:
        before = self.rows.get(key, (-1, False))[0]
        assert scn >= before, f"key {key}: the state of scn {scn} came after that of {before}"
        self.rows[key] = (scn, exists)


@dataclass(eq=False)
class ChunkRead:
    """A chunk on its way: the keys it covers, and the state of each row that it read."""

    first_key: int
    waiting: Waiting
    watermark_write: WatermarkWrite | None
    rows: dict[bytes, tuple[int, int]] | None = None
    chunk: Chunk | None = None  # read, and not handed over yet


class SpliceMachine(RuleBasedStateMachine):
    """I2 of ChunkWindow: no reader ever gets an older state after a newer one, and all get
    the final state."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Transaction] = []
        self.initial: set[int] = set()
        self.consumer = Consumer()
        self.streamed = 0
        self.builder: WindowBuilder | None = None
        self.touching: list[int] = []
        self.splice: ChunkWindow | None = None
        self.watermark_writes: WatermarkWrites | None = None
        self.next_key = 0
        self.in_flight: list[ChunkRead] = []

    @initialize(initial=st.sets(st.integers(0, KEYS - 1)), watermarks=st.booleans())
    def fill(self, initial: set[int], watermarks: bool) -> None:
        self.initial = initial
        if watermarks:
            self.watermark_writes = WatermarkWrites("d", "r", lambda dump_id: False)

    # -- the database --

    @rule(writes=st.dictionaries(st.integers(0, KEYS - 1), st.booleans(), min_size=1, max_size=3))
    def commit(self, writes: dict[int, bool]) -> None:
        locked = {key for t in self.log if not t.visible for key in t.writes}
        if not locked & set(writes):
            self.log.append(Transaction(len(self.log) + 1, writes))

    def mark(self, token: str) -> None:
        self.log.append(Transaction(len(self.log) + 1, {}, token))

    @precondition(lambda self: any(not t.visible for t in self.log))
    @rule(data=st.data())
    def show(self, data: st.DataObject) -> None:
        hidden = [t for t in self.log if not t.visible]
        data.draw(st.sampled_from(hidden)).visible = True

    def state_at(self, visible: frozenset[int]) -> dict[int, tuple[int, bool]]:
        state = {key: (0, key in self.initial) for key in range(KEYS)}
        for transaction in self.log:
            if transaction.scn in visible:
                for key, exists in transaction.writes.items():
                    state[key] = (transaction.scn, exists)
        return state

    # -- the stream --

    @precondition(lambda self: self.streamed < len(self.log))
    @rule(steps=st.integers(1, 8))
    def stream(self, steps: int) -> None:
        for _ in range(steps):
            if self.streamed < len(self.log):
                self.stream_a_step()

    def stream_a_step(self) -> None:
        transaction = self.log[self.streamed]
        if self.builder is None:
            self.builder = WindowBuilder(transaction.scn, 0)
            self.touching = list(transaction.writes)
            return
        if self.touching:
            key = self.touching.pop()
            self.consumer.apply(key, transaction.scn, transaction.writes[key])
            self.builder.event(
                Op.UPDATE, SCHEMA.source_id, SCHEMA.fingerprint, key_bytes(key), after=b"r"
            )
            self.observe(self.builder.take())
            return
        self.streamed += 1
        self.observe(self.builder.end(str(transaction.scn)))
        self.builder = None
        if transaction.token and self.watermark_writes is not None:
            self.watermark_writes.streamed(transaction.token)
            assert not self.watermark_writes.violation

    def observe(self, data: bytes) -> None:
        if self.splice is not None:
            self.splice.observe(frame_format.scan(data), memoryview(data))

    # -- the dump --

    @precondition(lambda self: self.splice is None)
    @rule(memory=st.integers(0, 3))
    def start_dump(self, memory: int) -> None:
        """What was streamed lately is known; what is older has become visible meanwhile."""
        recent = self.log[max(0, self.streamed - memory) : self.streamed]
        for transaction in self.log[: self.streamed - len(recent)]:
            transaction.visible = True
        in_window = self.builder is not None
        self.splice = ChunkWindow(SCHEMA.source_id, in_window=in_window and not recent, max_keys=4)
        for transaction in recent:
            builder = WindowBuilder(transaction.scn, 0)
            for key in transaction.writes:
                builder.event(
                    Op.UPDATE, SCHEMA.source_id, SCHEMA.fingerprint, key_bytes(key), after=b"r"
                )
            self.observe(builder.end(str(transaction.scn)))
        if in_window:
            open_one = self.log[self.streamed]
            builder = WindowBuilder(open_one.scn, 0)
            for key in set(open_one.writes) - set(self.touching):
                builder.event(
                    Op.UPDATE, SCHEMA.source_id, SCHEMA.fingerprint, key_bytes(key), after=b"r"
                )
            if builder.pending_bytes:
                self.observe(builder.take())

    @precondition(lambda self: self.splice is not None and len(self.in_flight) < MOST_IN_FLIGHT)
    @rule()
    def begin_chunk(self) -> None:
        if self.next_key < KEYS:
            self.in_flight.append(self.chunk_read(self.next_key))
            self.next_key += CHUNK_KEYS

    def chunk_read(self, first_key: int) -> ChunkRead:
        assert self.splice is not None
        watermark_write = None
        if self.watermark_writes is not None:
            watermark_write = self.watermark_writes.begin()
            self.mark(watermark_write.low)
        return ChunkRead(first_key, self.splice.begin(), watermark_write)

    @precondition(lambda self: any(chunk_read.rows is None for chunk_read in self.in_flight))
    @rule(data=st.data())
    def read_chunk(self, data: st.DataObject) -> None:
        self.read(
            data.draw(
                st.sampled_from(
                    [chunk_read for chunk_read in self.in_flight if chunk_read.rows is None]
                )
            )
        )

    def read(self, chunk_read: ChunkRead) -> None:
        assert self.splice is not None
        visible = frozenset(t.scn for t in self.log if t.visible)
        state = self.state_at(visible)
        keys = range(chunk_read.first_key, chunk_read.first_key + CHUNK_KEYS)
        chunk_read.rows = {key_bytes(key): (key, state[key][0]) for key in keys if state[key][1]}
        rows = Rows.of(Row(key, b"") for key in chunk_read.rows)
        snapshot = ModelSnapshot(visible, len(self.log))
        chunk_read.chunk = Chunk(SCHEMA, rows, snapshot, None, False)

    @precondition(lambda self: any(chunk_read.chunk is not None for chunk_read in self.in_flight))
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """Chunks may arrive in another order than that of their snapshots."""
        self.arrive(
            data.draw(
                st.sampled_from([chunk_read for chunk_read in self.in_flight if chunk_read.chunk])
            )
        )

    def arrive(self, chunk_read: ChunkRead) -> None:
        assert self.splice is not None
        assert chunk_read.chunk is not None
        if chunk_read.watermark_write is not None:
            self.mark(chunk_read.watermark_write.high)
        self.splice.arrived(chunk_read.waiting, chunk_read.chunk)
        chunk_read.chunk = None

    @precondition(lambda self: self.builder is None and self.in_flight)
    @rule(data=st.data(), slice_rows=st.integers(1, CHUNK_KEYS))
    def emit(self, data: st.DataObject, slice_rows: int) -> None:
        """Any chunk may go out, and a part of it only: the runner's order is but one of many."""
        self.emit_a_slice(data.draw(st.sampled_from(self.in_flight)), slice_rows)

    def emit_a_slice(self, chunk_read: ChunkRead, slice_rows: int) -> None:
        assert self.splice is not None
        chunk, resolved = chunk_read.waiting.chunk, self.streamed
        if chunk_read.watermark_write is not None and chunk is not None:
            if not chunk_read.watermark_write.is_closed:
                return
            assert self.streamed >= chunk.snapshot.high, "the high token lies behind the snapshot"
        outcome = self.splice.outcome(chunk_read.waiting, resolved)
        if outcome is None or chunk is None:
            return
        assert chunk_read.rows is not None
        if isinstance(outcome, ReadAgain):
            assert outcome.reason
            self.splice.leave(chunk_read.waiting)
            self.in_flight[self.in_flight.index(chunk_read)] = self.chunk_read(chunk_read.first_key)
            return
        assert isinstance(outcome, Ready)
        going = outcome.left[:slice_rows].tolist()
        for index in going:
            key, scn = chunk_read.rows[chunk.rows[index].key]
            self.consumer.apply(key, scn, True)
        if len(going) < len(outcome.left):
            self.splice.sent(chunk_read.waiting, int(outcome.left[slice_rows]))
            return
        self.splice.sent(chunk_read.waiting, len(chunk.rows))
        self.splice.leave(chunk_read.waiting)
        self.in_flight.remove(chunk_read)

    def teardown(self) -> None:
        for _ in range(1000):
            for transaction in self.log:
                transaction.visible = True
            if self.streamed < len(self.log):
                self.stream_a_step()
            elif self.splice is None:
                self.start_dump(0)
            elif any(chunk_read.rows is None for chunk_read in self.in_flight):
                self.read(
                    next(chunk_read for chunk_read in self.in_flight if chunk_read.rows is None)
                )
            elif any(chunk_read.chunk is not None for chunk_read in self.in_flight):
                self.arrive(
                    next(
                        chunk_read for chunk_read in self.in_flight if chunk_read.chunk is not None
                    )
                )
            elif self.in_flight:
                self.emit_a_slice(self.in_flight[0], CHUNK_KEYS)
            elif self.next_key < KEYS:
                self.begin_chunk()
            else:
                break
        assert self.next_key >= KEYS and not self.in_flight, "the dump does not come to its end"
        final = self.state_at(frozenset(t.scn for t in self.log))
        got = {key: self.consumer.rows.get(key, (0, False)) for key in range(KEYS)}
        wanted = {key for key, (_, exists) in final.items() if exists}
        assert {key for key, (_, exists) in got.items() if exists} == wanted
        assert all(got[key][0] == final[key][0] for key in wanted)


TestSplice = pytest.mark.slow(SpliceMachine.TestCase)
TestSplice.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
