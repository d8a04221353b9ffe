"""Chunk dumps spliced into the stream, against a plain model of a database.

The model commits transactions, shows each to snapshots only some time after it can be
streamed (as PostgreSQL may), streams them in commit order, and reads chunks in between, at
any interleaving that hypothesis finds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from databus.common.schema import Column, Kind, SourceSchema
from databus.relay.sources.source import Chunk, Row
from databus.relay.watermark import ChunkWindow, ReadAgain, Spliced

KEYS = 4
CHUNK_KEYS = 2
SCHEMA = SourceSchema("t.t", (Column("id", Kind.INT, False), Column("v", Kind.INT)), ("id",))


def key_bytes(key: int) -> bytes:
    return SCHEMA.encode_key((key,))


@dataclass
class Transaction:
    scn: int
    writes: dict[int, bool]  # key -> does the row exist afterwards
    visible: bool = False


@dataclass(frozen=True)
class ModelSnapshot:
    visible: frozenset[int]
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        return int(txid) in self.visible


@dataclass
class Consumer:
    """Applies what it gets; keeps for each key the scn of its state and whether it exists."""

    rows: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def apply(self, key: int, scn: int, exists: bool) -> None:
        before = self.rows.get(key, (-1, False))[0]
        assert scn >= before, f"key {key}: the state of scn {scn} came after that of {before}"
        self.rows[key] = (scn, exists)


class SpliceMachine(RuleBasedStateMachine):
    """I2 of ChunkWindow: no reader ever gets an older state after a newer one, and all get
    the final state."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Transaction] = []
        self.initial: set[int] = set()
        self.consumer = Consumer()
        self.streamed = 0
        self.touching: list[int] = []
        self.in_window = False
        self.splice: ChunkWindow | None = None
        self.next_key = 0
        self.reading = False
        self.waiting: dict[bytes, tuple[int, int]] = {}
        self.emitted_rows = 0

    @initialize(initial=st.sets(st.integers(0, KEYS - 1)))
    def fill(self, initial: set[int]) -> None:
        self.initial = initial

    # -- the database --

    @rule(writes=st.dictionaries(st.integers(0, KEYS - 1), st.booleans(), min_size=1, max_size=3))
    def commit(self, writes: dict[int, bool]) -> None:
        locked = {key for t in self.log if not t.visible for key in t.writes}
        if not locked & set(writes):
            self.log.append(Transaction(len(self.log) + 1, writes))

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

    @precondition(lambda self: self.streamed < len(self.log) or self.in_window)
    @rule(steps=st.integers(1, 8))
    def stream(self, steps: int) -> None:
        for _ in range(steps):
            if self.streamed < len(self.log) or self.in_window:
                self.stream_a_step()

    def stream_a_step(self) -> None:
        if not self.in_window:
            self.touching = list(self.log[self.streamed].writes)
            self.in_window = True
            return
        transaction = self.log[self.streamed]
        if self.touching:
            key = self.touching.pop()
            self.consumer.apply(key, transaction.scn, transaction.writes[key])
            if self.splice:
                self.splice.touch(key_bytes(key), SCHEMA.fingerprint)
            return
        self.streamed += 1
        self.in_window = False
        if self.splice:
            self.splice.end_window(transaction.scn, str(transaction.scn))
        self.try_to_emit()

    # -- the dump --

    @precondition(lambda self: self.splice is None and self.next_key < KEYS)
    @rule(memory=st.integers(0, 3))
    def start_dump(self, memory: int) -> None:
        """What was streamed lately is known; what is older has become visible meanwhile."""
        recent = self.log[max(0, self.streamed - memory) : self.streamed]
        for transaction in self.log[: self.streamed - len(recent)]:
            transaction.visible = True
        self.splice = ChunkWindow(in_window=self.in_window and not recent, max_keys=4)
        for transaction in recent:
            for key in transaction.writes:
                self.splice.touch(key_bytes(key), SCHEMA.fingerprint)
            self.splice.end_window(transaction.scn, str(transaction.scn))
        if self.in_window:
            done = set(self.log[self.streamed].writes) - set(self.touching)
            for key in done:
                self.splice.touch(key_bytes(key), SCHEMA.fingerprint)

    @precondition(lambda self: self.splice and not self.reading and self.splice.waits_for is None)
    @rule()
    def begin_chunk(self) -> None:
        assert self.splice is not None
        if self.next_key < KEYS:
            self.splice.begin()
            self.reading = True

    @precondition(lambda self: self.reading)
    @rule()
    def read_chunk(self) -> None:
        assert self.splice is not None
        visible = frozenset(t.scn for t in self.log if t.visible)
        state = self.state_at(visible)
        keys = range(self.next_key, self.next_key + CHUNK_KEYS)
        rows = {key_bytes(key): (key, state[key][0]) for key in keys if state[key][1]}
        self.waiting = rows
        self.reading = False
        self.splice.arrived(
            Chunk(
                SCHEMA,
                [Row(key, b"") for key in rows],
                ModelSnapshot(visible, len(self.log)),
                None,
                False,
            )
        )
        if not self.in_window:
            self.try_to_emit()

    def try_to_emit(self) -> None:
        if self.splice is None or self.splice.waits_for is None:
            return
        outcome = self.splice.take(self.streamed)
        if isinstance(outcome, Spliced):
            for row in outcome.rows:
                key, scn = self.waiting[row.key]
                self.consumer.apply(key, scn, True)
            assert len(outcome.rows) + outcome.dropped_count == len(self.waiting)
            self.next_key += CHUNK_KEYS
        elif isinstance(outcome, ReadAgain):
            assert outcome.reason

    def teardown(self) -> None:
        for transaction in self.log:
            transaction.visible = True
        for _ in range(1000):
            if self.streamed < len(self.log) or self.in_window:
                self.stream_a_step()
            elif self.next_key >= KEYS:
                break
            elif self.splice is None:
                self.start_dump(0)
            elif self.reading:
                self.read_chunk()
            else:
                self.begin_chunk()
        assert self.next_key >= KEYS, "the dump does not come to its end"
        final = self.state_at(frozenset(t.scn for t in self.log))
        got = {key: self.consumer.rows.get(key, (0, False)) for key in range(KEYS)}
        wanted = {key for key, (_, exists) in final.items() if exists}
        assert {key for key, (_, exists) in got.items() if exists} == wanted
        assert all(got[key][0] == final[key][0] for key in wanted)


TestSplice = SpliceMachine.TestCase
TestSplice.settings = settings(max_examples=400, stateful_step_count=30, deadline=None)
